"""Does it learn? Each method on tasks of a tiny model: in one process, through the whole loop, and beside TRL.

    .venv/bin/python -m benchmarks.learning ours ppo grpo --seeds 0 1 2
    .venv/bin/python -m benchmarks.learning ours ppo --flip 0.2 | --offset 1 | --coin | --late 8
    .venv/bin/python -m benchmarks.learning ours reinforce --raw [--offset 1]
    .venv/bin/python -m benchmarks.learning ours ppo reinforce --captured 0.05
    .venv/bin/python -m benchmarks.learning ours ppo --set optimizer.lr=1e-4
    .venv/bin/python -m benchmarks.learning ours reinforce --seeds 0 1 2 --set mix.file=FILE.jsonl mix.share=0.2
    .venv/bin/python -m benchmarks.learning ours ppo --file 192 --samples 1024 --set kl_coef=0.01
    .venv/bin/python -m benchmarks.learning loop ppo --task tools --seeds 0 1 2 [--tools strict] [--gpu]
    .venv/bin/python -m benchmarks.learning trl grpo rloo --set lr=2e-4 --trl FOLDER/bin/python
    .venv/bin/python -m benchmarks.learning all --out FOLDER --trl FOLDER/bin/python
    .venv/bin/python -m benchmarks.learning report --out FOLDER [--curves docs/methods]

Every run prints one line and is kept as a JSON line in FOLDER/runs/NAME.json; a run that is there is not made again, so
`all` goes on where it was stopped. How TRL's environment is made, benchmarks/learning/trl.py says. `loop` wants a quiet
machine: 100 to 200 s a run there.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from benchmarks.learning.plan import BUDGET, TRL_OFFLINE, Wanted, everything
from benchmarks.learning.report import draw, tables
from examples.tasks.drive import HeldTools
from examples.tasks.methods import METHODS
from examples.tasks.start import TASKS, start, teacher


def main() -> int:
    """Make the runs, or say what came of them."""
    options = _options()
    if options.what == "report":
        lines = [json.loads(file.read_text()) for file in sorted((options.out / "runs").glob("*.json"))]
        print(tables(lines))
        if options.curves:
            draw(lines, options.curves)
        return 0
    failed = 0
    for wanted in everything() if options.what == "all" else _wanted_trials(options):
        file = options.out / "runs" / f"{wanted.name}.json"
        if not file.exists():
            try:
                line = _run(wanted, options.out, options.trl)
            except RunFailed as error:
                print(f"{wanted.name}: {error}", file=sys.stderr, flush=True)
                failed += 1
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"name": wanted.name, "kind": wanted.kind, **line}) + "\n")
        print(summary(json.loads(file.read_text())), flush=True)
    return 1 if failed else 0


class RunFailed(Exception):
    """A run in another process failed; the message is the end of its output."""


def summary(line: Mapping[str, Any]) -> str:
    """A run in one line."""
    steps, seconds = line.get("steps", "-"), line.get("cpu_s", line.get("wall_s", 0))
    return f"{line['name']:48s} {line['before']:.3f} -> {line['after']:.3f}  {steps} steps, {seconds:.0f} s"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("ours", "loop", "trl", "all", "report"))
    parser.add_argument("methods", nargs="*")
    parser.add_argument("--task", choices=TASKS, default="sums")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--samples", type=int, default=BUDGET)
    parser.add_argument("--flip", type=float, default=0.0, help="share of rewards that say the opposite")
    parser.add_argument("--offset", type=float, default=0.0, help="added to each reward")
    parser.add_argument("--coin", action="store_true", help="rewards are tossed")
    parser.add_argument("--late", type=int, default=0, help="steps between sampling and learning; `ours` only")
    parser.add_argument("--captured", type=float, default=1.0, help="share of log-probabilities; `ours` only")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters, 0: all weights; `ours` only")
    parser.add_argument("--offline", action="store_true", help="learn from replies of the start weights; `ours` only")
    parser.add_argument("--raw", action="store_true", help="`ours reinforce` only: rewards are compared with nothing")
    parser.add_argument("--file", type=int, default=0, help="lines that `sft` learns first; `ours` only")
    parser.add_argument("--tools", choices=get_args(HeldTools), default="plain", help="grammar of calls; `loop` only")
    parser.add_argument("--gpu", action="store_true", help="vLLM on a GPU; `loop` only")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of `algorithm`, dotted")
    parser.add_argument("--out", type=Path, default=Path("learning"))
    parser.add_argument("--trl", type=Path, help="python of the environment that TRL is in")
    parser.add_argument("--curves", type=Path, help="folder to draw the curves into")
    return parser.parse_args()


def _wanted_trials(options: argparse.Namespace) -> Iterator[Wanted]:
    for seed in options.seeds:
        for method in options.methods:
            yield Wanted(
                place=options.what,
                method=method,
                task=options.task,
                seed=seed,
                samples=options.samples,
                flip=options.flip,
                offset=options.offset,
                coin=options.coin,
                late=options.late,
                captured=options.captured,
                lora=options.lora,
                offline=options.offline,
                raw=options.raw,
                file=options.file,
                gpu=options.gpu,
                tools=options.tools,
                changes=tuple(options.set),
            )


def _run(wanted: Wanted, out: Path, trl: Path | None) -> dict[str, Any]:
    if wanted.place != "trl" and METHODS[wanted.method].taught:
        teacher(out, wanted.task, wanted.seed)
    if wanted.place == "loop":
        return _loop(wanted, out)
    # importing torch takes seconds
    from benchmarks.learning import ours

    task, base = TASKS[wanted.task], start(out, wanted.task, wanted.seed)
    replies = out / "start" / f"{wanted.task}-{wanted.seed}.jsonl"
    if wanted.offline or (wanted.place == "trl" and wanted.method in TRL_OFFLINE):
        ours.write_replies(replies, task, base, seed=wanted.seed, samples=wanted.samples)
    if wanted.file:
        base = ours.learn_file(wanted, task, base, base.parent / f"{wanted.task}-{wanted.seed}-file{wanted.file}")
    if wanted.place == "trl":
        return _trl(wanted, base, replies, trl)
    return ours.learn(wanted, task, base, replies if wanted.offline else None)


def _trl(wanted: Wanted, base: Path, replies: Path, trl: Path | None) -> dict[str, Any]:
    if trl is None:
        raise RunFailed("--trl: name the python of an environment that holds trl")
    command = [trl, "-m", "benchmarks.learning.trl", wanted.method, "--seed", wanted.seed, "--start", base]
    command += ["--samples", wanted.samples, "--offline", replies]
    for each in wanted.changes:
        name, value = each.split("=", 1)
        command += [f"--{name}", value]
    line: dict[str, Any] = json.loads(_output_of(command).splitlines()[-1])
    return line


def _loop(wanted: Wanted, out: Path) -> dict[str, Any]:
    """The run of `python -m examples.tasks`, whose folder is kept only if it fails."""
    start(out, wanted.task, wanted.seed)
    with tempfile.TemporaryDirectory(prefix="learning-") as folder:
        command = [sys.executable, "-m", "examples.tasks", wanted.task, "--method", wanted.method]
        command += ["--seed", wanted.seed, "--samples", wanted.samples, "--start", out, "--dir", folder]
        command += ["--tools", wanted.tools, "--flip", wanted.flip, "--offset", wanted.offset]
        command += [f"--{mark}" for mark in ("coin", "gpu") if getattr(wanted, mark)]
        command += ["--set", *wanted.changes]
        _output_of(command)
        found = json.loads((Path(folder) / "summary.json").read_text())
    return {
        "trainer": "loop",
        "method": wanted.method,
        "task": wanted.task,
        "seed": wanted.seed,
        "samples": wanted.samples,
        "before": found["reward_before"],
        "after": found["reward_after"],
        "steps": found["steps"],
        "wall_s": found["seconds"],
        "curve": [[at, right] for at, _, right in found["judged"]],
        **{name: found[name] for name in ("versions", "trained", "requests", "requests_failed")},
    }


def _output_of(command: Iterable[object]) -> str:
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RunFailed(f"exit code {ended.returncode}\n{(ended.stdout + ended.stderr)[-2000:]}")
    return ended.stdout


if __name__ == "__main__":
    sys.exit(main())
