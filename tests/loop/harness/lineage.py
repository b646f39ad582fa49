"""What the trainer's checkpoints say that its optimiser did, and whether the ledger says the same."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from tuneloop.shared.checkpoints import TRAINER_STATE, read_manifest
from tuneloop.shared.errors import CheckpointUnreadable


class Account(NamedTuple):
    """The optimiser's own count, in a checkpoint: of steps, of the actor's updates, of the critic's."""

    parent: int
    step: int
    counters: tuple[int, int, int]


class Lineage:
    """The accounts of all checkpoints, taken down while they are there: old ones are deleted."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._accounts: dict[int, Account] = {}

    def look(self, versions: Iterable[Any]) -> None:
        """Take down what is new among these rows of `versions`."""
        for row in versions:
            if row.consumed and row.version not in self._accounts and (account := _account(Path(row.path))):
                self._accounts[row.version] = account

    def mistakes(self, versions: Iterable[Any], trained: Counter[int | None]) -> list[str]:
        """What the ledger and the checkpoints disagree about, a sentence each.

        `trained` counts the experiences by the version that they were trained in.
        """
        rows = {row.version: row for row in versions}
        trained = Counter({each: count for each, count in trained.items() if each is not None})
        return [
            *_mistakes_of_rows(rows, trained),
            *(f"rows are trained in version {each}, which is not registered" for each in trained if each not in rows),
            *chain.from_iterable(
                self._mistakes_on_the_line({number: row for number, row in rows.items() if row.policy == policy})
                for policy in {row.policy for row in rows.values()}
            ),
        ]

    def _mistakes_on_the_line(self, rows: Mapping[int, Any]) -> list[str]:
        """From a policy's newest version back to its first: every step is one batch, and all batches are there."""
        mistakes: list[str] = []
        first, version = min(rows), max(each for each, row in rows.items() if row.state != "rejected")
        while version != first:
            account = self._accounts.get(version)
            if account is None:
                return [*mistakes, f"nobody has seen the checkpoint of version {version}"]
            row, steps = rows[version], account.step - rows[account.parent].step
            counted, actor_updates, critic_updates = account.counters
            parent = self._accounts.get(account.parent)
            # Critic and moments are written behind the weights: after a crash the critic may be that of an older
            # version, and where there is none AdamW begins anew, and so does its count.
            possible = {steps, steps + (parent.counters[1] if parent else 0)}
            if {account.step, counted} != {row.step} or actor_updates not in possible or critic_updates > row.step:
                mistakes.append(f"version {version}: step {row.step}, but its checkpoint says {account}")
            if steps * self._batch != row.consumed:
                mistakes.append(f"version {version}: {steps} steps, but {row.consumed} rows")
            version = account.parent
        return mistakes


def _mistakes_of_rows(rows: Mapping[int, Any], trained: Counter[int]) -> Iterator[str]:
    for version, row in rows.items():
        if row.consumed != trained[version]:
            yield f"version {version}: {trained[version]} rows are trained in it, but it consumed {row.consumed}"


def _account(folder: Path) -> Account | None:
    try:
        manifest = read_manifest(folder)
        state = json.loads((folder / TRAINER_STATE / "state.json").read_bytes())
    except (CheckpointUnreadable, OSError):
        return None
    return Account(manifest.parent, manifest.step, (state["steps"], state["actor_updates"], state["critic_updates"]))
