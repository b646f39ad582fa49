"""The benchmark of learning: what is sampled, what is left for the learner, what is kept, and what is drawn."""

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks.learning import __main__ as learning
from benchmarks.learning import offline, ours
from benchmarks.learning.curves import mean_of, panels
from benchmarks.learning.offline import Row, pairs
from benchmarks.learning.plan import SEEDS, Wanted, everything
from benchmarks.learning.play import Player
from benchmarks.learning.report import draw, tables
from examples.sums.model import save
from examples.tasks.methods import METHODS
from examples.tasks.start import TASKS
from examples.tasks.warmup import build


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A start model that knows nothing."""
    folder = tmp_path_factory.mktemp("learning") / "start" / "sums-0"
    save(*build(0), folder)
    (folder / "warmed_up.json").write_text("{}")
    return folder


def logprobs(network: torch.nn.Module, prompt: list[int], ids: list[int]) -> list[float]:
    with torch.no_grad():
        logits = network(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(logits.log_softmax(1), ids, strict=True)]


@pytest.mark.parametrize("task", ["sums", "calculator"])
def test_sampled_log_probabilities_are_the_models(task: str) -> None:
    network, words = build(3)
    played = Player(TASKS[task], network, words, seed=0).play(TASKS[task].questions()[100 - 8 : 100])
    for said in (said for run in played for said in run.replies):
        assert np.allclose(said.logprobs, logprobs(network, said.prompt, said.ids), atol=1e-4)
        assert words.eos_token_id not in said.ids[:-1]
        assert 1 <= len(said.ids) <= TASKS[task].max_tokens


def test_a_run_learns_from_the_replies_it_asked_for(base: Path) -> None:
    wanted = Wanted(place="ours", method="reinforce", samples=128, coin=True)
    line = ours.learn(wanted, TASKS["sums"], base)
    assert line["steps"] == 2
    assert [at for at, _ in line["curve"]] == [64, 128]
    assert line["before"] == 0.0


def test_a_run_that_is_taught_asks_its_teacher(base: Path) -> None:
    shutil.copytree(base, base.with_name("sums-0-teacher"))
    line = ours.learn(Wanted(place="ours", method="distill", samples=64), TASKS["sums"], base)
    assert line["steps"] == 1
    assert line["metrics"]["actor/teacher_kl"] == pytest.approx(0.0, abs=1e-5)  # It is itself.


def test_late_means_that_so_many_batches_wait(base: Path) -> None:
    settings = ours.settings_of(Wanted(place="ours", method="reinforce"), TASKS["sums"], base)
    learner = ours.snapshot.load(settings, None)
    words = ours.AutoTokenizer.from_pretrained(base)
    source = iter(ours.Online(Wanted(place="ours", method="reinforce", late=2), TASKS["sums"], learner, words))
    samples, _, sampled = next(source)
    assert sampled == 3 * len(samples) == 192


def test_settings_of_a_run_are_the_methods_own_and_the_changes(base: Path) -> None:
    for method in METHODS:
        wanted = Wanted(place="ours", method=method, changes=("optimizer.lr=1e-6",))
        settings = ours.settings_of(wanted, TASKS["sums"], base)
        assert (settings.algorithm.algorithm_type, settings.algorithm.optimizer.lr) == (method, 1e-6)


def test_offline_replies_come_in_groups_and_are_sampled_once(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "replies.jsonl"
    ours.write_replies(file, TASKS["sums"], base, seed=0, samples=64)
    first = file.read_bytes()
    found = offline.rows(file)
    assert len(found) == 64
    assert len({row.task_id for row in found}) == 8
    ours.write_replies(file, TASKS["sums"], base, seed=1, samples=64)
    assert file.read_bytes() == first


def test_pairs_are_of_one_question_and_never_of_equals() -> None:
    rewards = {"a": [0.0, 1.0, 1.0, 0.0, 0.0], "b": [1.0, 1.0], "c": [0.0, 0.5, 1.0]}
    replies = [Row(name, [1], [2], [0.0], reward) for name, each in rewards.items() for reward in each]
    found = [(chosen.task_id, chosen.reward, rejected.reward) for chosen, rejected in pairs(replies)]
    assert found == [("a", 1.0, 0.0), ("a", 1.0, 0.0), ("c", 1.0, 0.0)]


def test_the_whole_has_every_seed_and_no_run_twice() -> None:
    plan = list(everything())
    names = [wanted.name for wanted in plan]
    assert len(set(names)) == len(names)
    kinds = {wanted.kind for wanted in plan}
    assert {f"{kind}-{seed}" for kind in kinds for seed in SEEDS} == set(names)


def line(kind: str, seed: int, after: float) -> dict[str, object]:
    curve = [[at, after * at / 4096] for at in range(64, 4097, 64)]
    return {"name": f"{kind}-{seed}", "kind": kind, "seed": seed, "before": 0.3, "after": after, "curve": curve}


def test_the_report_compares_with_the_best_of_the_rivals_rates(tmp_path: Path) -> None:
    lines = [line("ours-sums-grpo-4096", seed, 0.9) for seed in SEEDS]
    lines += [line(f"trl-sums-grpo-lr={rate}-4096", 0, after) for rate, after in (("1e-4", 0.7), ("5e-4", 0.6))]
    assert "| ours-sums-grpo-4096 | 0.30 | 0.900 0.900 0.900 | 0.900 |" in tables(lines)
    assert "| grpo | 0.900 | 0.700 (1e-4) | +0.200 |" in tables(lines)
    draw(lines, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["in_process.svg"]
    ElementTree.parse(tmp_path / "in_process.svg")


def test_a_picture_has_a_line_for_each_seed_and_one_for_the_mean() -> None:
    curves = {"a<b": {"x": [[[10, 0.0], [20, 1.0]], [[10, 1.0], [20, 1.0]]]}}
    picture = ElementTree.fromstring(panels("t & t", curves, most=20, unit="replies"))
    assert len(picture.findall(".//{*}polyline")) == 3
    assert [round(at, 1) for at, _ in mean_of(curves["a<b"]["x"], most=20)] == [9.6, 19.6]
    assert [share for _, share in mean_of(curves["a<b"]["x"], most=20)] == [0.5, 1.0]


def test_a_run_that_is_there_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    done = line("ours-sums-ppo-4096", 0, 0.9)
    (tmp_path / "runs" / "ours-sums-ppo-4096-0.json").write_text(json.dumps(done))
    monkeypatch.setattr("sys.argv", ["learning", "ours", "ppo", "--out", str(tmp_path)])
    assert learning.main() == 0
    assert "0.300 -> 0.900" in capsys.readouterr().out


def test_a_run_that_fails_is_said_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], base: Path
) -> None:
    monkeypatch.setattr(learning, "start", lambda *_: base)
    monkeypatch.setattr("sys.argv", ["learning", "trl", "grpo", "--out", str(tmp_path)])
    assert learning.main() == 1
    assert "name the python" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
