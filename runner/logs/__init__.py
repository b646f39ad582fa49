"""Readers of logged exchanges between clients and models."""
