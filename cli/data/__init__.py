"""Import, export and erasure."""
