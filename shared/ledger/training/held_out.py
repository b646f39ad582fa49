"""Held-out replies: a candidate is compared with the champion on them."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Select, select

from tuneloop.shared.evaluation.off_policy import HeldOutReply
from tuneloop.shared.experience import HELD_OUT, State
from tuneloop.shared.ledger.storage.codec import from_blob
from tuneloop.shared.ledger.storage.schema import experiences, worth

_COLUMNS = (worth.label("reward"), *(experiences.c[name] for name in ("id", "blob", "temperature", "task_id")))


def held_out_replies(rows: Iterable[Any]) -> list[HeldOutReply]:
    """The replies of rows of `newest_held_out`."""
    decoded = ((row, from_blob(row.blob)) for row in rows)
    return [
        HeldOutReply(row.id, prompt, reply, logprobs, row.temperature, row.reward, row.task_id)
        for row, (prompt, reply, logprobs) in decoded
        if len(prompt)  # Else its first token was predicted from nothing.
    ]


def newest_held_out(count: int, temperature: float | None) -> Select[Any]:
    """The rows of them, read backwards from the newest that was dropped."""
    dropped = experiences.c.state == State.DROPPED
    rewarded = (experiences.c.reason == HELD_OUT, worth.is_not(None))
    not_empty = experiences.c.completion_tokens > 0
    freely = experiences.c.unsampled.is_(None), experiences.c.grammar.is_(None)
    sampled = (not_empty, *freely, experiences.c.temperature > 0)
    query = select(*_COLUMNS).where(dropped, *rewarded, *sampled)
    if temperature is not None:
        query = query.where(experiences.c.temperature == temperature)
    return query.order_by(experiences.c.sampled_at.desc(), experiences.c.id.desc()).limit(count)
