"""What a trainer's steps cost those who are answered by an engine on the same GPU, and what `yield_to_traffic` mends.

    python -m benchmarks.on_gpu.yielding [--size 0.6b] [--seconds 40] [--clients 8] [--tokens 64]
        [--micro-batch-tokens 8192] [--work FOLDER]

One vLLM, and in front of it one explorer; clients chat for some seconds, rest as long, and so on. Three phases of so
many seconds: nobody trains; a process makes one step after the other (SFT of random replies, as in
`benchmarks/train_step.py`); it does so and yields. Explorer and trainer share a job folder, as they do in production.
Printed are the chats' latencies, and how many steps were made.

On a machine without a GPU everything is tiny, and shows only that it runs.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch

from benchmarks.on_gpu.random_model import make_model
from benchmarks.on_gpu.services import Clock, await_ready, bare_engine, rollout_of, service, write_settings
from benchmarks.train_step import made_samples
from tuneloop.shared.settings.loader import load_settings
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.micro_batch import MicroBatch

_PORT, _MODEL, _BURST_S = 21_700, "random", 3.0
_PHASES = ("nobody trains", "a trainer steps", "it yields")


class Phase(NamedTuple):
    """Seconds of each chat, how many failed, and the steps that ended meanwhile."""

    name: str
    taken: list[float]
    failed: int
    steps: int


def main() -> int:
    """Measure and print; 1 if a chat failed."""
    options = _options()
    if options.steps_of:
        return _make_steps(options.steps_of)
    clock, phases = Clock(0), list[Phase]()
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="yielding-", dir=options.work)))
        model = make_model(options.size, work / "model", on_gpu=options.gpu)
        rollout = rollout_of(on_gpu=options.gpu, memory=0.4, api_servers=1)
        engine = write_settings(work / "engine/settings.yaml", _values(work / "engine", model, options, rollout))
        log = work / "engine.log"
        pid = stack.enter_context(bare_engine(engine, model, _PORT, log))
        await_ready(f"http://127.0.0.1:{_PORT}/health", pid, log, timeout_s=400)
        clock.say("engine is up")
        for number, name in enumerate(_PHASES):
            with _explorer(work / str(number), number, model, options) as config:
                phases.append(_phase(name, config, options, clock, port=_PORT + 1 + number, trains=number > 0))
    name = torch.cuda.get_device_name() if options.gpu else "CPU"
    print(
        f"{name}; Qwen3 {options.size}; {options.clients} clients in bursts of {_BURST_S:g} s, {options.tokens} tokens"
    )
    print("| | chats | p50 | p99 | p99, ratio | steps |\n|---|---|---|---|---|---|")
    most = _percentile(phases[0], 99)
    for each in phases:
        p50, p99 = _percentile(each, 50), _percentile(each, 99)
        ratio = f"{p99 / most:.2f}"
        print(f"| {each.name} | {len(each.taken)} | {p50:.3f} s | {p99:.3f} s | {ratio} | {each.steps} |")
    return 1 if any(each.failed for each in phases) else 0


def _values(folder: Path, model: Path, options: argparse.Namespace, rollout: dict[str, Any]) -> dict[str, Any]:
    return {
        "project": "bench",
        "name": "yielding",
        "checkpoint_root_dir": str(folder),
        "model": {"model_path": str(model), "max_model_len": 4096, "served_model_name": _MODEL},
        "algorithm": {"algorithm_type": "sft", "kl_coef": 0.0},
        "cluster": {"gpu_per_node": int(options.gpu)},
        "explorer": {"rollout_model": rollout},
        "trainer": {
            "device": "cuda" if options.gpu else "cpu",
            "dtype": "bfloat16" if options.gpu else "float32",
            "micro_batch_tokens": options.micro_batch_tokens,
        },
    }


@contextmanager
def _explorer(folder: Path, number: int, model: Path, options: argparse.Namespace) -> Iterator[Path]:
    """The settings' file of an explorer that answers."""
    dtype = "bfloat16" if options.gpu else "float32"
    values = _values(folder, model, options, {"engine_urls": [f"http://127.0.0.1:{_PORT}"], "dtype": dtype})
    values["explorer"]["proxy_port"] = _PORT + 1 + number
    values["trainer"]["yield_to_traffic"] = number == len(_PHASES) - 1
    write_settings(folder / "settings.yaml", values)
    with service(folder / "settings.yaml", "explorer", folder / "explorer.log") as pid:
        url = f"http://127.0.0.1:{_PORT + 1 + number}/health/ready"
        await_ready(url, pid, folder / "explorer.log", timeout_s=120)
        yield folder / "settings.yaml"


def _phase(name: str, config: Path, options: argparse.Namespace, clock: Clock, *, port: int, trains: bool) -> Phase:
    made = config.parent / "steps"
    made.write_text("")
    with ExitStack() as stack:
        if trains:
            command = [sys.executable, "-m", "benchmarks.on_gpu.yielding", "--steps-of", str(config)]
            trainer = stack.enter_context(subprocess.Popen(command))
            stack.callback(trainer.kill)
            while not made.read_text():  # the first step compiles
                if trainer.poll() is not None:
                    raise RuntimeError("the process that makes steps has ended")
                time.sleep(0.2)
        clock.say(f"{name}: begins")
        before, began = len(made.read_text().split()), time.monotonic()
        with ThreadPoolExecutor(options.clients) as pool:
            stopped = threading.Event()
            found = [pool.submit(_chat, port, options.tokens, began, stopped) for _ in range(options.clients)]
            time.sleep(options.seconds)
            stopped.set()
            taken, failed = zip(*(each.result() for each in found), strict=True)
        steps = len(made.read_text().split()) - before
    clock.say(f"{name}: ended")
    return Phase(name, [each for part in taken for each in part], sum(failed), steps)


def _chat(port: int, tokens: int, began: float, stopped: threading.Event) -> tuple[list[float], int]:
    """Chat in bursts; the seconds of each, and how many failed."""
    taken, failed = list[float](), 0
    body = {"model": _MODEL, "max_tokens": tokens, "messages": [{"role": "user", "content": "Where is my parcel?"}]}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False) as http:
        while not stopped.is_set():
            into = (time.monotonic() - began) % (2 * _BURST_S)
            if into > _BURST_S:
                stopped.wait(2 * _BURST_S - into)
                continue
            asked = time.perf_counter()
            answered = http.post("/v1/chat/completions", json=body).status_code == 200
            taken.append(time.perf_counter() - asked)
            failed += not answered
    return taken, failed


def _make_steps(config: Path) -> int:
    """One after the other, a line for each, until killed."""
    settings = load_settings(config)
    learner, micro_batch = snapshot.load(settings, None), MicroBatch(settings)
    samples = made_samples(64, 675, 2475, learner.actor.vocabulary) if settings.trainer.device == "cuda" else None
    for _ in range(10_000):
        micro_batch.step(learner, samples or made_samples(16, 60, 200, learner.actor.vocabulary), version=0)
        with (config.parent / "steps").open("a") as lines:
            lines.write("step\n")
    return 0


def _percentile(phase: Phase, share: float) -> float:
    return float(np.percentile(phase.taken, share))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--size", default="0.6b" if on_gpu else "tiny")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a phase")
    parser.add_argument("--clients", type=int, default=8 if on_gpu else 2)
    parser.add_argument("--tokens", type=int, default=64 if on_gpu else 8)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--work", type=Path, help="where to put everything")
    parser.add_argument("--steps-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--gpu", action=argparse.BooleanOptionalAction, default=on_gpu)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
