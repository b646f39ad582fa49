"""Who answered a conversation before: that engine still has the keys and values of its beginning, the others have not.

A beginning is a hash of what was said up to some point. Each request is noted under all that it says, and the next one
of its conversation finds it there.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

#: How many requests are remembered; the least recently used are forgotten first. All together take some megabytes.
MOST = 8192

#: A prompt that is no chat has no turns: it is cut into so many characters, or token ids.
_CHARACTERS, _IDS = 1024, 256


class EngineCache(Protocol):
    """What there is to know of an engine."""

    @property
    def number(self) -> int:
        """Which one."""

    @property
    def loads(self) -> int:
        """How often its weights changed; what it had cached was forgotten then."""


class Affinity:
    """Which engines were asked what. Hashes of the text are kept, not the text."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        #: By beginning: the engines' numbers, and how often their weights had changed.
        self._asked: OrderedDict[int, dict[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._asked)

    def note(self, beginnings: Sequence[int], engine: EngineCache) -> None:
        """Say that the engine is asked a request."""
        if not beginnings:
            return
        last = beginnings[-1]
        self._asked.setdefault(last, {})[engine.number] = engine.loads
        self._asked.move_to_end(last)
        if len(self._asked) > self._most:
            self._asked.popitem(last=False)

    def knowing(self, beginnings: Sequence[int], engines: Sequence[EngineCache]) -> list[set[int]]:
        """The numbers of the engines that know a beginning, those that know the longest one first."""
        found = []
        for beginning in reversed(beginnings):
            asked = self._asked.get(beginning)
            if asked and (fresh := {each.number for each in engines if asked.get(each.number) == each.loads}):
                found.append(fresh)
        return found


def overloaded(in_flight: int, least: int) -> bool:
    """Whether an engine has so much more in flight than the least busy one that computing anew elsewhere is faster."""
    return in_flight > least + 8 + least // 4


def beginnings(asked: Mapping[str, Any]) -> tuple[int, ...]:
    """The beginnings of what an engine is asked that an earlier request may have been; the last one is all of it."""
    messages = asked.get("messages")
    if isinstance(messages, list):
        return _of_turns(messages)
    prompt = asked.get("prompt")
    if isinstance(prompt, str):
        return _of_blocks(prompt, _CHARACTERS)
    if isinstance(prompt, list) and all(isinstance(each, int) for each in prompt):
        return _of_blocks(tuple(prompt), _IDS)
    return ()


def _of_turns(messages: Sequence[Any]) -> tuple[int, ...]:
    """One before each reply: only there a request of this conversation can have ended, so that prompts alone, which
    many conversations share, draw nobody to an engine."""
    found, so_far = [], 0
    for message in messages:
        if isinstance(message, dict) and message.get("role") == "assistant":
            found.append(so_far)
        so_far = hash((so_far, orjson.dumps(message)))
    return (*found, so_far)


def _of_blocks(prompt: str | tuple[int, ...], size: int) -> tuple[int, ...]:
    found, so_far = [], 0
    for end in range(size, len(prompt) + 1, size):
        so_far = hash((so_far, prompt[end - size : end]))
        found.append(so_far)
    return tuple(found)
