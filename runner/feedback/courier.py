"""Sends what lies in an outbox, in its order, in a thread of its own, for as long as it takes."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import httpx

from tuneloop.runner.errors import FeedbackAway, FeedbackError
from tuneloop.runner.feedback.answers import NeverTaken, NotNow, Taken, understand
from tuneloop.runner.feedback.outbox import Outbox
from tuneloop.runner.feedback.verbs import MAX_ENTRY_BYTES, Entry

#: Seconds: between two looks for files of processes that ended; the first and the longest pause after a failure; and
#: the longest that we wait because the service asks us to.
_LOOK_S, _FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONGEST_WAIT_S = 5.0, 0.2, 30.0, 300.0

_MOST_ENTRIES = 1000

Post = Callable[[Sequence[Entry]], httpx.Response | httpx.HTTPError]

log = logging.getLogger(__name__)


class Courier:
    """Posts entries until the service has taken them or will never take them. The latter are set aside."""

    def __init__(self, outbox: Outbox, post: Post, hang_up: Callable[[], None]) -> None:
        self.outbox, self._post, self._hang_up = outbox, post, hang_up
        self.trouble: str | None = None
        self._thread: threading.Thread | None = None
        self._closing = self._hurry = self._has_looked = False
        self._reset()

    def put(self, entries: Sequence[Entry]) -> None:
        """Take entries: they are on disk when this returns. Raises FeedbackError or OSError."""
        if self._closing:
            raise FeedbackError("it is closed")
        self.outbox.put(entries)
        self.start()
        with self._changed:
            self._changed.notify_all()

    def start(self) -> None:
        """Begin to send, if that was not done yet."""
        with self._starting:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="tuneloop-feedback", daemon=True)
                self._thread.start()

    def flush(self, timeout: float) -> bool:
        """Try at once to send what waits, for so many seconds; whether nothing waits any more.

        What processes that have ended left in the folder waits, too: it has been looked for when this returns.
        """
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not self.outbox.pending and (self._has_looked or self._thread is None), timeout
            )

    def close(self, timeout: float) -> bool:
        """Flush, and stop. What is not sent waits on disk for the next process that opens the outbox."""
        if self._closing:
            return not self.outbox.pending
        done = self.flush(timeout) if self._thread else not self.outbox.pending
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)  # it may be waiting for an answer, and ends then
        else:
            self._end()
        return done

    def after_fork(self) -> None:
        """In the child there is no thread, and the files are the parent's."""
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
                    self._look()
                sent = self._send_next()
                failures, self.trouble = 0, None
            except Exception as error:  # noqa: BLE001 - whatever it is, what is acknowledged must still be sent
                self._note(error)
                retry_after_s = error.retry_after_s if isinstance(error, FeedbackAway) else None
                self._rest(_pause(failures) if retry_after_s is None else min(retry_after_s, _LONGEST_WAIT_S))
                failures += 1
                continue
            if not sent:
                self._rest(_LOOK_S, until_put=True)
        self._end()

    def _look(self) -> None:
        """Take over what processes that have ended left."""
        try:
            self.outbox.adopt()
        finally:
            with self._changed:
                self._has_looked = True
                self._changed.notify_all()

    def _end(self) -> None:
        self.outbox.close()
        self._hang_up()

    def _note(self, error: Exception) -> None:
        if self.trouble is None:
            log.warning("feedback waits on disk: %s", error, exc_info=not isinstance(error, FeedbackAway))
        self.trouble = str(error)

    def _rest(self, seconds: float, *, until_put: bool = False) -> None:
        """Wait, until somebody is in a hurry or, where nothing waits, until something does."""
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._closing or self._hurry or (until_put and self.outbox.pending > 0), seconds
            )
            self._hurry = False

    def _send_next(self) -> bool:
        """Send a batch; whether there was one. Raises FeedbackAway if it must be sent again."""
        batch = self.outbox.next_batch()
        if batch is None:
            return False
        refused = sum(self._deliver(entries) for entries in _posts(batch.entries))
        self.outbox.note_sent(batch, refused)
        return True

    def _deliver(self, entries: Sequence[Entry]) -> int:
        """Send entries, in their order; return how many of them will never be taken."""
        refused, waiting = 0, [list(entries)] if entries else []
        while waiting:
            now = waiting.pop()
            match understand(now, self._post(now)):
                case Taken(_, never, unclear):
                    for place in sorted(never.keys() - unclear):
                        self.outbox.set_aside(now[place], never[place])
                    refused += len(never) - len(unclear)
                    waiting += [[now[place]] for place in sorted(unclear, reverse=True)]
                case NotNow(reason, wait_s):
                    raise FeedbackAway(reason, retry_after_s=wait_s)
                case NeverTaken(reason, place) if len(now) == 1 or place is not None:
                    self.outbox.set_aside(now.pop(place or 0), reason)
                    refused += 1
                    waiting += [now] if now else []
                case NeverTaken():
                    half = len(now) // 2
                    waiting += [now[half:], now[:half]]
        return refused


def _pause(failures: int) -> float:
    longest: float = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures, 10))
    return longest * random.uniform(0.5, 1.0)


def _posts(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """The entries in the calls that they are sent by: each has room for any one of them."""
    cuts, size = [0], 0
    for place, entry in enumerate(entries):
        length = sum(len(str(each)) for each in entry.values()) * 6  # as JSON of characters that are not ASCII
        if place > cuts[-1] and (size + length > MAX_ENTRY_BYTES or place - cuts[-1] >= _MOST_ENTRIES):
            cuts.append(place)
            size = 0
        size += length
    for start, end in pairwise([*cuts, len(entries)]):
        yield entries[start:end]
