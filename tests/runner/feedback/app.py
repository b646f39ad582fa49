"""An app that says something of replies until it is killed: `python -m tests.runner.feedback.app URL OUTBOX FROM ID…`.

It says the numbers from FROM on, MOST of them, in turn of each id, and prints each when it is acknowledged, for as long
as a test lets it live. FROM `-` says nothing, and sends what is left.
"""

import signal
import sys
import time

from tuneloop.runner import Feedback

#: What it says at most, and how long it waits in between: on a quick machine a hundred apps would say more than the
#: service takes in a minute afterwards, or keeps of one source.
MOST, _PAUSE_S = 130, 0.003


def main(url: str, outbox: str, first: str, ids: list[str]) -> None:
    """Say it."""
    feedback = Feedback(url, outbox=outbox, timeout=5)
    if first == "-":
        sys.exit(0 if feedback.flush(60) else 1)
    for value in range(int(first), int(first) + MOST):
        feedback.reward(ids[value % len(ids)], value, source="app")
        print(value, flush=True)  # noqa: T201 - the test reads it
        time.sleep(_PAUSE_S)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[4:])
