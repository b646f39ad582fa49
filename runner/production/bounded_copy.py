"""Copies what an app passes around, in the app's own thread: so for no longer than it was said it may take."""

import copy
import time
from typing import Any

#: Objects between two looks at the clock, which cost about as much as one of them.
_OBJECTS = 16


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
                raise CopyTooLong(f"it takes more than {1000 * self._limit_s:g} ms to copy: see capture_milliseconds")
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
