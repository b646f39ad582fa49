"""Engines are asked for the log-probabilities of a share of the replies, and of all while these are mistrusted."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.doubles.engine import EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tuneloop.explorer import recorder as capture_choice
from tuneloop.explorer.recorder import CaptureChoice
from tuneloop.shared.experience import is_captured
from tuneloop.shared.ledger.storage.codec import from_blob
from tuneloop.shared.ledger.versions.alarms import Alarm
from tuneloop.shared.operations.diagnosis import CAPTURE_MISMATCH
from tuneloop.shared.settings.serving import CaptureSettings

PERIOD_S = capture_choice._PERIOD_S


def share_asked(choice: CaptureChoice, **upstream: object) -> float:
    """Of the moments of five periods."""
    moments = np.linspace(1e9, 1e9 + 5 * PERIOD_S, 4000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture_choice, "time", SimpleNamespace(time=iter(moments).__next__))
        return float(np.mean([choice.asks(upstream) for _ in moments]))


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, 1.0),
        ({"logprobs": "share"}, 0.05),
        ({"logprobs": "share", "share": 0.5}, 0.5),
        ({"logprobs": "none"}, 0.01),
    ],
)
def test_the_share_of_the_settings_is_asked_for(settings: dict[str, object], share: float) -> None:
    choice = CaptureChoice(CaptureSettings.model_validate(settings))
    assert share_asked(choice) == pytest.approx(share, abs=0.002)


def test_what_clients_ask_for_is_always_captured() -> None:
    choice = CaptureChoice(CaptureSettings(logprobs="none"))
    assert share_asked(choice, logprobs=True) == share_asked(choice, logprobs=0) == 1
    assert share_asked(choice, logprobs=False) == pytest.approx(0.01, abs=0.002)


def test_what_engines_of_ours_cut_off_is_always_captured(double: EngineDouble, explorer: RunningExplorer) -> None:
    choice = CaptureChoice(CaptureSettings(logprobs="none"))
    assert all(choice.asks({}, truncated=True) for _ in range(100))
    explorer.http.post("/v1/chat/completions", json=HELLO | {"top_p": 0.5}).raise_for_status()
    assert "logprobs" not in double.chats[-1].body  # it is an engine of others


@pytest.fixture
def explorer(running_explorer: Run, double: EngineDouble, monkeypatch: pytest.MonkeyPatch) -> RunningExplorer:
    """An explorer of which no reply is one of the share."""
    monkeypatch.setattr(capture_choice, "_PERIOD_S", 4e9)  # now is near its middle
    monkeypatch.setattr(capture_choice, "_ALARM_S", 0.05)
    return running_explorer(double, capture={"logprobs": "none"})


def test_of_a_quarter_that_is_captured_every_row_can_be_trained_on(
    running_explorer: Run, double: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_choice, "_PERIOD_S", 0.05)
    explorer = running_explorer(double, capture={"logprobs": "share", "share": 0.25})
    for number in range(24):
        assert explorer.chat(stream=number % 2 == 1).status_code == 200
    rows = explorer.rows("SELECT msg_id, blob, reason, unsampled, version_min, version_max FROM experiences")
    assert {row[2:] for row in map(tuple, rows)} == {(None, None, 0, 0)}, "the version to recompute from is known"
    captured = [is_captured(from_blob(row.blob)[2]) for row in rows]
    assert (len(captured), sum(captured)) == (24, sum("logprobs" in each.body for each in double.chats))
    assert 0 < sum(captured) < 24


def newest_logprobs(explorer: RunningExplorer) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    explorer.until_flushed()
    row = explorer.rows("SELECT blob, reason, unsampled FROM experiences ORDER BY id DESC LIMIT 1")[0]
    assert (row.reason, row.unsampled) == (None, None)
    return from_blob(row.blob)[2]  # type: ignore[return-value]


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_is_not_asked_tells_token_ids_alone(
    explorer: RunningExplorer, double: EngineDouble, stream: bool
) -> None:
    answer = explorer.http.post("/v1/chat/completions", json=HELLO | {"stream": stream})
    assert answer.status_code == 200
    assert '"token_ids":[' not in answer.text.replace(" ", "")
    assert "logprobs" not in double.chats[-1].body
    assert double.chats[-1].body["return_token_ids"] is True
    assert not is_captured(newest_logprobs(explorer))
    assert 'tuneloop_replies_captured_total{by="trainer"} 1.0' in explorer.http.get("/metrics").text


def test_a_client_that_asks_for_log_probabilities_gets_them(explorer: RunningExplorer, double: EngineDouble) -> None:
    [choice] = explorer.http.post("/v1/chat/completions", json=HELLO | {"logprobs": True}).json()["choices"]
    assert choice["logprobs"]["content"]
    assert is_captured(newest_logprobs(explorer))


def test_while_the_alarm_is_open_all_are_captured(explorer: RunningExplorer, double: EngineDouble) -> None:
    def asked() -> bool:
        explorer.chat()
        return double.chats[-1].body.get("logprobs") is True

    assert not asked()
    explorer.ledger.alarms.raise_alarm(Alarm(CAPTURE_MISMATCH, "they are not the same"))
    eventually(asked)
    explorer.until_flushed()
    assert is_captured(newest_logprobs(explorer))
    explorer.ledger.alarms.clear(CAPTURE_MISMATCH)
    eventually(lambda: not asked())
