"""Two adapters on one engine: it has two places for a version, and all that needs two engines does with one."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import MODEL, EngineDouble, EnginePlace
from tests.explorer.engines.test_adapters import adapted, candidate, until
from tests.explorer.running import RunningExplorer, eventually, explorer_running, open_ledger, settings_for
from tests.explorer.versions.test_gate import RIGHT, WRONG, gated
from tests.explorer.versions.test_reload import until_ready
from tests.explorer.versions.test_trial import SHARE, answered, by_hash
from tuneloop.explorer.engines import vllm
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.processes.supervision.attachment import Attachment, Champions
from tuneloop.explorer.versions.loading import KnownProbes, Verifier
from tuneloop.shared.experience import Evaluator, VersionAction, VersionState
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.versions import RolloutSettings

Start = Callable[[Settings], RunningExplorer]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def run(settings: Settings) -> RunningExplorer:
            running = stack.enter_context(explorer_running(settings))
            until_ready(running, 2)
            return running

        yield run


def tried(tmp_path: Path, double: EngineDouble, **rollout: Any) -> Settings:
    return adapted(tmp_path, double).model_copy(
        update={"rollout": RolloutSettings(**{"mode": "canary", "share": SHARE} | rollout)}
    )


def test_a_version_is_tried_beside_the_champion_and_rolled_back(
    start: Start, tmp_path: Path, double: EngineDouble
) -> None:
    explorer = start(tried(tmp_path, double))
    candidate(explorer)
    until(explorer, 1, VersionState.CANARY)
    until_ready(explorer, 2)
    assert answered(explorer) == by_hash()
    request = {str(each.body["user"]): str(each.body["model"]) for each in double.chats if "user" in each.body}
    assert {user: name.startswith("tuneloop-adapter-1-") for user, name in request.items()} == {
        user: bool(version) for user, version in by_hash().items()
    }
    assert not {"/pause", "/collective_rpc"} & set(double.posts)
    explorer.ledger.versions.roll_back(1, by="admin:anna", reason="to see")
    eventually(lambda: explorer.services.fleet.split is None)
    until_ready(explorer, 2)
    assert set(answered(explorer).values()) == {0}


def test_the_gate_tries_a_candidate_while_the_champion_answers(
    start: Start, tmp_path: Path, double: EngineDouble
) -> None:
    gate = gated(tmp_path, [double])
    double.says = {tmp_path.name: RIGHT, "global_step_1": WRONG, "global_step_2": RIGHT}
    explorer = start(adapted(tmp_path, double).model_copy(update={"gate": gate.gate, "monitor": gate.monitor}))
    candidate(explorer)
    while explorer.ledger.versions.all()[1].state is VersionState.CANDIDATE:
        assert explorer.chat().headers["x-tuneloop-version"] == "0"
    until(explorer, 1, VersionState.REJECTED)
    (evaluated,) = [each for each in explorer.ledger.versions.events(1) if each.action is VersionAction.EVALUATED]
    assert (evaluated.actor, evaluated.details["candidate"]["score"]) == ("explorer", 0.0)
    assert explorer.ledger.evaluations.of(1, Evaluator.ENGINE)
    candidate(explorer)
    until(explorer, 2, VersionState.CHAMPION)


def test_an_engine_that_was_started_again_gets_the_champion_s_adapter(
    tmp_path: Path, places: list[EnginePlace], start: Start
) -> None:
    explorer = start(tried(tmp_path, places[0].fresh()))
    candidate(explorer)
    until(explorer, 1, VersionState.CANARY)
    explorer.ledger.versions.promote(1, by="admin:anna", reason="to see")
    eventually(lambda: [each.version for each in explorer.services.fleet.engines] == [1, 1])
    places[0].fresh().dead = True
    eventually(lambda: {each.state for each in explorer.services.fleet.engines} == {EngineState.DOWN})
    again = places[0].fresh()
    until_ready(explorer, 2)
    assert explorer.version() == 1
    assert str(again.chats[-1].body["model"]).startswith("tuneloop-adapter-1-")


async def test_a_second_place_is_up_only_as_long_as_the_engine(tmp_path: Path, double: EngineDouble) -> None:
    settings = settings_for(tmp_path)
    ledger, host = open_ledger(settings), Engine(0, EngineHttp())

    async def doubt(engine: Engine, since: float) -> None:
        pytest.fail(f"engine {engine.number} was not started anew since {since}")

    async with vllm.open_session(url=double.url, socket=None, key=None) as session:
        second = Engine(1, EngineHttp(), vllm.EngineControl(session, model_name=MODEL))
        fleet = Fleet([host, second], wait_timeout_s=60)
        attachment = Attachment(
            second,
            fleet=fleet,
            champions=Champions(ledger, Verifier.of(settings), KnownProbes(ledger)),
            health_timeout_s=1.0,
            doubt_restarted=doubt,
            host=host,
        )
        staying = asyncio.ensure_future(attachment.run(Metrics()))
        try:
            for state, then in (
                (EngineState.STARTING, EngineState.STARTING),
                (EngineState.READY, EngineState.READY),
                (EngineState.RELOADING, EngineState.READY),
                (EngineState.DOWN, EngineState.DOWN),
                (EngineState.READY, EngineState.READY),
            ):
                await fleet.set_state(host, state)
                async with asyncio.timeout(60):
                    while second.state is not then:  # noqa: ASYNC110 - nobody tells
                        await asyncio.sleep(0.05)
                if state in {EngineState.STARTING, EngineState.RELOADING}:
                    await asyncio.sleep(1.2)
                    assert second.state is then, state
        finally:
            staying.cancel()
            await asyncio.gather(staying, return_exceptions=True)
            ledger.close()
