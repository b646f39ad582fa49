"""Defines a logged exchange and the readers of its parts; counts unreadable entries."""

import codecs
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import LogRefused
from tuneloop.runner.rewards.reply import ChatMessage, calls_of, text_of

#: Errors of an invalid entry.
UNREADABLE = (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)

_NAMED = 3  # examples per kind in a report


class BrokenEntries:
    """Counts the entries of logs that cannot be read; `strict` raises at the first one.

    >>> broken = BrokenEntries()
    >>> broken.add("not JSON", "log.jsonl:17", "Expecting value")
    >>> broken.total, list(broken.report())
    (1, ['1 not JSON: log.jsonl:17: Expecting value'])
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._first: defaultdict[str, list[str]] = defaultdict(list)
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, where: str, why: object) -> None:
        """Count one. Raises LogRefused if strict."""
        entry = f"{where}: {' '.join(str(why).split())[:200]}"
        if self._strict:
            raise LogRefused(entry) from None
        self.counts[kind] += 1
        if len(self._first[kind]) < _NAMED:
            self._first[kind].append(entry)

    @property
    def total(self) -> int:
        return self.counts.total()

    def report(self) -> Iterator[str]:
        """A line per kind, most frequent first, with the places of the first entries."""
        for kind, count in self.counts.most_common():
            more = "; ..." if count > _NAMED else ""
            yield f"{count} {kind}: {'; '.join(self._first[kind])}{more}"


_PREFIX = "tuneloop_"

_NO = frozenset({"false", "0", "no", "off"})  # values that refuse training


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedExchange:
    """A request and its reply.

    `source` is the kind (`tuneloop`, `openai`), `place` the file or URL, `exchange_id` the id there. Exchanges with one
    `conversation` may continue each other. `train` False: a person refused training. `target`: the reply is a correct
    answer, not only a model's. `at` is in seconds since 1970.
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

    @property
    def transcript(self) -> tuple[ChatMessage, ...]:
        return self.messages + self.reply


def json_lines(path: Path, broken: BrokenEntries | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects of a JSON lines file with their line numbers. Raises LogRefused for a broken line without `broken`."""
    unread = broken if broken is not None else BrokenEntries(strict=True)
    try:
        # Undecodable bytes become surrogates, so that they break their line only.
        with path.open("rb") as file:  # Windows shells redirect output as UTF-16
            encoding = "utf-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
        with path.open(encoding=encoding, errors="surrogateescape") as file:
            for number, line in enumerate(file, start=1):
                if line.strip() and (read := _object(line, f"{path}:{number}", unread)) is not None:
                    yield number, read
    except (OSError, UnicodeError) as error:
        raise LogRefused(f"{path}: {error}") from None


def _object(line: str, where: str, broken: BrokenEntries) -> dict[str, Any] | None:
    try:
        line.isascii() or line.encode()
    except UnicodeEncodeError as error:
        broken.add("not UTF-8", where, f"not UTF-8 at character {error.start}")
        return None
    try:
        read = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        broken.add("not JSON", where, f"not JSON: {error.msg} at character {error.colno}")
        return None
    except (ValueError, RecursionError) as error:  # too deep, or too many digits
        broken.add("not JSON", where, f"not JSON: {error}")
        return None
    if not isinstance(read, dict):
        broken.add("not an object", where, "a line must be a JSON object")
        return None
    return read


def may_train(*sources: object) -> bool:
    """Whether none of these refuses training: requests, rows, a span's attributes, or their metadata.

    >>> may_train({"metadata": {"tuneloop_train": "false"}}), may_train({"store": False}), may_train({"metadata": None})
    (False, False, True)
    """
    for each in sources:
        if not isinstance(each, Mapping):
            continue
        metadata = each.get("metadata")
        for place in (each, metadata if isinstance(metadata, Mapping) else {}):
            for value in (place.get(name) for name in ("train", f"{_PREFIX}train", "tuneloop.train")):
                if value is False or (isinstance(value, str) and value.strip().lower() in _NO):
                    return False
        if each.get("store") is False:
            return False
    return True


def labels_in(metadata: object) -> dict[str, str]:
    given = metadata if isinstance(metadata, Mapping) else {}
    named = {name: given.get(_PREFIX + name, given.get(name)) for name in ("task_id", "run_id")}
    return {name: str(value) for name, value in named.items() if value is not None}


def conversation_of(labels: Mapping[str, str], exchange_id: str) -> str:
    """The key of one run's calls; without a run, of one exchange."""
    return f"{labels.get('task_id', '')}/{labels['run_id']}" if "run_id" in labels else exchange_id


def json_value(value: object) -> Any:
    """The value of a JSON text, None if invalid; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def objects(listed: object) -> tuple[dict[str, Any], ...]:
    """The objects of a list or of its JSON text; empty otherwise."""
    listed = json_value(listed)
    return tuple(each for each in listed if isinstance(each, dict)) if isinstance(listed, list) else ()


def optional_text(value: object) -> str | None:
    """A text, or an integer as text; None otherwise."""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None


def optional_number(value: object) -> float | None:
    """A finite number, or None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def essence_of(messages: Sequence[ChatMessage]) -> list[str]:
    """Messages without call ids and without a client's form of parts, for comparison."""
    return [
        json.dumps(
            [each["role"], text_of(each.get("content")), [[call.name, call.arguments] for call in calls_of(each)]],
            sort_keys=True,
            default=str,
        )
        for each in messages
    ]
