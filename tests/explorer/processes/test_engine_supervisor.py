"""Engines that hang or die: they get no more requests, are started again, and come back with the champion."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer.checkpoints import register
from tests.explorer.conftest import Run
from tests.explorer.processes.test_fresh_engines import end, open_engine, until
from tests.explorer.running import HELLO, RunningExplorer, eventually, open_ledger, settings_for
from tuneloop.explorer.engines import movement, vllm
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.explorer.engines.process import EngineProcess
from tuneloop.explorer.processes import engine_supervisor
from tuneloop.explorer.processes.engine_supervisor import EngineSupervisor
from tuneloop.explorer.versions.loading import Verifier, servable_champion
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import VersionState
from tuneloop.shared.operations.engines import plugin_sentence


def states(fleet: Fleet) -> list[EngineState]:
    return [each.state for each in fleet.engines]


@dataclass
class DoubleProcess:
    """The process of a double: it is up again, and heals, when it is started."""

    double: EngineDouble
    started: list[Path] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, model: Path) -> None:
        self.started.append(model)
        self.over = asyncio.Event()
        self.double.weights, self.double.silent, self.double.dead = model, False, False

    async def wait(self) -> int:
        await self.over.wait()
        return 1

    async def stop(self) -> None:
        self.double.dead = True

    def has_room(self) -> bool:
        return True


async def running(
    doubles: list[EngineDouble], folder: Path, then: Callable[[Fleet, list[DoubleProcess]], Awaitable[None]]
) -> None:
    """Do something with two engines under their supervisors."""
    settings = settings_for(folder)
    ledger, verifier = open_ledger(settings), Verifier.of(settings)
    async with AsyncExitStack() as stack:
        stack.callback(ledger.close)
        engines = [await open_engine(number, double, stack) for number, double in enumerate(doubles)]
        fleet, processes = Fleet(engines, wait_timeout_s=60), [DoubleProcess(each) for each in doubles]
        supervisor = partial(
            EngineSupervisor, fleet=fleet, champion=partial(servable_champion, ledger, verifier), health_timeout_s=1.0
        )
        tasks = [asyncio.ensure_future(supervisor(*each).run()) for each in zip(engines, processes, strict=True)]
        try:
            await until(lambda: states(fleet) == [EngineState.READY] * 2)
            await then(fleet, processes)
        finally:
            await end(tasks)


@pytest.mark.parametrize("how", ["hangs", "dies"])
async def test_an_engine_of_ours_that_hangs_or_dies_is_started_again(
    tmp_path: Path, doubles: list[EngineDouble], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "_PAUSE_S", 0.1)

    async def lose_the_first(fleet: Fleet, processes: list[DoubleProcess]) -> None:
        ill, well = fleet.engines
        loads = ill.loads
        if how == "hangs":
            doubles[0].silent = True
        else:
            doubles[0].dead = True
            processes[0].over.set()
        await until(lambda: ill.state is EngineState.DOWN)
        assert await fleet.acquire() is well
        assert await fleet.acquire() is well
        await until(lambda: ill.state is EngineState.READY)
        assert [len(each.started) for each in processes] == [2, 1]
        assert ill.loads > loads
        assert await fleet.acquire() is ill

    doubles[0].packs = True
    with capture_logs() as logs:
        await running(doubles, tmp_path, lose_the_first)
    assert [(each["engine"], each["sentence"]) for each in logs if each["event"] == "engine_without_plugin"] == [
        (1, plugin_sentence(of_others=False))
    ]
    (down,) = [each for each in logs if each["event"] == "engine_down"]
    assert down["engine"] == 0
    assert down["reason"] == ("it does not say that it is healthy" if how == "hangs" else "its process ended")


async def test_an_engine_of_ours_is_given_a_grammar_whenever_it_starts(
    tmp_path: Path, doubles: list[EngineDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "_PAUSE_S", 0.1)
    monkeypatch.setattr(vllm.EngineControl, "rebuilds_grammars", True)

    async def start_the_first_again(fleet: Fleet, processes: list[DoubleProcess]) -> None:
        assert [each.grammars_given for each in doubles] == [1, 1]
        processes[0].over.set()
        await until(lambda: doubles[0].grammars_given == 2)

    await running(doubles, tmp_path, start_the_first_again)


async def test_an_engine_of_ours_that_drafts_must_sample_from_the_policy_whenever_it_starts(
    tmp_path: Path, doubles: list[EngineDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "_PAUSE_S", 0.1)
    monkeypatch.setattr(vllm.EngineControl, "drafts", True)

    async def start_the_first_again(fleet: Fleet, processes: list[DoubleProcess]) -> None:
        assert [each.asked_for_one for each in doubles] == [1, 1]
        doubles[0].drafts_at_any_temperature = True
        processes[0].over.set()
        await until(lambda: doubles[0].asked_for_one >= 3)
        assert states(fleet) == [EngineState.DOWN, EngineState.READY]
        doubles[0].drafts_at_any_temperature = False
        await until(lambda: states(fleet) == [EngineState.READY] * 2)

    with capture_logs() as logs:
        await running(doubles, tmp_path, start_the_first_again)
    reason = next(each["reason"] for each in logs if each["event"] == "engine_not_restarted")
    assert reason.startswith("explorer.rollout_model.engine_args: its log-probabilities at temperature 0.5")


async def test_an_engine_that_is_being_reloaded_has_time_to_be_silent(
    tmp_path: Path, doubles: list[EngineDouble]
) -> None:
    async def reload(fleet: Fleet, processes: list[DoubleProcess]) -> None:
        engine = fleet.engines[0]
        await fleet.set_state(engine, EngineState.RELOADING)
        doubles[0].silent = True
        ill = asyncio.ensure_future(engine_supervisor._until_ill(engine, 0.01))
        _, pending = await asyncio.wait([ill], timeout=3)
        assert pending, "it was asked several times"
        doubles[0].silent = False
        ill.cancel()
        await fleet.set_state(engine, EngineState.READY)

    await running(doubles, tmp_path, reload)


@contextmanager
def computing() -> Iterator[int]:
    """A process that computes all the time."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


async def test_an_engine_that_works_is_not_ended_for_a_health_check_that_waits(
    tmp_path: Path, doubles: list[EngineDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(movement, "_OVER_S", 0.5)

    async def be_busy(fleet: Fleet, processes: list[DoubleProcess]) -> None:
        engine = fleet.engines[0]
        watching = asyncio.ensure_future(watch(engine))
        with computing() as engine.movement.pid:
            doubles[0].silent = True
            await until(lambda: [each["event"] for each in logs].count("engine_busy") == 2)
            assert (engine.state, len(processes[0].started)) == (EngineState.READY, 1)
        await until(lambda: len(processes[0].started) == 2)  # once it computes no more
        watching.cancel()

    async def watch(engine: Engine) -> None:
        while True:
            await engine.look([None])
            await asyncio.sleep(0.1)

    with capture_logs() as logs:
        await running(doubles, tmp_path, be_busy)


async def test_an_engine_that_says_it_is_healthy_and_stands_still_is_started_again_unless_it_computes(
    tmp_path: Path, doubles: list[EngineDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "_PAUSE_S", 0.1)

    async def stand_still(fleet: Fleet, processes: list[DoubleProcess]) -> None:
        engine = fleet.engines[0]
        monkeypatch.setattr(engine.movement, "is_busy", lambda since: True)
        engine.movement.still_s = 61.0
        await asyncio.sleep(2)
        assert len(processes[0].started) == 1
        monkeypatch.setattr(engine.movement, "is_busy", lambda since: False)
        await until(lambda: engine.state is EngineState.DOWN)
        engine.movement.still_s = 0.0
        await until(lambda: len(processes[0].started) == 2)

    with capture_logs() as logs:
        await running(doubles, tmp_path, stand_still)
    [reason] = [each["reason"] for each in logs if each["event"] == "engine_down"]
    assert reason == "it is asked for something, and does not work on it"


@pytest.fixture
def two(running_explorer: Run, doubles: list[EngineDouble]) -> RunningExplorer:
    """An explorer with two engines of others, both ready; the first is asked first."""
    rollout = {"engine_urls": [each.url for each in doubles], "dtype": "float32", "health_timeout": 1.0}
    explorer = running_explorer(*doubles, rollout_model=rollout)
    eventually(lambda: states(explorer.services.fleet) == [EngineState.READY] * 2)
    return explorer


def test_an_engine_of_others_that_hangs_is_left_alone_and_comes_back_with_the_champion(
    two: RunningExplorer, doubles: list[EngineDouble]
) -> None:
    doubles[0].silent = True
    eventually(lambda: states(two.services.fleet) == [EngineState.DOWN, EngineState.READY])
    assert two.chat().status_code == 200
    version = register(two.ledger, two.settings.job_dir)
    eventually(lambda: two.ledger.versions.all()[version].state is VersionState.CHAMPION)
    assert [len(each.chats) for each in doubles] == [0, 1]
    doubles[0].silent = False
    eventually(lambda: states(two.services.fleet) == [EngineState.READY] * 2)
    assert doubles[0].weights == doubles[1].weights == two.ledger.versions.champion().path / "actor"
    assert two.chat().headers["x-tuneloop-version"] == str(version)
    assert len(doubles[0].chats) == 1


def test_an_engine_of_others_that_sends_something_is_not_down(
    two: RunningExplorer, doubles: list[EngineDouble]
) -> None:
    doubles[0].piece_pause_s = 0.5
    with two.http.stream("POST", "/v1/chat/completions", json=HELLO | {"stream": True}) as reply:
        doubles[0].silent = True
        assert [states(two.services.fleet)[0] for line in reply.iter_lines() if line][-1] is EngineState.READY
    eventually(lambda: states(two.services.fleet) == [EngineState.DOWN, EngineState.READY])


def test_a_request_waits_for_the_other_engine_where_that_is_being_reloaded(
    two: RunningExplorer, doubles: list[EngineDouble]
) -> None:
    doubles[1].load_s = 2.0
    register(two.ledger, two.settings.job_dir)
    eventually(lambda: doubles[1].loading == 1)
    doubles[0].dead = True
    assert two.chat().status_code == 200
    assert [len(each.chats) for each in doubles] == [0, 1]


async def test_nobody_waits_for_another_engine_that_is_not_about_to_be_ready() -> None:
    ill, other = engines = [Engine(number, EngineHttp()) for number in range(2)]
    fleet = Fleet(engines, wait_timeout_s=60)
    for other.state in (EngineState.STARTING, EngineState.DOWN):
        assert await fleet.wait_for_another(ill) is None
    await fleet.set_state(other, EngineState.RELOADING)
    waiting = asyncio.ensure_future(fleet.wait_for_another(ill))
    await asyncio.sleep(0)
    await fleet.set_state(ill, EngineState.DOWN)
    assert not waiting.done()
    await fleet.set_state(other, EngineState.READY)
    assert await waiting is other


async def test_an_engine_of_ours_starts_with_the_champion_before_one_that_is_damaged(
    tmp_path: Path, doubles: list[EngineDouble]
) -> None:
    settings = settings_for(tmp_path)
    ledger = open_ledger(settings)
    for _ in range(2):
        ledger.versions.promote(register(ledger, settings.job_dir))
    actors = [ledger.versions.all()[number].path / "actor" for number in (1, 2)]
    (actors[1] / "config.json").write_text("{}")

    async def look(fleet: Fleet, processes: list[DoubleProcess]) -> None:
        assert [each.version for each in fleet.engines] == [1, 1]
        assert [each.started for each in processes] == [[actors[0]]] * 2

    await running(doubles, tmp_path, look)
    assert ledger.versions.champion().version == 1
    assert [each.name for each in ledger.alarms.all()] == ["champion_damaged"]
    ledger.close()


@pytest.mark.contract
async def test_engines_of_ours_wait_for_a_champion_whose_folder_is_away_when_they_start(
    tmp_path: Path, doubles: list[EngineDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "_PAUSE_S", 0.1)
    settings = settings_for(tmp_path)
    ledger = open_ledger(settings)
    ledger.versions.promote(register(ledger, settings.job_dir))
    path = ledger.versions.champion().path
    hidden = path.rename(settings.job_dir / "hidden")
    seen: list[str] = []

    async def bring_back() -> None:
        await until(lambda: len(ledger.alarms.all()) == 1)
        seen.extend(each.name for each in ledger.alarms.all())
        hidden.rename(path)

    async def look(fleet: Fleet, processes: list[DoubleProcess]) -> None:
        assert [each.version for each in fleet.engines] == [1, 1]
        assert [each.started for each in processes] == [[path / "actor"]] * 2

    async with asyncio.TaskGroup() as group:
        group.create_task(bring_back())
        await running(doubles, tmp_path, look)
    assert (seen, ledger.versions.champion().version) == (["version_unreadable"], 1)
    ledger.close()


class DyingProcess(EngineProcess):
    """An engine that says one line and dies."""

    def command(self, model: Path) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, "-c", f"raise SystemExit('ValueError: {model}')"], {**os.environ}


async def test_why_an_engine_died_is_read_in_the_log_of_this_start(tmp_path: Path, double: EngineDouble) -> None:
    double.silent, settings = True, settings_for(tmp_path)
    async with vllm.open_session(url=double.url, socket=None, key=None) as session:
        engine = Engine(0, EngineHttp(), vllm.EngineControl(session, model_name=MODEL, tolerance=1e-3))
        process = DyingProcess(settings, engine, socket=tmp_path / "socket")
        for model in ("first", "second"):
            with pytest.raises(EnvironmentRefused, match=f"ValueError: {model}"):
                await process.start(Path(model))
        quiet = QuietProcess(settings, engine, socket=tmp_path / "socket")
        with pytest.raises(EnvironmentRefused, match=r"\(exit code 3\): no output"):
            await quiet.start(Path("third"))


@pytest.mark.parametrize("lacks", ["log", "process"])
async def test_an_engine_that_the_machine_cannot_start_is_refused(
    tmp_path: Path, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with an error that would end the service, or leave the engine between two versions."""
    process = QuietProcess(settings := settings_for(tmp_path), Engine(0, EngineHttp()), socket=tmp_path / "socket")
    if lacks == "log":
        (settings.job_dir / "logs" / "engine-0.log").mkdir(parents=True)
    else:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    with pytest.raises(EnvironmentRefused, match="engine 0 cannot be started"):
        await process.start(tmp_path)


async def test_an_engine_whose_log_is_gone_starts_all_the_same(tmp_path: Path, double: EngineDouble) -> None:
    double.silent, settings = True, settings_for(tmp_path)
    async with vllm.open_session(url=double.url, socket=None, key=None) as session:
        engine = Engine(0, EngineHttp(), vllm.EngineControl(session, model_name=MODEL, tolerance=1e-3))
        with pytest.raises(EnvironmentRefused, match=r"\(exit code 3\): no output"):
            await ForgetfulProcess(settings, engine, socket=tmp_path / "socket").start(tmp_path)


class ForgetfulProcess(EngineProcess):
    """An engine whose log somebody deletes before it dies."""

    def command(self, model: Path) -> tuple[list[str], dict[str, str]]:
        log = self._settings.job_dir / "logs" / "engine-0.log"
        return [sys.executable, "-c", f"import os; os.unlink({str(log)!r}); raise SystemExit(3)"], {**os.environ}


class QuietProcess(EngineProcess):
    """An engine that dies without a word."""

    def command(self, model: Path) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, "-c", "raise SystemExit(3)"], {**os.environ}
