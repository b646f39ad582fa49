import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from structlog.testing import capture_logs

from tests.doubles.engine import EngineDouble, logprobs_of
from tests.explorer.checkpoints import PROMPT, publish, register
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually, explorer_running, settings_for
from tuneloop.explorer.engines.fleet import EngineState
from tuneloop.explorer.versions import reload
from tuneloop.shared.checkpoints import CheckpointStore, Probe
from tuneloop.shared.experience import VersionState
from tuneloop.shared.ledger.ledger import Alarm, Version

pytestmark = pytest.mark.contract

SWAP = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]


def candidate(explorer: RunningExplorer, **but: Any) -> int:
    return register(explorer.ledger, explorer.settings.job_dir, **but)


def version(explorer: RunningExplorer, number: int) -> Version:
    return explorer.ledger.versions.all()[number]


def _store(explorer: RunningExplorer) -> CheckpointStore:
    return CheckpointStore(explorer.settings.job_dir)


def until(explorer: RunningExplorer, number: int, state: VersionState) -> None:
    eventually(lambda: version(explorer, number).state == state)


def until_ready(explorer: RunningExplorer, engines: int) -> None:
    eventually(lambda: [each.state for each in explorer.services.fleet.engines] == [EngineState.READY] * engines)


def all_ready(running_explorer: Run, doubles: list[EngineDouble], **settings: Any) -> RunningExplorer:
    explorer = running_explorer(*doubles, **settings)
    until_ready(explorer, len(doubles))
    return explorer


def actor(explorer: RunningExplorer, number: int) -> Path:
    return version(explorer, number).path / "actor"


def model(explorer: RunningExplorer) -> Path:
    return explorer.settings.model.model_path.absolute()


def test_a_candidate_is_taken_up_and_becomes_champion(explorer: RunningExplorer, double: EngineDouble) -> None:
    assert explorer.version() == 0
    assert candidate(explorer) == 1
    until(explorer, 1, VersionState.CHAMPION)
    assert version(explorer, 0).state == VersionState.RETIRED
    assert version(explorer, 1).served_at is not None
    assert explorer.version() == 1
    assert double.weights == actor(explorer, 1)
    assert double.posts == SWAP
    assert explorer.metrics()["tuneloop_version_served"] == 1


def test_the_log_says_how_long_it_took_to_verify_and_to_load_a_version(explorer: RunningExplorer) -> None:
    with capture_logs() as logs:
        candidate(explorer)
        until(explorer, 1, VersionState.CHAMPION)
    told = {each["event"]: each for each in logs if each.get("version") == 1}
    assert told["version_verified"]["seconds"] > 0
    assert told["version_loaded"]["seconds"] >= 0
    assert told["version_loaded"]["engine"] == 0


def test_a_verifier_is_started_before_each_version(
    running_explorer: Run, double: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    async def note() -> None:
        started.append(len(double.posts))

    monkeypatch.setattr(reload, "start_verifier_ahead", note)
    explorer = all_ready(running_explorer, [double])
    eventually(lambda: started)
    candidate(explorer)
    eventually(lambda: len(started) > 1 and started[-1] > started[0])


def test_only_the_newest_of_several_is_taken_up(explorer: RunningExplorer, double: EngineDouble) -> None:
    for _ in range(3):
        candidate(explorer)
    eventually(lambda: explorer.ledger.versions.champion().version == 3)
    assert double.weights == actor(explorer, 3)
    assert all(version(explorer, each).state != VersionState.CANDIDATE for each in range(4))


async def test_no_request_in_flight_fails_and_replies_across_a_reload_are_marked(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    double.piece_pause_s, double.load_s = 1.0, 0.05

    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(**HELLO, stream=True)
        pieces = [piece async for piece in stream]
        assert pieces[-1].choices[0].finish_reason == "length"
        return pieces[-1].id

    async with explorer.openai_async() as client, asyncio.TaskGroup() as group:
        across = [group.create_task(one(client)) for _ in range(16)]
        while len(double.chats) < 16:  # noqa: ASYNC110 - the double hears them in another thread
            await asyncio.sleep(0.01)
        await asyncio.to_thread(candidate, explorer)
        await asyncio.to_thread(until, explorer, 1, VersionState.CHAMPION)
        double.piece_pause_s = 0.0
        after = [group.create_task(one(client)) for _ in range(4)]
    kept = {each.msg_id: each.experiences[0] for each in explorer.exchanges()}
    for task in across:
        found = kept[task.result()]
        assert (found.unsampled, found.version_min, found.version_max) == ("mixed_version", 0, 1)
    for task in after:
        found = kept[task.result()]
        assert (found.unsampled, found.version_min, found.version_max) == (None, 1, 1)


def test_a_whole_reply_across_a_reload_is_marked_too(explorer: RunningExplorer, double: EngineDouble) -> None:
    """An engine tells of it only when it is all said."""
    double.hangs = True
    asking = threading.Thread(target=explorer.chat)
    asking.start()
    eventually(lambda: len(double.chats) == 1)
    candidate(explorer)
    until(explorer, 1, VersionState.CHAMPION)
    double.hangs = False
    asking.join()
    (found,) = explorer.exchanges()[0].experiences
    assert (found.unsampled, found.version_min, found.version_max) == ("mixed_version", 0, 1)


def test_a_request_that_comes_during_a_reload_waits(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.load_s = 0.3
    candidate(explorer)
    eventually(lambda: double.loading == 1)
    assert explorer.http.get("/health/ready").status_code == 200
    reply = explorer.chat()
    assert (reply.status_code, reply.headers["x-tuneloop-version"]) == (200, "1")
    assert explorer.exchanges()[-1].experiences[0].unsampled is None


def test_with_wait_replies_end_before_the_weights_change(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double, on_reload="wait")
    double.hangs = True
    asking = threading.Thread(target=lambda: explorer.chat(stream=True))
    asking.start()
    eventually(lambda: len(double.chats) == 1)
    candidate(explorer)
    eventually(lambda: explorer.services.fleet.engines[0].state == EngineState.RELOADING)
    assert double.posts == []
    double.hangs = False
    asking.join()
    until(explorer, 1, VersionState.CHAMPION)
    (kept,) = explorer.exchanges()[0].experiences
    assert (kept.unsampled, kept.version_min, kept.version_max) == (None, 0, 0)


def test_with_wait_a_reply_without_end_does_not_stop_the_reload(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double, on_reload="wait", request_timeout=0.8)
    double.piece_pause_s = 0.4
    asking = threading.Thread(target=lambda: explorer.chat(stream=True))
    asking.start()
    eventually(lambda: len(double.chats) == 1)
    candidate(explorer)
    until(explorer, 1, VersionState.CHAMPION)
    asking.join()


def rejected(explorer: RunningExplorer, number: int, reason: str) -> None:
    """The version is rejected for that reason, and the one before it serves on."""
    until(explorer, number, VersionState.REJECTED)
    assert reason in (version(explorer, number).reason or "")
    eventually(lambda: explorer.decisions("rejected") == 1)
    until_ready(explorer, len(explorer.services.fleet.engines))
    assert explorer.version() == number - 1
    assert explorer.ledger.versions.champion().version == number - 1


def test_a_corrupted_checkpoint_never_reaches_an_engine(explorer: RunningExplorer, double: EngineDouble) -> None:
    epoch = explorer.ledger.training.take_epoch("trainer")

    def spoilt(number: int) -> tuple[Path, str]:
        path, sha256 = publish(_store(explorer), number)
        weights = path / "actor" / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        return path, sha256

    explorer.ledger.training.register(epoch, [], step=1, publish=spoilt)
    rejected(explorer, 1, "sha256")
    assert double.posts == []


def test_an_engine_that_refuses_to_load_gets_its_old_weights_back(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    double.refuses_load_of.add("global_step_1")
    candidate(explorer)
    rejected(explorer, 1, "500")
    assert double.weights == model(explorer)
    assert not double.paused
    candidate(explorer)
    until(explorer, 2, VersionState.CHAMPION)


@pytest.mark.parametrize("how", ["wrong probe", "old weights", "no JSON", "NaN", "no rows", "other ids", "empty probe"])
def test_weights_that_do_not_prove_right_are_taken_back(
    explorer: RunningExplorer, double: EngineDouble, how: str
) -> None:
    wrong = Probe(prompt_ids=PROMPT, logprobs=(-1.0, -1.0, -1.0), tolerance=0.01)
    probe = {"wrong probe": wrong, "empty probe": Probe(prompt_ids=(1,), logprobs=(), tolerance=1.0)}.get(how)
    double.keeps_old_weights = how == "old weights"
    answers = {
        "no JSON": b"<html>",
        "NaN": b'{"choices": [{"prompt_logprobs": [null, {"5": {"logprob": NaN}}]}]}',
        "no rows": b'{"choices": [{"prompt_logprobs": null}]}',
        "other ids": b'{"choices": [{"prompt_logprobs": [null, {"9": {}}, {"9": {}}, {"9": {}}]}]}',
    }
    double.answer_to_probe = answers.get(how)
    candidate(explorer, probe=probe)
    until(explorer, 1, VersionState.REJECTED)
    assert "log-probabilities" in (version(explorer, 1).reason or "") or "probe" in (version(explorer, 1).reason or "")
    until_ready(explorer, 1)
    assert explorer.version() == 0
    # An engine that answers so to every probe may meanwhile have been found out with its old weights, too.
    assert double.posts[: len(SWAP) * 2] == SWAP * 2
    assert not double.paused


def test_weights_within_the_tolerance_are_served(explorer: RunningExplorer) -> None:
    path = _store(explorer).path(1) / "actor"
    near = tuple(each + 0.009 for each in logprobs_of(path, PROMPT))
    candidate(explorer, probe=Probe(prompt_ids=PROMPT, logprobs=near, tolerance=0.01))
    until(explorer, 1, VersionState.CHAMPION)


def test_an_engine_that_dies_of_a_version_is_attached_again_and_the_version_is_rejected_in_the_end(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    double.dies_of.add("global_step_1")
    candidate(explorer)
    eventually(lambda: explorer.services.fleet.engines[0].state == EngineState.DOWN)
    assert version(explorer, 1).state == VersionState.CANDIDATE
    assert explorer.http.get("/health/ready").status_code == 503
    double.dead, double.paused = False, False
    eventually(lambda: double.dead)
    until(explorer, 1, VersionState.REJECTED)
    assert "die" in (version(explorer, 1).reason or "")
    double.dead, double.paused = False, False
    until_ready(explorer, 1)
    assert (explorer.version(), double.weights) == (0, model(explorer))


def test_an_engine_that_dies_before_it_has_seen_a_version_says_nothing_about_it(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    double.dies_at_pauses = {1, 3}  # the second is that of its being attached again
    candidate(explorer)
    for _ in double.dies_at_pauses:
        eventually(lambda: double.dead)
        eventually(lambda: not explorer.services.fleet.ready)
        double.dead = False
    until(explorer, 1, VersionState.CHAMPION)
    assert double.weights == actor(explorer, 1)


def test_engines_are_reloaded_one_at_a_time(running_explorer: Run, doubles: list[EngineDouble]) -> None:
    explorer = all_ready(running_explorer, doubles)
    for double in doubles:
        double.load_s = 0.2
    candidate(explorer)
    seen = set()
    while version(explorer, 1).state == VersionState.CANDIDATE:
        assert sum(each.loading for each in doubles) <= 1
        seen.add(explorer.version())
    assert seen >= {0}
    assert [each.weights for each in doubles] == [actor(explorer, 1)] * 2


@pytest.mark.parametrize("how", ["refuses", "wrong"])
def test_when_the_second_engine_fails_the_first_goes_back_too(
    running_explorer: Run, doubles: list[EngineDouble], how: str
) -> None:
    explorer = all_ready(running_explorer, doubles)
    if how == "refuses":
        doubles[1].refuses_load_of.add("global_step_1")
    else:
        doubles[1].keeps_old_weights = True
    candidate(explorer)
    rejected(explorer, 1, "")
    eventually(lambda: doubles[0].weights == model(explorer))
    until_ready(explorer, 2)
    assert [each.version for each in explorer.services.fleet.engines] == [0, 0]
    assert not any(each.paused for each in doubles)


def test_when_one_engine_dies_the_other_serves_on(running_explorer: Run, doubles: list[EngineDouble]) -> None:
    explorer = all_ready(running_explorer, doubles)
    doubles[1].dies_of.add("global_step_1")
    candidate(explorer)
    eventually(lambda: explorer.services.fleet.engines[1].state == EngineState.DOWN)
    for _ in range(20):
        assert explorer.chat().status_code == 200
    doubles[1].dies_of.clear()
    doubles[1].dead = doubles[1].paused = False
    until(explorer, 1, VersionState.CHAMPION)
    eventually(lambda: doubles[1].weights == actor(explorer, 1))


def test_an_engine_that_missed_a_version_gets_the_champion_when_it_is_back(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    explorer = all_ready(running_explorer, doubles)
    doubles[1].dead = True
    eventually(lambda: explorer.services.fleet.engines[1].state == EngineState.DOWN)
    candidate(explorer)
    until(explorer, 1, VersionState.CHAMPION)
    doubles[1].dead = False
    until_ready(explorer, 2)
    assert [each.version for each in explorer.services.fleet.engines] == [1, 1]
    assert doubles[1].weights == actor(explorer, 1)


def test_a_new_explorer_serves_the_champion(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double)
    candidate(explorer)
    until(explorer, 1, VersionState.CHAMPION)
    double.weights = Path("/somewhere/else")
    with explorer_running(explorer.settings) as again:
        assert again.version() == 1
        assert double.weights == actor(explorer, 1)
        eventually(lambda: again.metrics()["tuneloop_version_served"] == 1)


def test_a_new_explorer_puts_right_what_the_one_before_left_in_an_engine(
    running_explorer: Run, double: EngineDouble
) -> None:
    """An explorer that is killed in the middle of a reload leaves its engine paused, with whatever weights."""
    explorer = running_explorer(double)
    double.refuses_load_of.add("global_step_1")
    candidate(explorer)
    until(explorer, 1, VersionState.REJECTED)
    double.paused, double.weights = True, Path("/half/loaded")
    with explorer_running(explorer.settings) as again:
        assert again.version() == 0
        assert double.weights == model(explorer)


def test_an_engine_that_need_only_serve_is_left_alone(explorer: RunningExplorer, double: EngineDouble) -> None:
    explorer.chat()
    assert double.posts == []


def test_stopping_in_the_middle_of_a_reload_is_quick(tmp_path: Path, double: EngineDouble) -> None:
    double.load_s = 20
    with explorer_running(settings_for(tmp_path, [double.url])) as explorer:
        candidate(explorer)
        eventually(lambda: double.loading == 1)
        started = time.monotonic()
    assert time.monotonic() - started < 10


def test_while_an_alarm_holds_candidates_are_left_alone_and_then_the_newest_is_taken_up(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    explorer.ledger.alarms.raise_alarm(Alarm("length", "replies got long", holds=True))
    for _ in range(2):
        candidate(explorer)
    explorer.until_looked()
    assert [version(explorer, each).state for each in range(3)] == [
        VersionState.CHAMPION,
        VersionState.CANDIDATE,
        VersionState.CANDIDATE,
    ]
    assert double.posts == []
    explorer.ledger.alarms.clear("length")
    until(explorer, 2, VersionState.CHAMPION)
    assert version(explorer, 1).state is VersionState.RETIRED
    assert double.weights == actor(explorer, 2)
