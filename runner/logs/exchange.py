"""A logged exchange, wherever it was read, which of them continue each other, and what cannot be read."""

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

#: What reading an entry raises that is not as it should be.
UNREADABLE = (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)

_NAMED = 3  # of each kind


class BrokenEntries:
    """What could not be read of one or several logs, and was left out; `strict` ends the reading at the first one.

    >>> broken = BrokenEntries()
    >>> broken.add("not JSON", "log.jsonl:17", "Expecting value")
    >>> broken.total, list(broken.report())
    (1, ['1 not JSON: log.jsonl:17: Expecting value'])
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._first: defaultdict[str, list[str]] = defaultdict(list)
        #: How many, by kind.
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, where: str, why: object) -> None:
        """Count one. Raises LogRefused if it is strict."""
        said = f"{where}: {' '.join(str(why).split())[:200]}"
        if self._strict:
            raise LogRefused(said) from None
        self.counts[kind] += 1
        if len(self._first[kind]) < _NAMED:
            self._first[kind].append(said)

    @property
    def total(self) -> int:
        """How many there are."""
        return self.counts.total()

    def report(self) -> Iterator[str]:
        """A line for each kind, the most frequent first, with where the first ones stand."""
        for kind, count in self.counts.most_common():
            more = "; ..." if count > _NAMED else ""
            yield f"{count} {kind}: {'; '.join(self._first[kind])}{more}"


_PREFIX = "tuneloop_"

#: What says that something must not be trained on.
_NO = frozenset({"false", "0", "no", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedExchange:
    """What was asked, and what was answered.

    `source` is its kind (`tuneloop`, `openai`), `place` the file or URL, and `exchange_id` its name
    there. Exchanges with one `conversation` may continue each other. `train` is False where a person refused training
    on it. `target`: the reply is an answer as it should be, not just what a model said. `at` is in seconds
    since 1970.
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
        """What was asked and what was answered."""
        return self.messages + self.reply


def json_lines(path: Path, broken: BrokenEntries | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with one a line, each with its line's number. Without `broken` it raises LogRefused."""
    unread = broken if broken is not None else BrokenEntries(strict=True)
    try:
        # Bytes that are no text are kept as surrogates, so that they spoil their line only.
        with path.open("rb") as file:  # Windows' shells redirect what a program writes as UTF-16
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
    except (ValueError, RecursionError) as error:  # nested too deeply, or a number of too many digits
        broken.add("not JSON", where, f"not JSON: {error}")
        return None
    if not isinstance(read, dict):
        broken.add("not an object", where, "a line must be a JSON object")
        return None
    return read


def may_train(*sources: object) -> bool:
    """Whether no one of these refuses training: each is a request, a row, a span's attributes, or the metadata of one.

    >>> may_train({"metadata": {"tuneloop_train": "false"}}), may_train({"store": False}), may_train({"metadata": None})
    (False, False, True)
    """
    for each in sources:
        if not isinstance(each, Mapping):
            continue
        metadata = each.get("metadata")
        for place in (each, metadata if isinstance(metadata, Mapping) else {}):
            for said in (place.get(name) for name in ("train", f"{_PREFIX}train", "tuneloop.train")):
                if said is False or (isinstance(said, str) and said.strip().lower() in _NO):
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


def json_value(value: object) -> Any:
    """What a JSON text says, None if it is none; what is no text is the value itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def objects(listed: object) -> tuple[dict[str, Any], ...]:
    """The objects in a list, which may be its JSON text; nothing for anything else."""
    listed = json_value(listed)
    return tuple(each for each in listed if isinstance(each, dict)) if isinstance(listed, list) else ()


def optional_text(value: object) -> str | None:
    """A text, or a number as one; None for anything else."""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None


def optional_number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def essence_of(messages: Sequence[ChatMessage]) -> list[str]:
    """Each message without what differs though it is the same: ids of calls, and how a client writes its parts."""
    return [
        json.dumps(
            [each["role"], text_of(each.get("content")), [[call.name, call.arguments] for call in calls_of(each)]],
            sort_keys=True,
            default=str,
        )
        for each in messages
    ]
