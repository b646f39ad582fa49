"""What is said where the models do not fit."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tuneloop.shared.errors import EnvironmentRefused


@contextmanager
def room_for_weights() -> Iterator[None]:
    """Raise EnvironmentRefused where the GPU has no room for what no smaller micro-batch makes smaller."""
    gc.collect()  # A compiled layer holds itself.
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise EnvironmentRefused(
            f"model.model_path: the GPU's memory has no room for the weights and optimisers: {reason}. Lower "
            "explorer.rollout_model.gpu_memory_utilization if an engine shares it, raise trainer.workers, or train an"
            " adapter: model.lora.rank"
        ) from None
