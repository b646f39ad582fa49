"""How the services log: one line per state change, `key=value` or JSON, on stderr."""

import atexit
import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
import traceback
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from types import TracebackType
from typing import TextIO, cast

import structlog
from structlog.typing import EventDict, WrappedLogger

#: Controls, marks that change the direction of text, lone surrogates, and separators that begin a line.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})

#: So many lines of one event are written at once, and so many a second after them.
LINES_AT_ONCE, LINES_PER_S = 100, 10.0

_SUMMARY_S = 10.0

_SUMMARY = "lines_left_out"

#: Lines that wait for a stream which takes none, and how long the end of a process waits for them, in seconds.
MOST_WAITING, _FINISH_S = 2_000, 1.0

#: The variables in which `tuneloop run --log-level debug --log-json` hands on how services log.
LEVEL_VARIABLE, JSON_VARIABLE = "TUNELOOP_LOG_LEVEL", "TUNELOOP_LOG_JSON"


#: The fields of an event with an error, which may quote a user's text.
_ERROR_FIELDS = ("exception", "reason", "error")


class _Cleaner:
    """Removes from errors what must not be written."""

    clean: Callable[[str], str] = staticmethod(lambda text: text)

    def process(self, logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
        for field in _ERROR_FIELDS:
            if isinstance(value := event.get(field), str):
                event[field] = self.clean(value)
        return event


_CLEANER = _Cleaner()


def clean_errors(clean: Callable[[str], str]) -> None:
    """Write errors through `clean` from now on: tracebacks, reasons, the lines of libraries."""
    _CLEANER.clean = clean


def clean_error(error: object) -> str:
    return _CLEANER.clean(str(error))


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogWriter:
    """Writes the log in a thread, so that a pipe without a reader blocks no service; drops lines beyond the buffer."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        #: Called for each piece of text that is dropped.
        self.count_dropped: Callable[[], object] = lambda: None
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # which has no thread but its own

    def _begin(self) -> None:
        self._waiting: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)

    def write(self, text: str) -> None:
        if self._waiting.qsize() >= MOST_WAITING:
            self._dropped += 1
            self.count_dropped()
            return
        if self._thread.ident is None:
            with contextlib.suppress(RuntimeError):  # another thread has just started it
                self._thread.start()
        self._waiting.put(text)

    def flush(self) -> None:
        """Nothing: a caller that logs does not wait."""

    def finish(self) -> None:
        """Wait until all is written, for a moment at most: before the process ends."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._waiting.put(written := threading.Event())
            written.wait(_FINISH_S)

    def _run(self) -> None:
        while True:
            text = self._waiting.get()
            if isinstance(text, threading.Event):
                text.set()
                continue
            # Not by sys.stderr, whose lock the end of the process would wait for. A full disk drops the line.
            data = text.encode(errors="backslashreplace")
            with contextlib.suppress(OSError):
                while data:
                    data = data[os.write(self._descriptor, data) :]
            if self._dropped and not self._waiting.qsize():
                dropped, self._dropped = self._dropped, 0
                structlog.get_logger().warning("log_lines_dropped", lines=dropped, reason="the log took none")


LOG = LogWriter(2)


class LineLimiter:
    """Leaves out lines of an event that comes too often, and later calls `tell` with the count of each."""

    def __init__(self, tell: Callable[[dict[str, int]], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._lock = threading.Lock()
        self._room: dict[str, tuple[float, float]] = {}  # for each event: lines, as of when
        self._left_out: Counter[str] = Counter()

    def admits(self, event: str) -> bool:
        with self._lock:
            now = self._clock()
            room, since = self._room.get(event, (float(LINES_AT_ONCE), now))
            room = min(room + (now - since) * LINES_PER_S, LINES_AT_ONCE)
            admitted = room >= 1
            self._room[event] = room - admitted, now
            if not admitted:
                if not self._left_out:
                    timer = threading.Timer(_SUMMARY_S, self.summarise)
                    timer.daemon = True
                    timer.start()
                self._left_out[event] += 1
        return admitted

    def summarise(self) -> None:
        with self._lock:
            left_out, self._left_out = self._left_out, Counter()
        if left_out:
            self._tell(dict(left_out))

    def process(self, logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
        if event["event"] != _SUMMARY and not self.admits(str(event["event"])):
            raise structlog.DropEvent
        return event

    def filter(self, record: logging.LogRecord) -> bool:
        return self.admits(f"{record.name}:{record.lineno}")


def configure_logging(environment: Mapping[str, str] | None = None) -> None:
    """Send structlog's events and the libraries' warnings to stderr; a level that is wrongly named counts as `info`."""
    variables = os.environ if environment is None else environment
    named = variables.get(LEVEL_VARIABLE, "").strip().lower()
    level = getattr(logging, named.upper()) if named in set(LogLevel) else logging.INFO
    as_json = variables.get(JSON_VARIABLE, "").strip().lower() in {"1", "true", "yes"}
    libraries = logging.StreamHandler(LOG)
    libraries.setFormatter(_JsonFormatter() if as_json else _TextFormatter("%(asctime)s %(name)s %(message)s"))
    logging.captureWarnings(capture=True)
    atexit.register(LOG.finish)
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[libraries])
    limiter = LineLimiter(lambda lines: structlog.get_logger().warning(_SUMMARY, **lines))
    for handler in logging.getLogger().handlers:
        handler.addFilter(limiter)
    sys.excepthook = _tell_uncaught
    threading.excepthook = lambda end: _tell_uncaught(end.exc_type, end.exc_value, end.exc_traceback)
    structlog.configure(
        processors=[
            limiter.process,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _CLEANER.process,
            *(
                [structlog.processors.JSONRenderer(default=str)]
                if as_json
                else [_escape_values, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", LOG)),
    )


def _escape_values(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """Names that clients choose move no cursor, and begin no line. Tracebacks keep their lines."""
    return {
        key: visible(value) if isinstance(value, str) and key != "exception" else value for key, value in event.items()
    }


def visible(text: str, *, keep: str = "") -> str:
    r"""The text with everything that is not seen written as an escape, but for the characters in `keep`.

    >>> visible("fine\x1b[2J\n9  champion by ann")
    'fine\\x1b[2J\\n9  champion by ann'
    """
    if text.isprintable():
        return text
    return "".join(
        each.encode("unicode_escape").decode() if unicodedata.category(each) in _HIDDEN and each not in keep else each
        for each in text
    )


def _tell_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Say what a thread or the process ends of, as Python does."""
    if not issubclass(kind, KeyboardInterrupt | SystemExit):
        LOG.write(clean_error("".join(traceback.format_exception(kind, error, trace))))


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return clean_error(super().format(record))


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")
        event = {"event": clean_error(record.getMessage()), "logger": record.name, "level": record.levelname.lower()}
        if record.exc_info:
            event["exception"] = clean_error(self.formatException(record.exc_info))
        return json.dumps({**event, "timestamp": moment})
