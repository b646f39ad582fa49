"""How alike a reply and its edited answer are: 1 less their edit distance, as a part of the longer one.

Everything here runs inside a transaction of the ledger.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, select

from tuneloop.shared.experience import message_of
from tuneloop.shared.ledger.storage.schema import experiences, feedback
from tuneloop.shared.ledger.storage.transactions import portions

#: Characters up to which two texts are compared by characters. Longer ones are by words, as many of them at most.
LONGEST = 4000


def similarities(connection: Connection, edits: Mapping[int, int]) -> dict[int, float]:
    """How alike the reply of each row of `experiences` and the answer of its feedback event are, by the rows' ids."""
    answers: dict[int, str] = {}
    for portion in portions({*edits.values()}):
        query = select(feedback.c.id, feedback.c.text).where(feedback.c.id.in_(portion))
        answers |= {row.id: _said_in(row.text) for row in connection.execute(query)}
    found: dict[int, float] = {}
    for portion in portions(edits):
        words = select(experiences.c.id, experiences.c.text, experiences.c.tool_calls)
        for row in connection.execute(words.where(experiences.c.id.in_(portion))):
            calls = json.loads(row.tool_calls) if row.tool_calls else None
            found[row.id] = similarity(_said(row.text, calls), answers[edits[row.id]])
    return found


def similarity(reply: str, answer: str) -> float:
    """From 0, nothing in common, to 1, the same.

    >>> similarity("10", "10"), similarity("on Monday", "on Sunday"), similarity("", "18")
    (1.0, 0.7777777777777778, 0.0)
    """
    if reply == answer:
        return 1.0
    by_words = max(len(reply), len(answer)) > LONGEST
    one, other = (text.split()[:LONGEST] if by_words else text for text in (reply, answer))
    return 1 - _distance(one, other) / (max(len(one), len(other)) or 1)


def _distance(one: Sequence[str], other: Sequence[str]) -> int:
    """The fewest insertions, deletions and replacements that make one of the other (Levenshtein).

    Myers (1999), as Hyyrö (2003) has it: a column of the table of costs is two numbers, whose bits say where it rises
    and falls.
    """
    if not one or not other:
        return len(one) + len(other)
    places: dict[str, int] = {}
    for at, unit in enumerate(one):
        places[unit] = places.get(unit, 0) | 1 << at
    every, last = (1 << len(one)) - 1, 1 << (len(one) - 1)
    rises, falls, distance = every, 0, len(one)
    for unit in other:
        same = places.get(unit, 0)
        diagonal = (((same & rises) + rises) ^ rises) | same | falls
        right, left = falls | (every & ~(diagonal | rises)), diagonal & rises
        distance += bool(right & last) - bool(left & last)
        right, left = right << 1 | 1, left << 1
        rises, falls = every & (left | ~(diagonal | right)), right & diagonal & every
    return distance


def _said_in(answer: str) -> str:
    message = message_of(answer)
    return answer if message is None else _said(message.get("content"), message.get("tool_calls"))


def _said(content: Any, calls: Any) -> str:
    """A message's text, and the calls of tools in it, without their ids and however their JSON is written."""
    text = content if isinstance(content, str) else json.dumps(content) if content else ""
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        said = function if isinstance(function, dict) else {"arguments": call}
        text += f"\n{said.get('name')} {_canonical(said.get('arguments'))}"
    return text


def _canonical(arguments: Any) -> str:
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(read, sort_keys=True)
    except (ValueError, RecursionError):
        return str(arguments)
