"""What a request says of itself beside its messages: its task and run, whom it is for, how urgent it is."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tuneloop.explorer.http.bodies import finite, name, text_or_number, wrong_type

#: Larger than any rank that somebody would give, and safe in every database.
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
    # Ours first: a client that writes it does so for us. OpenAI's newer name comes before its older one.
    users = (text_or_number(metadata, "user"), name(body, "safety_identifier"), name(body, "user"))
    return Labels(
        task_id=text_or_number(metadata, "task_id"),
        run_id=text_or_number(metadata, "run_id"),
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
    return 0.0 if value is None else finite(value, "metadata.priority", bound=MAX_PRIORITY)
