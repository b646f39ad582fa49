"""The calls of a run: how many there are, which become one sequence in training, and the tokens that this saves."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from sqlalchemy import ColumnElement, func, select

from tuneloop.shared.experience import Int32s
from tuneloop.shared.ledger.storage.codec import from_blob
from tuneloop.shared.ledger.storage.database import LedgerPart
from tuneloop.shared.ledger.storage.schema import experiences


class _Call(Protocol):
    @property
    def prompt_ids(self) -> Int32s: ...

    @property
    def completion_ids(self) -> Int32s: ...


class CallTokens(NamedTuple):
    """Token ids of a call."""

    prompt_ids: Int32s
    completion_ids: Int32s


class RunTokens(NamedTuple):
    """Tokens that a run's calls have with their prompts, each on its own and in merged sequences; and without."""

    calls: int
    tokens: int
    completion_tokens: int
    sequences: int
    merged_tokens: int


C = TypeVar("C", bound=_Call)


def merge_calls(calls: Iterable[C]) -> list[list[C]]:
    """The sequences of a run's calls, which come in the order in which they were sampled.

    A call whose prompt begins with all tokens of an earlier call's prompt and reply continues it; the longest such
    sequence where there are several.
    """
    sequences: list[list[C]] = []
    histories: list[Int32s] = []
    for call in sorted(calls, key=lambda each: len(each.prompt_ids)):
        fitting = [
            at
            for at, history in enumerate(histories)
            if (len(call.prompt_ids) >= len(history) and np.array_equal(call.prompt_ids[: len(history)], history))
        ]
        whole = np.concatenate([call.prompt_ids, call.completion_ids])
        if fitting:
            longest = max(fitting, key=lambda at: len(histories[at]))
            sequences[longest].append(call)
            histories[longest] = whole
        else:
            sequences.append([call])
            histories.append(whole)
    return sequences


def count_tokens(calls: Iterable[_Call]) -> RunTokens:
    """What merging saves of a run."""
    sequences = merge_calls(calls)
    merged = [call for sequence in sequences for call in sequence]
    return RunTokens(
        calls=len(merged),
        tokens=sum(map(_length, merged)),
        completion_tokens=sum(len(call.completion_ids) for call in merged),
        sequences=len(sequences),
        merged_tokens=sum(_length(sequence[-1]) for sequence in sequences),
    )


def _length(call: _Call) -> int:
    return len(call.prompt_ids) + len(call.completion_ids)


_SAMPLED_ORDER = experiences.c.sampled_at, experiences.c.id


class Runs(LedgerPart):
    """What is stored of single runs."""

    def count_calls(self, tenant: str, task_id: str, run_id: str) -> int:
        """The replies that a run got."""
        query = select(func.count(experiences.c.msg_id.distinct()))
        return int(self._read(query.where(*_of_run(tenant, task_id, run_id)))[0][0])

    def count_tokens(self, tenant: str, task_id: str, run_id: str) -> RunTokens:
        """What merging its calls saves; its corrections and purged replies are left out."""
        rows = select(experiences.c.blob).where(*_of_run(tenant, task_id, run_id), experiences.c.correction == 0)
        found = self._read(rows.order_by(*_SAMPLED_ORDER))
        return count_tokens(CallTokens(*from_blob(row.blob)[:2]) for row in found)


def _of_run(tenant: str, task_id: str, run_id: str) -> tuple[ColumnElement[bool], ...]:
    return experiences.c.tenant == tenant, experiences.c.task_id == task_id, experiences.c.run_id == run_id
