"""From the CPU, where batches are made, to where the models are, and back."""

from collections.abc import Callable

import torch
from torch import Tensor


def hand_over(made: Tensor, device: torch.device) -> Tensor:
    """What was made on the CPU, on the device: a GPU copies it later, and nothing waits for it."""
    if device.type == "cuda" and made.device.type == "cpu":
        return made.pin_memory().to(device, non_blocking=True)
    return made.to(device)


def bring_back(made: Tensor) -> Callable[[], Tensor]:
    """It in main memory, once one calls, from whatever thread: until then nothing waits for a GPU."""
    if made.device.type != "cuda":
        return lambda: made
    here = torch.empty(made.shape, dtype=made.dtype, pin_memory=True).copy_(made, non_blocking=True)
    arrived = torch.cuda.current_stream(made.device).record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]

    def wait() -> Tensor:
        arrived.synchronize()
        return here

    return wait
