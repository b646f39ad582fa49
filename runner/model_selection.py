"""Raises ImportError with the replacement for AgentScope's module of this name."""

from tuneloop.runner import select_model  # noqa: F401 - it raises
