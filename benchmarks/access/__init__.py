"""The cost of keys."""
