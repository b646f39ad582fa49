"""What the answer to feedback says became of it, on either database."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, select

from tests.doubles.engine import EngineDouble
from tests.doubles.serving import serving
from tests.explorer.running import MoodyLedger, RunningExplorer, eventually, explorer_running, settings_for
from tests.explorer.whole import create_app
from tests.factories import exchange, published
from tests.factories import ids as ids_of
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import BatchRules
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.shared.settings.feedback import RewardRule

pytestmark = pytest.mark.contract

Start = Callable[..., AbstractContextManager[RunningExplorer]]


@pytest.fixture
def start(tmp_path: Path, double: EngineDouble, engine: Engine) -> Start:
    """Start an explorer over the database; again over the same spool, if need be."""
    settings = settings_for(tmp_path, [double.url])

    @contextmanager
    def started(*, compensate_late: bool = False, **rule: Any) -> Iterator[RunningExplorer]:
        ledger = MoodyLedger(engine, rule=RewardRule(**rule), compensate_late=compensate_late)
        ledger.versions.ensure_base(settings.model.model_path.absolute())
        app = create_app(settings, ledger, on_failure=lambda error: None)
        with serving(app) as url, httpx.Client(base_url=url, timeout=30) as http:
            eventually(lambda: http.get("/health/ready").status_code == 200)
            yield RunningExplorer(url, app, settings, ledger, http)

    return started


@pytest.fixture
def explorer(start: Start) -> Iterator[RunningExplorer]:
    """An explorer under the default rule."""
    with start() as explorer:
        yield explorer


def reply_id(explorer: RunningExplorer, **but: Any) -> str:
    found: str = explorer.chat(**but).json()["id"]
    return found


def outcomes(reply: httpx.Response) -> dict[str, str]:
    assert reply.status_code == 200, reply.text
    assert reply.json()["status"] == "success"
    found: dict[str, str] = reply.json()["outcomes"]
    return found


def say(explorer: RunningExplorer, **body: Any) -> str:
    """Send feedback about one thing; its outcome."""
    [outcome] = outcomes(explorer.http.post("/feedback", json=body)).values()
    return outcome


def rewards(engine: Engine) -> list[float | None]:
    with engine.connect() as connection:
        return list(connection.execute(select(experiences.c.reward).order_by(experiences.c.id)).scalars())


def train(explorer: RunningExplorer) -> None:
    """What a trainer would do with all that is committed."""
    ledger = explorer.ledger
    epoch = ledger.training.take_epoch("trainer")
    samples = ledger.training.lease(epoch, ledger.reports.counts()[State.COMMITTED], BatchRules())
    ledger.training.register(epoch, ids_of(samples), step=1, publish=published)


def test_said_once_it_is_accepted_and_said_again_a_duplicate(explorer: RunningExplorer, engine: Engine) -> None:
    said = reply_id(explorer)
    answer = explorer.feedback(said, reward=0.5).json()
    assert answer == {
        "status": "success",
        "accepted": 1,
        "outcomes": {said: "accepted"},
        "counts": {"accepted": 1, "duplicate": 0, "unknown": 0, "not_recorded": 0, "full": 0, "late": 0, "pending": 0},
    }
    assert say(explorer, msg_ids=[said], reward=0.5) == "duplicate"
    assert say(explorer, msg_ids=[said], reward=0.75) == "accepted"
    assert rewards(engine) == [0.75]


def test_ids_are_told_as_they_were_written(explorer: RunningExplorer) -> None:
    said = reply_id(explorer, n=2)
    bare, second = said.removeprefix("chatcmpl-"), f"{said}:1"
    assert outcomes(explorer.feedback(said, bare, second, "guess")) == {
        said: "accepted",
        bare: "accepted",
        second: "accepted",
        "guess": "unknown",
    }


def test_what_is_known_is_stored_and_the_rest_named(explorer: RunningExplorer, engine: Engine) -> None:
    said = reply_id(explorer)
    answer = explorer.feedback(said, "chatcmpl-guess", f"{said}:7")
    assert outcomes(answer) == {said: "accepted", "chatcmpl-guess": "unknown", f"{said}:7": "unknown"}
    assert answer.json()["counts"]["unknown"] == 2
    assert rewards(engine) == [1.0]


def test_if_nothing_is_known_the_call_is_refused_and_says_so_in_the_same_words(explorer: RunningExplorer) -> None:
    answer = explorer.feedback("a", "b")
    body = answer.json()
    assert (answer.status_code, body["status"], body["error"]["code"]) == (404, "error", "unknown_msg_id")
    assert (body["outcomes"], body["accepted"]) == ({"a": "unknown", "b": "unknown"}, 0)
    assert body["counts"]["unknown"] == 2


def test_a_preference_over_an_unknown_reply_is_unknown_and_the_rest_is_stored(
    explorer: RunningExplorer, engine: Engine
) -> None:
    said = reply_id(explorer)
    assert say(explorer, msg_ids=[said], reward=0.5, preferred_over="guess") == "unknown"
    assert rewards(engine) == [0.5]
    assert explorer.http.post("/feedback", json={"msg_ids": [said], "preferred_over": "guess"}).status_code == 404


def test_of_several_outcomes_about_one_id_the_weakest_is_told(explorer: RunningExplorer) -> None:
    said = reply_id(explorer)
    assert say(explorer, msg_ids=[said], reward=1) == "accepted"
    assert say(explorer, msg_ids=[said], reward=1, comment="so") == "accepted"
    assert say(explorer, msg_ids=[said], reward=1, comment="so") == "duplicate"
    explorer.commit()
    train(explorer)
    assert say(explorer, msg_ids=[said], reward=0, comment="but") == "late"


def test_feedback_that_comes_before_the_row_of_its_reply_is_parked(explorer: RunningExplorer, engine: Engine) -> None:
    early = explorer.services.feedback.signer.mint("default", 1)
    assert outcomes(explorer.feedback(early, reward=0.25)) == {early: "pending"}
    assert outcomes(explorer.feedback(early, reward=0.25)) == {early: "duplicate"}
    explorer.ledger.recording.record([exchange(msg_id=early, tenant="default")])
    assert rewards(engine) == [0.25]
    assert outcomes(explorer.feedback(early, reward=0.5)) == {early: "accepted"}


def test_feedback_on_a_reply_that_is_not_recorded_says_so(explorer: RunningExplorer) -> None:
    said, forgotten = reply_id(explorer), reply_id(explorer, store=False)
    for name in (forgotten, f"{forgotten}:0"):
        answer = explorer.feedback(name)
        assert (answer.status_code, answer.json()["accepted"], outcomes(answer)) == (200, 0, {name: "not_recorded"})
    assert outcomes(explorer.feedback(said, forgotten)) == {said: "accepted", forgotten: "not_recorded"}
    preferred = {"msg_ids": [said], "preferred_over": forgotten}
    assert outcomes(explorer.http.post("/feedback", json=preferred)) == {said: "not_recorded"}
    assert len(explorer.feedbacks()) == 1


def test_a_share_of_the_traffic_is_recorded_and_runs_as_a_whole(tmp_path: Path, double: EngineDouble) -> None:
    settings = settings_for(tmp_path, [double.url])
    share = settings.buffer.model_copy(update={"record_share": 0.5})
    with explorer_running(settings.model_copy(update={"buffer": share})) as explorer:
        runs = {f"run-{number}": 3 for number in range(12)}
        replies = {
            reply_id(explorer, metadata={"task_id": "t", "run_id": run}): run
            for run, calls in runs.items()
            for _ in range(calls)
        }
        single = [reply_id(explorer) for _ in range(24)]
        kept = {each.msg_id for each in explorer.exchanges()}
        recorded = Counter(run for name, run in replies.items() if name in kept)
        assert 0 < len(recorded) < len(runs)
        assert set(recorded.values()) == {3}
        assert 0 < len(kept & {*single}) < len(single)
        told = outcomes(explorer.feedback(*replies, *single))
        assert {name for name, outcome in told.items() if outcome == "accepted"} == kept
        assert {told[name] for name in told.keys() - kept} == {"not_recorded"}
        assert reply_id(explorer, store=True) in {each.msg_id for each in explorer.exchanges()}


def test_feedback_on_a_trajectory_is_told_under_its_name(explorer: RunningExplorer, engine: Engine) -> None:
    label = {"task_id": "task", "run_id": 3}
    answer = explorer.http.post("/feedback", json={"reward": 0.25, **label})
    assert outcomes(answer) == {"task/3": "pending"}
    for _ in range(2):
        explorer.chat(metadata=label)
    assert explorer.counts()[State.REWARDED] == 2
    assert rewards(engine) == [0.25, 0.25]
    assert say(explorer, reward=0.5, **label) == "accepted"
    assert explorer.commit(**label).json()["committed"] == 2


def test_a_list_is_one_call_with_a_value_for_each(explorer: RunningExplorer, engine: Engine) -> None:
    said = [reply_id(explorer) for _ in range(3)]
    entries = [{"msg_ids": [each], "value": number / 2} for number, each in enumerate(said)]
    answer = explorer.http.post("/feedback", json={"feedback": [*entries, {"msg_ids": ["guess"], "value": 1}]})
    assert outcomes(answer) == dict.fromkeys(said, "accepted") | {"guess": "unknown"}
    assert rewards(engine) == [0.0, 0.5, 1.0]


def test_feedback_corrected_and_taken_back(explorer: RunningExplorer, engine: Engine) -> None:
    said = reply_id(explorer)
    for body, reward in (({"value": True}, 1.0), ({"value": False}, 0.0), ({"retract": True}, None)):
        assert say(explorer, msg_ids=[said], **body) == "accepted"
        assert rewards(engine) == [reward]
    explorer.feedback(said, reward=0.5)
    assert explorer.commit().json()["committed"] == 1
    assert say(explorer, msg_ids=[said], retract=True) == "accepted"
    assert explorer.counts()[State.RECORDED] == 1


def test_late_feedback_is_stored_and_compensated_if_the_settings_say_so(start: Start, engine: Engine) -> None:
    with start(compensate_late=True) as explorer:
        said = reply_id(explorer)
        explorer.feedback(said, reward=1)
        explorer.commit()
        train(explorer)
        answer = explorer.feedback(said, reward=0)
        assert outcomes(answer) == {said: "late"}
        assert answer.json()["accepted"] == 0
        assert rewards(engine) == [1.0, 0.0]
        assert explorer.commit().json()["committed"] == 1


def test_the_rule_of_the_settings_makes_the_reward(start: Start, engine: Engine) -> None:
    rule = {"weights": {"reward": 2.0, "tone": -1.0}, "boolean_values": [-1.0, 3.0], "label_values": {"rude": 0.5}}
    with start(clip=None, **rule) as explorer:
        said = reply_id(explorer)
        say(explorer, msg_ids=[said], value=True)
        say(explorer, msg_ids=[said], value="rude", metric="tone")
        assert rewards(engine) == [5.5]


def test_twenty_duplicates_at_once_count_once(explorer: RunningExplorer, engine: Engine) -> None:
    said = reply_id(explorer)

    async def all_at_once() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=explorer.url, timeout=30) as http:
            body = {"msg_ids": [said], "reward": 0.5}
            return await asyncio.gather(*(http.post("/feedback", json=body) for _ in range(20)))

    told = Counter(outcomes(answer)[said] for answer in asyncio.run(all_at_once()))
    assert told == {"accepted": 1, "duplicate": 19}
    assert rewards(engine) == [0.5]


def test_a_key_makes_a_repeated_call_a_duplicate_also_after_a_restart(start: Start, engine: Engine) -> None:
    key = {"Idempotency-Key": '"8e03978e-40d5"'}
    with start() as explorer:
        said = reply_id(explorer)
        body = {"msg_ids": [said], "reward": 0, "comment": "no"}
        assert outcomes(explorer.http.post("/feedback", json=body, headers=key)) == {said: "accepted"}
        assert say(explorer, msg_ids=[said], reward=1) == "accepted"
    with start() as explorer:
        for again in (body, body | {"reward": 0.25}):
            assert outcomes(explorer.http.post("/feedback", json=again, headers=key)) == {said: "duplicate"}
        assert outcomes(explorer.http.post("/feedback", json=body)) == {said: "accepted"}
    assert rewards(engine) == [0.0]


def test_of_two_entries_under_one_key_the_first_is_stored(explorer: RunningExplorer, engine: Engine) -> None:
    said = reply_id(explorer)
    entries = [{"msg_ids": [said], "reward": reward, "idempotency_key": "k"} for reward in (1, 0.25)]
    assert outcomes(explorer.http.post("/feedback", json={"feedback": entries})) == {said: "accepted"}
    assert rewards(engine) == [1.0]
    counted = explorer.http.get("/metrics").text
    assert 'tuneloop_feedback_total{kind="number",outcome="duplicate"} 1.0' in counted


def test_two_keys_that_differ_are_refused(explorer: RunningExplorer) -> None:
    said = reply_id(explorer)
    body = {"msg_ids": [said], "reward": 0, "idempotency_key": "a"}
    refused = explorer.http.post("/feedback", json=body, headers={"Idempotency-Key": "b"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "idempotency_key")


def test_while_the_database_is_away_feedback_is_pending_and_then_applied(
    explorer: RunningExplorer, engine: Engine
) -> None:
    explorer.ledger.recording.away = True
    said = reply_id(explorer)
    answers = [explorer.feedback(said, reward=reward) for reward in (0.25, 0.5)]
    assert [outcomes(answer) for answer in answers] == [{said: "pending"}] * 2
    assert answers[0].json()["accepted"] == 0
    explorer.ledger.recording.away = False
    explorer.until_flushed()
    assert rewards(engine) == [0.5]


def test_feedback_between_a_lease_and_its_end_is_late_and_counts_if_the_batch_is_not_trained(
    explorer: RunningExplorer, engine: Engine
) -> None:
    said = reply_id(explorer)
    explorer.feedback(said, reward=1)
    explorer.commit()
    explorer.ledger.training.lease(explorer.ledger.training.take_epoch("trainer"), 1, BatchRules())
    assert say(explorer, msg_ids=[said], reward=0) == "late"
    assert rewards(engine) == [1.0]
    explorer.ledger.training.take_epoch("the next trainer")
    assert rewards(engine) == [0.0]


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_a_hundred_thousand_ids_are_taken_in_one_call(explorer: RunningExplorer) -> None:
    signer = explorer.services.feedback.signer
    said = reply_id(explorer)
    ids = [signer.mint("default", 1) for _ in range(99_999)]
    explorer.ledger.recording.away = True  # what is tried here is the wire; the database has a test of its own
    answer = explorer.http.post("/feedback", json={"msg_ids": [*ids, said], "reward": 1}, timeout=120)
    assert answer.json()["counts"]["pending"] == 100_000
    assert len(explorer.feedbacks()) == 100_000
    assert explorer.feedback(*ids, said, said).status_code == 413


def test_where_only_some_choices_were_trained_on_each_is_told_apart(start: Start, engine: Engine) -> None:
    with start(compensate_late=True) as explorer:
        reply = reply_id(explorer, n=2)
        explorer.feedback(f"{reply}:0")
        explorer.commit()
        train(explorer)
        told = explorer.feedback(reply, reward=-1.0).json()
        assert told["outcomes"] == {reply: "late"}
        assert told["choices"] == {reply: {f"{reply}:0": "late", f"{reply}:1": "accepted"}}
        assert "choices" not in explorer.feedback(f"{reply}:1", reward=0.5).json()
    assert rewards(engine) == [1.0, 0.5, -1.0]


def test_a_number_beyond_the_clip_is_told_of(explorer: RunningExplorer, engine: Engine) -> None:
    said = reply_id(explorer)
    assert explorer.feedback(said, reward=1e6).json()["clipped"] is True
    assert rewards(engine) == [1.0]
    assert "clipped" not in explorer.feedback(said, reward=1).json()
    other = explorer.http.post("/feedback", json={"msg_ids": [said], "value": 9, "metric": "stars"})
    assert "clipped" not in other.json()
