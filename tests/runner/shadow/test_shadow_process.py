"""Shadow runs in a process that the user starts: it runs the calls that the app's runner left in a folder."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.doubles.engine import MODEL
from tests.explorer.running import RunningExplorer, eventually
from tests.runner.feedback.service import FeedbackService
from tuneloop.runner import EveryCall, ShadowTools, TrainingContext, TrainingRunner

APP = """
import threading, time
from pathlib import Path
from openai import OpenAI
from tuneloop.runner import ShadowTools

TOOLS = ShadowTools()
SENT = []

@TOOLS.tool
def send(what):
    SENT.append(what)
    return "sent " + what

@TOOLS.tool(read_only=True)
async def look(what):
    return "seen " + what

def make_agent(run):
    def answer(question):
        with OpenAI(base_url=run.base_url, api_key=run.api_key, max_retries=0) as client:
            messages = [{"role": "user", "content": question}]
            client.chat.completions.create(model=run.model, messages=messages, max_tokens=4)
        with open("begun", "a") as file:
            print(question, file=file)
        while Path("hold").exists():
            time.sleep(0.02)
        return question.upper()
    return answer

def same(result):
    return float(result.result == result.production_result)

def make_caller(run):
    async def call(what):
        said = [send(what), send("other"), await look(what), list(run.tools)]
        thread = threading.Thread(target=lambda: said.append(send("thread")))
        thread.start()
        thread.join()
        return said
    return call

def tell(result):
    Path("said").write_text(repr((result.result, SENT, [each.outcome for each in result.tool_calls])))
    return True
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "app.py").write_text(APP)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return tmp_path


@contextmanager
def shadow_process(folder: Path, url: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    given = ["--queue", "calls", "--service", url, "--model", MODEL]
    command = [sys.executable, "-m", "tuneloop.runner", "shadow", *given, *more]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def end(process: subprocess.Popen[str]) -> dict[str, int]:
    """What it counted, once it was told to end."""
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    counts: dict[str, int] = json.loads(said.splitlines()[-1])
    return counts


def calls_in(folder: Path) -> list[Path]:
    return list((folder / "calls").glob("*.json"))


def lines(file: Path) -> list[str]:
    return sorted(file.read_text().split()) if file.exists() else []


@pytest.mark.contract
def test_no_call_is_lost_or_rewarded_twice_by_a_process_that_is_killed(explorer: RunningExplorer, folder: Path) -> None:
    with TrainingRunner(queue=folder / "calls", selection_strategy=EveryCall()) as runner:
        ask = runner.wrap(lambda question: str(question).upper())
        with TrainingContext.mark("hard"):
            assert [ask(each) for each in ("one", "two", "three")] == ["ONE", "TWO", "THREE"]
        assert ask(("no", "list")) == "('NO', 'LIST')"
    assert runner.counters() | {"selected": 4, "queued": 3, "dropped_not_json": 1} == runner.counters()
    (folder / "hold").touch()
    commands = ("app:make_agent", "--reward", "app:same")
    with shadow_process(folder, explorer.url, *commands) as process:
        eventually(lambda: lines(folder / "begun") == ["one", "two"])
        process.kill()
        process.wait()
    assert len(calls_in(folder)) == 3
    (folder / "hold").unlink()
    with shadow_process(folder, explorer.url, *commands) as process:
        eventually(lambda: not calls_in(folder))
        counts = end(process)
    assert counts | {"runs": 3, "completed": 3, "rewarded": 3, "commits": 1} == counts
    assert lines(folder / "begun") == ["one", "one", "three", "two", "two"]
    rows = explorer.rows("SELECT task_id, run_id, reward, state FROM experiences ORDER BY id")
    rewarded = [row for row in rows if row[2] is not None]
    assert [(row[1], row[2], row[3]) for row in rewarded] == [("0", 1.0, "committed")] * 3
    assert (len({row[0] for row in rewarded}), len(rows)) == (3, 5)
    assert [tuple(row) for row in explorer.rows("SELECT text FROM feedback WHERE kind = 'label'")] == [("hard",)] * 3


def test_its_tools_answer_from_the_record_of_the_app_and_write_nothing_in_any_thread(
    service: FeedbackService, folder: Path
) -> None:
    tools = ShadowTools()
    send = tools.tool(lambda what: f"sent {what}", name="send")
    runner = TrainingRunner(queue=folder / "calls", selection_strategy=EveryCall(), tools=tools).start()
    runner.wrap(lambda what: send(what))("mail")
    assert runner.stop()
    more = ("app:make_caller", "--reward", "app:tell", "--tools", "app:TOOLS")
    with shadow_process(folder, service.url, *more) as process:
        eventually(lambda: not calls_in(folder))
        assert end(process)["rewarded"] == 1
    said, sent, outcomes = eval((folder / "said").read_text())
    assert (said[0], said[2], said[3], sent) == ("sent mail", "seen mail", ["send", "look"], [])
    assert all("was not run" in json.loads(said[place])["error"] for place in (1, 4))
    assert outcomes == ["recorded", "refused", "ran"]


def test_a_call_that_is_none_or_ended_its_process_thrice_is_set_aside(service: FeedbackService, folder: Path) -> None:
    calls = folder / "calls"
    calls.mkdir()
    (calls / "1-a-0.json").write_text('{"name"')
    (calls / "2-b-3.json").write_text("{}")
    with shadow_process(folder, service.url, "app:make_agent", "--reward", "app:same") as process:
        eventually(lambda: not calls_in(folder))
        counts = end(process)
    assert (counts["set_aside"], counts["runs"]) == (2, 0)
    assert sorted(each.name for each in calls.glob("*.aside")) == ["1-a-0.aside", "2-b-3.aside"]
