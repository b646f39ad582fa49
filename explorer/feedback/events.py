"""Makes events of remarks: one for each thing that is said of each reply, the same for the same call repeated."""

import hashlib
import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import orjson

from tuneloop.explorer.capture.reply_id import ParsedReplyId, ReplyIdSigner
from tuneloop.explorer.feedback.request import MAX_OF_ONE, Entry, Signal
from tuneloop.explorer.http.caller import Caller
from tuneloop.shared import steady_time
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import Feedback, Kind


class FeedbackEvent(NamedTuple):
    """An event, and what it is about in the client's words; `event` None: about no reply of ours."""

    about: str
    kind: Kind
    event: Feedback | None


class EventFactory:
    """One call. Its ids are read by `signer` as the caller's tenant's, and its raters are the caller's.

    Names go into digests `as_stored`.
    """

    def __init__(
        self, signer: ReplyIdSigner, caller: Caller, *, as_stored: Callable[[str], str] = lambda name: name
    ) -> None:
        self._as_stored = as_stored
        self._signer = signer
        self._tenant = caller.tenant
        self._caller = caller
        self._call_id = uuid.uuid4().hex
        self._now = steady_time.now()
        self._stamp = steady_time.stamp()
        self._numbers = itertools.count()

    def hear(self, remarks: Sequence[Entry]) -> list[FeedbackEvent]:
        """What the remarks say, in their order. Of two names of one reply both have the same event."""
        _refuse_floods(remarks, self._signer, self._tenant)
        named = [remark._replace(source=self._caller.rater(remark.source)) for remark in remarks]
        return [each for number, remark in enumerate(named) for each in self._events_of_entry(remark, number)]

    def _events_of_entry(self, remark: Entry, place: int) -> Iterator[FeedbackEvent]:
        number = 0 if remark.key_alone else place
        if remark.msg_ids is None:
            for saying in remark.sayings:
                yield FeedbackEvent(
                    f"{remark.task_id}/{remark.run_id}", saying.kind, self._event(remark, saying, number)
                )
            return
        other = self._signer.parse(remark.preferred_over, self._tenant) if remark.preferred_over else None
        events: dict[ParsedReplyId, list[Feedback | None]] = {}
        for about in dict.fromkeys(remark.msg_ids):
            reply = self._signer.parse(about, self._tenant)
            if reply is not None and reply not in events:
                _must_differ(reply, other)
                events[reply] = [self._about(remark, saying, number, reply, other) for saying in remark.sayings]
            said = events[reply] if reply is not None else [None] * len(remark.sayings)
            for saying, event in zip(remark.sayings, said, strict=True):
                yield FeedbackEvent(about, saying.kind, event)

    def _about(
        self, remark: Entry, saying: Signal, number: int, reply: ParsedReplyId, other: ParsedReplyId | None
    ) -> Feedback | None:
        if saying.kind is not Kind.PREFERENCE:
            return self._event(remark, saying, number, reply)
        return None if other is None else self._event(remark, saying, number, reply, other)

    def _event(
        self,
        remark: Entry,
        saying: Signal,
        number: int,
        reply: ParsedReplyId | None = None,
        other: ParsedReplyId | None = None,
    ) -> Feedback:
        return Feedback(
            event_id=self._event_id(remark, saying, number, reply),
            call_id=self._call_id,
            tenant=self._tenant,
            key=self._caller.name,
            msg_id=reply.msg_id if reply else None,
            choice=reply.choice if reply else None,
            received_at=self._now,
            kind=saying.kind,
            metric=saying.metric,
            value=saying.value,
            text=saying.text,
            other_msg_id=other.msg_id if other else None,
            other_choice=other.choice if other else None,
            task_id=remark.task_id,
            run_id=remark.run_id,
            source=remark.source,
            occurred_at=remark.occurred_at,
            stamp=self._stamp,
        )

    def _event_id(self, remark: Entry, saying: Signal, number: int, reply: ParsedReplyId | None) -> str:
        """The entry's place in its call counts, too: two entries under the call's one key are not the same for that."""
        if remark.key is None:
            return f"{self._call_id}-{next(self._numbers)}"
        names = (remark.key, remark.task_id, remark.run_id, remark.source)
        key, task_id, run_id, source = (name and self._as_stored(name) for name in names)
        same = [self._tenant, key, number, *(reply or (None, None)), task_id, run_id]
        return hashlib.sha256(orjson.dumps([*same, source, saying.metric, saying.kind])).hexdigest()


def _refuse_floods(remarks: Sequence[Entry], signer: ReplyIdSigner, tenant: str) -> None:
    """Raise RequestRefused if one reply, choice or run gets more events than a call may bring it."""
    counts: Counter[object] = Counter()
    for remark in remarks if sum(len(remark.sayings) for remark in remarks) > MAX_OF_ONE else ():
        if remark.msg_ids is None:
            counts[remark.task_id, remark.run_id] += len(remark.sayings)
        for about in set(remark.msg_ids or ()):
            reply = signer.parse(about, tenant)
            counts[reply] += len(remark.sayings) if reply else 0
    if max(counts.values(), default=0) > MAX_OF_ONE:
        raise RequestRefused(
            f"a reply, a choice or a run gets more than {MAX_OF_ONE} events, which are allowed in one call",
            status=413,
            code="too_many_events",
            param="feedback",
        )


def _must_differ(reply: ParsedReplyId, other: ParsedReplyId | None) -> None:
    if other is not None and reply.msg_id == other.msg_id and (None in (reply.choice, other.choice) or reply == other):
        raise RequestRefused("a reply cannot be preferred over itself", code="invalid_value", param="preferred_over")
