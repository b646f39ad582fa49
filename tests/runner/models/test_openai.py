"""The model that a workflow gets where AgentScope is not installed: an openai client, bound to its run."""

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.clients.packages import PLACES, ROOT
from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer.running import RunningExplorer, eventually
from tests.runner.models.workflows.in_process import ask_five_times
from tuneloop.runner.errors import ExtraMissing
from tuneloop.runner.models.bound_model import CallDefaults, ModelEndpoint, make_model, wanted_client
from tuneloop.runner.models.run import Run
from tuneloop.runner.models.transport import close_connections

pytestmark = pytest.mark.contract

ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "3+4="}], "max_tokens": 12}
DEFAULTS = CallDefaults(model_name=MODEL)
SCRIPT = Path(__file__).parent / "workflows" / "openai_clients.py"


def run_of(explorer: RunningExplorer, number: object = 0) -> Run:
    return Run(service=explorer.url, task_id="task", run_id=str(number))


@pytest.mark.parametrize("package", ["openai1", "openai3", None])
def test_calls_are_taken_down_and_have_the_defaults(
    explorer: RunningExplorer, double: EngineDouble, package: str | None
) -> None:
    python = PLACES / package / "bin" / "python" if package else sys.executable
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment["PYTHONPATH"] = str(ROOT / "build" / "links")
    done = subprocess.run(
        [str(python), str(SCRIPT), explorer.url], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    [plain, asynchronous] = json.loads(done.stdout)
    eventually(lambda: len(explorer.exchanges()) == 4)
    kept = {each.msg_id: each.run_id for each in explorer.exchanges()}
    assert [[kept[call[0]], call[1]] for call in plain + asynchronous] == [["0", 200]] * 2 + [["1", 200]] * 2
    prompt, completion = plain[0][2:]
    assert prompt > 0
    assert completion > 0
    assert [call[2:] for call in plain + asynchronous] == [
        [prompt, completion],
        [None, None],  # a stream that was not asked what it cost
        [prompt, completion],
        [prompt, completion],
    ]
    bodies = [each.body for each in double.chats]
    assert [each["temperature"] for each in bodies] == [0.5, 0.25, 0.5, 0.5]
    assert [each["top_p"] for each in bodies] == [0.9] * 4
    assert [each.get("max_tokens") for each in bodies] == [50, 50, 50, None]
    assert [each["chat_template_kwargs"]["enable_thinking"] for each in bodies] == [False, False, False, True]


@pytest.mark.parametrize("sync", [False, True])
def test_a_client_is_of_the_library_that_openai_has_its_own_of(sync: bool) -> None:
    """One of another library would have each request and each answer converted."""
    made = make_model(ModelEndpoint(base_url="http://there/v1"), DEFAULTS, sync=sync)
    stock = (openai.OpenAI if sync else openai.AsyncOpenAI)(api_key="none")
    assert isinstance(stock._client, type(made._client))


async def test_many_runs_in_one_event_loop_each_have_their_own_calls(explorer: RunningExplorer) -> None:
    async def attempt(run: Run) -> None:
        model = make_model(run, DEFAULTS, client="async_openai")
        for _ in range(3):
            await model.chat.completions.create(**ASKED, user=f"run {run.run_id}")

    runs = [run_of(explorer, number) for number in range(100)]
    await asyncio.gather(*map(attempt, runs))
    await close_connections()
    _assert_apart(explorer, runs, calls=3)


def test_many_runs_in_threads_each_have_their_own_calls(explorer: RunningExplorer) -> None:
    def attempt(run: Run) -> None:
        model = make_model(run, DEFAULTS, sync=True)
        assert isinstance(model, openai.OpenAI)
        for _ in range(3):
            model.chat.completions.create(**ASKED, user=f"run {run.run_id}")

    def attempt_in_a_loop(run: Run) -> None:
        async def ask() -> None:
            model = make_model(run, DEFAULTS)
            for _ in range(3):
                await model.chat.completions.create(**ASKED, user=f"run {run.run_id}")
            await close_connections()

        asyncio.run(ask())

    runs = [run_of(explorer, number) for number in range(64)]
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(attempt, runs[:32]))
        list(pool.map(attempt_in_a_loop, runs[32:]))
    _assert_apart(explorer, runs, calls=3)


def test_an_event_loop_that_ends_leaves_no_connection_open(explorer: RunningExplorer) -> None:
    """As those of workflows in threads that call `asyncio.run` for an async model."""

    async def ask() -> None:
        model = make_model(run_of(explorer, 0), DEFAULTS, client="async_openai")
        await asyncio.gather(*(model.chat.completions.create(**ASKED) for _ in range(2)))

    def open_sockets() -> int:
        return sum("socket" in os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())

    asyncio.run(ask())
    before = open_sockets()
    for _ in range(10):
        asyncio.run(ask())
    assert open_sockets() <= before + 2  # the explorer is in this process, and has ends of its own


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_runs_in_processes_each_have_their_own_calls(explorer: RunningExplorer, start: str) -> None:
    first = run_of(explorer, "parent")
    make_model(first, DEFAULTS, sync=True).chat.completions.create(**ASKED, user="run parent")
    runs = [run_of(explorer, number) for number in range(3)]
    context = multiprocessing.get_context(start)
    processes = [context.Process(target=ask_five_times, args=(run,)) for run in runs]
    for each in processes:
        each.start()
    make_model(first, DEFAULTS, sync=True).chat.completions.create(**ASKED, user="run parent")
    for each in processes:
        each.join(300)
        assert each.exitcode == 0
    eventually(lambda: len(explorer.exchanges()) == 2 + 3 * 5)
    assert Counter(each.run_id for each in explorer.exchanges()) == {"parent": 2, **{str(one): 5 for one in range(3)}}
    assert all(each.user == f"run {each.run_id}" for each in explorer.exchanges())
    assert len(first.calls) == 2


def _assert_apart(explorer: RunningExplorer, runs: list[Run], *, calls: int) -> None:
    eventually(lambda: len(explorer.exchanges()) == len(runs) * calls)
    for kept in explorer.exchanges():
        assert kept.user == f"run {kept.run_id}"
    by_run = {run.run_id: {each.msg_id for each in explorer.exchanges() if each.run_id == run.run_id} for run in runs}
    assert {run.run_id: set(run.calls.msg_ids) for run in runs} == by_run


def test_a_run_that_called_no_model_says_so(explorer: RunningExplorer, double: EngineDouble) -> None:
    run = run_of(explorer)
    model = make_model(run, DEFAULTS, sync=True)
    model.models.list()
    assert not run.calls
    with pytest.raises(openai.NotFoundError):
        model.chat.completions.create(**ASKED | {"model": "other"})
    assert (len(run.calls), [each.status for each in run.calls]) == (0, [404])
    double.status = 500
    with pytest.raises(openai.APIStatusError):
        model.with_options(max_retries=0).chat.completions.create(**ASKED)
    assert not run.calls
    double.status = 200
    reply = model.chat.completions.create(**ASKED)
    assert (run.calls.msg_ids, run.calls.model_versions) == ([reply.id], [0])
    assert (run.calls.prompt_tokens, run.calls.completion_tokens) == (
        reply.usage.prompt_tokens,
        reply.usage.completion_tokens,
    )


def test_a_service_that_is_away_is_no_answer() -> None:
    run = Run(service="http://127.0.0.1:9", task_id="t", run_id="0")
    with pytest.raises(openai.APIConnectionError):
        make_model(run, DEFAULTS, sync=True).with_options(max_retries=0).chat.completions.create(**ASKED)
    assert [(each.status, each.answered) for each in run.calls] == [(0, False)]


def test_the_other_routes_are_taken_down_too(explorer: RunningExplorer) -> None:
    run = run_of(explorer)
    model = make_model(run, DEFAULTS, sync=True)
    whole = model.responses.create(model=MODEL, input="3+4=")
    list(model.responses.create(model=MODEL, input="3+4=", stream=True))
    made = list(run.calls)
    assert made[0].msg_id == whole.id
    assert [each.path.rpartition("/")[2] for each in made] == ["responses", "responses"]
    assert [each.completion_tokens for each in made] == [whole.usage.output_tokens] * 2


def test_any_other_service_is_called_unbound(explorer: RunningExplorer) -> None:
    bound = ModelEndpoint(base_url=f"{explorer.url}/v1")
    make_model(bound, DEFAULTS, client="openai").chat.completions.create(**ASKED)
    assert len(bound.calls) == 1
    assert explorer.exchanges()[0].run_id is None


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Run(service="http://there", task_id="t", run_id="0")
    with pytest.raises(ExtraMissing, match=r"runner\[agentscope\]"):
        make_model(run, DEFAULTS, client="agentscope")
    (tmp_path / "agentscope").mkdir()
    (tmp_path / "agentscope/__init__.py").write_text("from mcp.client.streamable_http import streamablehttp_client\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ExtraMissing, match=r"AgentScope is installed, and cannot .*mcp.*runner\[agentscope1\]"):
        make_model(run, DEFAULTS, client="agentscope")
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ExtraMissing, match=r"runner\[openai\]"):
        make_model(run, CallDefaults(model_name="another"), client="openai")


def test_the_annotation_of_model_says_which_one_is_wanted() -> None:
    async def one(task: object, model: openai.AsyncOpenAI) -> None: ...
    def two(task: object, model: "openai.OpenAI") -> None: ...
    async def three(task: object, model: Any) -> None: ...
    def four(task: object) -> None: ...

    kinds = [wanted_client(each) for each in (one, two, three, four)]
    assert kinds == [("async_openai", False), ("openai", True), ("auto", False), ("auto", True)]
