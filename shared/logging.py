"""How the services log: one line per state change, `key=value` or JSON, on stderr."""

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import TextIO, cast

import structlog
from structlog.typing import EventDict, WrappedLogger

#: So many lines of one event are written at once, and so many a second after them.
LINES_AT_ONCE, LINES_PER_S = 100, 10.0

#: How long after a line is left out it is told how many were.
_SUMMARY_S = 10.0

#: The event that tells it.
_SUMMARY = "lines_left_out"

#: The variables in which `tuneloop run --log-level debug --log-json` hands on how services log.
LEVEL_VARIABLE, JSON_VARIABLE = "TUNELOOP_LOG_LEVEL", "TUNELOOP_LOG_JSON"


class LogLevel(StrEnum):
    """The least level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class _LossyStream:
    """A stream that drops what it cannot write: a full disk or a closed reader must not stop the service."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._file.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()


class LineLimiter:
    """Leaves out lines of an event that comes too often, and calls `tell` with how many of each, a while later.

    Whoever causes a line, such as a stranger's request, must not fill the disk with it.
    """

    def __init__(self, tell: Callable[[dict[str, int]], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._lock = threading.Lock()
        self._room: dict[str, tuple[float, float]] = {}  # for each event: lines, as of when
        self._left_out: Counter[str] = Counter()

    def admits(self, event: str) -> bool:
        """Whether a line of this event may be written now."""
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
        """Tell what was left out since the last time."""
        with self._lock:
            left_out, self._left_out = self._left_out, Counter()
        if left_out:
            self._tell(dict(left_out))

    def process(self, logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
        """Drop structlog's event, if it comes too often."""
        if event["event"] != _SUMMARY and not self.admits(str(event["event"])):
            raise structlog.DropEvent
        return event

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a library's line may be written now."""
        return self.admits(f"{record.name}:{record.lineno}")


def _tell_left_out(lines: dict[str, int]) -> None:
    structlog.get_logger().warning(_SUMMARY, **lines)


def configure_logging(environment: Mapping[str, str] | None = None) -> None:
    """Send structlog's events and the libraries' warnings to stderr, with colours only for a terminal.

    A level that the environment names wrongly counts as `info`.
    """
    variables = os.environ if environment is None else environment
    named = variables.get(LEVEL_VARIABLE, "").strip().lower()
    level = getattr(logging, named.upper()) if named in set(LogLevel) else logging.INFO
    as_json = variables.get(JSON_VARIABLE, "").strip().lower() in {"1", "true", "yes"}
    _send_libraries_warnings(as_json=as_json, level=max(level, logging.WARNING))
    limiter = LineLimiter(_tell_left_out)
    for handler in logging.getLogger().handlers:
        handler.addFilter(limiter)
    structlog.configure(
        processors=[
            limiter.process,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str)
            if as_json
            else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _LossyStream(sys.stderr))),
    )


def _send_libraries_warnings(*, as_json: bool, level: int) -> None:
    if not as_json:
        logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler])


class _JsonFormatter(logging.Formatter):
    """A library's record as the services' own events are written."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")
        event = {"event": record.getMessage(), "logger": record.name, "level": record.levelname.lower()}
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps({**event, "timestamp": moment})
