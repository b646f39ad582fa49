"""Replies of the start weights with their rewards, the same for our and TRL's offline methods."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """One reply: `task_id` names the group of replies to one question."""

    task_id: str
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    reward: float


def rows(file: Path) -> list[Row]:
    """The replies of a file of `write`, in sampling order."""
    return [Row(*json.loads(line)) for line in file.read_text().splitlines()]


def write(file: Path, replies: Sequence[Row]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in replies))


def pairs(replies: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """(chosen, rejected) of each group: the best with the worst, the second best with the second worst, and so on."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in replies:
        groups[row.task_id].append(row)
    for group in groups.values():
        ranked = sorted(group, key=lambda row: row.reward, reverse=True)
        for chosen, rejected in zip(ranked, reversed(ranked), strict=True):
            if chosen.reward <= rejected.reward:
                break
            yield chosen, rejected
