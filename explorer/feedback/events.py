"""What a client says of replies, as events: one for each signal about each reply, the same in a repeated call."""

import hashlib
import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from tuneloop.explorer.auth import Caller
from tuneloop.explorer.http.bodies import (
    finite_number,
    optional_bool,
    optional_id,
    optional_name,
    optional_text,
    optional_time,
    wrong_type,
)
from tuneloop.explorer.transcript import ParsedReplyId, ReplyIdSigner
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import MAX_REWARD, Feedback, Kind, Outcome, stamp, steady_clock

#: Ids in one call. More get a 413, and nothing of the call is stored.
MAX_IDS = 100_000

#: Characters that one call may bring to disk: what is about many replies is stored with each of them.
MAX_CHARACTERS = 32 << 20

#: Events about one reply, or one run, in one call: each later one is computed with all of them.
MAX_OF_ONE = 100

_SAYS = ("reward", "value", "label", "comment", "demonstration", "preferred_over", "retract")
_ABOUT = ("msg_ids", "task_id", "run_id")
_FIELDS = frozenset({*_SAYS, *_ABOUT, "metric", "source", "time", "idempotency_key", "feedback"})
_NAME_SHOWN, _EXAMPLE = 64, 128


class Signal(NamedTuple):
    """One rating, label, comment, edited answer or preference; it becomes one event for each reply that it is about."""

    kind: Kind
    metric: str
    value: float | None = None
    text: str | None = None


class Entry(NamedTuple):
    """An entry of a feedback body: its signals, their target, and their source.

    `msg_ids` are as the client wrote them; None: the entry is about all of `task_id` and `run_id`. `key_alone`:
    the key is this entry's own, so that the entry is the same wherever in a call it stands.
    """

    signals: tuple[Signal, ...]
    msg_ids: tuple[str, ...] | None
    preferred_over: str | None
    task_id: str | None
    run_id: str | None
    source: str | None
    occurred_at: float | None
    key: str | None
    key_alone: bool = False


def parse_entries(body: dict[str, Any], key_header: str | None) -> list[Entry]:
    key = optional_name(body, "idempotency_key")
    # In the header it stands in quotes by the book.
    of_header = optional_name({"Idempotency-Key": (key_header or "").strip().strip('"')}, "Idempotency-Key")
    if key and of_header and key != of_header:
        raise RequestRefused(
            "idempotency_key and the header Idempotency-Key differ", code="invalid_value", param="idempotency_key"
        )
    key = key or of_header
    _refuse_unknown_numbers(body)
    entries = body.get("feedback")
    parsed = [_parse_entry(body, key)] if entries is None else list(_entries_of_list(body, entries, key))
    if (count := sum(len(entry.msg_ids or "1") for entry in parsed)) > MAX_IDS:
        raise RequestRefused(
            f"msg_ids has {count} ids, {MAX_IDS} are allowed in one call",
            status=413,
            code="too_many_ids",
            param="msg_ids",
        )
    characters = 0
    for entry in parsed:
        names = sum(len(text or "") for text in (entry.task_id, entry.run_id, entry.source))
        of_one = sum(names + len(signal.metric) + len(signal.text or "") for signal in entry.signals)
        characters += of_one * len(entry.msg_ids or "1")
    if characters > MAX_CHARACTERS:
        raise RequestRefused(
            f"so long a text for so many ids: {MAX_CHARACTERS} characters, counted once for each id, are allowed in"
            " one call",
            status=413,
            code="body_too_large",
        )
    return parsed


def _entries_of_list(body: dict[str, Any], entries: object, key: str | None) -> Iterator[Entry]:
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise wrong_type("feedback", "a list of at least one object")
    if misplaced := [param for param in (*_ABOUT, *_SAYS) if body.get(param) is not None]:
        raise RequestRefused(
            f"{misplaced[0]} stands beside feedback: write it into the entries",
            code="invalid_value",
            param=misplaced[0],
        )
    for number, entry in enumerate(entries):
        try:
            _refuse_unknown_numbers(entry)
            own = optional_name(entry, "idempotency_key")
            yield _parse_entry(entry, own or key)._replace(key_alone=own is not None)
        except RequestRefused as error:
            place = f"feedback[{number}]"
            param = f"{place}.{error.param}" if error.param else place
            raise RequestRefused(f"{place}: {error}", status=error.status, code=error.code, param=param) from None


def _refuse_unknown_numbers(entry: dict[str, Any]) -> None:
    """Raise RequestRefused for a number or a thumb under a name that no field has: it would count for nothing."""
    for name, value in entry.items():
        if name not in _FIELDS and isinstance(value, bool | int | float):
            written = orjson.dumps({"metric": name, "value": value}).decode()
            raise RequestRefused(
                f"feedback has no field {name[:_NAME_SHOWN]}: a number of one's own is a metric, {written[:_EXAMPLE]}",
                code="unknown_parameter",
                param=name[:_NAME_SHOWN],
            )


def _parse_entry(entry: dict[str, Any], key: str | None) -> Entry:
    task_id, run_id = optional_id(entry, "task_id"), optional_id(entry, "run_id")
    msg_ids = _msg_ids(entry, whole_run=None not in (task_id, run_id))
    signals = tuple(_checked_signals(entry))
    preferred_over = optional_name(entry, "preferred_over")
    if preferred_over and (msg_ids is None or len(set(msg_ids)) != 1):
        raise RequestRefused(
            "preferred_over compares two replies: msg_ids must name exactly one", code="invalid_value", param="msg_ids"
        )
    return Entry(
        signals=signals,
        msg_ids=msg_ids,
        preferred_over=preferred_over,
        task_id=task_id,
        run_id=run_id,
        source=optional_name(entry, "source"),
        occurred_at=optional_time(entry, "time"),
        key=key,
    )


def _msg_ids(entry: dict[str, Any], *, whole_run: bool) -> tuple[str, ...] | None:
    ids = entry.get("msg_ids")
    if ids is None:
        if whole_run:
            return None
        raise RequestRefused(
            "msg_ids and reward are required; without msg_ids, task_id and run_id name a whole trajectory",
            code="missing",
            param="msg_ids",
        )
    if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
        raise wrong_type("msg_ids", "a list of strings")
    # Not the whole trajectory: a client that collected no ids did not mean that.
    if not ids:
        raise RequestRefused("msg_ids must name at least one reply", code="missing", param="msg_ids")
    return tuple(ids)


def _checked_signals(entry: dict[str, Any]) -> Sequence[Signal]:
    signals = list(_signals(entry))
    if not signals:
        raise RequestRefused(
            f"msg_ids and reward are required; in the place of reward may stand {', '.join(_SAYS[1:])}",
            code="missing",
            param="reward",
        )
    if signals[0].kind is Kind.RETRACTION and len(signals) > 1:
        raise RequestRefused(
            "retract stands alone; send the rest in another call", code="invalid_value", param="retract"
        )
    if (metric := optional_name(entry, "metric")) is not None:
        signals[0] = signals[0]._replace(metric=metric)
    if len({each.metric for each in signals}) < len(signals):
        raise RequestRefused(
            f"only one value can be given for the metric {metric}", code="invalid_value", param="metric"
        )
    return signals


def _signals(entry: dict[str, Any]) -> Iterator[Signal]:
    if optional_bool(entry, "retract"):
        yield Signal(Kind.RETRACTION, "reward")
    rating = _rating(entry)
    if rating is not None:
        yield rating
    if label := optional_name(entry, "label"):
        if rating is not None and rating.kind is Kind.LABEL:
            raise RequestRefused("value is a label already: leave out label", code="invalid_value", param="label")
        yield Signal(Kind.LABEL, "reward" if rating is None else "label", text=label)
    if optional_name(entry, "preferred_over"):
        yield Signal(Kind.PREFERENCE, "preference")
    answer = entry.get("demonstration")
    if not isinstance(answer, dict):
        answer = optional_text(entry, "demonstration")
    elif answer.get("role", "assistant") != "assistant" or not (answer.get("content") or answer.get("tool_calls")):
        raise wrong_type("demonstration", "a string, or a message of the assistant with content or tool_calls")
    else:
        answer = orjson.dumps({"role": "assistant"} | answer).decode()
    if answer:
        yield Signal(Kind.DEMONSTRATION, "demonstration", text=answer)
    if comment := optional_text(entry, "comment"):
        yield Signal(Kind.COMMENT, "comment", text=comment)


def _rating(entry: dict[str, Any]) -> Signal | None:
    if entry.get("reward") is not None:
        if entry.get("value") is not None:
            raise RequestRefused("reward and value are two names for one field: give one", code="invalid_value")
        return Signal(Kind.NUMBER, "reward", value=finite_number(entry["reward"], "reward", bound=MAX_REWARD))
    match entry.get("value"):
        case None | "":
            return None
        case bool(thumb):
            return Signal(Kind.BOOLEAN, "reward", value=float(thumb))
        case str():
            return Signal(Kind.LABEL, "reward", text=optional_name(entry, "value"))
        case number if isinstance(number, int | float):
            return Signal(Kind.NUMBER, "reward", value=finite_number(number, "value", bound=MAX_REWARD))
    raise wrong_type("value", "a number, a boolean or a string")


class FeedbackEvent(NamedTuple):
    """An event, and what it is about in the client's words; `event` None: about nothing that it can be stored of."""

    about: str
    kind: Kind
    event: Feedback | None
    outcome: Outcome = Outcome.UNKNOWN


class EventFactory:
    """One call. Names go into digests `as_stored`. `judge`: the source that is our judge's alone."""

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
        """The events of the entries, in order; two names of one reply have the same event. Raises RequestRefused."""
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
                two = (reply, other) if signal.kind is Kind.PREFERENCE else (reply,)
                if None not in two and not all(each.recorded for each in two if each):
                    yield FeedbackEvent(about, signal.kind, None, Outcome.NOT_RECORDED)
                else:
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
