"""Reads what a judge wrote: one JSON object, alone or among words; what is in doubt is refused. Pure."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tuneloop.runner.errors import JudgeFailed

_OPENS, _CLOSES = "<think>", "</think>"


def object_in(text: str, key: str) -> dict[str, Any]:
    """The one JSON object in the text that has the key. Raises JudgeFailed if there is none, or any doubt which it is.

    A judge that quotes what it judges may quote a verdict: so several are refused, and so is a brace that is no part of
    a whole object, for what follows it may stand in a quotation. What it thought before is not looked at.

    >>> object_in('I would say: {"scores": {"tone": 4}}', "scores")
    {'scores': {'tone': 4}}
    """
    found = [each for each in _objects(_without_thought(text)) if key in each]
    if len(found) != 1:
        many = "several objects" if found else "no JSON object"
        raise JudgeFailed(f"the judge's answer has {many} with {key}", text)
    return found[0]


def scores_in(answer: Mapping[str, Any], criteria: Iterable[str], scale: tuple[int, int]) -> dict[str, float]:
    """The score of each criterion. Raises JudgeFailed unless there is just one, on the scale, for each."""
    scores, wanted = answer.get("scores"), list(criteria)
    if not isinstance(scores, dict) or scores.keys() != set(wanted):
        raise JudgeFailed(f"the judge's answer does not score just {', '.join(wanted)}", str(scores))
    for name, score in scores.items():
        if isinstance(score, bool) or not isinstance(score, int | float) or not scale[0] <= score <= scale[1]:
            raise JudgeFailed(f"the judge's score of {name} is not from {scale[0]} to {scale[1]}", str(score))
    return {name: float(scores[name]) for name in wanted}


def words_in(answer: Mapping[str, Any], key: str) -> str:
    """A text of the answer; empty if there is none."""
    words = answer.get(key)
    return words if isinstance(words, str) else ""


def _without_thought(text: str) -> str:
    """The text after the thought, which some chat templates open themselves. Raises JudgeFailed if it has no end.

    >>> _without_thought('Four? {"scores": 4}? No.</think>{"scores": {"tone": 5}}')
    '{"scores": {"tone": 5}}'
    """
    thought, closed, after = text.partition(_CLOSES)
    # What begins with an object may have the tag in a string of it.
    rest = after if closed and not thought.lstrip().startswith("{") else text
    if _OPENS in rest.partition("{")[0]:
        raise JudgeFailed("the judge's answer ends in the middle of a thought", text)
    return rest


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The outermost JSON objects in a text. Raises JudgeFailed for what only begins as one."""
    decoder = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_number)
    end = 0
    while (at := text.find("{", end)) >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            raise JudgeFailed("the judge's answer has broken JSON in it", text) from None
        yield value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise JudgeFailed("the judge's answer says something twice")
    return found


def _no_number(word: str) -> float:
    raise JudgeFailed(f"the judge's answer has {word} in it")
