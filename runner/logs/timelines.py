"""Which calls of a run continue one another. Pure."""

import json
from collections.abc import Iterable, Sequence

from tuneloop.runner.logs.exchange import LoggedExchange
from tuneloop.runner.rewards.chat_messages import ChatMessage
from tuneloop.runner.rewards.reply import calls_of, text_of


def essence_of(messages: Sequence[ChatMessage]) -> list[str]:
    """Each message without what differs though it is the same: ids of calls, and how a client writes its parts."""
    return [
        json.dumps(
            [each["role"], text_of(each.get("content")), [[call.name, call.arguments] for call in calls_of(each)]],
            sort_keys=True,
            default=str,
        )
        for each in messages
    ]


def merge_calls(exchanges: Iterable[LoggedExchange]) -> list[tuple[ChatMessage, ...]]:
    """The conversations in the calls of a run, the longest first: one that another begins with is part of that.

    Calls that continue nothing, such as another agent's, are conversations of their own.
    """
    found: list[tuple[list[str], tuple[ChatMessage, ...]]] = []
    for transcript in sorted((each.transcript for each in exchanges), key=len, reverse=True):
        essence = essence_of(transcript)
        if not any(longer[: len(essence)] == essence for longer, _ in found):
            found.append((essence, transcript))
    return [transcript for _, transcript in found]
