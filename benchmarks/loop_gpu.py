"""From the last commit of a batch to replies of the new weights, stage by stage; what the trainer does with its time.

    python -m benchmarks.loop_gpu [--size 0.6b] [--gpus 1] [--lanes 16,64] [--batch 64] [--budget-seconds 240]
        [--set trainer.max_staleness=4] [--work FOLDER]

`tuneloop run` with the README's settings at `save_interval: 1`, on one GPU, which engine and trainer share, or on two.
So many clients ask side by side, each reply gets feedback, and what has some is committed four times a second. For each
number of clients a phase: its versions' stages, and of the whole phase what was trained, and what the trainer's time
went into. Stages follow from the ledger's own times, and from what the services log:

    batch       the last commit of the batch, until its step begins: what is trained first, and what is published
    step        until the step is made
    publish     until the version is registered: weights written and hashed, probe, files synced
    seen        until the explorer begins to verify it
    verified    until it is verified
    begun       until the first engine begins to load: its prefix cache is filled, it is paused
    loaded      until an engine has the weights: load, forget
    served      until it is proven, and the champion
    all         commit to served

On a machine without a GPU the model is tiny, and the run shows only that it runs.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import sqlalchemy
import torch

from benchmarks.on_gpu.random_model import make_model
from benchmarks.on_gpu.services import Clock, await_ready, log_events, rollout_of, tell_trouble, write_settings
from benchmarks.proxy.load import running
from tuneloop.explorer.engines import vllm
from tuneloop.explorer.ui.operations import CurveReader
from tuneloop.shared.operations.engines import read_explorer
from tuneloop.shared.settings.hardware import placement_sentence
from tuneloop.shared.settings.loader import load_settings
from tuneloop.shared.settings.settings import Settings

_RUN = "from tuneloop.cli.main import main; main()"
_MODEL, _PORT = "random", 21_700
_STAGES = ("batch", "step", "publish", "seen", "verified", "begun", "loaded", "served", "all")
_COMMIT_S = 0.25
#: Versions that are not counted in medians.
_COLD = 2
#: What is left of the time at the end is for the last version, and for stopping.
_END_S = 25.0

_VERSIONS = sqlalchemy.text("""
    SELECT v.version, v.step, v.state, v.created_at, v.served_at, v.consumed, max(e.committed_at), max(e.rewarded_at)
    FROM versions v JOIN experiences e ON e.trained_version = v.version GROUP BY v.version ORDER BY v.version
""")
_STATES = sqlalchemy.text("SELECT state, count(*) FROM experiences GROUP BY state")


class Timeline(NamedTuple):
    """A version's moments, in seconds since 1970; None if unknown."""

    version: int
    step: int
    consumed: int
    moments: dict[str, float | None]

    def stages(self) -> dict[str, float]:
        """Seconds of each stage with two known ends."""
        found, before = {}, self.moments["commit"]
        for stage in _STAGES[:-1]:
            at = self.moments[stage]
            if at is not None and before is not None:
                found[stage] = at - before
            before = at
        served, commit = self.moments["served"], self.moments["commit"]
        if served is not None and commit is not None:
            found["all"] = served - commit
        return found


@dataclass
class Traffic:
    """The clients' results."""

    tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def replies(self) -> int:
        return len(self.seconds)


def main() -> int:
    """Run it and print; 1 if a request failed."""
    options = _options()
    clock = Clock(options.budget_seconds)
    traffic = Traffic()
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loop-", dir=options.work)))
        model = make_model(options.size, work / "model", on_gpu=options.gpus > 0)
        write_settings(work / "tuneloop.yaml", _values(work, model, options))
        settings = load_settings(work / "tuneloop.yaml", options.set)
        _tell_what(settings, options)
        log = work / "both.log"
        more = [part for each in options.set for part in ("--set", each)]
        command = [sys.executable, "-P", "-c", _RUN, "run", "--config", work / "tuneloop.yaml", *more]
        pid = stack.enter_context(running(command, log, env={"TUNELOOP_LOG_JSON": "1"}))
        url = f"http://127.0.0.1:{_PORT}"
        try:
            await_ready(f"{url}/health/ready", pid, log, timeout_s=clock.remaining - 40)
            clock.say("; ".join(["it serves", *(each.sentence for each in read_explorer(settings).engines or ())]))
            phases = [int(each) for each in options.lanes.split(",")]
            for number, lanes in enumerate(phases):
                seconds = (clock.remaining - _END_S) / (len(phases) - number)
                since = time.time()
                asyncio.run(_use(url, lanes, seconds, traffic, tokens=options.tokens))
                _report(settings, log, traffic, clock, lanes=lanes, since=since)
            time.sleep(max(0.0, min(10.0, clock.remaining - 15)))
        finally:
            tell_trouble(log, clock)
        _report(settings, log, traffic, clock, lanes=None, since=0.0)
    for failure in traffic.failures[:5]:
        print("failed:", failure)
    p50, p99 = np.percentile(traffic.seconds or [0.0], [50, 99])
    print(f"{traffic.replies} replies, {p50:.2f} s each, p99 {p99:.2f} s; {len(traffic.failures)} requests failed")
    return 1 if traffic.failures else 0


def _values(work: Path, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The README's settings, with this machine's paths."""
    on_gpu = options.gpus > 0
    memory = options.memory or (0.4 if options.gpus == 1 else 0.9)
    values: dict[str, Any] = {
        "mode": "both",
        "project": "bench",
        "name": "loop",
        "checkpoint_root_dir": str(work / "job"),
        "model": {"model_path": str(model), "max_model_len": 8192 if on_gpu else 1024, "served_model_name": _MODEL},
        "cluster": {"gpu_per_node": options.gpus},
        "explorer": {
            "proxy_port": _PORT,
            "rollout_model": rollout_of(on_gpu=on_gpu, memory=memory, api_servers=None),
            "capture": {"logprobs": options.capture},
        },
        "buffer": {"train_batch_size": options.batch},
        "trainer": {"save_interval": 1},
    }
    return values


def _tell_what(settings: Settings, options: argparse.Namespace) -> None:
    where = torch.cuda.get_device_name() if options.gpus else "CPU"
    print(
        f"{where}, {len(os.sched_getaffinity(0))} cores, {vllm.installed_version()}, torch {torch.__version__}; Qwen3 "
        f"{options.size}, random; {placement_sentence(settings) or 'no GPU'}; {settings.algorithm.algorithm_type}, "
        f"batches of {options.batch}, replies of at most {options.tokens} tokens, capture {options.capture}, "
        f"{' '.join(options.set)}\n"
        "parts of tuneloop: explorer, ledger, trainer, engines (whether with our vLLM plugin is said when they serve)",
        flush=True,
    )


async def _use(url: str, lanes: int, seconds: float, traffic: Traffic, *, tokens: int) -> None:
    """So many clients for so long."""
    over = asyncio.Event()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as http,
        asyncio.TaskGroup() as group,
    ):
        for number in range(lanes):
            group.create_task(_lane(http, number, over, traffic, tokens))
        group.create_task(_commit(http, over, traffic))
        await asyncio.sleep(seconds)
        over.set()


async def _lane(http: httpx.AsyncClient, number: int, over: asyncio.Event, traffic: Traffic, tokens: int) -> None:
    asked = 0
    while not over.is_set():
        asked += 1
        said = f"Tell me about number {number * 100_003 + asked}."
        body = {"model": _MODEL, "messages": [{"role": "user", "content": said}], "max_tokens": tokens}
        try:
            began = time.monotonic()
            reply = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()
            took = time.monotonic() - began
            text = reply["choices"][0]["message"]["content"] or ""
            reward = text.count("e") / max(1, len(text))
            (await http.post("/feedback", json={"msg_ids": [reply["id"]], "reward": reward})).raise_for_status()
        except (httpx.HTTPError, LookupError, ValueError) as error:
            traffic.failures.append(f"{time.strftime('%H:%M:%S')} {error!r}")
            await asyncio.sleep(0.5)
        else:
            traffic.seconds.append(took)
            traffic.tokens += reply["usage"]["completion_tokens"]


async def _commit(http: httpx.AsyncClient, over: asyncio.Event, traffic: Traffic) -> None:
    while not over.is_set():
        await asyncio.sleep(_COMMIT_S)
        try:
            reply = await http.post("/commit", json={})
            if reply.status_code != 503:  # that says that the outbox is not all in the database yet
                reply.raise_for_status()
        except httpx.HTTPError as error:
            traffic.failures.append(f"{time.strftime('%H:%M:%S')} commit: {error!r}")


def _report(settings: Settings, log: Path, traffic: Traffic, clock: Clock, *, lanes: int | None, since: float) -> None:
    """The versions registered since, their stages; and what the trainer's time went into."""
    try:
        found = [each for each in timelines(settings, log) if (each.moments["publish"] or 0.0) > since]
        curves = CurveReader(settings.tensorboard_dir / "trainer").read()
        states = _read(settings, _STATES)
    except (OSError, ValueError, sqlalchemy.exc.SQLAlchemyError) as error:
        clock.say(f"nothing can be told: {error!r}")
        return
    head = f"{lanes} clients at once" if lanes else "all phases, and what came after them"
    clock.say(f"{head}: {len(found)} versions; in all {traffic.replies} replies, {traffic.tokens:,} tokens")
    print(stage_table(found))
    print(trainer_table(found, curves))
    print(f"rows by state: {dict(map(tuple, states))}", flush=True)


def timelines(settings: Settings, log: Path) -> list[Timeline]:
    """Of all registered versions."""
    told: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
    for event in log_events(log):
        number = event.get("step" if event.get("event") == "step" else "version")
        if isinstance(number, int) and event.get("timestamp"):
            at = datetime.fromisoformat(event["timestamp"]).timestamp()
            told[event["event"]].setdefault(number, (at, float(event.get("seconds", 0.0))))
    found = []
    for version, step, _, created, served, consumed, committed, _ in _read(settings, _VERSIONS):
        stepped, verified = told["step"].get(step), told["version_verified"].get(version)
        loaded = told["version_loaded"].get(version)
        moments = {
            "commit": committed,
            "batch": stepped and stepped[0] - stepped[1],
            "step": stepped and stepped[0],
            "publish": created,
            "seen": verified and verified[0] - verified[1],
            "verified": verified and verified[0],
            "begun": loaded and loaded[0] - loaded[1],
            "loaded": loaded and loaded[0],
            "served": served,
        }
        found.append(Timeline(version, step, consumed, moments))
    return found


def stage_table(found: Sequence[Timeline]) -> str:
    """Median, p90 and the most of each stage; the first and the last versions' in lines of their own."""
    heads = ["seconds", *_STAGES]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    seconds = [each.stages() for each in found]
    # In the first steps of a trainer layers are compiled, and memory for copies is pinned.
    warm = [each.stages() for each in found if each.version > _COLD]
    for name, figure in (("median", 50.0), ("p90", 90.0), ("most", 100.0)):
        cells = []
        for stage in _STAGES:
            known = [each[stage] for each in warm if stage in each]
            cells.append(f"{np.percentile(known, figure):.2f} ({len(known)})" if known else "–")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for each, stages in zip(found[:4] + found[4:][-12:], seconds[:4] + seconds[4:][-12:], strict=True):
        told = [f"{stages[stage]:.2f}" if stage in stages else "–" for stage in _STAGES]
        lines.append(f"| version {each.version} | " + " | ".join(told) + " |")
    return "\n".join(lines)


def trainer_table(found: Sequence[Timeline], curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """What steps took of the time between the first and the last of these versions' steps; and what they said."""
    known = [each for each in found if each.moments["batch"]]
    steps = {each.step for each in known}
    points = {name: [value for step, value in curve if step in steps] for name, curve in curves.items()}
    if len(known) < 2:
        return "too few steps"
    window_s = (known[-1].moments["batch"] or 0.0) - (known[0].moments["batch"] or 0.0)
    # Of the first step the wait came before, of the last only the wait before it.
    taken = {name: sum(points.get(f"time/{name}", [])[:-1]) for name in ("train_step", "save_checkpoint")}
    taken["batch_wait"] = sum(points.get("time/batch_wait", [])[1:])
    speeds = zip(points.get("perf/tokens_per_second", [])[:-1], points.get("time/train_step", [])[:-1], strict=False)
    tokens = sum(speed * seconds for speed, seconds in speeds)
    lines = [f"{len(steps)} steps, {tokens:,.0f} tokens trained on in all but the last"]
    if window_s > 0:
        shares = ", ".join(f"{name} {seconds / window_s:.1%}" for name, seconds in taken.items())
        rest = 1 - sum(taken.values()) / window_s
        speed = f"{(len(known) - 1) / window_s:.2f} steps/s, {tokens / window_s:,.0f} tokens/s"
        lines.append(f"in {window_s:.1f} s: {speed}; {shares}, the rest {rest:.1%}")
    for name, values in sorted(points.items()):
        if values and name.startswith(("time/", "state/", "perf/", "off_policy/staleness", "capture/")):
            median, high = np.percentile(values, [50, 90])
            lines.append(f"    {name}: median {median:.3f}, p90 {high:.3f}, most {max(values):.3f} ({len(values)})")
    return "\n".join(lines)


def _read(settings: Settings, query: Any) -> list[Any]:
    database = sqlalchemy.create_engine(settings.database_url)
    try:
        with database.connect() as connection:
            return list(connection.execute(query))
    finally:
        database.dispose()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--size", default="0.6b" if on_gpu else "tiny")
    parser.add_argument("--gpus", type=int, default=int(on_gpu), help="1: engine and trainer share it; 0: the CPU")
    parser.add_argument("--lanes", default="16,64" if on_gpu else "2,4", help="clients at once, of each phase")
    parser.add_argument("--batch", type=int, default=64 if on_gpu else 8, help="buffer.train_batch_size")
    parser.add_argument("--tokens", type=int, default=256 if on_gpu else 16, help="of a reply, at most")
    parser.add_argument("--capture", choices=["all", "share", "none"], default="all")
    parser.add_argument("--memory", type=float, help="gpu_memory_utilization: 0.4 beside the trainer, else 0.9")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one more setting")
    parser.add_argument("--budget-seconds", type=float, default=240.0)
    parser.add_argument("--work", type=Path, help="where to put everything")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
