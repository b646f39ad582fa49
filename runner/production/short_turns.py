"""Makes a thread of the app's wait for less long while threads of the runner's compute in the same interpreter."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Seconds after which a thread that computes hands over the interpreter; Python's own 5 ms are felt by the app each
#: time that it comes back from the network.
_TURN_S = 0.0001

_lock = threading.Lock()
_depth, _ordinary_s = 0, 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """Within it threads take turns every tenth of a millisecond; it may be entered by several at once."""
    global _depth, _ordinary_s
    with _lock:
        if _depth == 0:
            _ordinary_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_TURN_S, _ordinary_s))
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                sys.setswitchinterval(_ordinary_s)
