"""Held-out evaluation and its statistics, which both services must reckon alike."""
