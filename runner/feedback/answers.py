"""What the service's answer to a list of entries means. Pure."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tuneloop.runner.feedback.verbs import Entry
from tuneloop.runner.judging.endpoint import retry_after_s

_PLACE = re.compile(r"feedback\[(\d+)\]")

#: The outcomes of what is not kept, and will not be if it is said again.
_REFUSALS = {
    "unknown": "404: no id of a reply of this service",
    "full": "200: as much has been said of this reply as is kept",
}


@dataclass(frozen=True, slots=True)
class Taken:
    """It was taken, but for the entries whose places are in `refused`, each with the reason why it never will be.

    At `unclear` is said what became of any of several entries about one name: each alone is answered for itself.
    """

    answer: Mapping[str, Any]
    refused: Mapping[int, str] = field(default_factory=dict)
    unclear: frozenset[int] = frozenset()


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


ServiceAnswer = Taken | NeverTaken | NotNow


def understand(entries: Sequence[Entry], response: httpx.Response | httpx.HTTPError) -> ServiceAnswer:
    """What became of entries that were sent.

    An error in words that are not the service's, such as a 404 of a server that stands before it, says nothing of them.
    """
    if not isinstance(response, httpx.Response):
        return NotNow(f"the service does not answer: {response!r}")
    answer = _object(response)
    if response.is_success and "outcomes" in answer:
        refused = _refusals(entries, answer)
        return Taken(answer, refused, _unclear(entries, refused))
    if response.status_code == 404 and "outcomes" in answer:
        return Taken(answer, dict.fromkeys(range(len(entries)), _REFUSALS["unknown"]))
    error = answer.get("error")
    if response.status_code in {400, 413} and isinstance(error, dict) and isinstance(error.get("message"), str):
        place = _PLACE.match(str(error.get("param")))
        within = place and int(place[1]) < len(entries)
        return NeverTaken(
            f"{response.status_code}: {error['message']}", int(place[1]) if place and within else None, answer
        )
    if response.status_code == 413:
        return NeverTaken("413: too large")
    return NotNow(f"the service answered {response.status_code}: {response.text[:200]}", retry_after_s(response))


def names_of(entry: Entry) -> Sequence[str]:
    """What the service calls that which an entry is about: replies, or else a run."""
    return entry.get("msg_ids") or [f"{entry.get('task_id')}/{entry.get('run_id')}"]


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        found = response.json()
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _refusals(entries: Sequence[Entry], answer: Mapping[str, Any]) -> dict[int, str]:
    outcomes = answer["outcomes"] if isinstance(answer["outcomes"], dict) else {}
    refused = {}
    for place, entry in enumerate(entries):
        met = {outcomes.get(name) for name in names_of(entry)}
        if reason := next((_REFUSALS[outcome] for outcome in _REFUSALS if outcome in met), None):
            refused[place] = reason
    return refused


def _unclear(entries: Sequence[Entry], refused: Mapping[int, str]) -> frozenset[int]:
    """The refused that share a name with another entry: of several outcomes the service says the weakest."""
    entries_about = Counter(name for entry in entries for name in set(names_of(entry)))
    return frozenset(place for place in refused if any(entries_about[name] > 1 for name in names_of(entries[place])))
