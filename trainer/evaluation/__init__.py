"""Held-out evaluation of a version, and what is kept of it."""
