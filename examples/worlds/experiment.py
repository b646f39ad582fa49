"""Common parts of the examples: options, tasks as files, and the final report."""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.tasks.dialogue import Task
from examples.worlds.start import Beginner, start_model
from tuneloop.runner import JudgeOutput

#: Runs of the control get 0 or 1 by the toss of a coin.
COIN = (0.0, 1.0)


def write_tasks(folder: Path, *, train: Sequence[Mapping[str, Any]], test: Sequence[Mapping[str, Any]]) -> Path:
    """The folder with `train.jsonl` and `test.jsonl`, one task a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, tasks in (("train", train), ("test", test)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return folder


def options_of(name: str, *, steps: int, rate: float, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m examples.{name}.main")
    parser.add_argument("--model", help="a Hugging Face model; without it a tiny one is made, in minutes")
    parser.add_argument("--gpu", action="store_true", help="vLLM and the trainer on the first GPU")
    parser.add_argument("--gpu-share", type=float, default=0.05, help="of its memory, for vLLM")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=8, help="tasks of a step")
    parser.add_argument("--group", type=int, default=8, help="runs of a task")
    parser.add_argument("--rate", type=float, default=rate, help="learning rate; 1e-6 suits models from 0.5 B on")
    parser.add_argument("--evaluate-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--held-out", type=int, default=128, metavar="TASKS", help="evaluated on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reward", choices=("judge", "random"), default="judge", help="random: it must not learn")
    parser.add_argument("--dir", type=Path, default=Path(f"{name}-run"), help="where everything goes")
    parser.add_argument("--start", type=Path, default=Path("examples-start"), help="where start models are kept")
    return parser.parse_args(arguments)


@dataclass(frozen=True, slots=True)
class Experiment:
    """One call of tune() by an example, with its `options`. `name` is what the model is served as."""

    name: str
    options: argparse.Namespace

    def model_path(self, task: Task, beginner: Beginner) -> str:
        """The named model, otherwise the world's start model."""
        options = self.options
        if options.model:
            return str(options.model)
        return str(start_model(task, beginner, options.start, seed=options.seed, gpu=options.gpu))

    def record_verdict(self, output: JudgeOutput) -> JudgeOutput:
        """The verdict; the control replaces its reward by a coin toss and keeps the metrics."""
        if self.options.reward == "judge":
            return output
        return JudgeOutput(reward=random.choice(COIN), metrics=output.metrics)

    def settings(self) -> dict[str, Any]:
        """Changes of the settings that tune() writes: a tiny model's optimizer, and devices."""
        options, tiny = self.options, not self.options.model
        engine: dict[str, Any] = {"seed": options.seed, "enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
        trainer: dict[str, Any] = {"seed": options.seed, "max_checkpoints_to_keep": 3}
        if options.gpu:
            engine |= {"gpu_memory_utilization": options.gpu_share}
        else:
            engine |= {"enforce_eager": True, "single_process": True}
        if tiny or not options.gpu:
            # vLLM's measured share fails if others on the GPU free memory meanwhile
            engine |= {"kv_cache_memory_bytes": 256 << 20}
        if tiny:
            engine |= {"dtype": "float32", "enforce_eager": True, "api_servers": 1}
            trainer |= {"dtype": "float32", "device": "cuda" if options.gpu else "cpu"}
        return {
            "model": {"served_model_name": self.name},
            "cluster": {"node_num": 1, "gpu_per_node": int(options.gpu)},
            "explorer": {"rollout_model": engine},
            "trainer": trainer,
            "algorithm": {"optimizer": {"betas": [0.9, 0.99]}, "kl_coef": 0.0, "mini_batches": 2},
        }

    def report(self, result: Any) -> None:
        """Print the metrics before and after on held-out tasks, and write them to `summary.json`."""
        first, last = result.evaluations[0], result.evaluations[-1]
        print(f"{self.name}: {result.steps} steps, version {result.version}, {last.reward.count} held-out tasks")
        rows = {"reward": (first.reward.mean, last.reward.mean)}
        rows |= {name: (first.metrics[name], last.metrics.get(name, 0.0)) for name in first.metrics}
        for name, (before, after) in rows.items():
            print(f"  {name:12s} {before:7.3f} -> {after:7.3f}")
        self.options.dir.mkdir(parents=True, exist_ok=True)
        (self.options.dir / "summary.json").write_text(json.dumps(self.summary(result, rows)) + "\n")

    def summary(self, result: Any, rows: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
        """The result as JSON: `curve` has the mean reward of each step, `evaluations` the metrics of each version."""
        return {
            "example": self.name,
            "seed": self.options.seed,
            "reward": self.options.reward,
            "steps": result.steps,
            "version": result.version,
            "before": {name: before for name, (before, _) in rows.items()},
            "after": {name: after for name, (_, after) in rows.items()},
            "curve": [[each.step, each.reward.mean] for each in result.history if each.reward],
            "evaluations": [
                {"step": each.step, "reward": each.reward.mean, **each.metrics} for each in result.evaluations
            ],
            "seconds": round(sum(each.seconds for each in result.history), 1),
            "failures": dict(result.failures),
            "folder": str(result.folder),
        }
