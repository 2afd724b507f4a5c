"""Data sets for long sequences: real text (`text`) and synthetic tasks (`synthetic`)."""
