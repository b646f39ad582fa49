"""Runs the command `python -m tuneloop.runner shadow`: processes the calls in a TrainingRunner's queue."""

import argparse
import fcntl
import importlib
import json
import operator
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuneloop.runner.feedback.feedback_client import Feedback
from tuneloop.runner.shadow.call_queue import CallQueue
from tuneloop.runner.shadow.executor import ShadowCounts, ShadowExecutor, ShadowJob, ShadowWorker
from tuneloop.runner.shadow.tools import ShadowTools, enter_shadow_process

_LOOK_S = 0.1

#: Seconds for current runs at a stop, and then for their rewards. The rest is repeated or sent later.
_STOP_S, _SEND_S = 20.0, 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT. Exit codes: 0, 1 if not all was sent, 2 for invalid input."""
    parser = argparse.ArgumentParser(prog="python -m tuneloop.runner shadow", description=__doc__)
    parser.add_argument("agent", metavar="MODULE:FUNCTION", help="makes a shadow run's agent from its ShadowRun")
    parser.add_argument("--reward", required=True, metavar="MODULE:FUNCTION", help="the reward of a ShadowResult")
    parser.add_argument("--queue", required=True, type=Path, help="the queue folder of the app's TrainingRunner")
    parser.add_argument("--service", required=True, help="its URL; its key is read from TUNELOOP_API_KEY")
    parser.add_argument("--model", required=True, help="the model that the service trains")
    parser.add_argument("--tools", metavar="MODULE:OBJECT", help="the app's ShadowTools")
    parser.add_argument("--repeat", type=int, default=1, help="runs of one call, which make a group")
    parser.add_argument("--concurrency", type=int, default=2, help="calls that are run at once")
    parser.add_argument("--timeout", type=float, default=300.0, help="timeout of a run in seconds")
    parser.add_argument("--commit-interval", type=float, default=300.0, help="seconds between two commits")
    options = parser.parse_args(argv)
    if min(options.repeat, options.concurrency) < 1 or not options.timeout > 0:
        parser.error("--repeat and --concurrency must be at least 1, --timeout above 0")
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    enter_shadow_process()
    counts = ShadowCounts()
    try:
        agent: Any = _load(options.agent)
        tools: Any = ShadowTools() if options.tools is None else _load(options.tools)
        reward: Any = _load(options.reward)
        queue = CallQueue(options.queue, counts)
        lock = (options.queue / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        api_key = os.environ.get("TUNELOOP_API_KEY")
        feedback = Feedback(options.service, outbox=options.queue / "feedback", api_key=api_key)
    except BlockingIOError:
        print(f"another process runs the calls of {options.queue}: stop it first", file=sys.stderr)
        return 2
    except (ImportError, AttributeError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    executor = ShadowExecutor(
        service=options.service.rstrip("/").removesuffix("/v1"),
        model=options.model,
        api_key=api_key or "none",
        reward_calculator=reward,
        repeat_time=options.repeat,
        timeout_s=options.timeout,
        tools=tools,
        counts=counts,
        feedback=feedback,
        to_commit=True,  # rewards of a killed process
    )
    begun: dict[int, Path] = {}

    async def handle(job: ShadowJob) -> None:
        try:
            await executor.run(job)
            begun[id(job)].unlink()
        finally:
            del begun[id(job)]

    worker = ShadowWorker(
        handle,
        counts,
        concurrency=options.concurrency,
        queue_size=options.concurrency,
        commit=executor.commit,
        commit_interval_s=options.commit_interval,
    )
    while not stopping.wait(_LOOK_S):
        under_way = set(begun.values())
        room = options.concurrency - len(under_way)
        for path in [each for each in queue.waiting() if each not in under_way][:room]:
            if (found := queue.begin(path)) is not None:
                job = replace(found[1], agent=agent)
                begun[id(job)] = found[0]
                worker.offer(job)
    done = worker.stop(_STOP_S)
    done = executor.settle(_SEND_S) and done
    print(json.dumps(counts.snapshot()))
    lock.close()
    return 0 if done else 1


def _load(place: str) -> Any:
    """The object MODULE:NAME. Raises ImportError, AttributeError or ValueError."""
    module, _, name = place.partition(":")
    if not module or not name:
        raise ValueError(f"{place!r} is not MODULE:NAME, such as app:make_agent")
    return operator.attrgetter(name)(importlib.import_module(module))
