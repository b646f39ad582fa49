"""Versions that are taken up by fresh engines: beside the old ones where there is room, else one after the other."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer.checkpoints import PROMPT, register
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, MoodyLedger, eventually, open_ledger, settings_for
from tuneloop.explorer.engines import vllm
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.explorer.engines.process import EngineProcess
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.processes import engine_supervisor
from tuneloop.explorer.processes.engine_supervisor import EngineSupervisor, FleetTrial
from tuneloop.explorer.processes.services import is_tied
from tuneloop.explorer.versions import evaluation
from tuneloop.explorer.versions.attestation import Attestation
from tuneloop.explorer.versions.evaluation import CandidateEvaluation
from tuneloop.explorer.versions.loading import Verifier, servable_champion
from tuneloop.explorer.versions.reload import Reloader
from tuneloop.shared.checkpoints import Probe
from tuneloop.shared.errors import EngineError, EnvironmentRefused, RequestRefused
from tuneloop.shared.experience import VersionState
from tuneloop.shared.settings.settings import Settings

WRONG = Probe(prompt_ids=PROMPT, logprobs=(-1.0, -1.0, -1.0), tolerance=0.01)


@dataclass
class PlaceDouble:
    """A place for processes of a double."""

    double: EngineDouble
    dies_of: set[str] = field(default_factory=set)  # names of folders; "*": of all
    start_s: float = 0.05
    started: list[str] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, model: Path) -> None:
        name = model.parent.name if model.name == "actor" else "base"
        self.started.append(name)
        self.over = asyncio.Event()
        await asyncio.sleep(self.start_s)
        if self.dies_of & {name, "*"}:
            self.over.set()
            raise EnvironmentRefused(f"it died of {name}")
        self.double.start_again()
        self.double.weights, self.double.dead = model, False

    async def wait(self) -> int:
        await self.over.wait()
        return 1

    async def stop(self) -> None:
        self.double.dead = True
        self.over.set()

    def has_room(self) -> bool:
        return True


@dataclass
class Service:
    """Engines under their supervisors, and who gives them versions."""

    fleet: Fleet
    places: list[PlaceDouble]
    reloader: Reloader
    ledger: MoodyLedger
    job_dir: Path
    tasks: list["asyncio.Task[None]"]
    outcomes: Counter[str] = field(default_factory=Counter)

    def states(self) -> list[str]:
        return [f"{each.state.value}" for each in self.fleet.engines]

    async def candidate(self, **but: Any) -> int:
        return await asyncio.to_thread(register, self.ledger, self.job_dir, **but)

    def state_of(self, version: int) -> VersionState:
        return self.ledger.versions.all()[version].state

    async def ask(self) -> int:
        """Ask for a reply as the proxy does; which version has answered."""
        engine = await self.fleet.acquire()
        try:
            version = engine.version
            reply = await engine.http.request("POST", "/v1/chat/completions", orjson.dumps(HELLO))
            try:
                await reply.read()
            finally:
                reply.close()
            assert reply.status == 200
            return version
        finally:
            self.fleet.release(engine)

    async def keep_asking(self) -> None:
        """Count what becomes of requests until cancelled."""
        while True:
            try:
                self.outcomes[f"version {await self.ask()}"] += 1
            except (EngineError, RequestRefused) as error:
                self.outcomes[repr(error)] += 1
            await asyncio.sleep(0.002)

    @asynccontextmanager
    async def under_load(self) -> AsyncIterator[None]:
        asking = [asyncio.ensure_future(self.keep_asking()) for _ in range(4)]
        yield
        so_far = sum(self.outcomes.values())
        await until(lambda: sum(self.outcomes.values()) > so_far + 20)
        await end(asking)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - the doubles live in another thread
            await asyncio.sleep(0.01)


async def end(tasks: list["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def serving(
    folder: Path,
    doubles: list[EngineDouble],
    *,
    spare: int = 0,
    tries: bool = False,
    head_is_seen: bool = True,
    **explorer: Any,
) -> AsyncIterator[Service]:
    """Engines of ours in place of the doubles; the last `spare` places are empty."""
    settings = settings_for(folder, request_timeout=20, **explorer)
    ledger = open_ledger(settings)
    async with AsyncExitStack() as stack:
        stack.callback(ledger.close)
        engines = [await open_engine(number, each, stack) for number, each in enumerate(doubles)]
        for engine in engines[len(engines) - spare :]:
            engine.state = EngineState.SPARE
        fleet, places = Fleet(engines, wait_timeout_s=20), [PlaceDouble(each) for each in doubles]
        reloader = Reloader(settings, fleet, ledger=ledger, metrics=Metrics())
        trial = FleetTrial(fleet, head_is_seen=head_is_seen) if tries else None
        champion = partial(servable_champion, ledger, Verifier.of(settings))
        tasks = []
        for engine, place in zip(engines, places, strict=True):
            engine.restarts = not tries
            run = EngineSupervisor(
                engine, place, fleet=fleet, champion=champion, health_timeout_s=5.0, trial=trial
            ).run()
            tasks.append(asyncio.ensure_future(run))
        service = Service(fleet, places, reloader, ledger, settings.job_dir, tasks)
        try:
            await until(lambda: service.states().count("ready") == len(doubles) - spare)
            yield service
        finally:
            await end(tasks)


async def open_engine(number: int, double: EngineDouble, stack: AsyncExitStack) -> Engine:
    session = await stack.enter_async_context(vllm.open_session(url=double.url, socket=None, key=None))
    http = EngineHttp(url=double.url)
    stack.push_async_callback(http.close)
    return Engine(number, http, vllm.EngineControl(session, model_name=MODEL, tolerance=1e-3))


async def test_a_fresh_engine_takes_the_place_of_the_old_one_and_no_request_waits(
    tmp_path: Path, doubles: list[EngineDouble]
) -> None:
    async with serving(tmp_path, doubles, spare=1) as service:
        for version in (1, 2):
            fresh = doubles[version % 2]
            service.places[version % 2].start_s = 1.0
            await service.candidate()
            async with service.under_load():
                turn = asyncio.ensure_future(service.reloader.turn())
                await until(lambda: "starting" in service.states())
                before = sum(service.outcomes.values())
                await until(lambda before=before: sum(service.outcomes.values()) > before + 20)
                await turn
            assert service.state_of(version) is VersionState.CHAMPION
            assert fresh.weights.parent.name == f"global_step_{version}"
            assert service.states().count("spare") == service.states().count("ready") == 1
            assert await service.ask() == version
            assert [each.dead for each in doubles] == [version == 1, version == 2]
        assert set(service.outcomes) == {"version 0", "version 1", "version 2"}
        assert [each.started for each in service.places] == [["base", "global_step_2"], ["global_step_1"]]
        assert all("/collective_rpc" not in each.posts for each in doubles)


@pytest.mark.parametrize("count", [1, 2])
async def test_without_a_second_place_requests_wait_or_the_others_answer_until_an_engine_is_back(
    tmp_path: Path, doubles: list[EngineDouble], count: int
) -> None:
    async with serving(tmp_path, doubles[:count], min_running_model_num=count - 1) as service:
        service.places[0].start_s = 1.0
        await service.candidate()
        async with service.under_load():
            await service.reloader.turn()
        assert service.state_of(1) is VersionState.CHAMPION
        assert set(service.outcomes) == {"version 0", "version 1"}
        assert [each.started for each in service.places] == [["base", "global_step_1"]] * count
        assert service.states() == ["ready"] * count


@pytest.mark.parametrize("spare", [0, 1])
async def test_replies_in_flight_end_before_their_engine_is_ended(
    tmp_path: Path, doubles: list[EngineDouble], spare: int
) -> None:
    async with serving(tmp_path, doubles[: 1 + spare], spare=spare) as service:
        doubles[0].hangs = True
        asking = asyncio.ensure_future(service.ask())
        await until(lambda: len(doubles[0].chats) == 1)
        await service.candidate()
        turn = asyncio.ensure_future(service.reloader.turn())
        await until(lambda: service.states()[0] == "reloading")
        assert not doubles[0].dead
        doubles[0].hangs = False
        assert await asking == 0
        await turn
        assert service.state_of(1) is VersionState.CHAMPION


@pytest.mark.parametrize("why", ["no start", "wrong probe"])
@pytest.mark.parametrize("spare", [0, 1])
async def test_a_bad_version_costs_no_request_and_the_only_engine_one_start(
    tmp_path: Path, doubles: list[EngineDouble], spare: int, why: str
) -> None:
    async with serving(tmp_path, doubles[: 1 + spare], spare=spare) as service:
        tried = service.places[spare]
        tried.dies_of |= {"global_step_1"} if why == "no start" else set()
        await service.candidate(probe=None if why == "no start" else WRONG)
        async with service.under_load():
            for _ in range(3):
                await service.reloader.turn()
        assert service.state_of(1) is VersionState.REJECTED
        assert set(service.outcomes) == {"version 0"}
        if not spare:
            assert tried.started == ["base", "global_step_1", "base"]
            return
        assert service.states() == ["ready", "spare"]
        assert service.places[0].started == ["base"]
        assert tried.started == ["global_step_1", "base"][: 2 if why == "no start" else 1]
        await service.candidate()
        await service.reloader.turn()
        assert service.states() == ["spare", "ready"]
        assert service.state_of(2) is VersionState.CHAMPION


async def test_where_no_engine_runs_beside_the_old_one_versions_are_taken_up_in_its_place(
    tmp_path: Path, doubles: list[EngineDouble]
) -> None:
    async with serving(tmp_path, doubles, spare=1) as service:
        service.places[1].dies_of.add("*")
        with capture_logs() as logs:
            for _ in (1, 2):
                await service.candidate()
                async with service.under_load():
                    await service.reloader.turn()
        assert service.state_of(2) is VersionState.CHAMPION
        assert set(service.outcomes) == {"version 0", "version 1", "version 2"}
        assert [each.started for each in service.places] == [
            ["base", "global_step_1", "global_step_2"],
            ["global_step_1", "base"],
        ]
        assert [each["engine"] for each in logs if each["event"] == "no_surge_capacity"] == [1]


@pytest.mark.parametrize("spare", [0, 1])
async def test_a_version_that_is_rolled_back_by_hand_answers_nobody_from_then_on(
    tmp_path: Path, doubles: list[EngineDouble], spare: int
) -> None:
    async with serving(tmp_path, doubles[: 1 + spare], spare=spare) as service:
        await service.candidate()
        await service.reloader.turn()
        service.ledger.versions.roll_back(1, by="admin", reason="it is rude")
        async with service.under_load():
            await service.reloader.turn()
        assert await service.ask() == 0
        assert service.states() == ["ready", "spare"][: 1 + spare]
        assert set(service.outcomes) <= {"version 0", "version 1"}


async def test_an_explorer_that_ends_meanwhile_takes_the_version_up_when_it_is_back(
    tmp_path: Path, doubles: list[EngineDouble]
) -> None:
    async with serving(tmp_path, doubles, spare=1) as service:
        service.places[1].start_s = 60
        await service.candidate()
        turn = asyncio.ensure_future(service.reloader.turn())
        await until(lambda: service.states() == ["ready", "starting"])
        await end([turn])
    assert [each.dead for each in doubles] == [True, True]
    async with serving(tmp_path, doubles, spare=1) as service:
        assert await service.ask() == 0
        await service.reloader.turn()
        assert service.state_of(1) is VersionState.CHAMPION
        assert await service.ask() == 1


@pytest.mark.parametrize("spare", [0, 1])
async def test_a_fresh_engine_that_dies_later_comes_back_with_the_champion(
    tmp_path: Path, doubles: list[EngineDouble], spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "_PAUSE_S", 0.1)
    async with serving(tmp_path, doubles[: 1 + spare], spare=spare) as service:
        await service.candidate()
        await service.reloader.turn()
        doubles[spare].dead = True
        service.places[spare].over.set()
        await until(lambda: service.states()[spare] == "down")
        await until(lambda: service.states()[spare] == "ready")
        assert await service.ask() == 1
        assert service.places[spare].started[-2:] == ["global_step_1", "global_step_1"]


async def test_an_engine_that_was_ended_has_no_date_of_its_last_proof(
    tmp_path: Path, doubles: list[EngineDouble]
) -> None:
    async with serving(tmp_path, doubles, spare=1) as service:
        metrics = Metrics()
        settings = settings_for(tmp_path, probe_interval=0.05)
        proofs = Attestation(settings, service.fleet, ledger=service.ledger, metrics=metrics, reloader=service.reloader)
        proving = asyncio.ensure_future(proofs.run())

        def proven() -> list[str]:
            (family,) = metrics.last_good_probe.collect()
            return [each.labels["engine"] for each in family.samples]

        await until(lambda: proven() == ["0"])
        await service.candidate()
        await service.reloader.turn()
        await until(lambda: proven() == ["1"])
        await end([proving])


async def test_a_candidate_that_no_engine_starts_with_costs_the_gate_one_start(
    tmp_path: Path, doubles: list[EngineDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "AGAIN_S", 0.0)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "3+4=", "answer": "7"}\n')
    async with serving(tmp_path, doubles) as service:
        more = {"gate": {"mode": "block"}, "monitor": {"evaluation": {"path": str(tasks)}}}
        settings = Settings.model_validate(settings_for(tmp_path).model_dump() | more)
        reloader = Reloader(settings, service.fleet, ledger=service.ledger, metrics=Metrics())
        gate = CandidateEvaluation(settings, service.fleet, ledger=service.ledger, metrics=Metrics(), reloader=reloader)
        for place in service.places:
            place.dies_of.add("global_step_1")
        await service.candidate()
        async with service.under_load():
            for _ in range(3):
                await gate.turn()
                await reloader.turn()
        assert service.state_of(1) is VersionState.REJECTED
        assert set(service.outcomes) == {"version 0"}
        assert sorted(each.started for each in service.places) == [["base"], ["base", "global_step_1", "base"]]


async def test_a_version_is_tried_on_a_fresh_engine_and_taken_back_by_another(
    tmp_path: Path, doubles: list[EngineDouble]
) -> None:
    more = {"rollout": {"mode": "canary", "share": 0.5}, "rollout_model": {"dtype": "float32", "engine_num": 2}}
    async with serving(tmp_path, doubles, **more) as service:
        await service.candidate()
        async with service.under_load():
            await service.reloader.turn()
            assert service.state_of(1) is VersionState.CANARY
            assert sorted(each.version for each in service.fleet.engines) == [0, 1]
            assert service.fleet.split is not None
            await asyncio.to_thread(service.ledger.versions.roll_back, 1, by="admin", reason="it is rude")
            await service.reloader.turn()
        assert [each.version for each in service.fleet.engines] == [0, 0]
        assert service.states() == ["ready", "ready"]
        assert set(service.outcomes) == {"version 0"}, "these requests have no key, and are the champion's"
        assert sorted(each.started for each in service.places) == [["base"], ["base", "global_step_1", "base"]]


async def test_an_engine_that_cannot_be_asked_about_a_text_is_not_tried(tmp_path: Path, double: EngineDouble) -> None:
    double.no_tokenizer = True
    with capture_logs() as logs:
        async with serving(tmp_path, [double], tries=True) as service:
            assert not service.fleet.engines[0].restarts
    assert "reload_not_tried" in [each["event"] for each in logs]


def doubles_that_drift(doubles: list[EngineDouble], nats: float) -> list[EngineDouble]:
    for each in doubles:
        each.drifts_at_load = nats
    return doubles


async def test_engines_that_are_not_themselves_after_a_reload_are_found_out_before_they_answer(
    tmp_path: Path, doubles: list[EngineDouble]
) -> None:
    with capture_logs() as logs:
        async with serving(tmp_path, doubles_that_drift(doubles, 0.02), tries=True, min_running_model_num=1) as service:
            assert [each.restarts for each in service.fleet.engines] == [True, True]
            assert sorted(each.started for each in service.places) == [["base"], ["base", "base"]], "one was tried"
            assert [each.drift for each in doubles] == [0.0, 0.0]
            await service.candidate()
            async with service.under_load():
                await service.reloader.turn()
            assert service.state_of(1) is VersionState.CHAMPION
            assert set(service.outcomes) == {"version 0", "version 1"}
    (said,) = [each for each in logs if each["event"] == "reload_is_not_exact"]
    assert "0.02 nats" in said["reason"]
    assert "on_reload: restart" in said["sentence"]


@pytest.mark.parametrize("how", ["refuses", "dies"])
async def test_engines_that_cannot_reload_at_all_are_found_out_too(
    tmp_path: Path, double: EngineDouble, how: str
) -> None:
    (double.refuses_load_of if how == "refuses" else double.dies_of).add(tmp_path.name)
    async with serving(tmp_path, [double], tries=True) as service:
        assert service.fleet.engines[0].restarts
        assert service.places[0].started == ["base", "base"]


async def test_engines_that_reload_exactly_go_on_doing_so(tmp_path: Path, doubles: list[EngineDouble]) -> None:
    async with serving(tmp_path, doubles, spare=1, tries=True) as service:
        assert not service.fleet.engines[0].restarts
        await service.candidate()
        await service.reloader.turn()
        assert service.states() == ["ready", "spare"]
        assert [each.started for each in service.places] == [["base"], []]
        assert await service.ask() == 1


@pytest.mark.parametrize("has_fingerprint", [False, True])
async def test_a_head_that_may_stay_behind_unseen_is_not_trusted_to_a_reload(
    tmp_path: Path, double: EngineDouble, has_fingerprint: bool
) -> None:
    double.extended = has_fingerprint
    async with serving(tmp_path, [double], tries=True, head_is_seen=False) as service:
        assert service.fleet.engines[0].restarts is not has_fingerprint


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"model_type": "qwen3"}, False),
        ({"model_type": "qwen3", "tie_word_embeddings": True}, True),
        ({"model_type": "gemma3_text"}, True),
        ({"model_type": "gemma2", "tie_word_embeddings": False}, False),
    ],
)
def test_a_head_is_tied_as_its_class_has_it_where_the_configuration_is_silent(
    config: dict[str, Any], tied: bool
) -> None:
    assert is_tied(config) is tied


def test_of_an_engine_of_others_that_does_not_come_back_it_is_said_that_it_is_not_ours_to_start(
    running_explorer: Run, double: EngineDouble
) -> None:
    explorer = running_explorer(double)
    double.drifts_at_load = 0.5
    with capture_logs() as logs:
        register(explorer.ledger, explorer.settings.job_dir)
        eventually(lambda: any(each["event"] == "engine_not_put_back" for each in logs))
    said = next(each for each in logs if each["event"] == "engine_not_put_back")
    assert "engines of engine_urls are not ours to start again" in said["sentence"]


@pytest.mark.parametrize(
    ("mode", "gpus", "engines", "gpu"),
    [("serve", 2, 1, "1"), ("both", 3, 1, "2"), ("serve", 4, 3, "3"), ("serve", 1, 1, "0")],
)
def test_the_spare_place_has_the_last_gpus_or_those_of_the_only_engine(
    tmp_path: Path, mode: str, gpus: int, engines: int, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    values = {"mode": mode, "cluster": {"gpu_per_node": gpus}, "model": {"model_path": tmp_path}}
    rollout = {"engine_num": engines, "spare_place": True, "gpu_memory_utilization": 0.4}
    settings = Settings.model_validate(values | {"explorer": {"rollout_model": rollout}})
    assert settings.spare_places == 1
    process = EngineProcess(settings, Engine(engines, EngineHttp()), socket=tmp_path / "socket")
    _, environment = process.command(tmp_path)
    assert environment["CUDA_VISIBLE_DEVICES"] == gpu


@pytest.mark.parametrize(("free", "room"), [(3 << 30, True), (1 << 30, False)])
def test_on_a_cpu_there_is_room_where_the_memory_is_free(
    tmp_path: Path, free: int, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneloop.explorer.engines.process.free_memory", lambda: free)
    settings = settings_for(tmp_path, rollout_model={"kv_cache_memory_bytes": 64 << 20})
    assert EngineProcess(settings, Engine(1, EngineHttp()), socket=tmp_path / "socket").has_room() is room
