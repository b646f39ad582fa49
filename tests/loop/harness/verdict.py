"""The client's own book and the optimiser's own count against the ledger."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import Engine, select

from tests.loop.harness.crowd import Book, Judgement
from tests.loop.harness.lineage import Lineage
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.storage.schema import experiences, feedback, versions

_WAITING = {State.RECORDED, State.REWARDED, State.COMMITTED, State.LEASED}
#: A row may have been leased in between as long as it is committed: whoever died with it gave it back.
_NEVER_LEASED = {State.RECORDED, State.REWARDED, State.EXPIRED, State.DROPPED}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What must be nothing, after any number of kills."""

    exchanges_lost: int
    exchanges_twice: int
    feedbacks_lost: int
    feedbacks_twice: int
    rewards_wrong: tuple[str, ...]
    commits_lost: int
    trained_unasked: int
    quarantined: int
    imbalance: tuple[str, ...]
    lineage_mistakes: tuple[str, ...]
    gave_up: tuple[str, ...]

    @property
    def spotless(self) -> bool:
        return not any(getattr(self, each.name) for each in fields(self))


class Found:
    """What the database holds in the end."""

    def __init__(self, database: Engine) -> None:
        with database.connect() as connection:
            self.rows = connection.execute(
                select(
                    experiences.c.msg_id,
                    experiences.c.choice,
                    experiences.c.state,
                    experiences.c.reward,
                    experiences.c.trained_version,
                )
            ).all()
            heard = connection.execute(select(feedback.c.msg_id, feedback.c.event_id)).all()
        self.versions = version_rows(database)
        self.events = Counter(row.msg_id for row in heard)
        self.trained = Counter(row.trained_version for row in self.rows)
        self.states = Counter(str(row.state) for row in self.rows)

    @property
    def waiting(self) -> int:
        return sum(self.states[state.value] for state in _WAITING)


def version_rows(database: Engine) -> Sequence[Any]:
    with database.connect() as connection:
        names = ("version", "policy", "state", "step", "consumed", "path")
        return connection.execute(select(*(versions.c[name] for name in names)).order_by(versions.c.version)).all()


def judge(
    book: Book, found: Found, *, lineage: Lineage, imbalance: Iterable[str], quarantined: int, gave_up: Iterable[str]
) -> Verdict:
    """Compare; `found` is what there is when nothing moves any more."""
    rows = {row.msg_id: row for row in found.rows}
    judged = book.judgements
    return Verdict(
        exchanges_lost=len(set(book.replies) - rows.keys()),
        exchanges_twice=len(book.replies) - len(set(book.replies)) + len(found.rows) - len(rows),
        feedbacks_lost=sum(_lost(judgement, found.events[msg_id]) for msg_id, judgement in judged.items()),
        feedbacks_twice=sum(
            max(0, events - len(judged[msg_id].sent if msg_id in judged else ()))
            for msg_id, events in found.events.items()
        ),
        rewards_wrong=tuple(
            f"{rows.get(msg_id)}: {judgement}"
            for msg_id, judgement in judged.items()
            if not _right(judgement, rows.get(msg_id))
        ),
        commits_lost=sum(row.state in {State.RECORDED, State.REWARDED} for row in _of(judged, rows)),
        trained_unasked=sum(row.trained_version is not None and row.msg_id not in judged for row in found.rows),
        quarantined=quarantined,
        imbalance=tuple(imbalance),
        lineage_mistakes=tuple(lineage.mistakes(found.versions, found.trained)),
        gave_up=tuple(gave_up),
    )


def _of(judged: Iterable[str], rows: dict[str, Any]) -> Iterator[Any]:
    return (rows[msg_id] for msg_id in judged if msg_id in rows)


def _lost(judgement: Judgement, events: int) -> int:
    """The same reward sent twice may be stored once or twice, another reward is another event."""
    return max(0, len(set(judgement.acknowledged)) - events)


def _right(judgement: Judgement, row: Any) -> bool:
    if row is None:
        return False
    if judgement.corrected_late and row.state not in _NEVER_LEASED:
        return row.reward in judgement.acknowledged
    return bool(row.reward == judgement.acknowledged[-1])
