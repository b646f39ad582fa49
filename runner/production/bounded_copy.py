"""Copies what an app passes around, in the app's own thread: so for no longer than it was said it may take."""

import copy
import json
import math
import time
from collections.abc import Mapping
from typing import Any

#: Objects between two looks at the clock, which cost about as much as one of them.
_OBJECTS = 16


#: Characters of one text that are written in about a second, while no clock is looked at.
_CHARACTERS_PER_S = 100e6


class CopyTooLong(Exception):
    """It has so many parts that its copy was given up."""


class _Memo(dict[int, Any]):
    """What `copy.deepcopy` asks before each part that it copies. The time is this thread's own: others may be busy."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._until, self._left = limit_s, time.thread_time() + limit_s, _OBJECTS

    def get(self, key: int, default: Any = None) -> Any:
        self._left -= 1
        if self._left <= 0:
            self._left = _OBJECTS
            if time.thread_time() > self._until:
                raise _too_long(self._limit_s)
        return super().get(key, default)


def bounded_copy(thing: Any, limit_s: float) -> Any:
    """A deep copy. Raises CopyTooLong, or what copy.deepcopy does for what cannot be copied, such as a lock."""
    return copy.deepcopy(thing, _Memo(limit_s))


def copy_or_same(thing: Any, limit_s: float = 0.001) -> Any:
    """A copy that nobody else changes; the thing itself where it cannot be copied, or not in that time."""
    try:
        return bounded_copy(thing, limit_s)
    except Exception:  # noqa: BLE001 - any class may refuse to be copied in its own way
        return thing


def bounded_json(named: Mapping[str, Any], limit_s: float = math.inf) -> str:
    """Things by name as JSON, of those that have none what `repr` says. Raises CopyTooLong."""
    until, written = time.thread_time() + limit_s, list[str]()
    if any(len(each) > limit_s * _CHARACTERS_PER_S for each in named.values() if isinstance(each, str | bytes)):
        raise _too_long(limit_s)
    try:
        for each in _WRITER.iterencode(named):
            written.append(each)
            if not len(written) % _OBJECTS and time.thread_time() > until:
                raise _too_long(limit_s)
    except CopyTooLong:
        raise
    except Exception:  # noqa: BLE001 - keys that are no texts, circles, and what classes of the app's raise
        return json.dumps({"arguments": repr_or_kind(named)})
    return "".join(written)


def repr_or_kind(thing: object) -> str:
    """What `repr` says, or the name of its class where that raises."""
    try:
        return repr(thing)
    except Exception:  # noqa: BLE001 - any class may raise what it likes
        return f"<{type(thing).__qualname__}>"


_WRITER = json.JSONEncoder(sort_keys=True, default=repr_or_kind)


def _too_long(limit_s: float) -> CopyTooLong:
    return CopyTooLong(f"it takes more than {1000 * limit_s:g} ms to copy: see capture_milliseconds")
