"""Batches: token sequences as tensors, and their division into micro-batches.

Dimensions, written as suffixes of tensors throughout the trainer:
    B sequences   T positions of prompt and reply   R positions from the first reply token on
    N all reply tokens, sequence after sequence   C replies ("calls"; a merged sequence has several)
    D width of the model   V vocabulary
    K sets of tokens that a grammar allows   W words of 32 bits, one bit for each token of the vocabulary
T and R are padded on the right. A reply 4 5 to the prompt 7 8 9, padded to T = 6 and R = 3:
    ids_BT       7 8 9 4 5 0
    predicts_BT  . . x x . .     the positions whose next token is a reply token
    replies_BR   4 5 0
    mask_BR      x x .
In a merged sequence the mask has holes, where users or tools speak between two replies.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tuneloop.shared.experience import Int32s
from tuneloop.trainer.batches.sequences import TokenSequence
from tuneloop.trainer.transfer import hand_over


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some sequences as tensors. `lengths_B` counts the tokens of prompt and reply together.

    `allowed_KW` and `held_BR` are there where a grammar held some reply: at each of its tokens, which of the sets it
    allowed, -1 where it allowed all.

    `calls_BR` numbers the replies of the whole batch, sequence after sequence: of which one a token is, -1 if of none.
    """

    ids_BT: Tensor
    predicts_BT: Tensor
    replies_BR: Tensor
    mask_BR: Tensor
    sampled_BR: Tensor
    temperatures_BR: Tensor
    calls_BR: Tensor
    lengths_B: Tensor
    held_BR: Tensor | None = None
    allowed_KW: Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many reply tokens there are."""
        return int(self.mask_BR.sum())

    def rows(self, index_B: Tensor) -> "Batch":
        """The sequences `index_B`, without the padding that they do not need."""
        lengths_B, mask_BR = self.lengths_B[index_B], self.mask_BR[index_B]
        widths = {"T": int(lengths_B.max()), "R": (int(mask_BR.any(0).nonzero().max()) + 1)}
        cut: dict[str, Tensor | None] = {"allowed_KW": self.allowed_KW}
        for field in fields(self):
            each_B = getattr(self, field.name)
            if each_B is not None and field.name not in cut:
                each_B = each_B[index_B]
                cut[field.name] = each_B if each_B.dim() == 1 else each_B[:, : widths[field.name[-1]]]
        return Batch(**cut)  # type: ignore[arg-type]


def collate(sequences: Sequence[TokenSequence]) -> Batch:
    """The sequences as one batch on the CPU. Each has a prompt and a reply."""
    starts = [sequence.start for sequence in sequences]
    before = [0, *accumulate(len(sequence.calls) for sequence in sequences)]
    predicts = [np.append(sequence.of[1:] >= 0, False) for sequence in sequences]
    tails = [sequence.of[start:] for sequence, start in zip(sequences, starts, strict=True)]
    numbered = [np.where(of >= 0, of + first, -1) for of, first in zip(tails, before, strict=False)]
    held_BR, allowed_KW = _grammar_tensors(sequences, tails)
    return Batch(
        ids_BT=_pad(sequence.ids for sequence in sequences).long(),
        predicts_BT=_pad(predicts),
        replies_BR=_pad(each.ids[start:] for each, start in zip(sequences, starts, strict=True)).long(),
        mask_BR=_pad(of >= 0 for of in tails),
        sampled_BR=_pad(each.sampled[start:] for each, start in zip(sequences, starts, strict=True)).float(),
        temperatures_BR=_pad(
            (each.temperatures[start:] for each, start in zip(sequences, starts, strict=True)), filler=1.0
        ).float(),
        calls_BR=_pad(numbered, filler=-1).long(),
        lengths_B=torch.tensor([len(sequence.ids) for sequence in sequences]),
        held_BR=held_BR,
        allowed_KW=allowed_KW,
    )


def all_but_first(ids: Sequence[int]) -> Batch:
    """One sequence, each of whose tokens but the first is as if of a reply, at temperature 1."""
    ids_BT = torch.tensor([ids])
    like_BR = torch.zeros(1, len(ids) - 1)
    return Batch(
        ids_BT=ids_BT,
        predicts_BT=torch.arange(len(ids))[None] != len(ids) - 1,
        replies_BR=ids_BT[:, 1:],
        mask_BR=like_BR == 0,
        sampled_BR=like_BR,
        temperatures_BR=like_BR + 1,
        calls_BR=like_BR.long(),
        lengths_B=torch.tensor([len(ids)]),
    )


def _grammar_tensors(
    sequences: Sequence[TokenSequence], tails: Sequence[Int32s]
) -> tuple[Tensor | None, Tensor | None]:
    """`held_BR` and `allowed_KW` of a batch. Replies to one agent share most of their sets."""
    if all(call.allowed is None for sequence in sequences for call in sequence.calls):
        return None, None
    sets: dict[bytes, int] = {}
    held = []
    for sequence, of in zip(sequences, tails, strict=True):
        at = np.full(len(of), -1, np.int64)
        for number, call in enumerate(sequence.calls):
            if call.allowed is not None:
                known = [sets.setdefault(row.tobytes(), len(sets)) for row in call.allowed.rows]
                at[of == number] = np.array([*known, -1])[call.allowed.at]
        held.append(at)
    rows = [torch.from_numpy(np.frombuffer(each, np.int32).copy()) for each in sets]
    return _pad(held, filler=-1).long(), torch.stack(rows) if rows else torch.zeros(0, 0, dtype=torch.int32)


def micro_batches(
    lengths_B: Tensor, budget: int, units_B: Tensor | None = None, *, padded: bool = False
) -> list[Tensor]:
    """The sequences' indices in groups of at most `budget` tokens together; a longer one stands alone.

    The longest come first, each into the first group that has room. Sequences of one unit stay together. With `padded`
    the budget is of positions, padding included, and like goes with like.
    """
    groups: list[list[int]] = []
    sizes: list[int] = []
    widest = 0
    for unit in _longest_first(lengths_B, units_B):
        longest, tokens = int(lengths_B[unit].max()), int(lengths_B[unit].sum())
        if padded:
            # Groups come from the longest down, so that a later sequence is no wider than those before it.
            at = len(groups) - 1 if groups and (len(groups[-1]) + len(unit)) * widest <= budget else None
            widest = longest if at is None else widest
        else:
            at = next((index for index, size in enumerate(sizes) if size + tokens <= budget), None)
        if at is None:
            groups.append([])
            sizes.append(0)
            at = -1
        groups[at] += unit
        sizes[at] += tokens
    return [torch.tensor(group) for group in groups]


def share_of(rank: int, size: int, lengths_B: Tensor, units_B: Tensor | None = None, *, width: int) -> Tensor:
    """The indices of one rank's sequences, so that `size` ranks have about as much to do; there may be none.

    The dearest unit comes first, each to the rank that has least. In a model of this `width` attention takes as long as
    all else at 12 x width tokens.
    """
    if size == 1:
        return torch.arange(len(lengths_B))
    costs = (lengths_B * (1 + lengths_B / (12 * width))).tolist()
    units = [(sum(costs[row] for row in unit), unit) for unit in _longest_first(lengths_B, units_B)]
    given: list[list[int]] = [[] for _ in range(size)]
    loads = [0.0] * size
    for cost, unit in sorted(units, key=lambda each: -each[0]):
        least = loads.index(min(loads))
        given[least] += unit
        loads[least] += cost
    return torch.tensor(sorted(given[rank]), dtype=torch.long)


def mini_batches(rows: int, count: int, units_B: Tensor | None, generator: torch.Generator) -> list[Tensor]:
    """The sequences' indices, shuffled and cut into `count` parts; sequences of one unit stay together."""
    units = rows if units_B is None else int(units_B.max()) + 1
    parts = torch.randperm(units, generator=generator).tensor_split(min(count, units))
    if units_B is None:
        return list(parts)
    return [torch.cat([(units_B == unit).nonzero()[:, 0] for unit in part]) for part in parts]


def scatter_tokens(flat_N: Tensor, mask_BR: Tensor) -> Tensor:
    """One number per reply token, put back in its place; 0 in the padding.

    The mask may be on the CPU, and is best there: to count it on a GPU would wait for it, forth and back.
    """
    places_N = hand_over(mask_BR.flatten().nonzero()[:, 0], flat_N.device)
    return flat_N.new_zeros(mask_BR.numel()).index_copy(0, places_N, flat_N).view(mask_BR.shape)


def _longest_first(lengths_B: Tensor, units_B: Tensor | None) -> list[list[int]]:
    order = torch.argsort(lengths_B, descending=True, stable=True).tolist()
    if units_B is None:
        return [[row] for row in order]
    units: dict[int, list[int]] = {}
    for row in order:
        units.setdefault(int(units_B[row]), []).append(row)
    return list(units.values())


def _pad(rows: Iterable[npt.NDArray[np.generic]], filler: float = 0) -> Tensor:
    tensors = [torch.from_numpy(np.array(row)) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=filler)
