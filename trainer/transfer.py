"""Moves tensors between the CPU, where batches are made, and the models' device."""

from collections.abc import Callable

import torch
from torch import Tensor


def hand_over(made: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; a GPU copies it asynchronously."""
    if device.type == "cuda" and made.device.type == "cpu":
        return made.pin_memory().to(device, non_blocking=True)
    return made.to(device)


def bring_back(made: Tensor) -> Callable[[], Tensor]:
    """A function that returns the tensor in main memory, in any thread; only the call waits for a GPU."""
    if made.device.type != "cuda":
        return lambda: made
    here = torch.empty(made.shape, dtype=made.dtype, pin_memory=True).copy_(made, non_blocking=True)
    arrived = torch.cuda.current_stream(made.device).record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]

    def wait() -> Tensor:
        arrived.synchronize()
        return here

    return wait
