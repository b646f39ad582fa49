"""What leaves a running explorer has none of the secrets planted in it: traces, exports, metrics, crash reports."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.data.exporting import exported
from tests.doubles.serving import serving
from tests.doubles.spelling import SpellingDouble
from tests.explorer.proxy.test_tracing import Receiver, attributes_of
from tests.explorer.recording.test_redaction import BODIES, CHAT_BODY, PLANTED, PRIVACY, TEXT, ask, private, traces
from tests.explorer.running import RunningExplorer, eventually, explorer_running, settings_for
from tuneloop.cli.exports import Format

pytestmark = pytest.mark.contract

#: As long as names may be.
NAME = TEXT[:200]


def rate(explorer: RunningExplorer, msg_id: str) -> None:
    rated = {"msg_ids": [msg_id], "source": PLANTED["email"]}
    for said in (
        {"value": True, "comment": TEXT},
        {"demonstration": TEXT},
        {"value": 0.5, "metric": PLANTED["ticket"]},
        {"label": NAME, "metric": PLANTED["email"]},
    ):
        assert explorer.http.post("/feedback", json=rated | said).status_code == 200


def statuses(receiver: Receiver) -> list[int]:
    return [attributes_of(each).get("http.response.status_code", 0) for each in list(receiver.spans)]


def test_spans_have_none_of_it_whatever_fails(tmp_path: Path) -> None:
    double = SpellingDouble(reply=f"Noted: {TEXT}.")
    with Receiver().running() as receiver, serving(double) as url:
        settings = private(settings_for(tmp_path, [url]))
        settings = settings.model_copy(
            update={"monitor": settings.monitor.model_copy(update={"otlp_url": receiver.url})}
        )
        with explorer_running(settings) as explorer:
            for path in BODIES:
                for stream in (False, True):
                    ask(explorer, path, stream=stream)
            rate(explorer, explorer.http.post("/v1/chat/completions", json=CHAT_BODY).json()["id"])
            explorer.http.post("/v1/chat/completions", json=CHAT_BODY | {"model": PLANTED["api_key"]})
            double.status = 500
            for path, body in BODIES.items():
                assert explorer.http.post(path, json=body).status_code >= 500
            eventually(lambda: len(receiver.named("feedback")) == 4)
            eventually(lambda: statuses(receiver).count(500) >= len(BODIES))
        assert len(receiver.spans) > 20
        assert traces(tmp_path, b"".join(each.SerializeToString() for each in receiver.spans)) == set()


def test_exports_have_none_of_it(tmp_path: Path) -> None:
    double = SpellingDouble(reply=f"Noted: {TEXT}.")
    with serving(double) as url, explorer_running(private(settings_for(tmp_path, [url]))) as explorer:
        rate(explorer, json.loads(ask(explorer, "/v1/chat/completions", stream=False))["id"])
        explorer.until_flushed()
        for form, kind in itertools.product(Format, ("jsonl", "parquet")):
            file = tmp_path / f"{form.value}.{kind}"
            rows = exported(explorer.ledger, file, form, tenant="default", everything=True)
            assert rows, file
            told = json.dumps(rows, ensure_ascii=False, default=str)
            assert "[REDACTED:email]" in told, file
            assert traces(tmp_path, told.encode()) == set()


#: A process that dies of an error that quotes what somebody said.
_CRASH = """
import asyncio, sys, threading
import structlog
from tuneloop.shared.logging import clean_error, configure_logging
from tuneloop.shared.privacy.crash_reports import redact_crash_reports
from tuneloop.shared.settings.feedback import PrivacySettings

text = sys.stdin.read()
configure_logging()
redact_crash_reports(PrivacySettings.model_validate_json(sys.argv[1]))
log = structlog.get_logger()
try:
    raise ValueError(text)
except ValueError as error:
    log.exception("failed")
    log.error("failed", reason=str(error), error=str(error))
    sys.stderr.write(clean_error(error))
{how}
"""
CRASHES = {
    "of the process": "raise RuntimeError(text)",
    "of a thread": "thread = threading.Thread(target=lambda: int(text)); thread.start(); thread.join()",
    "with a cause": "try:\n    int(text)\nexcept ValueError as error:\n    raise KeyError(text) from error",
    "of a task": (
        "async def one():\n    task = asyncio.create_task(two())\n    await asyncio.sleep(0.1)\n    del task\n"
        "async def two():\n    raise ValueError(text)\nasyncio.run(one())"
    ),
}


@pytest.mark.parametrize("how", CRASHES)
def test_crash_reports_have_none_of_it(tmp_path: Path, how: str) -> None:
    script = _CRASH.replace("{how}", CRASHES[how])
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(PRIVACY)], input=TEXT, capture_output=True, text=True, cwd=tmp_path
    )
    told = done.stdout + done.stderr
    assert "[REDACTED:email]" in told
    assert "Error" in told
    assert traces(tmp_path, told.encode()) == set()
