"""What is shown: curves for TensorBoard, and the examples of docs/tune.md."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.clients.packages import PLACES, ROOT
from tests.doubles.serving import serving
from tests.house.documents.page_files import DOCS, python_of
from tests.runner.tuning.interrupting.resumed import guess
from tests.runner.tuning.service_double import ServiceDouble, knows_more_with_every_version
from tuneloop.runner import AlgorithmConfig, tune
from tuneloop.runner.tuning.views import interval_of

TASKS = [{"question": f"{n}+1"} for n in range(4)]


def test_curves_are_written_where_tensorboard_finds_them_and_the_page_names_them(tmp_path: Path) -> None:
    with serving(ServiceDouble()) as url:
        result = tune(
            workflow_func=guess,
            train_dataset=TASKS,
            eval_dataset=TASKS,
            algorithm=AlgorithmConfig(group_size=2, batch_size=2),
            service=url,
            checkpoint_root_dir=tmp_path,
            experiment_name="curves",
        )
    assert result.tensorboard == result.folder / "monitor" / "tensorboard"
    assert re.fullmatch(r"curves-\d{14}", result.folder.name)
    curves = EventAccumulator(str(result.tensorboard / "runner"))
    curves.Reload()
    names = set(curves.Tags()["scalars"])
    rows = (DOCS / "tune.md").read_text().split("|curve|is|")[1].split("\n\n")[0]
    assert {name.replace("metrics/luck", "metrics/{name}") for name in names} == set(
        re.findall(r"`([a-z_]+/[a-z_/{}]+)`", rows)
    )
    assert [point.step for point in curves.Scalars("rollout/reward_mean")] == [1, 2]
    assert [point.step for point in curves.Scalars("evaluation/reward_mean")] == [0, 2]
    assert result.history[0].tokens == 4 * 2 * 2, "four runs of two calls of two tokens"


@pytest.mark.parametrize(
    ("rewards", "low", "high"),
    [
        ([1.0] * 20, 0.839, 1.0),
        ([0.0, 1.0] * 50, 0.404, 0.596),
        ([1.0, 2.0, 3.0, 4.0], 0.446, 4.554),
        ([float(n % 5) for n in range(50)], 1.594, 2.406),
    ],
)
def test_the_interval_is_wilsons_of_binary_rewards_and_students_of_others(
    rewards: list[float], low: float, high: float
) -> None:
    found = interval_of(rewards)
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))


WITH_AGENTSCOPE, *WITH_OPENAI = python_of("tune.md")[:3]


@pytest.mark.parametrize("block", WITH_OPENAI, ids=("alone", "several models"))
def test_the_examples_of_the_page_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = ServiceDouble(), ServiceDouble()
    with serving(one) as url, serving(other) as second:
        code = block.replace("http://localhost:8010", url).replace("http://localhost:8011", second)
        exec(code, {})  # noqa: S102 - our own page
    assert one.version == 2
    assert other.version == (2 if "villagers" in block else 0)


def test_the_first_example_runs_with_agentscope(tmp_path: Path) -> None:
    python = PLACES / "agentscope1" / "bin" / "python"
    if not python.exists():
        pytest.skip("agentscope1 is not installed: scripts/install-clients")
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment["PYTHONPATH"] = f"{ROOT / 'build' / 'links'}:{environment.get('PYTHONPATH', '')}"

    def answer(parts: Any, version: int, call: int) -> str:
        return knows_more_with_every_version(parts[0]["text"], version, call)

    service = ServiceDouble(answer=answer)
    with serving(service) as url:
        command = [str(python), "-c", WITH_AGENTSCOPE.replace("http://localhost:8010", url)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert service.version == 2
    assert len(service.calls) == 8 * 4 + 2 * 8, "two steps, and an evaluation before and after"
