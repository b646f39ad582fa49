"""Engines of others answer nothing before they are proven, in each of their lives."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from tests.doubles import postgres
from tests.doubles.engine import CHAT, MODEL, EngineDouble
from tests.doubles.serving import serving
from tests.explorer.conftest import Run
from tests.explorer.processes.test_lazy_ledger import served_once, settings_on
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tests.explorer.versions.test_attestation import outcomes
from tests.explorer.versions.test_reload import actor, candidate, until, until_ready
from tests.explorer.whole import create_app
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.explorer.engines.vllm import EngineControl, open_session
from tuneloop.explorer.processes.control import _views
from tuneloop.explorer.processes.lazy_ledger import open_ledger
from tuneloop.shared.experience import State, VersionState
from tuneloop.shared.operations.engines import plugin_sentence


def served(explorer: RunningExplorer) -> RunningExplorer:
    """An explorer that serves version 1, whose engine is not about to be probed."""
    eventually(lambda: outcomes(explorer)["matched"] == 1)
    candidate(explorer)
    until(explorer, 1, VersionState.CHAMPION)
    until_ready(explorer, 1)
    eventually(lambda: outcomes(explorer)["matched"] >= 2)
    return explorer


def down(explorer: RunningExplorer) -> bool:
    return explorer.services.fleet.engines[0].state is EngineState.DOWN


def no_metrics(double: EngineDouble) -> None:
    double.answers_metrics = False


def as_it_is(double: EngineDouble) -> None:
    pass


def two_servers(double: EngineDouble) -> None:
    double.servers, double.extended = 2, True


@pytest.mark.parametrize(
    "tells", [as_it_is, no_metrics, two_servers], ids=["by its start time", "by its id", "by its workers' lives"]
)
def test_an_engine_that_was_started_anew_between_two_looks_gets_its_weights_again(
    running_explorer: Run, double: EngineDouble, tells: Callable[[EngineDouble], None]
) -> None:
    tells(double)
    explorer = served(running_explorer(double))
    right = explorer.chat().json()["id"]
    explorer.until_flushed()
    eventually(lambda: double.metrics_asked > 4)
    double.start_again()
    wrong = explorer.chat().json()["id"]
    assert double.chats[-1].weights != actor(explorer, 1), "nobody can know that yet"
    eventually(lambda: double.weights == actor(explorer, 1))
    until_ready(explorer, 1)
    assert explorer.version() == 1
    [row] = explorer.rows(f"SELECT state, reason FROM experiences WHERE msg_id = '{wrong}'")
    assert tuple(row) == (State.DROPPED, "engine_mismatch")
    assert explorer.rows(f"SELECT state FROM experiences WHERE msg_id = '{right}'")[0].state in set(State)
    [alarm] = explorer.ledger.alarms.all()
    assert "it was restarted" in alarm.reason


def test_an_engine_that_does_not_tell_of_its_start_is_given_its_weights_after_each_missed_look(
    running_explorer: Run, double: EngineDouble
) -> None:
    double.answers_metrics = double.answers_server_info = False
    with capture_logs() as logs:
        explorer = served(running_explorer(double, rollout_model=quick(double)))
        assert [entry["engine"] for entry in logs if entry["event"] == "engine_life_unknown"] == [0]
        double.silent = True
        eventually(lambda: double.left == 1)
        double.start_again()
        double.silent = False
        eventually(lambda: double.weights == actor(explorer, 1))
    assert {entry["event"] for entry in logs} & {"engine_down", "engine_restarted"} == {"engine_restarted"}
    until_ready(explorer, 1)
    assert explorer.version() == 1


def test_api_servers_with_an_id_each_and_no_extension_are_not_taken_for_ever_new_engines(
    running_explorer: Run, double: EngineDouble
) -> None:
    double.servers = 2
    with capture_logs() as logs:
        explorer = served(running_explorer(double, rollout_model=quick(double)))
        looks = double.metrics_asked
        eventually(lambda: double.metrics_asked > looks + 4)
    events = [entry["event"] for entry in logs]
    assert "engine_life_unknown" in events
    assert "engine_restarted" not in events
    assert explorer.version() == 1


@pytest.mark.parametrize("packs", [False, True])
def test_an_engine_of_others_serves_without_our_plugin_and_the_start_says_what_that_costs(
    running_explorer: Run, double: EngineDouble, packs: bool
) -> None:
    double.packs = packs
    with capture_logs() as logs:
        explorer = running_explorer(double)
    said = [(each["engine"], each["sentence"]) for each in logs if each["event"] == "engine_without_plugin"]
    assert said == ([] if packs else [(0, plugin_sentence(of_others=True))])
    assert explorer.chat().status_code == 200
    assert explorer.counts()[State.RECORDED] == 1
    copy = Fleet([Engine(0, EngineHttp())], wait_timeout_s=1)  # a worker's
    asyncio.run(copy.apply(_views(explorer.control)))
    assert copy.engines[0].packs is packs


@pytest.mark.parametrize("answer", [b"{}", b'{"choices":[{"logprobs":null}]}', b"no JSON"])
async def test_an_engine_whose_answer_tells_nothing_of_our_plugin_serves_without_a_word_of_its_cost(
    double: EngineDouble, answer: bytes
) -> None:
    double.weights, double.answer_to_probe = Path("/jobs/global_step_1/actor"), answer
    async with open_session(url=double.url, socket=None, key=None) as session:
        control = EngineControl(session, model_name=MODEL)
        with capture_logs() as logs:
            await control.find_plugin()
    assert control.packs is None
    assert [each["event"] for each in logs] == ["plugin_not_asked_for"]


def quick(double: EngineDouble) -> dict[str, object]:
    return {"engine_urls": [double.url], "dtype": "float32", "health_timeout": 0.5}


def test_an_engine_that_did_not_take_the_champion_s_weights_answers_nobody(
    running_explorer: Run, double: EngineDouble
) -> None:
    explorer = served(running_explorer(double))
    double.keeps_old_weights = True
    double.start_again()
    eventually(lambda: down(explorer))
    heard = len(double.chats)
    with capture_logs() as logs:
        eventually(lambda: any(entry["event"] == "engine_not_attached" for entry in logs))
    [reason, *_] = [entry["reason"] for entry in logs if entry["event"] == "engine_not_attached"]
    assert "nats from the trainer's" in reason
    assert explorer.http.get("/health/ready").status_code == 503
    assert len(double.chats) == heard
    double.keeps_old_weights = False
    until_ready(explorer, 1)
    assert double.weights == actor(explorer, 1)


def test_an_engine_that_comes_back_with_another_base_model_answers_nobody(
    running_explorer: Run, double: EngineDouble
) -> None:
    explorer = running_explorer(double)
    eventually(lambda: outcomes(explorer)["matched"] == 1)
    double.start_again()
    double.weights = Path("/jobs/global_step_9/actor")
    eventually(lambda: down(explorer))
    with capture_logs() as logs:
        eventually(lambda: any(entry["event"] == "engine_not_attached" for entry in logs))
    assert explorer.http.get("/health/ready").status_code == 503
    double.start_again()
    until_ready(explorer, 1)


@pytest.mark.postgres
def test_while_the_database_is_away_a_restarted_engine_gets_the_champion_again(
    tmp_path: Path, double: EngineDouble
) -> None:
    server = postgres.started()
    with ExitStack() as stack:
        stack.callback(server.close)
        settings = settings_on(server.url, tmp_path, double)
        ledger = served_once(settings)
        ledger.versions.promote(2)
        ledger.close()
        ledger = open_ledger(settings)
        stack.callback(ledger.close)
        url = stack.enter_context(serving(create_app(settings, ledger, on_failure=pytest.fail)))
        eventually(lambda: httpx.get(url + "/health/ready", timeout=60).status_code == 200)
        champion = settings.job_dir / "global_step_2" / "actor"
        eventually(lambda: double.weights == champion)
        server.stop()
        double.start_again()
        eventually(lambda: double.weights == champion)

        def answer() -> str | None:
            with suppress(httpx.HTTPError):
                return httpx.post(url + CHAT, json=HELLO, timeout=60).headers.get("x-tuneloop-version")
            return None

        eventually(lambda: answer() == "2")
        heard = len(double.chats)
        assert [answer() for _ in range(20)] == ["2"] * 20
        assert {each.weights for each in double.chats[heard:]} == {champion}
        server.start()
