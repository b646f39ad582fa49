"""The labels of a request beside its messages: task, run, user, priority, and whether to train on its reply.

Ours begin with `tuneloop_`, and a wrong value is refused. Without the prefix they are words that an application may
have used for itself: a value that cannot be a label of ours is the application's own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import orjson

from tuneloop.explorer.auth import RunBinding
from tuneloop.explorer.http.bodies import finite_number, id_of, wrong_type
from tuneloop.explorer.http.coercion import coerce_bool
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import person_name

T = TypeVar("T")

#: Larger than any sensible priority, and safe in every database.
MAX_PRIORITY = 1e9

#: Bytes of a request's metadata, as JSON: it is stored with each reply, and listed.
MAX_METADATA_BYTES = 64 << 10

#: Of the keys of `metadata` that can mean nothing else.
PREFIX = "tuneloop_"

#: The names under which a request may keep its reply out of training.
_CONSENT = ("train", f"{PREFIX}train")


class Labels(NamedTuple):
    """The labels of a request; `train` False keeps its reply out of training.

    `ignored` names the keys that would be labels, if their values could be.
    """

    task_id: str | None
    run_id: str | None
    user: str | None
    priority: float
    train: bool
    ignored: tuple[str, ...] = ()


def labels_of(body: dict[str, Any], run: RunBinding | None = None, *, train: bool = True) -> Labels:
    """The labels of a request's body, and of the run that its path binds it to, which wins.

    `train` holds where neither says anything of it. Raises RequestRefused for invalid labels that can only be ours.
    """
    labels, consent = _labels_in(body)
    if run is None:
        return labels._replace(train=train if consent is None else consent)
    either = [each for each in (consent, run.train) if each is not None]
    train = all(either) if either else train  # whoever opts out is heard
    return labels._replace(task_id=run.task_id, run_id=run.run_id, train=train)


def refuse_misplaced(body: dict[str, Any]) -> None:
    """Raise RequestRefused for consent beside `metadata`: nobody would read it, and the reply would be trained on."""
    for name in _CONSENT:
        if name in body:
            raise RequestRefused(f"write metadata.{name} instead of {name}", code="unknown_parameter", param=name)


def _labels_in(body: dict[str, Any]) -> tuple[Labels, bool | None]:
    """The labels of a body, and what it says of training."""
    metadata = body.get("metadata")
    if metadata:
        _refuse_large(metadata)
    reader = _LabelReader(metadata if isinstance(metadata, dict) else {})
    priority, train = reader.read("priority", _priority), reader.consent()
    labels = Labels(
        task_id=reader.read("task_id", id_of),
        run_id=reader.read("run_id", id_of),
        # Ours first: a client that sets it means it for us. OpenAI's newer name comes before its older one.
        user=reader.read("user", _person) or _safety_identifier(body) or _user(body),
        priority=0.0 if priority is None else priority,
        train=train is not False,
        ignored=tuple(reader.ignored),
    )
    return labels, train


def _refuse_large(metadata: object) -> None:
    try:
        size = len(orjson.dumps(metadata))
    except orjson.JSONEncodeError:  # nested too deeply, or a number that is too large
        raise RequestRefused("metadata cannot be stored as JSON", code="invalid_value", param="metadata") from None
    if size > MAX_METADATA_BYTES:
        message = f"metadata must have at most {MAX_METADATA_BYTES} bytes as JSON"
        raise RequestRefused(message, code="too_long", param="metadata")


class _LabelReader:
    """Reads labels from the metadata of a request."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata
        self.ignored: list[str] = []

    def consent(self) -> bool | None:
        """Whether to train on the reply, which is refused under either name, however written; None if it is not said.

        Raises RequestRefused for what is neither true nor false, null too: nobody knows what was meant by it.
        """
        names = [name for name in self._metadata if name.strip().lower() in _CONSENT]
        said = [coerce_bool(self._metadata[name], f"metadata.{name}") for name in names]
        return all(said) if said else None

    def read(self, name: str, parse: Callable[[object, str], T]) -> T | None:
        """A label; None if there is none. Raises RequestRefused if it is invalid, and prefixed."""
        if (value := self._metadata.get(PREFIX + name)) is not None:
            return parse(value, f"metadata.{PREFIX}{name}")
        if (value := self._metadata.get(name)) is None:
            return None
        try:
            return parse(value, f"metadata.{name}")
        except RequestRefused:
            self.ignored.append(f"metadata.{name}")
            return None


def _priority(value: object, param: str) -> float:
    # OpenAI's own clients can send nothing but strings in metadata.
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise wrong_type(param, "a number") from None
    return finite_number(value, param, bound=MAX_PRIORITY)


def _person(value: object, param: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise wrong_type(param, "a string or an integer")
    return person_name(str(value))


def _safety_identifier(body: dict[str, Any]) -> str | None:
    value = body.get("safety_identifier")
    return person_name(value) if value and isinstance(value, str) else None


def _user(body: dict[str, Any]) -> str | None:
    value = body.get("user")
    if not isinstance(value, str | None):
        raise wrong_type("user", "a string")  # vLLM refuses it too
    return person_name(value) if value else None
