"""What the service's answer to a list of entries means. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tuneloop.runner.feedback.verbs import Entry
from tuneloop.runner.judging.endpoint import retry_after_s

_PLACE = re.compile(r"feedback\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Taken:
    """It was taken, but for the entries whose places are in `unknown`, which name no reply of the service's."""

    answer: Mapping[str, Any]
    unknown: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class NeverTaken:
    """Nothing was, and nothing ever will be while the entry at `place` is among them; None: it is not said which."""

    reason: str
    place: int | None = None
    answer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NotNow:
    """Nothing was taken, through no fault of the entries. `wait_s` is how long we are asked to wait."""

    reason: str
    wait_s: float | None = None


Heard = Taken | NeverTaken | NotNow


def understand(entries: Sequence[Entry], heard: httpx.Response | httpx.HTTPError) -> Heard:
    """What became of entries that were sent.

    An error in words that are not the service's, such as a 404 of a server that stands before it, says nothing of them.
    """
    if not isinstance(heard, httpx.Response):
        return NotNow(f"the service does not answer: {heard!r}")
    answer = _object(heard)
    if heard.is_success and "outcomes" in answer:
        return Taken(answer, _unknown(entries, answer))
    if heard.status_code == 404 and "outcomes" in answer:
        return Taken(answer, frozenset(range(len(entries))))
    error = answer.get("error")
    if heard.status_code in {400, 413} and isinstance(error, dict) and isinstance(error.get("message"), str):
        place = _PLACE.match(str(error.get("param")))
        within = place and int(place[1]) < len(entries)
        return NeverTaken(
            f"{heard.status_code}: {error['message']}", int(place[1]) if place and within else None, answer
        )
    if heard.status_code == 413:
        return NeverTaken("413: too large")
    return NotNow(f"the service answered {heard.status_code}: {heard.text[:200]}", retry_after_s(heard))


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        found = response.json()
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _unknown(entries: Sequence[Entry], answer: Mapping[str, Any]) -> frozenset[int]:
    outcomes = answer["outcomes"] if isinstance(answer["outcomes"], dict) else {}
    lost = {name for name, outcome in outcomes.items() if outcome == "unknown"}
    return frozenset(place for place, entry in enumerate(entries) if not lost.isdisjoint(entry.get("msg_ids") or ()))
