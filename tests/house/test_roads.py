"""How many files a datum passes on its road through the code. The print is the map in docs/architecture.md.

Every call of a function of ours is seen by `sys.setprofile`, in all threads. What belongs to a road is told by who
called first: a call that a background loop began, which also runs while nothing is asked, belongs to no request.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any

import pytest
from sources import PACKAGES, ROOT

from tests.doubles.engine import EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.conftest import double as double
from tests.explorer.conftest import doubles as doubles
from tests.explorer.conftest import places as places
from tests.explorer.conftest import running_explorer as running_explorer
from tests.explorer.conftest import warm_verifier as warm_verifier
from tests.explorer.running import HELLO, RunningExplorer
from tests.trainer.conftest import base as base
from tests.trainer.conftest import ledger as ledger
from tests.trainer.conftest import settings as settings
from tests.trainer.factories import commit, sample
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.loop import TrainingLoop, run

#: The most files of each road: these numbers only fall.
CHAT, FEEDBACK, TRAINED = 16, 20, 70

#: How long a road's last calls may take, and what runs while nothing is asked is looked at.
_SETTLED_S, _IDLE_S = 0.3, 6.0

#: The loop that brings records from the outbox into the ledger.
_DRAIN = frozenset({"explorer/drain.py:Drain._run"})
#: What the drain looks at now and then.
_GAUGES = "shared/outbox_status.py"

STREAMED = "/v1/chat/completions"

_OURS = tuple(f"{(ROOT / package).resolve()}/" for package in PACKAGES)


class Tracer:
    """The files of ours that are entered, in order, by the outermost function of ours below which they are."""

    def __init__(self) -> None:
        self._names: dict[str, str | None] = {}
        self.calls: dict[tuple[str, str], None] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (file := self._file(frame)) is None:
            return
        if (outermost := self._outermost(frame)) is not None:
            self.calls.setdefault((outermost, file), None)

    def _file(self, frame: FrameType) -> str | None:
        name = frame.f_code.co_filename
        if name not in self._names:
            path = str(Path(name).resolve())
            ours = path.startswith(_OURS) and not path.endswith("__init__.py")
            self._names[name] = path.removeprefix(f"{ROOT.resolve()}/") if ours else None
        return self._names[name]

    def _outermost(self, frame: FrameType) -> str | None:
        """The function that a call came from; None for what runs once, when a module is imported."""
        found, each = "", frame
        while each is not None:
            if (name := self._file(each)) is not None:
                if each.f_code.co_name == "<module>":
                    return None
                found = f"{name}:{each.f_code.co_qualname}"
            each = each.f_back
        return found

    def take(self) -> list[tuple[str, str]]:
        """What was entered since the last time."""
        found, self.calls = list(self.calls), {}
        return found


@contextmanager
def tracing() -> Iterator[Tracer]:
    """A tracer of this thread, and of all that begin in the block."""
    tracer = Tracer()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        yield tracer
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def files(calls: list[tuple[str, str]], *, idle: list[tuple[str, str]], drained: bool = False) -> list[str]:
    """The files of a road in order, without background loops, but for that which writes to the ledger if `drained`."""
    loops = {root for root, _ in idle}
    steps = (file for root, file in calls if root not in loops or (drained and root in _DRAIN))
    return list(dict.fromkeys(file for file in steps if file != _GAUGES))


def tell(road: str, found: list[str]) -> None:
    """Print a road: `pytest -s` shows it."""
    print(  # noqa: T201 - this is the map
        f"\n{road}: {len(found)} files",
        *found,
        sep="\n  ",
    )


def msg_id_of(stream: str) -> str:
    return stream.partition('"id":"')[2].partition('"')[0]


def second_step(settings: Settings, tracer: Tracer, patch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What a trainer enters for a batch, until it is trained on: not what it enters to get up."""
    iterate = TrainingLoop._iterate

    def iterate_traced(loop: TrainingLoop) -> None:
        if loop._now.learner.steps == 1:
            tracer.take()
        iterate(loop)
        if loop._now.learner.steps == 2:
            found.extend(tracer.take())

    found: list[tuple[str, str]] = []
    patch.setattr(TrainingLoop, "_iterate", iterate_traced)
    run(settings, Event())
    return found


@contextmanager
def traced(run_explorer: Run, double: EngineDouble) -> Iterator[tuple[RunningExplorer, Tracer]]:
    """An explorer that has answered, stored and released a reply, with its tracer."""
    with tracing() as tracer:
        explorer = run_explorer(double)
        reply = explorer.http.post(STREAMED, json=HELLO | {"stream": True})
        explorer.feedback(msg_id_of(reply.text))
        explorer.commit()
        explorer.until_flushed()
        yield explorer, tracer


def test_the_roads_of_a_chat_of_feedback_and_of_training_do_not_grow(
    running_explorer: Run, double: EngineDouble, settings: Any, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with traced(running_explorer, double) as (explorer, tracer):
        time.sleep(_SETTLED_S)
        tracer.take()
        time.sleep(_IDLE_S)
        idle = tracer.take()
        reply = explorer.http.post(STREAMED, json=HELLO | {"stream": True})
        asked = tracer.take()
        explorer.until_flushed()
        time.sleep(_SETTLED_S)
        recorded = files(asked + tracer.take(), idle=idle, drained=True)
        assert explorer.feedback(msg_id_of(reply.text)).json()["status"] == "success"
        rated = files(tracer.take(), idle=idle, drained=True)
        assert explorer.commit().json()["committed"] == 1
        released = files(tracer.take(), idle=idle, drained=True)
        commit(ledger, [sample(i) for i in range(8)])
        learnt = files(second_step(settings(trainer={"total_steps": 2}), tracer, monkeypatch), idle=idle)
    assert {root for root, _ in idle} >= _DRAIN
    chat = files(asked, idle=idle)
    trained = list(dict.fromkeys([*recorded, *rated, *released, *learnt]))
    tell("a streamed chat, in its worker", chat)
    tell("feedback, until it is answered", rated)
    tell("a reply, until it is trained on", trained)
    assert 10 < len(chat) <= CHAT
    assert 10 < len(rated) <= FEEDBACK
    assert 10 < len(trained) <= TRAINED
