"""Nothing is imported from the folder in which users start us, whatever lies there."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.doubles.engine import MODEL
from tests.install.foreign import Foreign
from tests.install.wheels import ROOT
from tests.loop.harness.services import (
    Service,
    free_port,
    ledger_of,
    make_model,
    started,
    wait_for,
    wait_until_served,
    write_settings,
)

ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "3+4="}], "max_tokens": 8}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    process = started([sys.executable, "-m", "tests.doubles.engine_process", str(port)], log)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def settings_file(folder: Path, model: Path, mode: str, **rollout_model: Any) -> Path:
    folder.mkdir()
    path = write_settings(folder, model, mode=mode, buffer={"train_batch_size": 4})
    values = yaml.safe_load(path.read_text())
    values["model"]["served_model_name"] = MODEL
    values["explorer"]["rollout_model"] |= rollout_model
    path.write_text(yaml.safe_dump(values))
    return path


def test_the_folder_is_as_bad_as_it_is_meant_to_be(foreign: Foreign) -> None:
    """Python that does look there finds a module of the standard library's name."""
    done = subprocess.run([sys.executable, "-c", "import http"], cwd=foreign.folder, capture_output=True, check=False)
    assert (done.returncode, foreign.imported()) == (1, ["http"])


def test_commands_import_nothing_from_it(
    foreign: Foreign, model: Path, tmp_path: Path, installed: Path, environment: dict[str, str]
) -> None:
    config = settings_file(tmp_path / "experiment", model, "both")

    def tuneloop(*arguments: object) -> str:
        command = [str(installed / "bin" / "tuneloop"), *map(str, arguments)]
        done = subprocess.run(
            command, cwd=foreign.folder, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "is valid" in tuneloop("validate", config)
    assert "newest" in tuneloop("db", "upgrade", "--config", config)
    file = tmp_path / "exported.jsonl"
    assert "0 rows" in tuneloop("export", "--config", config, "--format", "experiences", "--to", file)
    assert file.exists()
    tuneloop("doctor", "--config", config)
    tuneloop("versions", "list", "--config", config)
    assert foreign.imported() == []


@pytest.mark.parametrize(("mode", "begun"), [("serve", "listening"), ("train", "trainer_ready")])
def test_a_service_imports_nothing_from_it(
    mode: str, begun: str, foreign: Foreign, model: Path, tmp_path: Path, engine_url: str, environment: dict[str, str]
) -> None:
    config = settings_file(tmp_path / "experiment", model, mode, engine_urls=[engine_url])
    service = Service(config, "run", cwd=foreign.folder, environment=environment)
    try:
        if mode == "serve":
            service.wait_until_ready()
            assert httpx.post(f"{service.url}/v1/chat/completions", json=ASKED, timeout=60).status_code == 200
        wait_for(lambda: begun in service.log.read_text(), why=f"it did not begin: {service.log.read_text()}")
    finally:
        assert service.stop() == 0, service.log.read_text()
    assert foreign.imported() == []


def test_the_whole_loop_imports_nothing_from_it(
    foreign: Foreign, model: Path, tmp_path: Path, engine_url: str, environment: dict[str, str]
) -> None:
    """Until a version that was trained is served: workers and the process that verifies checkpoints were started."""
    config = settings_file(tmp_path / "experiment", model, "both", engine_urls=[engine_url])
    both = Service(config, "run", cwd=foreign.folder, environment=environment)
    try:
        both.wait_until_ready()
        _use(both)
        ledger = ledger_of(both.settings)
        wait_for(lambda: len(ledger.versions.all()) > 1, why=f"nothing is trained: {both.log.read_text()}")
        wait_until_served(ledger, 1)
        ledger.close()
    finally:
        assert both.stop() == 0, both.log.read_text()
    assert foreign.imported() == []


def _use(service: Service) -> None:
    """Ask, and say how good the answers are."""
    for number in range(4):
        reply = httpx.post(f"{service.url}/v1/chat/completions", json=ASKED, timeout=60).raise_for_status().json()
        feedback = {"msg_ids": [reply["id"]], "reward": float(number % 2)}
        httpx.post(f"{service.url}/feedback", json=feedback, timeout=60).raise_for_status()
    wait_for(lambda: httpx.post(f"{service.url}/commit", timeout=60).status_code == 200)


@pytest.mark.soak
@pytest.mark.vllm
def test_an_engine_imports_nothing_from_it(
    foreign: Foreign, model: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """The engine's own processes are started as on GPUs: each by an interpreter of its own."""
    config = settings_file(tmp_path / "experiment", model, "serve")
    spawning = environment | {"VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"}
    service = Service(config, "run", cwd=foreign.folder, environment=spawning)
    try:
        service.wait_until_ready()
        assert httpx.post(f"{service.url}/v1/chat/completions", json=ASKED, timeout=60).status_code == 200
    finally:
        assert service.stop() == 0, service.log.read_text()
    assert foreign.imported() == []


def _commands(tree: ast.Module) -> Iterator[list[str]]:
    """The literal words of each list or call that starts a module with this interpreter."""
    for node in ast.walk(tree):
        parts = node.elts if isinstance(node, ast.List | ast.Tuple) else node.args if isinstance(node, ast.Call) else []
        words = [ast.unparse(part) for part in parts]
        if "sys.executable" in words and "'-m'" in words:
            yield words[words.index("sys.executable") :]


def test_each_process_that_is_started_is_told_not_to_look_there() -> None:
    commands = {
        str(file.relative_to(ROOT)): words
        for package in ("cli", "explorer", "shared", "trainer")
        for file in sorted((ROOT / package).rglob("*.py"))
        for words in _commands(ast.parse(file.read_text()))
    }
    assert len(commands) >= 6
    assert {file: words for file, words in commands.items() if words[1] != "'-P'"} == {}
