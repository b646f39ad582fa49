"""Replies to one and the same prompt: of two versions side by side, and pairs that somebody may compare.

Prompts are no column, so they are compared among the newest replies only.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Select, and_, or_, select, true, tuple_

from tuneloop.shared.experience import Kind
from tuneloop.shared.ledger.browsing.reply_pages import ReplyCursor, ReplyTexts
from tuneloop.shared.ledger.storage import codec
from tuneloop.shared.ledger.storage.schema import exchanges, experiences, feedback

#: Replies of each version, and in all, among which the same prompts are looked for.
AMONG_OF_VERSION, AMONG_ALL = 1_000, 2_000


class PromptAnswer(NamedTuple):
    id: int
    msg_id: str
    choice: int
    sampled_at: float
    version: int
    reward: float | None
    text: str
    tool_calls: bytes | None

    @property
    def name(self) -> str:
        return f"{self.msg_id}:{self.choice}"


class AnswerPair(NamedTuple):
    """Two answers to the same prompt; `request` is the client's JSON of the first."""

    request: bytes
    one: PromptAnswer
    other: PromptAnswer


class SamePrompts(ReplyTexts):
    def side_by_side(self, tenant: str, a: int, b: int, *, limit: int) -> list[AnswerPair]:
        """Answers of version a and of version b to the same prompts, the newest of each; fewer if those are long."""
        ours: dict[bytes, int] = {}
        for answer in self._newest(_of_version(tenant, a), None, AMONG_OF_VERSION):
            ours.setdefault(answer.prompt, answer.id)
        found: dict[bytes, tuple[int, int]] = {}
        for answer in self._newest(_of_version(tenant, b), None, AMONG_OF_VERSION):
            if answer.prompt in ours and answer.prompt not in found:
                found[answer.prompt] = ours[answer.prompt], answer.id
                if len(found) == limit:
                    break
        return self._pairs(list(found.values()))

    def next_pair(self, tenant: str, after: ReplyCursor | None) -> AnswerPair | None:
        """Two different answers to one prompt that nobody has compared; the second is the newest behind `after`."""
        seen: dict[bytes, _Digests] = {}
        for answer in self._newest(experiences.c.tenant == tenant, after, AMONG_ALL):
            other = seen.setdefault(answer.prompt, answer)
            compared = or_(
                and_(feedback.c.msg_id == answer.msg_id, feedback.c.other_msg_id == other.msg_id),
                and_(feedback.c.msg_id == other.msg_id, feedback.c.other_msg_id == answer.msg_id),
            )
            preferences = and_(feedback.c.tenant == tenant, feedback.c.kind == Kind.PREFERENCE, compared)
            if other.reply == answer.reply or self._read(select(feedback.c.id).where(preferences).limit(1)):
                continue
            if pairs := self._pairs([(other.id, answer.id)]):
                return pairs[0]
        return None

    def _newest(self, which: ColumnElement[bool], after: ReplyCursor | None, among: int) -> Iterator["_Digests"]:
        behind: ColumnElement[bool] = true()
        if after is not None:
            key = tuple_(experiences.c.sampled_at, experiences.c.id)
            behind = and_(experiences.c.sampled_at <= after.sampled_at, key < after)
        newest = select(experiences.c.id, experiences.c.correction).where(which, behind)
        newest = newest.order_by(experiences.c.sampled_at.desc(), experiences.c.id.desc()).limit(among)
        keys = [row for row in self._read(newest) if row.correction == 0]
        for portion in self._split(keys):
            rows = {row.id: row for row in self._read(_select_texts([key.id for key in portion]))}
            for key in portion:
                if (row := rows.pop(key.id, None)) is not None:
                    prompt = digest_of_prompt(codec.unpack_text(row.request))
                    yield _Digests(
                        row.id,
                        row.msg_id,
                        prompt,
                        _digest(row.text.encode(errors="surrogatepass"))
                        + (b"" if row.tool_calls is None else _digest(row.tool_calls)),
                    )

    def _pairs(self, ids: Sequence[tuple[int, int]]) -> list[AnswerPair]:
        """The answers of these ids, as far as they are still there, and their requests may be in memory at once."""
        of_both = experiences.c.id.in_([each for pair in ids for each in pair])
        answers = {row.id: PromptAnswer(*row) for row in self._read(select(*_ANSWER).where(of_both))}
        there = [pair for pair in ids if answers.keys() >= set(pair)]
        shown = next(self._split([answers[one] for one, _ in there]), [])
        requests = {row.id: row.request for row in self._read(_select_texts([one.id for one in shown]))}
        return [
            AnswerPair(codec.unpack_text(requests[one]), answers[one], answers[other])
            for one, other in there[: len(shown)]
            if one in requests
        ]


class _Digests(NamedTuple):
    """What is kept of a reply until the two that are shown are known."""

    id: int
    msg_id: str
    prompt: bytes
    reply: bytes


class _Prompt(msgspec.Struct):
    """What makes two prompts the same: not how was sampled."""

    messages: Any = msgspec.UNSET
    prompt: Any = msgspec.UNSET
    input: Any = msgspec.UNSET
    system: Any = msgspec.UNSET
    instructions: Any = msgspec.UNSET
    tools: Any = msgspec.UNSET


def digest_of_prompt(request: bytes) -> bytes:
    try:
        prompt = msgspec.json.encode(msgspec.json.decode(request, type=_Prompt), order="deterministic")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # an imported row may hold anything
        prompt = request
    return _digest(prompt)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _of_version(tenant: str, version: int) -> ColumnElement[bool]:
    alone = and_(experiences.c.version_min == version, experiences.c.version_max == version)
    return and_(alone, experiences.c.tenant == tenant)


_ANSWER = (
    *(experiences.c[name] for name in ("id", "msg_id", "choice", "sampled_at")),
    *(experiences.c[name] for name in ("version_min", "reward", "text", "tool_calls")),
)


def _select_texts(ids: Sequence[int]) -> Select[Any]:
    names = ("id", "msg_id", "text", "tool_calls")
    joined = exchanges.c.msg_id == experiences.c.msg_id
    query = select(*(experiences.c[name] for name in names), exchanges.c.request)
    return query.join_from(experiences, exchanges, joined).where(experiences.c.id.in_(ids))
