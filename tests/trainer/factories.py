"""Experiences made up for tests."""

import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX.proto.event_pb2 import Event

from tuneloop.shared.experience import Exchange, Experience, Feedback, Sample, pack_ids, pack_logprobs
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings


def sample(number: int = 0, **but: object) -> Sample:
    """A made-up sample, always the same for the same number."""
    random = np.random.default_rng(number)
    length = int(random.integers(1, 9))
    values: dict[str, object] = {
        "id": number,
        "prompt_ids": random.integers(0, 250, int(random.integers(1, 12)), dtype=np.int32),
        "completion_ids": random.integers(0, 250, length, dtype=np.int32),
        "logprobs": random.normal(-5.7, 0.1, length).astype(np.float32),
        "reward": float(random.integers(0, 2)),
        "temperature": float(random.choice([0.7, 1.0])),
        "version_min": 0,
        "version_max": 0,
        "tenant": "t",
        "task_id": None,
        "run_id": None,
        "group_id": None,
        "rewarded_at": 0.0,
        "committed_at": 0.0,
    }
    return Sample(**(values | but))  # type: ignore[arg-type]


def commit(
    ledger: Ledger, samples: list[Sample], *, unsaid: Collection[int] = (), source: str | None = None, policy: int = 0
) -> None:
    """Bring samples into the ledger the way that the explorer does. Nothing is said of the ids in `unsaid`."""
    for each in samples:
        experience = Experience(
            choice=0,
            prompt_ids=pack_ids(each.prompt_ids.tolist()),
            completion_ids=pack_ids(each.completion_ids.tolist()),
            logprobs=pack_logprobs(each.logprobs.tolist()),
            version_min=each.version_min,
            version_max=each.version_max,
            temperature=each.temperature,
            finish_reason="stop",
            text="",
            unsampled=each.unsampled,
        )
        msg_id = f"m{each.id}"
        said = Exchange(
            msg_id=msg_id,
            tenant="t",
            endpoint="chat",
            request=b"{}",
            received_at=1.0 + each.id,
            latency_s=0.1,
            experiences=(experience,),
            task_id=each.task_id,
            run_id=each.run_id,
            policy=policy,
        )
        heard = Feedback(
            event_id=f"e{each.id}",
            call_id="c",
            msg_id=msg_id,
            choice=None,
            tenant="t",
            value=each.reward,
            received_at=2.0 + each.id,
            source=source,
        )
        ledger.recording.record([said] if each.id in unsaid else [said, heard])
    ledger.recording.commit("t")


def eventually(holds: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait until it holds; to look costs a trainer its time."""
    began = time.monotonic()
    while not holds():
        waited = time.monotonic() - began
        assert waited < within_s, "it never came true"
        time.sleep(min(max(waited / 10, 0.01), 0.2))


def run_until(chosen: Settings, condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Run a trainer until the condition holds, then ask it to stop."""
    from tuneloop.trainer.loop import run

    stop = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        trainer = threads.submit(run, chosen, stop)
        try:
            eventually(lambda: trainer.done() or condition(), within_s)
        finally:
            stop.set()
        trainer.result(30)


class Waited(threading.Event):
    """A stop that tells whether a trainer has waited for rows."""

    has_waited = False

    def wait(self, timeout: float | None = None) -> bool:
        """See Stop."""
        self.has_waited = True
        return super().wait(timeout)


def read_until(process: Any, word: str) -> str:
    """The line of a process's errors that has the word."""
    for line in process.stderr:
        if word in line:
            return str(line)
    raise AssertionError(f"ended without {word}")


def gradients_of(learner: Any, name: str) -> dict[str, Any]:
    """By parameter what has been added up since the last update of the learner's model of this name."""
    model = learner.actor.network if name == "actor" else learner.critic
    shapes = {key: each.shape for key, each in model.named_parameters()}
    found = learner.optimizers[name].gradients
    return {key: each.view(shapes[key]) for key, each in found.items()}


def moments_of(optimizer: Any) -> dict[str, Any]:
    """AdamW's memory as it is saved."""
    return {name: each for name, each in optimizer.state() if not name.startswith("master.")}


def masters_of(optimizer: Any) -> list[Any]:
    """The float32 weights that updates are made of."""
    return list(optimizer._masters.values())


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    """The points of one curve as TensorBoard shows them, by step."""
    shown: dict[int, float] = {}
    for file in sorted(folder.iterdir(), key=lambda each: each.stat().st_mtime_ns):
        for event in _events(file.read_bytes()):
            if event.session_log.status == event.session_log.START:
                shown = {step: value for step, value in shown.items() if step < event.step}
            shown.update((event.step, value.simple_value) for value in event.summary.value if value.tag == name)
    return sorted(shown.items())


def _events(data: bytes) -> Iterator[Event]:
    """TFRecord: a length in eight bytes, four bytes of checksum, the event, four more. The last may be half written."""
    while len(data) >= 16 and len(data) >= 16 + (length := struct.unpack_from("<Q", data)[0]):
        event = Event()
        event.ParseFromString(data[12 : 12 + length])
        yield event
        data = data[16 + length :]
