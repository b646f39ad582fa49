"""The teacher of distill: here or behind an endpoint."""
