"""What a loss compares the models with: constants of one step, aligned with the reply tokens.

Dimension suffixes are explained in trainer/batches/batch.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from tuneloop.trainer.transfer import hand_over

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRewards:
    """The replies of a batch, C of them; a sequence of a trajectory has several.

    `rewards_C` are as the settings divide, clip and scale them. `rows_C`, `runs_C` and `groups_C` number a call's
    sequence, run and group; `last_C` is true of the last call of a run; `tasks` name what a reward is compared with.
    `of_BR` is the call of each action token, -1 elsewhere; `ends_BR` is true where a reward is paid: at the end of each
    call, or, if a trajectory is rewarded as a whole, of each sequence.
    """

    rewards_C: Tensor
    rows_C: Tensor
    runs_C: Tensor
    groups_C: Tensor
    last_C: Tensor
    tasks: tuple[str, ...]
    of_BR: Tensor
    ends_BR: Tensor

    def spread(self, each_C: Tensor) -> Tensor:
        """A call's number at each of its tokens, 0 elsewhere."""
        return each_C[self.of_BR.clamp(min=0)].masked_fill(self.of_BR < 0, 0)

    def of_runs(self, each_K: Tensor) -> Tensor:
        """A run's number at each token of all its calls, 0 elsewhere."""
        return self.spread(each_K.to(self.rewards_C.dtype)[self.runs_C])

    @property
    def paid_BR(self) -> Tensor:
        """The rewards where they are paid, 0 elsewhere."""
        return self.spread(self.rewards_C) * self.ends_BR


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Constants of one step; None is what the algorithm did not ask for.

    Log-probabilities as sampled, of the actor at the `start` of the step, of the reference and of the teacher; the
    critic's old values; what was made of the rewards; importance `weights` (0: the token is left out). `fresh_BR` is
    true of tokens that the very weights of the start sampled. `signs_B` is 1 for what to say rather, -1 for what not
    to; `units_B` numbers, from 0, what stays in one mini- and micro-batch; `divergence` is KL(policy || base model),
    per sequence.
    """

    mask_BR: Tensor
    sampled_BR: Tensor
    start_BR: Tensor | None = None
    reference_BR: Tensor | None = None
    teacher_BR: Tensor | None = None
    values_BR: Tensor | None = None
    advantages_BR: Tensor | None = None
    returns_BR: Tensor | None = None
    weights_BR: Tensor | None = None
    fresh_BR: Tensor | None = None
    signs_B: Tensor | None = None
    units_B: Tensor | None = None
    divergence: Tensor | None = None

    def rows(self, index_B: Tensor, like_BR: Tensor) -> Self:
        """The sequences `index_B`, cut to the width and put on the device of `like_BR`."""
        cut: dict[str, Tensor | None] = {}
        for name in (field.name for field in fields(self)):
            each: Tensor | None = getattr(self, name)
            if each is not None and name.endswith("_BR"):
                each = each[index_B, : like_BR.shape[1]]
            elif each is not None and name.endswith("_B"):
                each = each[index_B]
            cut[name] = None if each is None else hand_over(each, like_BR.device)
        return type(self)(**cut)  # type: ignore[arg-type]

    @property
    def totals(self) -> "Totals":
        """The denominators, if these are the targets of a whole mini-batch."""
        rows = len(self.mask_BR)
        units = rows if self.units_B is None else len(set(self.units_B.tolist()))
        desirable = 0 if self.signs_B is None else int((self.signs_B > 0).sum())
        fresh = 0 if self.fresh_BR is None else int(self.fresh_BR.sum())
        return Totals(int(self.mask_BR.sum()), rows, units, desirable, fresh)


class Totals(NamedTuple):
    """What a mean divides by: the action tokens, sequences and units of a mini-batch, over all its micro-batches.

    `desirable` are the sequences whose sign is 1, `fresh` the action tokens that the weights of the start sampled.
    """

    tokens: int
    sequences: int
    units: int
    desirable: int = 0
    fresh: int = 0


class Loss(NamedTuple):
    """A micro-batch's share in a mini-batch's loss and metrics: summed over the micro-batches they are whole."""

    value: Tensor
    metrics: Mapping[str, Tensor]


def require(each: _T | None) -> _T:
    """What the algorithm asked for."""
    if each is None:
        raise LookupError("an algorithm looks at what it did not ask for")
    return each


def sequence_sums(each_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """The sum over each sequence's action tokens, in float64: float32 loses the sign of small differences."""
    return torch.where(mask_BR, each_BR, 0.0).double().sum(1)


def log_ratios(targets: Targets, logprobs_BR: Tensor) -> Tensor:
    """Of each sequence, log(policy / base model), of shape B in float64."""
    return sequence_sums(logprobs_BR, targets.mask_BR) - sequence_sums(require(targets.reference_BR), targets.mask_BR)
