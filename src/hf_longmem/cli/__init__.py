"""The `longmem` command. Each command is a module that is imported only when it runs."""
