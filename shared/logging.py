"""How the services log: one line per state change, `key=value`, on stderr."""

import contextlib
import logging
import sys
from typing import TextIO, cast

import structlog


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


def configure_logging() -> None:
    """Send structlog's events and the libraries' warnings to stderr, with colours only for a terminal."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _LossyStream(sys.stderr))),
    )
