"""The format that a task demands of a reply: JSON, or what a regular expression describes. Pure."""

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

#: Any JSON value, and nothing else beside it.
JSON = "json"

_OF_JSON = ("json_object", "json_schema")


def format_of(task: Mapping[str, Any]) -> str | None:
    """JSON, a regular expression, or None for any format.

    Without `format`, a `response_format` as in a request may demand JSON. Raises ValueError.
    """
    pattern = task.get("format")
    if pattern is None:
        response_format = task.get("response_format")
        return JSON if isinstance(response_format, dict) and response_format.get("type") in _OF_JSON else None
    if not isinstance(pattern, str) or not pattern:
        raise ValueError('`format` must be "json" or a regular expression')
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f'`format` must be "json" or a regular expression of Python\'s ({error})') from None
    return pattern


def matches_format(wanted: str, reply: str) -> bool:
    """Whether the whole reply, but for white space at its ends, has the format.

    >>> matches_format(JSON, ' {"a": 1}'), matches_format(JSON, 'Here: {"a": 1}')
    (True, False)
    >>> matches_format("[A-D]", "B"), matches_format("[A-D]", "B.")
    (True, False)
    """
    text = reply.strip()
    if wanted != JSON:
        return re.fullmatch(wanted, text) is not None
    try:
        json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return False
    return True


def _no_json(name: str) -> NoReturn:
    """Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError(name)
