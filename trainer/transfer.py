"""From the CPU, where batches are made, to where the models are."""

import torch
from torch import Tensor


def hand_over(made: Tensor, device: torch.device) -> Tensor:
    """What was made on the CPU, on the device: a GPU takes it when it gets there, and nobody waits for it."""
    if device.type == "cuda" and made.device.type == "cpu":
        return made.pin_memory().to(device, non_blocking=True)
    return made.to(device)
