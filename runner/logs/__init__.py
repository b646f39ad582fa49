"""Exchanges of a client with a model, read from where they were logged."""
