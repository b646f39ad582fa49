"""Feedback on a run and on its replies: what each of the two makes of the rewards."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.doubles.engine import EngineDouble
from tests.explorer.feedback.test_routes import ok, reply_id, rewards
from tests.explorer.running import HELLO, RunningExplorer
from tests.factories import exchange, feedback
from tests.outboxes import exchanges_in
from tuneloop.explorer import recorder as recorder_module
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.recorder import OutboxLimits, Recorder
from tuneloop.runner.outbox import Outbox
from tuneloop.shared.experience import Record
from tuneloop.shared.privacy.detection import Detector
from tuneloop.shared.privacy.redactor import Redactor
from tuneloop.shared.settings.feedback import PrivacySettings

RUN = {"task_id": "t", "run_id": "r"}


def say(explorer: RunningExplorer, **body: Any) -> dict[str, Any]:
    return ok(explorer.http.post("/feedback", json=body))


@pytest.mark.contract
@pytest.mark.parametrize("run_first", [False, True])
def test_feedback_on_a_run_leaves_the_rewards_of_replies_that_have_their_own(
    explorer: RunningExplorer, run_first: bool
) -> None:
    first, second, third = (reply_id(explorer, metadata=RUN) for _ in range(3))
    of_run = {**RUN, "reward": 1.0}
    if run_first:
        say(explorer, **of_run)
    say(explorer, msg_ids=[first], reward=0.1)
    say(explorer, msg_ids=[second], reward=0.2)
    answer = say(explorer, **of_run)
    assert rewards(explorer) == [0.1, 0.2, 1.0]
    assert (answer["status"], answer["replies"]) == ("success", {"t/r": {"count": 1, "msg_ids": [third]}})


@pytest.mark.contract
def test_a_retraction_takes_back_what_was_said_of_the_run_or_of_the_reply_alone(explorer: RunningExplorer) -> None:
    rated, other = reply_id(explorer, metadata=RUN), reply_id(explorer, metadata=RUN)
    say(explorer, msg_ids=[rated], reward=0.1)
    say(explorer, **RUN, reward=1.0)
    say(explorer, msg_ids=[other], retract=True)
    assert rewards(explorer) == [0.1, 1.0]
    say(explorer, msg_ids=[rated], retract=True)
    assert rewards(explorer) == [1.0, 1.0]
    say(explorer, msg_ids=[rated], reward=0.1)
    say(explorer, **RUN, retract=True)
    assert rewards(explorer) == [0.1, None]


def test_the_answer_about_a_run_names_the_first_hundred_replies_and_counts_all(explorer: RunningExplorer) -> None:
    ids = [reply_id(explorer, metadata=RUN) for _ in range(101)]
    answer = say(explorer, **RUN, reward=1.0)
    assert answer["replies"] == {"t/r": {"count": 101, "msg_ids": ids[:100]}}
    assert "replies" not in say(explorer, msg_ids=ids[:1], reward=0.5)
    assert "replies" not in say(explorer, task_id="t", run_id="not yet", reward=0.5)


@pytest.mark.contract
def test_the_answer_says_what_a_later_word_of_the_same_source_replaced(explorer: RunningExplorer) -> None:
    first, second = reply_id(explorer, metadata=RUN), reply_id(explorer, metadata=RUN)
    assert "replaced" not in say(explorer, msg_ids=[first], reward=0.1)
    assert "replaced" not in say(explorer, msg_ids=[second], value="rude", metric="tone", source="ann")
    # Of the run and of its replies, by one source and another: none replaces the other.
    assert "replaced" not in say(explorer, **RUN, reward=1.0)
    assert "replaced" not in say(explorer, msg_ids=[first], reward=0.2, source="bob")
    assert say(explorer, msg_ids=[first, second], reward=0.3)["replaced"] == {first: {"reward": 0.1}}
    assert say(explorer, msg_ids=[second], value="kind", metric="tone", source="ann")["replaced"] == {
        second: {"tone": "rude"}
    }
    assert say(explorer, **RUN, value=True)["replaced"] == {"t/r": {"reward": 1.0}}
    assert say(explorer, **RUN, retract=True)["replaced"] == {"t/r": {"reward": True}}
    assert "replaced" not in say(explorer, **RUN, reward=0.5)
    assert "replaced" not in say(explorer, **RUN, reward=0.5)
    assert "replaced" not in say(explorer, task_id="t", run_id="not yet", reward=0.5)
    assert say(explorer, task_id="t", run_id="not yet", reward=0.4)["replaced"] == {"t/not yet": {"reward": 0.5}}


@pytest.mark.contract
def test_a_run_whose_last_call_was_cut_off_earns_nothing_and_is_counted(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    reply_id(explorer, metadata=RUN)
    double.cut_after = 3
    explorer.chat(metadata=RUN, stream=True)
    answer = say(explorer, **RUN, reward=1.0)
    assert (answer["replies"], answer["unfinished_runs"]) == ({"t/r": {"count": 0, "msg_ids": []}}, ["t/r"])
    assert rewards(explorer) == [None, None]
    assert explorer.metrics()["tuneloop_unfinished_runs_total"] == 1
    double.cut_after = None
    third = reply_id(explorer, metadata=RUN)
    answer = say(explorer, **RUN, reward=0.5)
    assert "unfinished_runs" not in answer
    assert answer["replies"]["t/r"]["msg_ids"][-1] == third


@pytest.mark.contract
def test_what_a_library_asks_again_is_trained_on_once(explorer: RunningExplorer, double: EngineDouble) -> None:
    """The first answer is recorded, and lost on its way; openai asks again by itself."""
    lose = [True]

    def lost_once(response: httpx.Response) -> None:
        if lose:
            lose.clear()
            raise httpx.ReadError("the connection broke")

    hooks = httpx.Client(event_hooks={"response": [lost_once]})
    with OpenAI(base_url=f"{explorer.url}/v1", api_key="dummy", max_retries=2, http_client=hooks) as client:
        answered = client.chat.completions.create(**HELLO, metadata={"task_id": "t", "run_id": "r"})
    answer = say(explorer, **RUN, reward=1.0)
    assert answer["replies"]["t/r"] == {"count": 1, "msg_ids": [answered.id]}
    assert rewards(explorer) == [None, 1.0]
    assert explorer.rows("SELECT reason FROM experiences ORDER BY id") == [("retried",), (None,)]


# Large records are redacted in a thread: what a client was told stays true, and the event loop goes on.


LARGE = b'{"messages": [], "more": "%b"}' % (b"x" * (300 << 10))


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - a thread changes it
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(("path", "status"), [("/v1/chat/completions", 200), ("/feedback", 404), ("/commit", 200)])
def test_a_body_of_many_names_is_read(explorer: RunningExplorer, path: str, status: int) -> None:
    many = {f"{number:020d}": 1 for number in range(20_000)}
    asked = {"more": many} | (HELLO if status == 200 else {"msg_ids": ["unknown"], "reward": 1})
    assert explorer.http.post(path, json=asked).status_code == status


class SlowRedactor(Redactor):
    """Takes as long as its gate is closed, and notes in which threads it was."""

    def __init__(self) -> None:
        super().__init__(Detector(PrivacySettings()), key=b"k" * 32)
        self.gate = threading.Event()
        self.threads: set[int] = set()

    def records(self, records: Sequence[Record]) -> list[Record]:
        self.threads.add(threading.get_ident())
        assert self.gate.wait(60)
        return super().records(records)


@pytest.fixture
def redacting(tmp_path: Path) -> Iterator[tuple[Recorder, SlowRedactor]]:
    outbox, redactor = Outbox(tmp_path, 1 << 20), SlowRedactor()
    limits = OutboxLimits(outbox, max_bytes=1 << 30, max_age_s=60)
    yield Recorder(outbox, limits, Metrics(), redactor, wake_drain=lambda: None), redactor
    outbox.close()


async def test_who_is_cancelled_ends_with_the_work(redacting: tuple[Recorder, SlowRedactor], tmp_path: Path) -> None:
    recorder, redactor = redacting
    waiting = asyncio.create_task(recorder.record(exchange(key="left", request=LARGE)))
    await _until(lambda: bool(redactor.threads))
    waiting.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    redactor.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [each.key for each in exchanges_in(tmp_path)] == ["left"]


async def test_many_events_are_redacted_aside(
    redacting: tuple[Recorder, SlowRedactor], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, redactor = redacting
    redactor.gate.set()
    events = [feedback(event_id=str(number)) for number in range(5000)]
    monkeypatch.setattr(recorder_module, "_PATIENCE_S", 0.0)
    assert len((await recorder.take(events)).outcomes) == 5000
    assert redactor.threads
    assert threading.get_ident() not in redactor.threads
