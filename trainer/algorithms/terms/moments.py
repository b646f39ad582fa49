"""Running moments: what the trainer remembers of rewards from step to step."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class Moments(NamedTuple):
    """Running mean and mean square of something, and the weight of what they are made of: below 1 until enough came."""

    mean: float
    square: float
    weight: float


#: Moments by what they are of; the trainer keeps them from step to step, and in the checkpoint.
Baselines = Mapping[str, Moments]


def update_moments(before: Moments | None, seen_C: Tensor, *, decay: float) -> Moments:
    """The moments after another batch: exponentially weighted, and unbiased from the first one on (Adam's way)."""
    mean, square, weight = before or Moments(0.0, 0.0, 0.0)
    return Moments(
        decay * mean + (1 - decay) * float(seen_C.double().mean()),
        decay * square + (1 - decay) * float(seen_C.double().square().mean()),
        decay * weight + (1 - decay),
    )


def mean_of(moments: Moments) -> float:
    """The mean."""
    return moments.mean / moments.weight
