"""Long pieces of work: one of each owner at a time, owners in turns, and nothing else waits for them."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.explorer.running import HELLO, RunningExplorer
from tests.factories import exchange, feedback
from tuneloop.explorer import bulk_work as bulk_work_module
from tuneloop.explorer.bulk_work import BulkWork
from tuneloop.explorer.capture import recorder as recorder_module
from tuneloop.explorer.capture.recorder import Recorder, SpoolLimits
from tuneloop.explorer.capture.spool import Spool, read
from tuneloop.explorer.feedback import routes
from tuneloop.explorer.http import bodies
from tuneloop.explorer.http.caller import Caller
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import Record
from tuneloop.shared.privacy.detection import Detector
from tuneloop.shared.privacy.redactor import Redactor
from tuneloop.shared.settings.feedback import PrivacySettings
from tuneloop.shared.spool_format import Position

LARGE = b'{"messages": [], "more": "%b"}' % (b"x" * (300 << 10))


@pytest.fixture
def bulk_work() -> Iterator[BulkWork]:
    found = BulkWork()
    yield found
    found.close()


class Gate:
    """Work that ends when it is let through; who is at work, and the order in which they began."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.began: list[str] = []

    def work(self, name: str) -> Callable[[], str]:
        def wait() -> str:
            self.began.append(name)
            assert self.open.wait(60)
            return name

        return wait


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - a thread changes it
            await asyncio.sleep(0.005)


async def test_one_piece_of_each_owner_at_a_time_and_owners_in_turns(bulk_work: BulkWork) -> None:
    gate = Gate()
    async with asyncio.TaskGroup() as group:
        loud = [group.create_task(bulk_work.run("loud", gate.work(f"loud {number}"))) for number in range(3)]
        quiet = group.create_task(bulk_work.run("quiet", gate.work("quiet")))
        await _until(lambda: len(gate.began) == 2)
        assert gate.began == ["loud 0", "quiet"]
        third = group.create_task(bulk_work.run("third", gate.work("third")))
        await asyncio.sleep(0)
        gate.open.set()
    assert [each.result() for each in (*loud, quiet, third)] == ["loud 0", "loud 1", "loud 2", "quiet", "third"]
    assert gate.began.index("third") < gate.began.index("loud 2")


async def test_an_error_is_the_callers_and_what_was_cancelled_is_not_begun(bulk_work: BulkWork) -> None:
    gate = Gate()
    first = asyncio.create_task(bulk_work.run("a", gate.work("first")))
    second = asyncio.create_task(bulk_work.run("a", gate.work("second")))
    await _until(lambda: gate.began == ["first"])
    second.cancel()
    first.cancel()
    gate.open.set()
    with pytest.raises(ZeroDivisionError):
        await bulk_work.run("a", lambda: 1 / 0)
    assert gate.began == ["first"]


async def test_work_that_rests_is_done_alone_and_leaves_as_long_to_others() -> None:
    times: list[float] = []

    def work() -> None:
        times.append(time.monotonic())
        time.sleep(0.05)
        times.append(time.monotonic())

    resting = BulkWork(rests=True)
    await asyncio.gather(*[resting.run(owner, work) for owner in ("a", "b", "a")])
    resting.close()
    for number in (1, 3):
        assert times[number + 1] - times[number] >= times[number] - times[number - 1]


@pytest.mark.parametrize(("names", "aside"), [(20_000, True), (0, False)])
@pytest.mark.parametrize(("path", "status"), [("/v1/chat/completions", 200), ("/feedback", 404), ("/commit", 200)])
def test_a_body_of_many_names_is_parsed_by_turns_and_a_large_text_at_once(
    explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch, names: int, path: str, status: int, *, aside: bool
) -> None:
    threads: list[str] = []

    def parse(data: bytes) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return bodies.parse_object(data)

    monkeypatch.setattr(bulk_work_module, "parse_object", parse)
    many = {f"{number:020d}": 1 for number in range(names)} or {"text": "x" * (300 << 10)}
    asked = {"more": many} | (HELLO if status == 200 else {"msg_ids": ["unknown"], "reward": 1})
    assert explorer.http.post(path, json=asked).status_code == status
    assert [name.startswith("bulk-work") for name in threads] == [aside]


class SlowRedactor(Redactor):
    """Takes as long as its gate is closed, and notes in which threads it was."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(Detector(PrivacySettings()), key=b"k" * 32)
        self.gate = gate
        self.threads: set[int] = set()

    def records(self, records: Sequence[Record]) -> list[Record]:
        self.threads.add(threading.get_ident())
        self.gate.work(records[0].key)()
        return super().records(records)


@pytest.fixture
def redacting(tmp_path: Path, bulk_work: BulkWork) -> Iterator[tuple[Recorder, SlowRedactor]]:
    spool, metrics, redactor = Spool.open(tmp_path, sync=False), Metrics(), SlowRedactor(Gate())
    limits = SpoolLimits(spool, max_bytes=1 << 30, max_age_s=60)
    yield Recorder(spool, limits, metrics, redactor, bulk_work), redactor
    spool.close()


async def test_large_records_wait_for_each_other_and_nothing_else_does(
    redacting: tuple[Recorder, SlowRedactor],
) -> None:
    recorder, redactor = redacting
    async with asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(recorder.record(exchange(msg_id=f"l{number}", key="loud", request=LARGE)))
        group.create_task(recorder.record(exchange(msg_id="q", key="quiet", request=LARGE)))
        await _until(lambda: len(redactor.gate.began) == 2)
        assert redactor.gate.began == ["loud", "quiet"]
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(threading.get_ident) not in redactor.threads
        redactor.gate.open.set()
    assert len(redactor.gate.began) == 51


async def test_who_is_cancelled_ends_with_the_work(redacting: tuple[Recorder, SlowRedactor], tmp_path: Path) -> None:
    recorder, redactor = redacting
    waiting = asyncio.create_task(recorder.record(exchange(key="left", request=LARGE)))
    await _until(lambda: len(redactor.gate.began) == 1)
    waiting.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    redactor.gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert b"left" in b"".join([payload for payload, _ in read(tmp_path / "0", Position(0, 0))])


async def test_many_events_are_redacted_aside(redacting: tuple[Recorder, SlowRedactor]) -> None:
    recorder, redactor = redacting
    redactor.gate.open.set()
    events = [feedback(event_id=str(number)) for number in range(5000)]
    assert len(await recorder.take(events)) == 5000
    assert redactor.threads
    assert threading.get_ident() not in redactor.threads


async def test_a_key_with_much_to_be_redacted_is_refused_more_of_it(
    redacting: tuple[Recorder, SlowRedactor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_UNREDACTED", 2 * len(LARGE))
    recorder, redactor = redacting
    loud, quiet = Caller(name="loud", tenant="t"), Caller(name="quiet", tenant="t")
    waiting = asyncio.create_task(recorder.record(exchange(tenant="t", key="loud", request=LARGE)))
    await _until(lambda: len(redactor.gate.began) == 1)
    with pytest.raises(RequestRefused) as refused:
        recorder.admit(loud, 2 * len(LARGE))
    assert (refused.value.status, refused.value.code) == (503, "overloaded")
    recorder.admit(loud, 1000)
    recorder.admit(quiet, 2 * len(LARGE))
    redactor.gate.open.set()
    await waiting
    recorder.admit(loud, 2 * len(LARGE) - 1)


def test_a_call_of_feedback_that_names_too_many_at_once_is_put_off(
    explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_IDS_AT_WORK", 150)
    reply = explorer.http.post("/v1/chat/completions", json=HELLO).json()["id"]
    answer = explorer.http.post("/feedback", json={"msg_ids": [reply] * 151, "reward": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    for _ in range(3):  # what is done does not count any more
        answer = explorer.http.post("/feedback", json={"msg_ids": [reply] * 150, "reward": 1})
        assert (answer.status_code, len(answer.json()["outcomes"])) == (200, 1)
