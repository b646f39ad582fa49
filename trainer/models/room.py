"""Refuses models that exceed the GPU's memory."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tuneloop.shared.errors import EnvironmentRefused


@contextmanager
def room_for_weights() -> Iterator[None]:
    """Raise EnvironmentRefused if the GPU has no memory for what no smaller micro-batch reduces."""
    gc.collect()  # a compiled layer references itself
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise EnvironmentRefused(
            f"model.model_path: the GPU's memory has no room for the weights and optimisers: {reason}. Lower "
            "explorer.rollout_model.gpu_memory_utilization if an engine shares it, raise trainer.workers, or train an"
            " adapter: model.lora.rank"
        ) from None
