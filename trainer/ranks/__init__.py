"""The ranks that train together."""
