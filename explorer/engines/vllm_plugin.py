"""A plugin for vLLM, loaded into each process of an engine: CPU engines sleep while they wait for each other.

vLLM's processes wait for each other in a loop of `sched_yield`. On Linux 6.18 such a loop beside a process that
computes keeps every other process of the machine waiting as long as both go on, for seconds at a time, unless there is
a core for each. vLLM has another way to wait, for Pythons before 3.11.1: to sleep for no time at all.
"""

import importlib
import os

#: The environment variable that turns this on.
SLEEPS = "TUNELOOP_ENGINE_SLEEPS"


def register() -> None:
    """Called by vLLM, in every process of every engine that runs where tuneloop is installed."""
    if os.environ.get(SLEEPS) == "1":
        importlib.import_module("vllm.distributed.utils").USE_SCHED_YIELD = False  # type: ignore[attr-defined]
