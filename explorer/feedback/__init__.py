"""Feedback: its route, its checks, what it says of each reply, and judges."""
