"""Replies to one and the same prompt: of two versions side by side, and pairs that somebody may compare.

Prompts are no column, so they are compared among the newest replies only.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Select, and_, or_, select, true, tuple_

from tuneloop.shared.experience import Kind
from tuneloop.shared.ledger.browsing.reply_pages import ReplyCursor
from tuneloop.shared.ledger.storage import codec
from tuneloop.shared.ledger.storage.schema import exchanges, experiences, feedback
from tuneloop.shared.ledger.storage.transactions import LedgerPart

#: Replies of each version, and in all, among which the same prompts are looked for.
AMONG_OF_VERSION, AMONG_ALL = 1_000, 2_000

_PORTION = 250

#: What makes two prompts the same: not how was sampled.
_PROMPT = ("messages", "prompt", "input", "system", "instructions", "tools")


class PromptAnswer(NamedTuple):
    """One choice of a reply, and the request that it answers."""

    id: int
    msg_id: str
    choice: int
    sampled_at: float
    version: int
    reward: float | None
    text: str
    tool_calls: bytes | None
    request: bytes

    @property
    def name(self) -> str:
        """Its name in feedback."""
        return f"{self.msg_id}:{self.choice}"


class SamePrompts(LedgerPart):
    """Questions about replies to the same prompts."""

    def side_by_side(self, tenant: str, a: int, b: int, *, limit: int) -> list[tuple[PromptAnswer, PromptAnswer]]:
        """Answers of version a and of version b to the same prompts, the newest of each."""
        ours: dict[bytes, PromptAnswer] = {}
        for answer in self._newest(_of_version(tenant, a), None, AMONG_OF_VERSION):
            ours.setdefault(digest_of_prompt(answer.request), answer)
        found: dict[bytes, tuple[PromptAnswer, PromptAnswer]] = {}
        for answer in self._newest(_of_version(tenant, b), None, AMONG_OF_VERSION):
            digest = digest_of_prompt(answer.request)
            if digest in ours and digest not in found:
                found[digest] = (ours[digest], answer)
                if len(found) == limit:
                    break
        return list(found.values())

    def next_pair(self, tenant: str, after: ReplyCursor | None) -> tuple[PromptAnswer, PromptAnswer] | None:
        """Two different answers to one prompt that nobody has compared; the second is the newest behind `after`."""
        seen: dict[bytes, PromptAnswer] = {}
        for answer in self._newest(experiences.c.tenant == tenant, after, AMONG_ALL):
            digest = digest_of_prompt(answer.request)
            other = seen.setdefault(digest, answer)
            different = (other.text, other.tool_calls) != (answer.text, answer.tool_calls)
            if different and not self._is_compared(tenant, answer.msg_id, other.msg_id):
                return other, answer
        return None

    def _is_compared(self, tenant: str, one: str, other: str) -> bool:
        pair = or_(
            and_(feedback.c.msg_id == one, feedback.c.other_msg_id == other),
            and_(feedback.c.msg_id == other, feedback.c.other_msg_id == one),
        )
        compared = and_(feedback.c.tenant == tenant, feedback.c.kind == Kind.PREFERENCE, pair)
        return bool(self._read(select(feedback.c.id).where(compared).limit(1)))

    def _newest(self, which: ColumnElement[bool], after: ReplyCursor | None, among: int) -> Iterator[PromptAnswer]:
        for _ in range(0, among, _PORTION):
            rows = self._read(_portion(which, after))
            for row in rows:
                if row.correction == 0:
                    yield _answer(row)
            if len(rows) < _PORTION:
                return
            after = ReplyCursor(rows[-1].sampled_at, rows[-1].id)


def digest_of_prompt(request: bytes) -> bytes:
    """The same for requests that ask the same."""
    try:
        body = msgspec.json.decode(request)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # an imported row may hold anything
        return request
    if not isinstance(body, dict):
        return request
    prompt = {name: body[name] for name in _PROMPT if name in body}
    return hashlib.blake2b(msgspec.json.encode(prompt, order="deterministic"), digest_size=16).digest()


def _of_version(tenant: str, version: int) -> ColumnElement[bool]:
    alone = and_(experiences.c.version_min == version, experiences.c.version_max == version)
    return and_(alone, experiences.c.tenant == tenant)


def _portion(which: ColumnElement[bool], after: ReplyCursor | None) -> Select[Any]:
    behind: ColumnElement[bool] = true()
    if after is not None:
        key = tuple_(experiences.c.sampled_at, experiences.c.id)
        behind = and_(experiences.c.sampled_at <= after.sampled_at, key < after)
    names = ("id", "msg_id", "choice", "correction", "sampled_at", "version_min", "reward", "text", "tool_calls")
    joined = exchanges.c.msg_id == experiences.c.msg_id
    query = select(*(experiences.c[name] for name in names), exchanges.c.request)
    query = query.join_from(experiences, exchanges, joined).where(which, behind)
    return query.order_by(experiences.c.sampled_at.desc(), experiences.c.id.desc()).limit(_PORTION)


def _answer(row: Any) -> PromptAnswer:
    return PromptAnswer(
        id=row.id,
        msg_id=row.msg_id,
        choice=row.choice,
        sampled_at=row.sampled_at,
        version=row.version_min,
        reward=row.reward,
        text=row.text,
        tool_calls=row.tool_calls,
        request=codec.unpack_text(row.request),
    )
