"""The labels of a request beside its messages: task, run, user, priority, and whether to train on its reply."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tuneloop.explorer.http.bodies import finite_number, optional_id, optional_name, wrong_type

#: Larger than any sensible priority, and safe in every database.
MAX_PRIORITY = 1e9


class Labels(NamedTuple):
    """The labels of a request; `train` False keeps its reply out of training."""

    task_id: str | None
    run_id: str | None
    user: str | None
    priority: float
    train: bool


def labels_of(body: dict[str, Any]) -> Labels:
    """The labels of a request's body. Raises RequestRefused for those of a wrong type or length."""
    metadata = body.get("metadata")
    if metadata is None:
        metadata = {}
    elif not isinstance(metadata, dict):
        raise wrong_type("metadata", "an object")
    # Ours first: a client that sets it means it for us. OpenAI's newer name comes before its older one.
    users = (optional_id(metadata, "user"), optional_name(body, "safety_identifier"), optional_name(body, "user"))
    return Labels(
        task_id=optional_id(metadata, "task_id"),
        run_id=optional_id(metadata, "run_id"),
        user=next((user for user in users if user), None),
        priority=_priority(metadata),
        train=metadata.get("train") not in (False, "false"),
    )


def _priority(metadata: Mapping[str, Any]) -> float:
    value = metadata.get("priority")
    # OpenAI's own clients can send nothing but strings in metadata.
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise wrong_type("metadata.priority", "a number") from None
    return 0.0 if value is None else finite_number(value, "metadata.priority", bound=MAX_PRIORITY)
