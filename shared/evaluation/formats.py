"""The form that a task demands of a reply: JSON, or what a regular expression describes. Pure."""

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

#: Any JSON value, and nothing else beside it.
JSON = "json"

_OF_JSON = ("json_object", "json_schema")


def form_of(task: Mapping[str, Any]) -> str | None:
    """JSON, a regular expression, or None for any form.

    Where `format` says nothing, `response_format`, as a request has it, may say JSON. Raises ValueError.
    """
    said = task.get("format")
    if said is None:
        asked = task.get("response_format")
        return JSON if isinstance(asked, dict) and asked.get("type") in _OF_JSON else None
    if not isinstance(said, str) or not said:
        raise ValueError('`format` must be "json" or a regular expression')
    try:
        re.compile(said)
    except re.error as error:
        raise ValueError(f'`format` must be "json" or a regular expression of Python\'s ({error})') from None
    return said


def has_form(form: str, reply: str) -> bool:
    """Whether the whole reply, but for white space at its ends, has the form.

    >>> has_form(JSON, ' {"a": 1}'), has_form(JSON, 'Here: {"a": 1}'), has_form("[A-D]", "B"), has_form("[A-D]", "B.")
    (True, False, True, False)
    """
    said = reply.strip()
    if form != JSON:
        return re.fullmatch(form, said) is not None
    try:
        json.loads(said, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return False
    return True


def _no_json(name: str) -> NoReturn:
    """Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError(name)
