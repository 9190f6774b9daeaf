"""Save optimizer state to files, and load it."""
