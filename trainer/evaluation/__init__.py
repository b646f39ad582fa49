"""Held-out evaluation of versions."""
