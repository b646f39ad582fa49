"""Do agents learn? The examples through the whole loop: tune(), the explorer with vLLM, the trainer; several seeds.

    .venv/bin/python -m benchmarks.learning.agents --example math_agent --seeds 0 1 2 --out FOLDER
    .venv/bin/python -m benchmarks.learning.agents --reward random --gpu --parallel 4 --out FOLDER
    .venv/bin/python -m benchmarks.learning.agents --out FOLDER --report [--curves docs/examples]

What comes of a run is in FOLDER/agents.json as soon as it has ended; a run that is there is not made again. Each has
a folder of its own below --work, with its logs, and a port. One that is not done after --timeout seconds is stopped;
what it had evaluated by then is kept.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.learning.curves import Curve, panels

EXAMPLES = ("math_agent", "email_search", "werewolf", "json_format")
#: What is drawn of each: the metric, and what it is divided by to be a share.
DRAWN: Mapping[str, Mapping[str, float]] = {
    "math_agent": {"accuracy": 1.0, "format": 1.0, "steps": 10.0},
    "email_search": {"tools": 1.0, "arguments": 1.0, "recall": 1.0},
    "werewolf": {"wins": 1.0, "survival": 1.0},
    "json_format": {"format": 1.0},
}
_TAIL = 3000

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of an example."""

    example: str
    seed: int
    reward: str = "judge"
    marks: str = ""

    @property
    def name(self) -> str:
        """The folder's name."""
        return "-".join(filter(None, (self.example, self.reward, self.marks, str(self.seed))))


class Results:
    """The lines of all finished trials, in one file that is always complete."""

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, threading.Lock()
        self.lines: dict[str, Line] = json.loads(file.read_text()) if file.exists() else {}

    def add(self, name: str, line: Line) -> None:
        """Keep a line, and write all of them."""
        with self._lock:
            self.lines[name] = line
            self._file.parent.mkdir(parents=True, exist_ok=True)
            staged = self._file.with_suffix(".new")
            staged.write_text(json.dumps(self.lines, indent=1) + "\n")
            os.replace(staged, self._file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs, or say what came of them."""
    options = _options(arguments)
    results = Results(options.out / "agents.json")
    failed = 0
    if not options.report:
        left = [each for each in _trials(options) if each.name not in results.lines]
        with ThreadPoolExecutor(options.parallel) as pool:
            failed = sum(pool.map(lambda trial: _keep(trial, options, results), left))
    print(table(list(results.lines.values())))
    if options.curves or results.lines:
        draw(list(results.lines.values()), options.curves or options.out)
    return 1 if failed else 0


def _keep(trial: Trial, options: argparse.Namespace, results: Results) -> bool:
    """Make one and keep what came of it; whether it failed."""
    folder = options.work / trial.name
    code, said = _run(trial, options, folder)
    line = line_of(trial, folder)
    if line:
        results.add(trial.name, line | {"ended": code})
        print(one_line(line), flush=True)
    if code or not line:
        options.out.mkdir(parents=True, exist_ok=True)
        with (options.out / "failures.log").open("a") as log:
            log.write(f"=== {trial.name}: exit code {code}\n{said[-_TAIL:]}\n{_service_log(folder)}\n")
        print(f"{trial.name}: exit code {code}: {said[-300:]}", file=sys.stderr, flush=True)
    return bool(code) or not line


def _run(trial: Trial, options: argparse.Namespace, folder: Path) -> tuple[int, str]:
    """The exit code and the output; after the time limit, all processes are stopped."""
    command = [sys.executable, "-m", f"examples.{trial.example}.main", "--seed", trial.seed, "--reward", trial.reward]
    command += ["--dir", folder, "--start", options.work / "start", *(["--gpu"] if options.gpu else [])]
    for name in ("steps", "batch", "group", "rate", "evaluate_every", "held_out", "gpu_share", "model"):
        if (value := getattr(options, name)) is not None:
            command += [f"--{name.replace('_', '-')}", value]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "run.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            process_group=0,
        )
        try:
            code = process.wait(options.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # the service ends with it
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            code = 124
    return code, log.read_text(errors="replace")


def line_of(trial: Trial, folder: Path) -> dict[str, Any]:
    """A trial's summary, or what its journal has so far; empty without any."""
    line: dict[str, Any] = {"example": trial.example, "seed": trial.seed, "reward": trial.reward, "marks": trial.marks}
    summary = folder / "summary.json"
    if summary.exists():
        return line | json.loads(summary.read_text())
    evaluations = [
        {"step": each["step"], "reward": fmean(each["rewards"]), **each["metrics"]}
        for file in sorted(folder.glob("checkpoints/*/*/tune/journal.jsonl"))
        for each in _events(file)
        if each.get("event") == "evaluated" and each.get("rewards")
    ]
    if not evaluations:
        return {}
    before, after = ({name: value for name, value in evaluations[at].items() if name != "step"} for at in (0, -1))
    return line | {"before": before, "after": after, "steps": evaluations[-1]["step"], "evaluations": evaluations}


def table(lines: Sequence[Line]) -> str:
    """In Markdown, a row for each example, reward and metric: before and after, by seed."""
    rows = [
        "| example | reward | metric | before, by seed | after, by seed | mean before | mean after |",
        "|" + "---|" * 7,
    ]
    for (example, reward, marks), seeds in _kinds(lines).items():
        for metric in seeds[0]["after"]:
            found = [[each[when].get(metric, 0.0) for each in seeds] for when in ("before", "after")]
            by_seed = (" ".join(f"{value:.3f}" for value in values) for values in found)
            means = (f"{fmean(values):.3f}" for values in found)
            rows.append(f"| {example} {marks} | {reward} | {metric} | {' | '.join([*by_seed, *means])} |")
    return "\n".join(rows)


def one_line(line: Line) -> str:
    """A run in one line."""
    metrics = (f"{name} {line['before'].get(name, 0.0):.3f} -> {value:.3f}" for name, value in line["after"].items())
    return f"{line['example']} {line['reward']} {line['seed']}: {line['steps']} steps; {', '.join(metrics)}"


def draw(lines: Sequence[Line], folder: Path) -> None:
    """An SVG for each example of which there are runs: its metrics on held-out tasks by steps, tuned and control."""
    for example, drawn in DRAWN.items():
        curves: dict[str, dict[str, list[Curve]]] = {}
        steps = max((line["steps"] for line in lines if line["example"] == example), default=0)
        for metric, scale in drawn.items():
            title = metric if scale == 1.0 else f"{metric} / {scale:g}"
            curves[title] = {
                ("rewarded by the judge" if reward == "judge" else "rewarded by a coin"): [
                    # Before the first step is drawn at its left edge.
                    [[max(0.01, each["step"]), each.get(metric, 0.0) / scale] for each in line["evaluations"]]
                    for line in seeds
                ]
                for (name, reward, marks), seeds in _kinds(lines).items()
                if name == example and not marks
            }
        if steps and any(curves.values()):
            folder.mkdir(parents=True, exist_ok=True)
            title = f"{example}: metrics on held-out tasks by steps"
            most = -(-steps // 4) * 4
            (folder / f"{example}.svg").write_text(panels(title, curves, most=most, unit="steps"))


def _kinds(lines: Sequence[Line]) -> dict[tuple[str, str, str], list[Line]]:
    kinds: dict[tuple[str, str, str], list[Line]] = {}
    for line in sorted(lines, key=lambda each: (each["example"], each["reward"], each["marks"], each["seed"])):
        kinds.setdefault((line["example"], line["reward"], line["marks"]), []).append(line)
    return kinds


def _events(file: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a journal."""
    for line in file.read_text(errors="replace").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _service_log(folder: Path) -> str:
    """The ends of the logs of a trial's service."""
    logs: Iterable[Path] = sorted(folder.glob("checkpoints/*/*/tune/*.log"))
    return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-_TAIL:]}" for log in logs)


def _trials(options: argparse.Namespace) -> Iterator[Trial]:
    for seed in options.seeds:
        for reward in options.reward:
            for example in options.example:
                yield Trial(example=example, seed=seed, reward=reward, marks=options.marks)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning.agents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--example", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--reward", nargs="+", choices=("judge", "random"), default=["judge"])
    parser.add_argument("--gpu", action="store_true", help="vLLM and the trainer on the first GPU")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds that a run may take")
    parser.add_argument("--marks", default="", help="what sets these runs apart from others of the same seeds")
    parser.add_argument("--out", type=Path, default=Path("agents"), help="results, as they come")
    parser.add_argument("--work", type=Path, default=Path("agents-work"), help="folders of the runs")
    parser.add_argument("--report", action="store_true", help="make no runs, say what came of those there are")
    parser.add_argument("--curves", type=Path, help="folder to draw the curves into")
    for name, kind in (("--steps", int), ("--batch", int), ("--group", int), ("--rate", float), ("--model", str)):
        parser.add_argument(name, type=kind, help="as the examples themselves take it")
    for name, kind in (("--evaluate-every", int), ("--held-out", int), ("--gpu-share", float)):
        parser.add_argument(name, type=kind, help="as the examples themselves take it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
