"""Large records are redacted in a thread: what a client was told stays true, and the event loop goes on."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

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
