"""Secrets are planted in every field of every route: none of them is in any byte that a running explorer leaves."""

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.cli.data.exporting import exported
from tests.doubles.engine import CHAT, EngineDouble
from tests.doubles.serving import serving
from tests.doubles.spelling import SpellingDouble, write_tokenizer
from tests.explorer.conftest import Run
from tests.explorer.proxy.test_tracing import Receiver, attributes_of
from tests.explorer.running import HELLO, RunningExplorer, eventually, explorer_running, settings_for
from tuneloop.cli.exports import Format
from tuneloop.shared.experience import REDACTED
from tuneloop.shared.settings.feedback import PrivacySettings
from tuneloop.shared.settings.settings import Settings

pytestmark = pytest.mark.contract

PLANTED = {
    "email": "ann.smith@example.org",
    "phone": "+44 20 7946 0958",
    "credit_card": "4111 1111 1111 1111",
    "iban": "DE89 3704 0044 0532 0130 00",
    "ip_address": "203.0.113.77",
    "api_key": "sk-proj-abcdefgh12345678",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dGVzdA",
    "private_key": "-----BEGIN PRIVATE KEY-----\nMIIBVgIBADAN\n-----END PRIVATE KEY-----",
    "us_ssn": "078-05-1120",
    "ticket": "TCK-99-kilo",
}
#: The same as bytes, and as the token ids that would spell them.
TRACES = {
    name: [
        value.encode(),
        json.dumps(value)[1:-1].encode(),
        np.frombuffer(value.encode(), "u1").astype("<i4").tobytes(),
    ]
    for name, value in PLANTED.items()
}
TEXT = "; ".join(f"{name}: {value}" for name, value in PLANTED.items())

PRIVACY = {"redact": [name for name in PLANTED if name != "ticket"], "patterns": {"ticket": r"TCK-\d+-\w+"}}


def private(settings: Settings, **privacy: Any) -> Settings:
    write_tokenizer(settings.model.model_path)
    return settings.model_copy(update={"privacy": PrivacySettings.model_validate(PRIVACY | privacy)})


@contextmanager
def running(tmp_path: Path, **privacy: Any) -> Iterator[tuple[RunningExplorer, SpellingDouble]]:
    double = SpellingDouble(reply=f"Noted: {TEXT}.", thoughts=f"hm {TEXT} ")
    with serving(double) as url:
        settings = private(settings_for(tmp_path, [url]), **privacy)
        with explorer_running(settings) as explorer:
            yield explorer, double


def traces(folder: Path, *more: bytes) -> set[tuple[str, str]]:
    """Which of the planted are in which file."""
    found = set()
    for path in folder.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        found |= {
            (str(path.relative_to(folder)), name) for name, forms in TRACES.items() for each in forms if each in data
        }
    for number, data in enumerate(more):
        found |= {(f"#{number}", name) for name, forms in TRACES.items() for each in forms if each in data}
    return found


TOOL = {"type": "function", "function": {"name": "add", "description": TEXT, "parameters": {"type": "object"}}}
CHAT_BODY = {
    "model": "t",
    "messages": [
        {"role": "system", "content": TEXT},
        {"role": "user", "content": [{"type": "text", "text": TEXT}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": TEXT})}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": TEXT},
    ],
    "tools": [TOOL],
    "user": PLANTED["email"],
    "metadata": {
        "note": TEXT,
        PLANTED["ticket"]: "x",
        "tuneloop_task_id": PLANTED["phone"],
        "tuneloop_run_id": TEXT[:200],
    },
}
BODIES = {
    "/v1/chat/completions": CHAT_BODY,
    "/v1/completions": {"model": "t", "prompt": TEXT, "user": PLANTED["api_key"]},
    "/v1/messages": {
        "model": "t",
        "max_tokens": 9,
        "system": TEXT,
        "messages": [{"role": "user", "content": TEXT}],
        "metadata": {"user_id": PLANTED["us_ssn"]},
    },
    "/v1/responses": {"model": "t", "instructions": TEXT, "input": TEXT, "metadata": {"note": TEXT[:500]}},
}


def ask(explorer: RunningExplorer, path: str, *, stream: bool, **but: Any) -> str:
    """What a client reads, whole or streamed."""
    answer = explorer.http.post(path, json=BODIES[path] | {"stream": stream} | but)
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_nothing_planted_is_left_anywhere(
    tmp_path: Path, path: str, stream: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path) as (explorer, double):
        if path == "/v1/chat/completions":
            double.arguments = json.dumps({"to": TEXT})
        answer = ask(explorer, path, stream=stream)
        if not stream:  # the client's own answer is as it was
            assert PLANTED["email"] in answer
        explorer.until_flushed()
        exposition = explorer.http.get("/metrics").content
        [row] = explorer.rows("SELECT text, tool_calls, user_id FROM experiences JOIN exchanges USING (msg_id)")
        assert all(f"[REDACTED:{name}]" in row.text for name in PLANTED)
        assert traces(tmp_path, exposition) == set()
    captured = capfd.readouterr()
    assert traces(tmp_path, captured.out.encode(), captured.err.encode()) == set()


def test_feedback_is_redacted_and_finds_its_reply_by_the_names_that_clients_write(tmp_path: Path) -> None:
    with running(tmp_path) as (explorer, _):
        said = json.loads(ask(explorer, "/v1/chat/completions", stream=False))["id"]
        body = {"msg_ids": [said], "reward": 1.0, "comment": TEXT, "demonstration": TEXT, "source": PLANTED["email"]}
        assert (
            explorer.http.post("/feedback", json=body | {"idempotency_key": PLANTED["us_ssn"]}).json()["status"]
            == "success"
        )
        again = explorer.http.post("/feedback", json=body | {"idempotency_key": PLANTED["us_ssn"]}).json()
        assert set(again["outcomes"].values()) == {"duplicate"}
        edited = {"role": "assistant", "content": TEXT, "tool_calls": CHAT_BODY["messages"][2]["tool_calls"]}
        explorer.http.post("/feedback", json={"msg_ids": [said], "demonstration": edited, "source": "b"})
        explorer.http.post(
            "/feedback", json={"msg_ids": [said], "label": TEXT[:200], "metric": PLANTED["ticket"], "source": "c"}
        )
        run = {"task_id": PLANTED["phone"], "run_id": TEXT[:200], "value": 0.5, "metric": "other"}
        assert explorer.http.post("/feedback", json=run).json()["status"] == "success"
        assert explorer.commit(task_id=PLANTED["phone"]).json()["committed"] == 1
        explorer.until_flushed()
        sources = [row.source for row in explorer.rows("SELECT DISTINCT source FROM feedback ORDER BY source")]
        assert any(each and each.startswith("redacted:") for each in sources)
        assert traces(tmp_path) == set()


def test_calls_of_a_run_and_a_persons_exchanges_are_found_by_the_names_that_clients_write(tmp_path: Path) -> None:
    names = {"user": PLANTED["email"], "task": PLANTED["phone"], "run": PLANTED["ticket"]}
    labels = {"task_id": names["task"], "run_id": names["run"]}
    with running(tmp_path) as (explorer, _):
        asked = explorer.http.post("/v1/chat/completions", json=HELLO | {"user": names["user"], "metadata": labels})
        assert explorer.http.get("/training/calls", params=labels).json() == {"calls": 1}
        assert explorer.http.get("/training/calls", params=labels | {"tokens": "true"}).json()["calls"] == 1
        for name, value in names.items():
            assert asked.json()["id"] in explorer.http.get("/ui/exchanges", params={name: value}).text, name
        [[stored]] = explorer.rows("SELECT user_id FROM exchanges")
        assert asked.json()["id"] in explorer.http.get("/ui/exchanges", params={"user": stored}).text


def test_stored_completions_are_found_by_what_was_redacted(tmp_path: Path) -> None:
    with running(tmp_path) as (explorer, _):
        said = json.loads(
            ask(explorer, "/v1/chat/completions", stream=False, store=True, metadata={"mail": PLANTED["email"]})
        )["id"]
        found = explorer.http.get("/v1/chat/completions", params={"metadata[mail]": PLANTED["email"]}).json()
        assert [each["id"] for each in found["data"]] == [said]
        changed = explorer.http.post(f"/v1/chat/completions/{said}", json={"metadata": {"phone": PLANTED["phone"]}})
        assert changed.json()["metadata"] == {"phone": "[REDACTED:phone]"}
        explorer.until_flushed()
        assert traces(tmp_path) == set()


def test_a_conversation_goes_on_from_what_was_kept(tmp_path: Path) -> None:
    with running(tmp_path) as (explorer, double):
        first = json.loads(ask(explorer, "/v1/responses", stream=False))["id"]
        ask(explorer, "/v1/responses", stream=False, previous_response_id=first, input="and then?")
        assert "[REDACTED:email]" in json.dumps(double.asked[-1])
        assert traces(tmp_path) == set()


def test_requests_that_fail_and_records_that_are_refused_leave_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path) as (explorer, double):
        for path, body in BODIES.items():
            double.status = 500
            assert explorer.http.post(path, json=body).status_code >= 500
            double.status = 200
            for wrong in (
                {"temperature": TEXT},
                {"metadata": {"tuneloop_priority": TEXT}},
                {"stream": TEXT},
                {"n": TEXT},
            ):
                explorer.http.post(path, json=body | wrong)
            explorer.http.post(path, content=json.dumps(body).encode()[:-1])
            explorer.http.post(path, content=b'{"messages": ' + b"[" * 2000 + TEXT.encode())
        explorer.http.post("/feedback", json={"msg_ids": [TEXT], "reward": TEXT})
        explorer.http.post("/commit", json={"task_id": [TEXT]})
        explorer.http.get("/v1/chat/completions", params={"metadata[mail]": TEXT, "after": TEXT})
        explorer.http.get(f"/nowhere/{PLANTED['email']}", params={"q": TEXT})
        explorer.ledger.recording.refuses = lambda record: True
        ask(explorer, "/v1/chat/completions", stream=False)
        eventually(lambda: bool(explorer.ledger.recording.refused_records()), within_s=90)
        assert traces(tmp_path, explorer.http.get("/metrics").content) == set()
    captured = capfd.readouterr()
    assert traces(tmp_path, captured.out.encode(), captured.err.encode()) == set()


def test_a_reply_that_breaks_off_is_redacted_too(tmp_path: Path) -> None:
    with running(tmp_path) as (explorer, double):
        double.piece_pause_s = 0.01
        with explorer.http.stream("POST", "/v1/chat/completions", json=CHAT_BODY | {"stream": True}) as reply:
            for number, _ in enumerate(reply.iter_lines()):
                if number > 200:
                    break
        eventually(lambda: explorer.rows("SELECT count(*) FROM exchanges") == [(1,)])
        assert traces(tmp_path) == set()


def test_a_pattern_that_backtracks_for_ever_takes_its_text_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    with running(tmp_path, patterns={"evil": r"(x+x+)+y"}) as (explorer, double):
        double.reply, double.thoughts = "fine", ""
        body = {"model": "t", "messages": [{"role": "user", "content": "x" * 5000}], "tools": []}
        assert explorer.http.post("/v1/chat/completions", json=body).status_code == 200
        explorer.until_flushed()
        [(request,)] = explorer.rows("SELECT request FROM exchanges")
        assert b"xxxx" not in request
        assert explorer.metrics()["tuneloop_patterns_timed_out_total"] >= 1


def test_tokens_that_spell_a_secret_are_gone_and_the_others_keep_their_places(tmp_path: Path) -> None:
    with running(tmp_path) as (explorer, double):
        double.reply, double.thoughts = f"Write to {PLANTED['email']}, please.", ""
        explorer.chat()
        explorer.until_flushed()
        [exchange] = explorer.exchanges()
        [said] = exchange.experiences
        ids = np.frombuffer(said.completion_ids, "<i4")
        logprobs = np.frombuffer(said.logprobs, "<f4")
        at = double.reply.index(PLANTED["email"])
        hidden = range(at, at + len(PLANTED["email"]))
        assert [number for number, each in enumerate(ids) if each == REDACTED] == list(hidden)
        assert bytes(each for each in ids.tolist() if each >= 0).decode() == "Write to , please."
        assert (logprobs[hidden.start : hidden.stop] == 0).all()
        assert (np.delete(logprobs, list(hidden)) == -0.5).all()
        assert said.unsampled == "redacted"
        assert REDACTED not in np.frombuffer(said.prompt_ids, "<i4")


def test_without_a_tokenizer_the_ids_of_what_holds_a_secret_are_not_kept(tmp_path: Path) -> None:
    double = SpellingDouble(reply=f"Write to {PLANTED['email']}.")
    with serving(double) as url:
        settings = settings_for(tmp_path, [url])
        settings = settings.model_copy(update={"privacy": PrivacySettings.model_validate(PRIVACY)})
        with explorer_running(settings) as explorer:
            explorer.chat()
            double.reply = "fine"
            explorer.chat(user=PLANTED["email"])
            explorer.until_flushed()
            first, second = (each.experiences[0] for each in explorer.exchanges())
            assert (first.prompt_ids, first.completion_ids, first.drop_reason) == (b"", b"", "redacted")
            assert second.completion_ids
            assert second.drop_reason is None
            assert traces(tmp_path) == set()


def test_secrets_are_taken_out_unless_the_settings_say_no(tmp_path: Path) -> None:
    with serving(SpellingDouble(reply=TEXT)) as url:
        settings = settings_for(tmp_path, [url])
        write_tokenizer(settings.model.model_path)
        with explorer_running(settings) as explorer:
            explorer.chat()
            explorer.until_flushed()
            [(text,)] = explorer.rows("SELECT text FROM experiences")
            assert {name for name in PLANTED if f"[REDACTED:{name}]" in text} == {"private_key", "jwt", "api_key"}
        with explorer_running(settings.model_copy(update={"privacy": PrivacySettings(redact=())})) as explorer:
            explorer.chat()
            explorer.until_flushed()
            assert TEXT in {row.text for row in explorer.rows("SELECT text FROM experiences")}


def test_the_same_request_is_counted_once_for_each_kind(tmp_path: Path) -> None:
    with running(tmp_path) as (explorer, double):
        double.reply = f"{PLANTED['email']} {PLANTED['email']}"
        explorer.chat()
        told = httpx.get(f"{explorer.url}/metrics").text
        assert 'tuneloop_redacted_total{kind="email"} 1.0' in told


def test_thousands_of_secrets_stop_nobody(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double)
    secrets = [f"sk-proj-{number:06d}" + "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0z" * 2 for number in range(3000)]
    message = {"role": "user", "content": [{"type": "text", "text": each} for each in secrets]}
    body = HELLO | {"messages": [message, *HELLO["messages"]], "metadata": {"colour": "red"}}
    began = time.process_time()
    answer = explorer.http.post(CHAT, json=body)
    assert answer.status_code == 200
    assert time.process_time() - began < 20  # it took minutes
    explorer.until_flushed()
    for path in ("", f"/{answer.json()['id']}", f"/{answer.json()['id']}/messages"):
        read = explorer.http.get(CHAT + path)
        assert read.status_code == 200, read.text[:500]
        assert "sk-proj-" not in read.text


# What leaves a running explorer has none of the secrets planted in it: traces, exports, metrics, crash reports.


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
from tuneloop.shared.privacy.detection import redact_crash_reports
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
