"""Reads what the list of exchanges is asked for, and writes it into links."""

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from tuneloop.explorer.http.bodies import number_in_form
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import MAX_NAME, State
from tuneloop.shared.ledger.browsing.reply_pages import ReplyCursor, ReplyFilter

#: The fields of the form, by their names in the query.
FIELDS = ("text", "state", "version", "reward_from", "reward_to", "task", "run", "user", "since", "until")

_NAMES = {"task": "task_id", "run": "run_id"}
_MAX_TEXT = 200
_DIGITS = 9


def parse_filter(query: Mapping[str, str]) -> ReplyFilter:
    """What a query asks for. Raises RequestRefused with the field that is wrong."""
    given = {name: value.strip() for name, value in query.items() if name in FIELDS and value.strip()}
    if unknown := sorted(query.keys() - {*FIELDS, "after"}):
        raise _refusal(unknown[0], f"there is no filter {unknown[0][:40]!r}; there are {', '.join(FIELDS)}")
    parsed: dict[str, Any] = {
        _NAMES.get(name, name): _PARSERS.get(name, _words)(name, value) for name, value in given.items()
    }
    wanted = ReplyFilter()._replace(**parsed)
    for low, high in (("reward_from", "reward_to"), ("since", "until")):
        first, last = getattr(wanted, low), getattr(wanted, high)
        if first is not None and last is not None and first > last:
            raise _refusal(low, f"{low} is larger than {high}: nothing can lie between them")
    return wanted


def with_stored_names(wanted: ReplyFilter, as_stored: Callable[[str], str]) -> ReplyFilter:
    """The filter by the names that tasks, runs and people have in the database."""
    task_id, run_id, user = (name and as_stored(name) for name in (wanted.task_id, wanted.run_id, wanted.user))
    return wanted._replace(task_id=task_id, run_id=run_id, user=user)


def parse_cursor(query: Mapping[str, str]) -> ReplyCursor | None:
    """Where the page begins. Raises RequestRefused."""
    after = query.get("after", "")
    if not after:
        return None
    time, _, number = after.partition("_")
    try:
        cursor = ReplyCursor(float(time), int(number))
    except ValueError:
        cursor = ReplyCursor(math.nan, 0)
    if not (math.isfinite(cursor.sampled_at) and 0 <= cursor.id < 2**63):
        raise _refusal("after", "after is not a position in this list: begin at its top")
    return cursor


def link(query: Mapping[str, str], after: ReplyCursor | None = None) -> str:
    """The query of a page with the same filters."""
    kept = {name: query[name] for name in FIELDS if query.get(name, "").strip()}
    if after is not None:
        kept["after"] = f"{after.sampled_at!r}_{after.id}"
    return urlencode(kept)


def _refusal(field: str, message: str) -> RequestRefused:
    return RequestRefused(message, code="invalid_value", param=field)


def _words(field: str, value: str) -> str:
    most = _MAX_TEXT if field == "text" else MAX_NAME
    if len(value) > most:
        raise _refusal(field, f"{field} is longer than {most} characters")
    return value


def _state(field: str, value: str) -> State:
    try:
        return State(value)
    except ValueError:
        raise _refusal(field, f"there is no state {value[:40]!r}; there are {', '.join(State)}") from None


def _version(field: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= _DIGITS):
        raise _refusal(field, f"version must be a number, not {value[:40]!r}")
    return int(value)


def _number(field: str, value: str) -> float:
    number = number_in_form(value)
    if number is None or not math.isfinite(number):
        raise _refusal(field, f"{field} must be a number, not {value[:40]!r}")
    return number


def _time(field: str, value: str) -> float:
    try:
        time = datetime.fromisoformat(value)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        message = f"{field} must be a time in UTC such as 2026-11-23T18:30, not {value[:40]!r}"
        raise _refusal(field, message) from None


_PARSERS = {
    "state": _state,
    "version": _version,
    "reward_from": _number,
    "reward_to": _number,
    "since": _time,
    "until": _time,
}
