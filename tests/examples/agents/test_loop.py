"""The examples through the whole loop: one step always, and the long versions in which their agents learn."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import httpx
import pytest

import examples.email_search.main as email_search
import examples.json_format.main as json_format
import examples.math_agent.main as math_agent
import examples.werewolf.both_sides as both_sides
import examples.werewolf.main as werewolf
from benchmarks.learning import agents
from examples.math_agent.world import Problems
from examples.worlds.schooling import Schooling
from examples.worlds.start import Beginner, start_model
from tests.loop.harness.bare_engine import KEY, engine_on, put_weights, url_of
from tests.loop.harness.services import free_port

Means = Mapping[str, float]

ROOT = Path(__file__).parent.parent.parent.parent
GIVEN = ("--steps", "1", "--batch", "2", "--group", "2", "--held-out", "4")

#: What three seeds come to on average, on held-out tasks.
GOALS: Mapping[str, Callable[[Means, Means], bool]] = {
    "math_agent": lambda before, after: (
        after["accuracy"] >= before["accuracy"] + 0.35 and after["steps"] <= 0.8 * before["steps"]
    ),
    "email_search": lambda before, after: after["tools"] >= 0.9 and after["arguments"] >= 0.85,
    "werewolf": lambda before, after: after["wins"] >= 0.75,
    "json_format": lambda before, after: after["format"] >= max(0.8, before["format"] + 0.3),
}


#: Tied, as most small models are: an engine that takes up a version must renew head and embeddings.
NOTHING = Beginner(is_tied=True, hidden=32, layers=1, schooling=Schooling(early_steps=1, late_steps=0, batch=1))


#: What the examples have their model served as.
NAMES = ("email_search", "json_format", "math_agent", "werewolf")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start_model(Problems(), NOTHING, tmp_path_factory.mktemp("start"), seed=0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, start: Path) -> Iterator[httpx.Client]:
    """One that all examples of one model attach to: to start it takes longer than the step that they make."""
    arguments = ["--served-model-name", *NAMES, "--api-key", KEY, "--max-model-len", "4096", "--enable-scale-out"]
    folder = tmp_path_factory.mktemp("engine")
    with engine_on(free_port(), folder, start, dtype="bfloat16", engine_args=arguments) as client:
        yield client


@pytest.fixture
def attached(engine: httpx.Client, start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The services that tune() starts find the engine in their environment, with the weights of the start model."""
    put_weights(engine, start)
    section = "TUNELOOP__EXPLORER__ROLLOUT_MODEL"
    monkeypatch.setenv(f"{section}__ENGINE_URLS", json.dumps([url_of(engine)]))
    monkeypatch.setenv(f"{section}__ENGINE_KEY", KEY)
    monkeypatch.setattr("examples.worlds.warmup.share_right", lambda *_: 0.0)


@pytest.mark.vllm
@pytest.mark.usefixtures("attached")
@pytest.mark.parametrize(
    "example",
    [
        email_search,
        json_format,
        # It makes a step below, in the environment of its framework.
        pytest.param(math_agent, marks=pytest.mark.soak),
        werewolf,
    ],
    ids=lambda each: each.NAME,
)
def test_an_example_makes_a_step_with_a_model_that_was_taught_nothing(
    example: ModuleType, start: Path, tmp_path: Path
) -> None:
    example.main([*GIVEN, "--model", str(start), "--dir", str(tmp_path / "run")])
    require_a_step(tmp_path / "run")


@pytest.mark.vllm
@pytest.mark.usefixtures("attached")
@pytest.mark.parametrize(
    ("example", "place"), [("math_agent", "agentscope2"), ("langchain_agent", "langchain"), ("openai_agents", "agents")]
)
def test_an_example_makes_a_step_in_the_environment_of_its_framework(
    example: str, place: str, start: Path, tmp_path: Path
) -> None:
    """The runner alone is in that environment; the service's command is found in PATH."""
    python = ROOT / ".venv" / "clients" / place / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{place} is not installed: run scripts/install-clients")
    (tmp_path / "links" / "tuneloop").mkdir(parents=True)
    (tmp_path / "links" / "tuneloop" / "runner").symlink_to(ROOT / "runner")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "links"), str(ROOT)]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    command = [python, "-m", f"examples.{example}.main", *GIVEN, "--model", start, "--dir", tmp_path / "run"]
    ended = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    require_a_step(tmp_path / "run")


def require_a_step(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert [each["step"] for each in summary["evaluations"]] == [0, 1]
    assert summary["failures"] == {}
    assert [step for step, _ in summary["curve"]] == [1]


@pytest.mark.soak
@pytest.mark.vllm
def test_both_sides_of_a_game_are_policies_of_one_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both_sides, "BEGINNER", NOTHING)
    monkeypatch.setattr("examples.worlds.warmup.share_right", lambda *_: 0.0)
    given = ["--steps", "1", "--batch", "16", "--group", "4", "--held-out", "2", "--dir", str(tmp_path / "run")]
    both_sides.main([*given, "--start", str(tmp_path / "start")])
    require_a_step(tmp_path / "run")
    assert [*(tmp_path / "run/service").rglob("global_step_*")]  # without contrast there is none: of 4 games often


def means(folder: Path, reward: str, when: str) -> dict[str, float]:
    lines = [line for line in json.loads((folder / "agents.json").read_text()).values() if line["reward"] == reward]
    assert len(lines) == 3
    return {name: sum(line[when][name] for line in lines) / 3 for name in lines[0][when]}


@pytest.mark.vllm
@pytest.mark.soak
@pytest.mark.parametrize("example", agents.EXAMPLES)
def test_an_agent_comes_to_its_goal_on_three_seeds_and_not_by_a_coin(example: str, tmp_path: Path) -> None:
    given = ["--example", example, "--seeds", "0", "1", "2", "--reward", "judge", "random"]
    assert agents.main([*given, "--out", str(tmp_path), "--work", str(tmp_path / "work")]) == 0
    assert GOALS[example](means(tmp_path, "judge", "before"), means(tmp_path, "judge", "after"))
    assert not GOALS[example](means(tmp_path, "random", "before"), means(tmp_path, "random", "after"))
