"""Rewards made of components, and the replies that they read."""
