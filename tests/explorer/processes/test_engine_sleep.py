"""Whose turn at the GPU it is: the engine's, but when the trainer waits and has waited long enough."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.explorer.running import settings_for
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.explorer.engines.process import EngineProcess
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.processes import engine_supervisor
from tuneloop.explorer.processes.engine_supervisor import EngineSleep
from tuneloop.shared.errors import EngineError
from tuneloop.shared.job_marks import GpuLocks

TURN_S = 0.4


class Control:
    """The routes of an engine, and what was asked of it while the GPU was whose."""

    loads_in_place = True
    renaming = None
    proof = ""

    def __init__(self, held: Callable[[], bool]) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.fails_at: str | None = None
        self.turns: EngineSleep | None = None
        self.is_busy = False
        self._held = held

    async def _ask(self, what: str) -> None:
        self.asked.append((what, self._held()))
        if what == self.fails_at:
            raise EngineError(what)

    async def sleep(self) -> None:
        await self._ask("sleep")

    async def wake_up(self) -> None:
        await self._ask("wake_up")


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[GpuLocks]:
    locks = GpuLocks.of(tmp_path)
    yield locks
    locks.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what is waited for is another process's
            await asyncio.sleep(0.01)


def played(folder: Path, trainer: GpuLocks, then: Callable[[Engine, Control, Metrics], Awaitable[Any]]) -> Any:
    """Do something with an engine that has the GPU, beside its turns."""
    locks, metrics = GpuLocks.of(folder), Metrics()
    control = Control(trainer.held.is_held_by_another)
    engine = Engine(0, None, control)  # type: ignore[arg-type]
    fleet = Fleet([engine], wait_timeout_s=1)
    turns = control.turns = EngineSleep(locks, fleet, metrics, turn_s=TURN_S, is_busy=lambda: control.is_busy)

    async def play() -> Any:
        await turns.hold()
        engine.state = EngineState.READY
        task = asyncio.ensure_future(turns.run())
        try:
            return await then(engine, control, metrics)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    try:
        return asyncio.run(play())
    finally:
        locks.close()


async def begin_turn(trainer: GpuLocks) -> None:
    await until(trainer.wanted_by_trainer.take)
    await until(trainer.held.take)
    trainer.wanted_by_trainer.release()


def test_the_engine_sleeps_before_the_trainer_has_the_gpu_and_wakes_after(tmp_path: Path, trainer: GpuLocks) -> None:
    async def then(engine: Engine, control: Control, metrics: Metrics) -> None:
        assert not trainer.held.take()
        await begin_turn(trainer)
        assert engine.state is EngineState.ASLEEP
        await asyncio.sleep(0.3)
        assert control.asked == [("sleep", True)]
        trainer.held.release()
        await until(lambda: engine.state is EngineState.READY)
        assert control.asked == [("sleep", True), ("wake_up", True)]
        assert metrics.registry.get_sample_value("tuneloop_gpu_turn_seconds_count") == 1

    played(tmp_path, trainer, then)


def test_the_trainer_does_not_come_again_before_the_engine(tmp_path: Path, trainer: GpuLocks) -> None:
    """After a turn the engine has one that is as long, however soon the trainer wants the next."""

    async def then(engine: Engine, control: Control, metrics: Metrics) -> float:
        await begin_turn(trainer)
        await until(trainer.wanted_by_engine.is_held_by_another)
        await asyncio.sleep(0.2)
        trainer.held.release()
        await until(lambda: engine.state is EngineState.READY)
        began = time.monotonic()
        await begin_turn(trainer)
        return time.monotonic() - began

    assert 0.2 <= played(tmp_path, trainer, then) < 10


def test_a_trainer_that_is_gone_before_it_has_the_gpu_is_not_waited_for(tmp_path: Path, trainer: GpuLocks) -> None:
    async def then(engine: Engine, control: Control, metrics: Metrics) -> None:
        await until(trainer.wanted_by_trainer.take)
        await until(lambda: engine.state is EngineState.ASLEEP)
        trainer.wanted_by_trainer.release()
        await until(lambda: engine.state is EngineState.READY)

    played(tmp_path, trainer, then)


@pytest.mark.parametrize("why", ["weights change", "reloading", "down", "starting", "stopping"])
def test_an_engine_that_is_needed_or_not_ready_does_not_give_way(tmp_path: Path, trainer: GpuLocks, why: str) -> None:
    """Or it would never get the weights of the trainer's turns, and weights would be read that are away."""

    async def then(engine: Engine, control: Control, metrics: Metrics) -> None:
        assert control.turns is not None
        control.is_busy = why == "weights change"
        engine.state = EngineState(why) if why in set(EngineState) else EngineState.READY
        if why == "stopping":
            control.turns.stay_awake()
        await until(trainer.wanted_by_trainer.take)
        await asyncio.sleep(0.3)
        assert not trainer.held.take()
        assert control.asked == []
        if why != "stopping":
            control.is_busy, engine.state = False, EngineState.READY
            await until(trainer.held.take)

    played(tmp_path, trainer, then)


def test_an_engine_that_was_started_anew_has_a_turn_first(tmp_path: Path, trainer: GpuLocks) -> None:
    async def then(engine: Engine, control: Control, metrics: Metrics) -> float:
        engine.state = EngineState.DOWN
        await until(trainer.wanted_by_trainer.take)
        await asyncio.sleep(0.2)
        engine.state, began = EngineState.READY, time.monotonic()
        await until(trainer.held.take)
        return time.monotonic() - began

    assert played(tmp_path, trainer, then) >= TURN_S - 0.1


def test_where_no_engine_is_the_trainer_has_the_gpu(tmp_path: Path, trainer: GpuLocks) -> None:
    async def then(engine: Engine, control: Control, metrics: Metrics) -> None:
        assert control.turns is not None
        engine.state = EngineState.DOWN
        control.turns.let_go()
        assert trainer.held.take()
        starting = asyncio.ensure_future(control.turns.hold())
        await until(trainer.wanted_by_engine.is_held_by_another)
        assert not starting.done()
        trainer.held.release()
        await starting

    played(tmp_path, trainer, then)


def test_an_engine_whose_lock_cannot_be_read_is_left_to_its_supervisor(
    tmp_path: Path, trainer: GpuLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def then(engine: Engine, control: Control, metrics: Metrics) -> None:
        async def fail() -> None:
            raise OSError("no locks available")

        monkeypatch.setattr(control.turns, "hold", fail)
        await begin_turn(trainer)
        trainer.held.release()
        await until(lambda: engine.state is EngineState.DOWN)

    played(tmp_path, trainer, then)


@pytest.mark.parametrize("step", ["sleep", "wake_up"])
def test_an_engine_that_does_not_do_it_is_left_to_its_supervisor(tmp_path: Path, trainer: GpuLocks, step: str) -> None:
    async def then(engine: Engine, control: Control, metrics: Metrics) -> None:
        control.fails_at = step
        await until(trainer.wanted_by_trainer.take)
        await until(lambda: engine.state is not EngineState.READY)
        if step == "wake_up":
            await until(trainer.held.take)
            trainer.wanted_by_trainer.release()
            trainer.held.release()
        await until(lambda: engine.state is EngineState.DOWN)
        assert not trainer.held.take()  # it is the engine's turn still, or again

    with capture_logs() as logs:
        played(tmp_path, trainer, then)
    assert "gpu_turn_failed" in {each["event"] for each in logs}


def test_that_the_gpu_does_not_come_back_is_said(
    tmp_path: Path, trainer: GpuLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "_SAY_EVERY_S", 0.1)

    async def then(engine: Engine, control: Control, metrics: Metrics) -> None:
        await begin_turn(trainer)
        await asyncio.sleep(0.6)

    with capture_logs() as logs:
        played(tmp_path, trainer, then)
    assert "gpu_not_given_back" in {each["event"] for each in logs}


def test_an_engine_s_process_that_is_no_more_has_no_gpu(tmp_path: Path, trainer: GpuLocks) -> None:
    async def then(engine: Engine, control: Control, metrics: Metrics) -> None:
        process = EngineProcess(settings_for(tmp_path), engine, socket=tmp_path / "s", gpu=control.turns)
        assert not trainer.held.take()
        await process.stop()
        assert trainer.held.take()

    played(tmp_path, trainer, then)
