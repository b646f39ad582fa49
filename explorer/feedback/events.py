"""Makes events of the entries of a feedback body: one for each signal about each reply, the same in a repeated call."""

import hashlib
import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import orjson

from tuneloop.explorer.auth import Caller
from tuneloop.explorer.feedback.request import MAX_OF_ONE, Entry, Signal
from tuneloop.explorer.transcript import ParsedReplyId, ReplyIdSigner
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import Feedback, Kind, stamp, steady_clock


class FeedbackEvent(NamedTuple):
    """An event, and what it is about in the client's words; `event` None: about no reply of ours."""

    about: str
    kind: Kind
    event: Feedback | None


class EventFactory:
    """One call. Its ids are read by `signer` as the caller's tenant's, and its raters are the caller's.

    Names go into digests `as_stored`. `judge`: the source that is our judge's alone, whose word is taken for true.
    """

    def __init__(
        self,
        signer: ReplyIdSigner,
        caller: Caller,
        *,
        as_stored: Callable[[str], str] = lambda name: name,
        judge: str | None = None,
    ) -> None:
        self._judge = judge
        self._as_stored = as_stored
        self._signer = signer
        self._tenant = caller.tenant
        self._caller = caller
        self._call_id = uuid.uuid4().hex
        self._now = steady_clock()
        self._stamp = stamp()
        self._numbers = itertools.count()

    def events_of(self, entries: Sequence[Entry]) -> list[FeedbackEvent]:
        """The events of the entries, in their order. Of two names of one reply both have the same event.

        Raises RequestRefused for what nobody may say, or not so much of.
        """
        _refuse_floods(entries, self._signer, self._tenant)
        named = [entry._replace(source=self._caller.rater(entry.source)) for entry in entries]
        if self._judge is not None and self._judge in {entry.source for entry in named}:
            message = f"{self._judge} is the source of the judge in the settings; choose another name"
            raise RequestRefused(message, code="source_of_judge", param="source")
        return [each for number, entry in enumerate(named) for each in self._events_of_entry(entry, number)]

    def _events_of_entry(self, entry: Entry, place: int) -> Iterator[FeedbackEvent]:
        number = 0 if entry.key_alone else place
        if entry.msg_ids is None:
            for signal in entry.signals:
                yield FeedbackEvent(f"{entry.task_id}/{entry.run_id}", signal.kind, self._event(entry, signal, number))
            return
        other = self._signer.parse(entry.preferred_over, self._tenant) if entry.preferred_over else None
        events: dict[ParsedReplyId, list[Feedback | None]] = {}
        for about in dict.fromkeys(entry.msg_ids):
            reply = self._signer.parse(about, self._tenant)
            if reply is not None and reply not in events:
                of_one = other is not None and reply.msg_id == other.msg_id
                if of_one and (reply == other or None in (reply.choice, other and other.choice)):
                    message = "a reply cannot be preferred over itself"
                    raise RequestRefused(message, code="invalid_value", param="preferred_over")
                events[reply] = [
                    self._event(entry, signal, number, reply)
                    if signal.kind is not Kind.PREFERENCE
                    else other and self._event(entry, signal, number, reply, other)
                    for signal in entry.signals
                ]
            made = events[reply] if reply is not None else [None] * len(entry.signals)
            for signal, event in zip(entry.signals, made, strict=True):
                yield FeedbackEvent(about, signal.kind, event)

    def _event(
        self,
        entry: Entry,
        signal: Signal,
        number: int,
        reply: ParsedReplyId | None = None,
        other: ParsedReplyId | None = None,
    ) -> Feedback:
        if entry.key is None:
            event_id = f"{self._call_id}-{next(self._numbers)}"
        else:  # its place in its call counts, too: two entries under the call's one key are not the same for that
            names = (entry.key, entry.task_id, entry.run_id, entry.source)
            key, task_id, run_id, source = (name and self._as_stored(name) for name in names)
            same = [self._tenant, key, number, *(reply or (None, None)), task_id, run_id]
            event_id = hashlib.sha256(orjson.dumps([*same, source, signal.metric, signal.kind])).hexdigest()
        return Feedback(
            event_id=event_id,
            call_id=self._call_id,
            tenant=self._tenant,
            key=self._caller.name,
            msg_id=reply.msg_id if reply else None,
            choice=reply.choice if reply else None,
            received_at=self._now,
            kind=signal.kind,
            metric=signal.metric,
            value=signal.value,
            text=signal.text,
            other_msg_id=other.msg_id if other else None,
            other_choice=other.choice if other else None,
            task_id=entry.task_id,
            run_id=entry.run_id,
            source=entry.source,
            occurred_at=entry.occurred_at,
            stamp=self._stamp,
        )


def _refuse_floods(entries: Sequence[Entry], signer: ReplyIdSigner, tenant: str) -> None:
    """Raise RequestRefused if one reply, choice or run gets more events than a call may bring it."""
    counts: Counter[object] = Counter()
    for entry in entries if sum(len(entry.signals) for entry in entries) > MAX_OF_ONE else ():
        if entry.msg_ids is None:
            counts[entry.task_id, entry.run_id] += len(entry.signals)
        for about in set(entry.msg_ids or ()):
            reply = signer.parse(about, tenant)
            counts[reply] += len(entry.signals) if reply else 0
    if max(counts.values(), default=0) > MAX_OF_ONE:
        raise RequestRefused(
            f"a reply, a choice or a run gets more than {MAX_OF_ONE} events, which are allowed in one call",
            status=413,
            code="too_many_events",
            param="feedback",
        )
