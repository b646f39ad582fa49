"""A logged exchange, wherever it was read, and what the readers of files share."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import LogRefused
from tuneloop.runner.rewards.chat_messages import ChatMessage

_PREFIX = "tuneloop_"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedExchange:
    """What was asked, and what was answered.

    `source` is its kind (`tuneloop`, `openai`, `otel`, `studio`), `place` the file or URL, and `exchange_id` its name
    there. Exchanges with one `conversation` may continue each other. `train` is False where somebody said that it must
    not be trained on. `target`: the reply is an answer as it should be, not just what a model said. `at` is in seconds
    since 1970. `feedback` are the events on it, in the order in which they count, where the source has them.
    """

    source: str
    place: str
    exchange_id: str
    conversation: str
    messages: tuple[ChatMessage, ...]
    reply: tuple[ChatMessage, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    model: str | None = None
    at: float | None = None
    user: str | None = None
    reward: float | None = None
    train: bool = True
    target: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    feedback: tuple[Mapping[str, Any], ...] = ()

    @property
    def transcript(self) -> tuple[ChatMessage, ...]:
        """What was asked and what was answered."""
        return self.messages + self.reply


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with one a line, each with its line's number. Raises LogRefused, which names the line."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _object(line, f"{path}:{number}")
    except (OSError, UnicodeError) as error:
        raise LogRefused(f"{path}: {error}") from None


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        read = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LogRefused(f"{where}: not JSON: {error}") from None
    if not isinstance(read, dict):
        raise LogRefused(f"{where}: a line must be a JSON object")
    return read


def may_train(*sources: object) -> bool:
    """Whether nobody said no: each is a request, a row, a span's attributes, or the metadata of one.

    >>> may_train({"metadata": {"tuneloop_train": "false"}}), may_train({"store": False}), may_train({"metadata": None})
    (False, False, True)
    """
    for each in sources:
        if not isinstance(each, Mapping):
            continue
        metadata = each.get("metadata")
        for place in (each, metadata if isinstance(metadata, Mapping) else {}):
            if any(_says_no(place.get(name)) for name in ("train", f"{_PREFIX}train", "tuneloop.train")):
                return False
        if each.get("store") is False:
            return False
    return True


def labels_in(metadata: object) -> dict[str, str]:
    """The task and the run that metadata names."""
    given = metadata if isinstance(metadata, Mapping) else {}
    named = {name: given.get(_PREFIX + name, given.get(name)) for name in ("task_id", "run_id")}
    return {name: str(value) for name, value in named.items() if value is not None}


def conversation_of(labels: Mapping[str, str], exchange_id: str) -> str:
    """What keeps the calls of one run together; without a run each exchange stands alone."""
    return f"{labels.get('task_id', '')}/{labels['run_id']}" if "run_id" in labels else exchange_id


def objects(listed: object) -> tuple[dict[str, Any], ...]:
    """The objects in a list, which may be its JSON text; nothing for anything else."""
    if isinstance(listed, str):
        try:
            listed = json.loads(listed)
        except (ValueError, RecursionError):
            return ()
    return tuple(each for each in listed if isinstance(each, dict)) if isinstance(listed, list) else ()


def optional_text(value: object) -> str | None:
    """A text, or a number as one; None for anything else."""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None


def optional_number(value: object) -> float | None:
    """A number; None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _says_no(value: object) -> bool:
    return value is False or (isinstance(value, str) and value.strip().lower() in {"false", "0", "no", "off"})
