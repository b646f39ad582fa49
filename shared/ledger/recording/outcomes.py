"""What became of feedback about several choices at once, choice by choice: some may be trained on, others open."""

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Select, select, tuple_

from tuneloop.shared.experience import Feedback, Outcome
from tuneloop.shared.ledger.recording.rewards import TRAJECTORY, RewardRow, in_time_for, newest_corrections
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.shared.settings.feedback import RewardRule

#: The choices of a reply or trajectory that are told apart.
MAX_TOLD = 1000


def rows_about(event: Feedback) -> Select[Any]:
    """The rows of an event that names no single choice, the first MAX_TOLD of them."""
    rows = select(*(experiences.c[name] for name in RewardRow._fields)).where(experiences.c.tenant == event.tenant)
    if event.msg_id is not None:
        rows = rows.where(experiences.c.msg_id == event.msg_id)
    else:
        named = tuple_(*(experiences.c[name] for name in TRAJECTORY))
        run = (event.tenant, event.task_id, event.run_id)
        rows = rows.where(experiences.c.task_id.is_not(None), named.in_([run]))
    return rows.order_by(experiences.c.id).limit(MAX_TOLD)


def outcomes_apart(rule: RewardRule, event: Feedback, rows: Sequence[RewardRow]) -> dict[str, Outcome]:
    """What became of an event for each choice, as `msg_id:choice`; empty if it is the same for all."""
    told = dict(_of_choices(rule, event, rows))
    return told if len(set(told.values())) > 1 else {}


def _of_choices(rule: RewardRule, event: Feedback, rows: Sequence[RewardRow]) -> Iterator[tuple[str, Outcome]]:
    # What the event itself made of a row that it came too late for does not count.
    earlier = (row for row in rows if not (row.correction and row.rewarded_at == event.received_at))
    for row in newest_corrections(earlier):
        outcome = Outcome.ACCEPTED if in_time_for(rule, event, row) else Outcome.LATE
        yield f"{row.msg_id}:{row.choice}", outcome
