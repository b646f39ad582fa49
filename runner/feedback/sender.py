"""Sends the outbox's entries in order, in a thread, and interprets the answers."""

import logging
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from tuneloop.runner.errors import FeedbackAway, FeedbackError
from tuneloop.runner.feedback.feedback_outbox import FeedbackOutbox
from tuneloop.runner.feedback.verbs import MAX_ENTRY_BYTES, Entry
from tuneloop.runner.judging.endpoint import retry_after_s

_PLACE = re.compile(r"feedback\[(\d+)\]")

#: Outcomes of entries that the service will never keep.
_REFUSALS = {
    "unknown": "404: no id of a reply of this service",
    "not_recorded": "200: the reply is not recorded, by its request or the service's settings",
    "full": "200: the reply has as much feedback as the service keeps",
}


@dataclass(frozen=True, slots=True)
class Accepted:
    """Accepted, except the entries at the places in `refused`, each with its reason.

    Entries at `unclear` share a name with others, so that the outcome may be another's: each is sent again alone.
    """

    answer: Mapping[str, Any]
    refused: Mapping[int, str] = field(default_factory=dict)
    unclear: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Rejected:
    """Nothing was accepted, because of the entry at `place`, or an unknown one if None."""

    reason: str
    place: int | None = None
    answer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TryLater:
    """Nothing was accepted, whatever the entries. `wait_s` is the wait that the service asks for."""

    reason: str
    wait_s: float | None = None


ServiceAnswer = Accepted | Rejected | TryLater


def understand(entries: Sequence[Entry], response: httpx.Response | httpx.HTTPError) -> ServiceAnswer:
    """Interpret an answer. Only the service's own error format decides about entries."""
    if not isinstance(response, httpx.Response):
        return TryLater(f"the service does not answer: {response!r}")
    answer: dict[str, Any] = {}
    with suppress(ValueError, RecursionError):
        found = response.json()
        answer = found if isinstance(found, dict) else {}
    if response.is_success and "outcomes" in answer:
        outcomes, refused = answer["outcomes"] if isinstance(answer["outcomes"], dict) else {}, {}
        for at, entry in enumerate(entries):
            met = {outcomes.get(name) for name in names_of(entry)}
            if reason := next((_REFUSALS[outcome] for outcome in _REFUSALS if outcome in met), None):
                refused[at] = reason
        # Of several outcomes for one name, the service reports the weakest.
        entries_about = Counter(name for entry in entries for name in set(names_of(entry)))
        return Accepted(
            answer,
            refused,
            frozenset(place for place in refused if any(entries_about[name] > 1 for name in names_of(entries[place]))),
        )
    if response.status_code == 404 and "outcomes" in answer:
        return Accepted(answer, dict.fromkeys(range(len(entries)), _REFUSALS["unknown"]))
    error = answer.get("error")
    if response.status_code in {400, 413} and isinstance(error, dict) and isinstance(error.get("message"), str):
        place = _PLACE.match(str(error.get("param")))
        within = place and int(place[1]) < len(entries)
        return Rejected(
            f"{response.status_code}: {error['message']}", int(place[1]) if place and within else None, answer
        )
    if response.status_code == 413:
        return Rejected("413: too large")
    return TryLater(f"the service answered {response.status_code}: {response.text[:200]}", retry_after_s(response))


def names_of(entry: Entry) -> Sequence[str]:
    """The service's names of an entry's subject: replies or a run."""
    return entry.get("msg_ids") or [f"{entry.get('task_id')}/{entry.get('run_id')}"]


#: Seconds: between searches for files of ended processes; first and longest pause after failures; longest Retry-After.
_LOOK_S, _FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONGEST_WAIT_S = 5.0, 0.2, 30.0, 300.0

_MOST_ENTRIES = 1000

Post = Callable[[Sequence[Entry]], httpx.Response | httpx.HTTPError]

log = logging.getLogger(__name__)


class Sender:
    """Posts entries until the service accepts or refuses them for good; refused ones are set aside."""

    def __init__(self, outbox: FeedbackOutbox, post: Post, hang_up: Callable[[], None]) -> None:
        self.outbox, self._post, self._hang_up = outbox, post, hang_up
        self.trouble: str | None = None
        self._thread: threading.Thread | None = None
        self._closing = self._hurry = self._has_looked = False
        self._reset()

    def put(self, entries: Sequence[Entry]) -> None:
        """Sync entries to disk. Raises FeedbackError or OSError."""
        if self._closing:
            raise FeedbackError("it is closed")
        self.outbox.put(entries)
        self.start()
        with self._changed:
            self._changed.notify_all()

    def start(self) -> None:
        with self._starting:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="tuneloop-feedback", daemon=True)
                self._thread.start()

    def flush(self, timeout: float) -> bool:
        """Send at once, for up to `timeout` seconds, also for ended processes; whether all is sent."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not self.outbox.pending and (self._has_looked or self._thread is None), timeout
            )

    def close(self, timeout: float) -> bool:
        """Flush and stop. Unsent entries wait for the next process that opens the outbox."""
        if self._closing:
            return not self.outbox.pending
        done = self.flush(timeout) if self._thread else not self.outbox.pending
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)  # ends after a pending answer
        else:
            self._end()
        return done

    def after_fork(self) -> None:
        """Restart in a child, which has no thread and must not touch the parent's files."""
        running = self._thread is not None
        self.outbox.forget_parents_files()
        self._reset()
        if running:
            self.start()

    def _reset(self) -> None:
        self._starting = threading.Lock()
        self._changed = threading.Condition()
        self._thread, self._closing, self._hurry, self._has_looked = None, False, False, False

    def _run(self) -> None:
        failures, looked = 0, 0.0
        while not self._closing:
            try:
                if time.monotonic() - looked >= _LOOK_S or not looked:
                    looked = time.monotonic()
                    # Adopt files of ended processes.
                    try:
                        self.outbox.look()
                    finally:
                        with self._changed:
                            self._has_looked = True
                            self._changed.notify_all()
                if (batch := self.outbox.next_batch()) is not None:
                    refused = sum(self._deliver(entries) for entries in _posts(batch.entries))
                    self.outbox.note_sent(batch, refused)
                failures, self.trouble = 0, None
            except Exception as error:
                if self.trouble is None:
                    log.warning("feedback waits on disk: %s", error, exc_info=not isinstance(error, FeedbackAway))
                self.trouble = str(error)
                retry_after_s = error.retry_after_s if isinstance(error, FeedbackAway) else None
                pause_s = random.uniform(0.5, 1.0) * min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures, 10))
                self._rest(pause_s if retry_after_s is None else min(retry_after_s, _LONGEST_WAIT_S))
                failures += 1
                continue
            if batch is None:
                self._rest(_LOOK_S, until_put=True)
        self._end()

    def _end(self) -> None:
        self.outbox.close()
        self._hang_up()

    def _rest(self, seconds: float, *, until_put: bool = False) -> None:
        """Wait until the timeout, a flush, or, with `until_put`, a new entry."""
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._closing or self._hurry or (until_put and self.outbox.pending > 0), seconds
            )
            self._hurry = False

    def _deliver(self, entries: Sequence[Entry]) -> int:
        refused, waiting = 0, [list(entries)] if entries else []
        while waiting:
            now = waiting.pop()
            match understand(now, self._post(now)):
                case Accepted(_, never, unclear):
                    for place in sorted(never.keys() - unclear):
                        self.outbox.set_aside(now[place], never[place])
                    refused += len(never) - len(unclear)
                    waiting += [[now[place]] for place in sorted(unclear, reverse=True)]
                case TryLater(reason, wait_s):
                    raise FeedbackAway(reason, retry_after_s=wait_s)
                case Rejected(reason, place) if len(now) == 1 or place is not None:
                    self.outbox.set_aside(now.pop(place or 0), reason)
                    refused += 1
                    waiting += [now] if now else []
                case Rejected():
                    half = len(now) // 2
                    waiting += [now[half:], now[:half]]
        return refused


def _posts(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    cuts, size = [0], 0
    for place, entry in enumerate(entries):
        length = sum(len(str(each)) for each in entry.values()) * 6  # JSON escapes take 6 bytes
        if place > cuts[-1] and (size + length > MAX_ENTRY_BYTES or place - cuts[-1] >= _MOST_ENTRIES):
            cuts.append(place)
            size = 0
        size += length
    for start, end in pairwise([*cuts, len(entries)]):
        yield entries[start:end]
