"""How the services log: one line per state change, `key=value` or JSON, on stderr."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import TextIO, cast

import structlog

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


def configure_logging(environment: Mapping[str, str] | None = None) -> None:
    """Send structlog's events and the libraries' warnings to stderr, with colours only for a terminal.

    A level that the environment names wrongly counts as `info`.
    """
    variables = os.environ if environment is None else environment
    named = variables.get(LEVEL_VARIABLE, "").strip().lower()
    level = getattr(logging, named.upper()) if named in set(LogLevel) else logging.INFO
    as_json = variables.get(JSON_VARIABLE, "").strip().lower() in {"1", "true", "yes"}
    _send_libraries_warnings(as_json=as_json, level=max(level, logging.WARNING))
    structlog.configure(
        processors=[
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
