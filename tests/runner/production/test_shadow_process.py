"""Shadow runs in a process of their own: away from the app's interpreter lock, and all else as in the app."""

import ast
import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.explorer.running import eventually
from tests.runner.feedback.service import FeedbackService
from tests.runner.production import sent
from tests.runner.production.recording import runner_of
from tuneloop.runner import TrainingContext, TrainingRunner
from tuneloop.runner.production.isolation import remote_runs
from tuneloop.runner.production.isolation.app_pipe import CannotSend


def made(service: FeedbackService, agent: Any, calculator: Any = sent.one, **settings: Any) -> Any:
    settings = {"run_in": "process", "tools": sent.TOOLS} | settings
    return runner_of(service.url, agent=agent, reward_calculator=calculator, **settings)


def test_a_run_and_its_reward_are_made_in_another_process(service: FeedbackService) -> None:
    with made(service, sent.where, sent.is_elsewhere, run_in="auto") as (runner, _):
        assert runner.wrap(lambda pid: pid)(os.getpid()) == os.getpid()
        assert runner.stop(60)
    expected = {"runs": 1, "runs_in_app": 0, "completed": 1, "rewarded": 1, "commits": 1}
    assert runner.counters() | expected == runner.counters()
    assert [each["value"] for each in service.entries] == [True]


def test_groups_and_marks_are_as_in_the_app(service: FeedbackService) -> None:
    with made(service, sent.where, sent.which_member, repeat_time=3) as (runner, _):
        ask = runner.wrap(lambda text: text)
        TrainingContext.mark("hard")
        ask("a")
        assert runner.stop(60)
    told = [each for each in service.entries if each.get("metric") is None]
    assert [each["reward"] for each in told] == [0.0, 1.0, 2.0]
    assert len({each["task_id"] for each in told}) == 1
    assert [each["run_id"] for each in told] == ["0", "1", "2"]
    assert len([each for each in service.entries if each.get("metric") == "mark:hard"]) == 3


async def test_tools_are_the_apps_and_write_nothing(
    service: FeedbackService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELOOP_TEST_SAID", str(tmp_path / "said"))
    sent.done.clear()

    async def production(kept: str) -> str:
        assert sent.buy(kept) == "bought apple"
        with pytest.raises(LookupError):
            sent.buy("gone")
        return kept

    with made(service, sent.using_tools, sent.says_all) as (runner, _):
        await runner.wrap(production)("apple")
        assert await asyncio.to_thread(runner.stop, 60), runner.counters()
    assert runner.counters()["completed"] == 1, runner.counters()
    really = [each for each in sent.done if each.startswith("buy")]
    assert really == ["buy apple", "buy gone"]
    said, outcomes, found, refused = ast.literal_eval((tmp_path / "said").read_text())
    here = os.getpid()
    assert said[:3] == [f"tea in {here}", f"coffee in {here}", "bought apple"]
    assert "was not run" in said[3]
    assert "was not run" in said[4]
    assert said[5:7] == ["later x", "later y"]
    assert "was not run" in said[7]
    assert said[8:] == [5, "LookupError('gone')"]
    assert outcomes == [
        *("find ran", "find ran", "buy recorded", "buy refused", "buy refused"),
        *("later ran", "later ran", "delete refused", "buy recorded"),
    ]
    assert found == f"judged in {here}"
    assert "was not run" in refused


def test_what_an_agent_raises_is_counted_and_logged_with_where_it_was(
    service: FeedbackService, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), made(service, sent.raising) as (runner, _):
        ask = runner.wrap(lambda: 1)
        ask()
        ask()
        assert runner.stop(60)
    assert runner.counters() | {"shadow_failed": 2, "completed": 0, "rewarded": 0} == runner.counters()
    [record] = [each for each in caplog.records if "no such thing" in each.getMessage()]
    assert "in act" in (logging.Formatter().formatException(record.exc_info) if record.exc_info else "")


def test_a_process_that_ends_costs_its_run_and_is_started_again(service: FeedbackService, tmp_path: Path) -> None:
    with made(service, sent.killing, concurrency=1) as (runner, _):
        ask = runner.wrap(lambda file: file)
        ask(str(tmp_path / "killed"))
        ask(str(tmp_path / "killed"))
        assert runner.stop(60)
    assert runner.counters() | {"shadow_failed": 1, "completed": 1, "rewarded": 1} == runner.counters()


def test_a_run_that_takes_too_long_is_counted_at_once_and_the_process_ends_with_the_runner(
    service: FeedbackService,
) -> None:
    with made(service, sent.never, timeout_seconds=0.2) as (runner, _):
        runner.wrap(lambda: 1)()
        eventually(lambda: runner.counters()["shadow_timed_out"] == 1)
        began = time.monotonic()
        assert not runner.stop(2)
        assert time.monotonic() - began < 10
    assert children_of(os.getpid()) == []


async def test_a_run_that_waits_for_a_tool_no_more_costs_no_other(service: FeedbackService) -> None:
    with made(service, sent.giving_up) as (runner, _):
        ask = runner.wrap(lambda seconds: 1)
        ask(0.02)
        await asyncio.to_thread(eventually, lambda: runner.counters()["completed"] == 1)
        await asyncio.sleep(0.15)
        ask(30.0)
        assert await asyncio.to_thread(runner.stop, 60)
    assert runner.counters() | {"shadow_failed": 0, "completed": 2, "rewarded": 2} == runner.counters()


def test_a_process_that_reads_nothing_does_not_hold_up_a_stop(
    service: FeedbackService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_runs, "_END_S", 0.1)
    with made(service, sent.where) as (runner, _):
        ask = runner.wrap(lambda text: text)
        ask("")
        eventually(lambda: runner.counters()["completed"] == 1)
        [child] = children_of(os.getpid())
        os.kill(child, signal.SIGSTOP)
        for _ in range(3):
            ask("x" * 100_000)
        time.sleep(0.1)
        began = time.monotonic()
        assert not runner.stop(0.1)
        assert time.monotonic() - began < 10
    assert children_of(os.getpid()) == []


def test_runs_read_nothing_of_what_the_app_sends(service: FeedbackService) -> None:
    with made(service, sent.reading_input, timeout_seconds=5) as (runner, _):
        ask = runner.wrap(lambda: 1)
        ask()
        ask()
        assert runner.stop(60)
    assert runner.counters() | {"shadow_failed": 0, "completed": 2} == runner.counters()


def test_what_cannot_be_sent_runs_in_the_app_and_says_so_once(
    service: FeedbackService, caplog: pytest.LogCaptureFixture
) -> None:
    unnamed = made(service, lambda run: lambda *args: 1, run_in="auto")
    with caplog.at_level(logging.WARNING), unnamed as (runner, _):
        ask = runner.wrap(lambda *args: 1)
        ask()
        ask()
        assert runner.stop(60)
    assert runner.counters() | {"runs": 2, "runs_in_app": 2, "rewarded": 2} == runner.counters()
    [said] = [each.getMessage() for each in caplog.records if "interpreter lock" in each.getMessage()]
    assert "lambda" in said


def test_inputs_that_cannot_be_sent_are_run_in_the_app(service: FeedbackService) -> None:
    with made(service, sent.where, sent.one, run_in="auto", capture=lambda args, kwargs: (args, kwargs)) as (runner, _):
        ask = runner.wrap(lambda thing: 1)
        ask(threading.Lock())
        ask(sent.Unreadable())
        ask(5)
        assert runner.stop(60)
    assert runner.counters() | {"runs": 3, "runs_in_app": 1, "completed": 2, "shadow_failed": 1} == runner.counters()


def test_a_process_that_cannot_import_it_leaves_the_runs_to_the_app(service: FeedbackService) -> None:
    with made(service, sent.where, sent.UnreadableCalculator(), run_in="auto") as (runner, _):
        runner.wrap(lambda *args: 1)(0)
        assert runner.stop(60)
    assert runner.counters() | {"runs_in_app": 1, "rewarded": 1} == runner.counters()


def test_where_a_process_is_demanded_what_cannot_be_sent_is_refused(service: FeedbackService) -> None:
    for settings in ({"calculator": lambda result: 1.0}, {"agent": lambda run: lambda *args: 1}):
        with pytest.raises(CannotSend, match="lambda"):
            made(service, **({"agent": sent.where} | settings)).__enter__()
    with made(service, sent.where) as (runner, _):
        runner.wrap(lambda: 1, agent=lambda run: lambda *args: 1)()
        assert runner.stop(60)
    assert runner.counters() | {"shadow_failed": 1, "runs_in_app": 0} == runner.counters()
    with pytest.raises(ValueError, match="run_in"):
        TrainingRunner(service=service.url, model="t", agent=sent.where, reward_calculator=sent.one, run_in="x")  # type: ignore[arg-type]


def test_a_forked_child_of_the_app_leaves_it_to_its_parent(service: FeedbackService) -> None:
    with made(service, sent.where) as (runner, _):
        ask = runner.wrap(str.upper)
        if not (pid := os.fork()):
            os._exit(0 if ask("child") == "CHILD" else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert ask("parent") == "PARENT"
        assert runner.stop(60)
    assert runner.counters() | {"calls": 1, "rewarded": 1} == runner.counters()


def test_a_forked_child_that_starts_has_a_process_of_its_own(service: FeedbackService) -> None:
    with made(service, sent.where, sent.is_elsewhere) as (runner, _):
        ask = runner.wrap(lambda pid: pid)
        if not (pid := os.fork()):
            runner.start()
            ask(os.getpid())
            os._exit(0 if runner.stop(60) and runner.counters()["rewarded"] == 1 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        ask(os.getpid())
        assert runner.stop(60)
    assert runner.counters() | {"calls": 1, "rewarded": 1} == runner.counters()
    assert [each["value"] for each in service.entries] == [True, True]


def test_the_process_ends_when_the_app_is_killed(tmp_path: Path, service: FeedbackService) -> None:
    script = tmp_path / "app.py"
    script.write_text(
        "import time\nfrom tests.runner.production import sent\nfrom tuneloop.runner import EveryCall, TrainingRunner\n"
        f"runner = TrainingRunner(service={service.url!r}, model='t', agent=sent.where, reward_calculator=sent.one,\n"
        "    selection_strategy=EveryCall(), run_in='process').start()\n"
        "runner.wrap(lambda: 1)()\n"
        "while not runner.counters()['completed']: time.sleep(0.05)\nprint('made', flush=True)\ntime.sleep(100)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment) as app:
        assert app.stdout is not None
        assert app.stdout.readline() == b"made\n"
        [child] = children_of(app.pid)
        app.send_signal(signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{child}").exists())


def test_agents_of_the_module_that_was_started_are_sent_by_its_name(tmp_path: Path, service: FeedbackService) -> None:
    """`python -m app` calls it `__main__`; what it starts when it is imported is not started again in the process."""
    (tmp_path / "started_app.py").write_text(
        "import os\nfrom tuneloop.runner import EveryCall, TrainingRunner\n"
        "class Asked:\n    def __init__(self, pid): self.pid = pid\n"
        "def agent(run): return lambda asked: (type(asked) is Asked, os.getpid() != asked.pid)\n"
        "def worth(result): return float(result.result == (True, True))\n"
        f"runner = TrainingRunner(service={service.url!r}, model='t', agent=agent, reward_calculator=worth,\n"
        "    selection_strategy=EveryCall(), run_in='process').start()\n"
        "ask = runner.wrap(lambda asked: 1)\n"
        "if __name__ == '__main__':\n    ask(Asked(os.getpid()))\n    assert runner.stop(60), runner.counters()\n"
        "    print(runner.counters()['rewarded'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    command = [sys.executable, "-m", "started_app"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.stdout == "1\n", done.stderr
    assert [each["reward"] for each in service.entries] == [1.0]


def test_an_app_waits_no_longer_while_a_run_computes(service: FeedbackService) -> None:
    """What it waits for the interpreter's lock: hardly at all with a process, for turns of 5 ms without."""
    waits = {where: _computing_app_waits(service, where) for where in ("process", "thread")}
    assert waits["process"] < 0.002, waits


def _computing_app_waits(service: FeedbackService, run_in: str) -> float:
    """Seconds that a sleep of a millisecond takes too long, at the median: other work on the machine is not meant."""
    late: list[float] = []
    with made(service, sent.computing, run_in=run_in) as (runner, _):
        ask = runner.wrap(lambda seconds: 1)
        ask(0.0)
        eventually(lambda: runner.counters()["completed"] == 1)

        async def wait() -> None:
            while runner.counters()["completed"] < 2:
                began = time.perf_counter()
                await asyncio.sleep(0.001)
                late.append(time.perf_counter() - began - 0.001)

        ask(1.0)
        asyncio.run(wait())
    return sorted(late)[len(late) // 2]


def children_of(pid: int) -> list[int]:
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            stat = each.read_text()
        except OSError:
            continue
        if "shadow_process" in (each.parent / "cmdline").read_text() and int(stat.rpartition(")")[2].split()[1]) == pid:
            found.append(int(each.parent.name))
    return found
