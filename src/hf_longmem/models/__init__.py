"""The architectures, with the names transformers uses."""
