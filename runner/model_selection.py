"""Not here: what AgentScope's tuner has under this name, so that importing it says where to go."""

from tuneloop.runner import select_model  # noqa: F401 - it raises
