"""Explorers whose clocks are wrong: nothing closes, expires or is deleted but by the time that has passed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import tests
from tests.conftest import Place, tables_at
from tests.doubles.engine import CHAT, EngineDouble
from tests.explorer.checkpoints import write_model
from tests.explorer.running import HELLO, eventually
from tests.explorer.test_main import attached_to, service, write_settings
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.settings.loader import load_settings

HOUR, DAY = 3600.0, 86400.0

#: All of these would be over for whoever believed a clock that is a day wrong.
_BOUNDS: dict[str, Any] = {
    "reward": {"attribution_window": HOUR, "default": -1.0},
    "retention": {"recorded": 6 * HOUR, "rewarded": 6 * HOUR, "trained": 6 * HOUR},
}


class Explorers:
    """Explorers of one experiment, each with an engine and an outbox of its own."""

    def __init__(self, root: Path, place: Place, doubles: dict[str, EngineDouble], patch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._place = place
        self._doubles = doubles
        self._patch = patch

    def settings(self, name: str) -> Path:
        folder = self._root / name
        folder.mkdir(exist_ok=True)
        buffer = {"path": self._place.url, "name": self._place.schema}
        return write_settings(
            folder,
            checkpoint_root_dir=str(self._root / "checkpoints"),
            explorer__outbox_dir=str(folder / "outbox"),
            model__model_path=str(write_model(self._root / "model")),
            buffer__trainer_input__experience_buffer=buffer,
            explorer__service_status_check_interval=0.1,
            **_BOUNDS,
            **attached_to(self._doubles[name]),
        )

    @contextmanager
    def running(self, name: str, *, ahead_s: float) -> Iterator[httpx.Client]:
        """An explorer whose clock is wrong, on a machine of its own."""
        with self._patch.context() as patch:
            patch.setenv("PYTHONPATH", str(Path(tests.__path__[0]) / "doubles" / "set_clock"), prepend=":")
            patch.setenv("TUNELOOP_TEST_CLOCK", str(ahead_s))
            patch.setenv("TUNELOOP_TEST_BOOT", f"the machine of {name}")
            with service(self.settings(name)) as (_process, http):
                yield http

    def ledger(self) -> Ledger:
        """The ledger, as a trainer whose clock is right sees it."""
        return Ledger.of(load_settings(self.settings("one")))


@pytest.fixture
def explorers(
    tmp_path: Path,
    postgres_place: Place,
    doubles: list[EngineDouble],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Explorers]:
    with tables_at(postgres_place, request, "migrated"):
        yield Explorers(tmp_path, postgres_place, dict(zip(("one", "other"), doubles, strict=True)), monkeypatch)


def chat(http: httpx.Client) -> str:
    reply = http.post(CHAT, json=HELLO)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def rate(http: httpx.Client, msg_id: str) -> str:
    outcomes: dict[str, str] = http.post("/feedback", json={"msg_ids": [msg_id], "reward": 1}).json()["outcomes"]
    return outcomes[msg_id]


def commit(http: httpx.Client) -> int:
    answers: list[httpx.Response] = []

    def done() -> bool:
        answers.append(http.post("/commit", json={}))
        return answers[-1].status_code == 200

    eventually(done)
    return int(answers[-1].json()["committed"])


@pytest.mark.postgres
def test_explorers_a_day_ahead_and_a_day_behind_share_one_ledger(explorers: Explorers) -> None:
    ledger = explorers.ledger()
    with explorers.running("one", ahead_s=DAY) as ahead, explorers.running("other", ahead_s=-DAY) as behind:
        replies, unrated = [chat(ahead), chat(behind)], [chat(ahead), chat(behind)]
        eventually(lambda: ledger.reports.counts()[State.RECORDED] == 4)
        assert [rate(behind, replies[0]), rate(ahead, replies[1])] == ["accepted", "accepted"]
        assert commit(behind) + commit(ahead) == 2  # and what has no feedback yet has its window open
        assert ledger.reports.counts()[State.RECORDED] == len(unrated)
        eventually(lambda: clocks_are_told(ahead, ahead_s=DAY))
        eventually(lambda: [alarm.name for alarm in ledger.alarms.all()] == ["clock_skew"])
    epoch = ledger.training.take_epoch("a trainer whose clock is right")
    batch = ledger.training.lease(epoch, 2, BatchRules())
    assert sorted(each.msg_id for each in batch) == sorted(replies)
    assert all(abs(each.sampled_at - time.time()) < HOUR / 2 for each in batch)
    with explorers.running("one", ahead_s=-HOUR) as ahead:
        assert commit(ahead) == 0
        assert ledger.reports.counts()[State.LEASED] == 2
    version = ledger.training.register(
        epoch, [each.id for each in batch], step=1, publish=lambda _: (Path("x"), "5" * 64)
    )
    ledger.versions.reject(version, by="the test", reason="it has no files")
    for step in (DAY, -DAY):
        with explorers.running("one", ahead_s=step) as again:
            assert commit(again) == 0
            assert rate(again, chat(again)) == "accepted"
            assert commit(again) == 1
    counts = ledger.reports.counts()
    assert (counts[State.TRAINED], counts[State.RECORDED], counts[State.COMMITTED]) == (2, 2, 2)
    assert counts[State.EXPIRED] == 0
    assert ledger.reports.imbalance() == []
    ledger.close()


def clocks_are_told(http: httpx.Client, *, ahead_s: float) -> bool:
    for line in http.get("/metrics").text.splitlines():
        if line.startswith('tuneloop_clock_skew_seconds{clock="machine"}'):
            return abs(float(line.split()[-1]) - ahead_s) < HOUR / 2
    return False
