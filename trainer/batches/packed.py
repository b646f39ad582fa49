"""Micro-batches as the models read them: sequences side by side in one row, or, for a few models, padded.

Dimension suffixes are explained in trainer/batches/batch.py; beside them
    P positions that a model reads: all tokens, sequence after sequence, and the padding where there is any

All is made on the CPU: to make it on a GPU would wait for it at every micro-batch.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tuneloop.trainer.batches.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What a model is given: `ids_BT` and the position of each, one row if they are packed.

    `predicts_N` are the places, in the rows one after the other, whose next token is a reply token; `lengths` are those
    of the sequences in a packed row, empty where they are padded.
    """

    ids_BT: Tensor
    positions_BT: Tensor
    predicts_N: Tensor
    lengths: tuple[int, ...]

    @property
    def processed(self) -> int:
        """How many positions a model reads."""
        return self.ids_BT.numel()

    def part(self, place: int, count: int) -> tuple["Rows", slice]:
        """The part `place` of `count` equal ones of a packed row, and which of the reply tokens it predicts.

        Its `lengths` are those of the whole row, which a sequence that nobody looks at makes long enough.
        """
        missing = -self.processed % count
        ids_T = torch.nn.functional.pad(self.ids_BT[0], (0, missing))
        positions_T = torch.cat([self.positions_BT[0], torch.arange(missing)])
        width = len(ids_T) // count
        here, bounds = slice(place * width, (place + 1) * width), torch.tensor([place * width, (place + 1) * width])
        first, last = torch.searchsorted(self.predicts_N, bounds).tolist()
        part = Rows(
            ids_BT=ids_T[here][None],
            positions_BT=positions_T[here][None],
            predicts_N=self.predicts_N[first:last] - here.start,
            lengths=(*self.lengths, missing) if missing else self.lengths,
        )
        return part, slice(first, last)


@dataclass(slots=True)
class Positions:
    """How many positions were read, and how many of them are tokens of a sequence."""

    processed: int = 0
    useful: int = 0

    def add(self, rows: Rows, batch: Batch, place: int = 0) -> None:
        """Count what is read. Of ranks that share a row the one in the first place has counted what is useful."""
        self.processed += rows.processed
        self.useful += int(batch.lengths_B.sum()) if place == 0 else 0


def count_positions(counts: Iterable[Positions]) -> dict[str, float]:
    """How many positions were read, and in how many of them a token of a sequence stood."""
    counted = list(counts)
    return {"processed": sum(each.processed for each in counted), "useful": sum(each.useful for each in counted)}


def packed_rows(batch: Batch) -> Rows:
    """All sequences in one row."""
    positions_T = torch.arange(batch.ids_BT.shape[1])
    real_BT = positions_T < batch.lengths_B[:, None]
    return Rows(
        ids_BT=batch.ids_BT[real_BT][None],
        positions_BT=positions_T.expand(real_BT.shape)[real_BT][None],
        predicts_N=batch.predicts_BT[real_BT].nonzero()[:, 0],
        lengths=tuple(batch.lengths_B.tolist()),
    )


def padded_rows(batch: Batch) -> Rows:
    """A row for each sequence."""
    return Rows(
        ids_BT=batch.ids_BT,
        positions_BT=torch.arange(batch.ids_BT.shape[1]).expand(batch.ids_BT.shape),
        predicts_N=batch.predicts_BT.flatten().nonzero()[:, 0],
        lengths=(),
    )
