"""`tuneloop evaluate`: versions of a running service, asked the same tasks."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from tests.cli.test_versions import file as file
from tests.cli.test_versions import ledger as ledger
from tests.databases import put_file
from tests.doubles.engine import EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.conftest import double as double
from tests.explorer.conftest import doubles as doubles
from tests.explorer.conftest import places as places
from tests.explorer.conftest import running_explorer as running_explorer
from tests.explorer.conftest import warm_verifier as warm_verifier
from tests.explorer.running import RunningExplorer
from tuneloop.cli.evaluate import AskedVersion, ComparedTask, ScoredAnswer, TaskComparison
from tuneloop.cli.main import app
from tuneloop.shared.errors import EnvironmentRefused, VersionRefused
from tuneloop.shared.evaluation.tasks import Task
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.loader import load_settings

pytestmark = pytest.mark.contract

#: What a version replies to the task of a number.
Replies = Callable[[int, int], str]


@contextmanager
def service(replies: Replies, asked: list[dict[str, Any]] | None = None) -> Iterator[str]:
    """A service that serves version 2 as `model` and others as `model@N`, but no 3, over HTTP; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if asked is not None:
                asked.append(body | {"key": self.headers.get("authorization")})
            _, at, number = body["model"].partition("@")
            version = int(number) if at else 2
            question = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
            reply = replies(version, int(question))
            choice = {"text": reply} if "prompt" in body else {"message": {"role": "assistant", "content": reply}}
            answer: dict[str, Any] = {"choices": [choice]}
            if version == 3:
                answer = {"error": {"message": "version 3 is not served; these are: 2", "code": "model_not_found"}}
            data = json.dumps(answer).encode()
            self.send_response(404 if version == 3 else 200)
            self.send_header("x-tuneloop-version", str(version))
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Forty tasks, the first half of them of the slice low."""
    path = tmp_path / "tasks.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": str(number)}], "answer": "yes"}
        | ({"slice": "low"} if number < 20 else {})
        for number in range(39)
    ]
    path.write_text("\n".join(json.dumps(each) for each in [*lines, {"prompt": "39", "answer": "yes"}]))
    return path


def evaluate(file: Path, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments), "-c", str(file)])


def test_versions_are_compared_task_by_task(file: Path, ledger: Ledger, tasks: Path) -> None:
    """The base is right on a quarter of them, the champion on those and another half: the difference is certain."""
    asked: list[dict[str, Any]] = []
    with service(lambda version, n: "yes" if n % 4 < 1 + version else "no", asked) as url:
        told = evaluate(file, tasks, "--service", url)
        as_json = evaluate(file, tasks, "--service", url, "--json", "--fail-if-worse")
        worse = evaluate(file, tasks, "--service", url, "--versions", "champion,base", "--fail-if-worse")
    assert told.exit_code == 0, told.output
    lines = told.output.splitlines()
    assert lines[0].startswith("base (0): 0.250 [0.1")
    assert lines[1].startswith("champion (2): 0.750 [0.5")
    assert "; +0.500 [+0.343, +0.657] against base" in lines[1]
    assert [line.split(":")[0] for line in lines[2:]] == ["base (0) on low", "champion (2) on low"]
    found = json.loads(as_json.output)
    assert (found["complete"], found["tasks"], found["asked"], found["failures"]) == (True, 40, 40, [])
    assert [(each["name"], each["slice"], each["tasks"], each["worse"]) for each in found["scores"]] == [
        ("base", None, 40, False),
        ("champion", None, 40, False),
        ("base", "low", 20, False),
        ("champion", "low", 20, False),
    ]
    assert (as_json.exit_code, worse.exit_code) == (0, 1)
    assert "worse" in worse.output
    # Nothing of it is stored or trained on, and each reply is the most probable one.
    aside = {"store": False, "metadata": {"tuneloop_train": "false"}, "temperature": 0.0}
    assert all(aside.items() <= each.items() for each in asked)


def test_a_difference_that_may_be_chance_fails_nothing(file: Path, ledger: Ledger, tasks: Path) -> None:
    with service(lambda version, n: "no" if version == 0 and n == 1 else "yes") as url:
        told = evaluate(file, tasks, "--service", url, "--versions", "champion,base", "--fail-if-worse")
    assert told.exit_code == 0, told.output


def test_the_page_is_one_file_in_which_nothing_is_run(file: Path, ledger: Ledger, tasks: Path, tmp_path: Path) -> None:
    page = tmp_path / "answers.html"
    with service(lambda version, n: "<script>alert(1)</script>\u202eyes" if n == 7 else "yes") as url:
        assert evaluate(file, tasks, "--service", url, "--html", page).exit_code == 0
    text = page.read_text()
    assert "<script" not in text
    assert "\u202e" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert not re.search("https?://|src=|href=", text)
    assert text.count("<tr>") == 41


def test_a_version_that_is_not_served_is_told_with_its_cure(file: Path, ledger: Ledger, tasks: Path) -> None:
    with service(lambda version, n: "yes") as url:
        told = evaluate(file, tasks, "--service", url, "--versions", "champion,3")
    assert told.exit_code == 1
    assert isinstance(told.exception, VersionRefused)
    assert "3: version 3 is not served; these are: 2; explorer.version_pins: true" in str(told.exception)
    assert "`tuneloop versions pin 3`" in str(told.exception)


@pytest.mark.parametrize("name", ["17", "nobody"])
def test_unknown_versions_are_refused(file: Path, ledger: Ledger, tasks: Path, name: str) -> None:
    told = evaluate(file, tasks, "--versions", f"base,{name}")
    assert isinstance(told.exception, VersionRefused)
    assert name in str(told.exception)


def test_no_service_and_broken_tasks_are_told(file: Path, ledger: Ledger, tasks: Path, tmp_path: Path) -> None:
    told = evaluate(file, tasks, "--service", "http://127.0.0.1:9")
    assert isinstance(told.exception, EnvironmentRefused)
    assert "no service answers at http://127.0.0.1:9" in str(told.exception)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "1", "answer": "1"}\n{"prompt": "2"}\n')
    told = evaluate(file, broken)
    assert "broken.jsonl, line 2: `answer` must be text" in str(told.exception)
    assert "monitor.evaluation.path" not in str(told.exception)


def test_a_task_that_one_version_does_not_answer_is_left_out_of_all_scores() -> None:
    versions = [AskedVersion("base", 0, "m@0"), AskedVersion("champion", 2, "m")]
    answers = [
        [ScoredAnswer("yes", 1.0), ScoredAnswer("yes", 1.0)],
        [ScoredAnswer("", 0.0, "500: broken"), ScoredAnswer("yes", 1.0)],
    ]
    tasks = [Task(1, "1", "yes", None), Task(2, "2", "yes", None)]
    found = TaskComparison(versions, [ComparedTask(*each) for each in zip(tasks, answers, strict=True)], 2)
    assert [each.score.mean for each in found.scores] == [1.0, 1.0]
    assert found.failures == ["line 2: base: 500: broken"]


def test_what_is_interrupted_says_so(file: Path, ledger: Ledger, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, main = [0], threading.current_thread()

    def interrupt(_: object, count: int) -> None:
        asked[0] += count
        if asked[0] >= 5:
            assert threading.current_thread() is main
            raise KeyboardInterrupt

    monkeypatch.setattr("tuneloop.cli.evaluate.counting", lambda label: _Counting(interrupt))
    with service(lambda version, n: "yes") as url:
        told = evaluate(file, tasks, "--service", url)
    assert told.exit_code == 1
    assert "of 40 tasks were asked; this is a part" in told.output


class _Counting:
    def __init__(self, count: Callable[[object, int], None]) -> None:
        self._count = count

    def __enter__(self) -> Callable[[int], None]:
        return lambda count: self._count(self, count)

    def __exit__(self, *_: object) -> None:
        pass


def test_a_real_explorer_answers(running_explorer: Run, double: EngineDouble, tasks: Path, tmp_path: Path) -> None:
    explorer: RunningExplorer = running_explorer(double)
    settings, before = explorer.settings, explorer.counts()
    put_file(url := f"sqlite:///{tmp_path}/copy.db", "migrated")
    values = {
        "checkpoint_root_dir": str(tmp_path / "copy"),
        "model": {"model_path": str(settings.model.model_path), "served_model_name": settings.served_model_name},
        "buffer": {"trainer_input": {"experience_buffer": {"path": url}}},
    }
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(values))
    with closing(Ledger.of(load_settings(path))) as ledger:
        ledger.versions.ensure_base(settings.model.model_path)
        ledger.own(*(load_settings(path).project, load_settings(path).name))
    told = evaluate(path, tasks, "--service", explorer.url, "--json")
    assert told.exit_code == 0, (told.output, told.exception)
    assert json.loads(told.output)["asked"] == 40
    assert explorer.counts() == before  # nothing was recorded
