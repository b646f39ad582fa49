"""Sequence parallelism as in Ulysses (Jacobs et al. 2023): several ranks read parts of one packed row.

Outside of attention a rank has its part of the positions and all heads; within, all positions and its part of the
heads. Before and after, and in the backward pass, ranks exchange them:

    H heads x P/S positions   ->   H/S heads x P positions   ->   attention   ->   H x P/S

A key head shared by fewer queries than there are ranks goes to several.
"""

from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tuneloop.shared.errors import SettingsError
from tuneloop.trainer.models.attention import is_packable
from tuneloop.trainer.parallel import SequenceGroup

_SETTING = "trainer.ulysses_sequence_parallel_size"


def require_divisible(network: PreTrainedModel, size: int) -> None:
    """Raise SettingsError unless so many ranks can share the network's heads and rows."""
    config, name = network.config.get_text_config(), type(network).__name__
    queries = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or queries
    if not is_packable(network):
        raise SettingsError(f"{_SETTING}: {size} workers cannot share the rows of {name}, which are padded; write 1")
    if queries % size or (keys % size and size % keys):
        raise SettingsError(
            f"{_SETTING}: {size} workers cannot share the heads of {name}, {queries} of queries and {keys} of keys;"
            " write a number that divides both, or that divides the one and is a multiple of the other"
        )


def gather_tokens(part_N: Tensor, chosen: slice, total: int, group: SequenceGroup) -> Tensor:
    """One value for each of `total` reply tokens, from the `chosen` of each rank; each rank's gradient is its own."""
    return cast(Tensor, _Gathered.apply(part_N, chosen, total, group))  # type: ignore[no-untyped-call]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, part_N: Tensor, chosen: slice, total: int, group: SequenceGroup) -> Tensor:
        context.chosen = chosen
        whole_N = part_N.new_zeros(total)
        whole_N[chosen] = part_N
        return group.add_up(whole_N)

    @staticmethod
    def backward(context: Any, slopes_N: Tensor) -> tuple[Tensor | None, ...]:
        return slopes_N[context.chosen], None, None, None
