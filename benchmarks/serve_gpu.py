"""Tokens a second through the explorer beside vLLM alone, by what is captured, by turns on one GPU.

    python -m benchmarks.serve_gpu [--size 0.6b] [--budget-seconds 360] [--at-once 32,128,256] [--api-servers N]
        [--subjects all,share,none] [--share 0.05] [--no-plugin] [--workers 1] [--built FOLDER] [--work FOLDER]

One engine as the explorer starts its own, and an explorer attached to it for each mode of `explorer.capture.logprobs`,
which record to a disk as they do by default; and "bare", vLLM itself: a second engine with the same flags on the same
GPU, without our plugin, which neither log-probabilities nor token ids are asked of. Clients ask all of them in turns,
for whole and for streamed replies of the same length, so many at once, in waves. `plain`, `ids`, `captured` and
`packed` are the first engine alone, asked as the bare one is, for token ids, and for log-probabilities too: vLLM's own
way, and packed, as explorers ask. Each round asks all once; a ratio is the geometric mean over the rounds of what one
got by what the bare engine got in the same turn, with its standard error.
Which engine has our plugin is said when they are up; with `--no-plugin` none has it, as an engine of others that was
attached by `engine_urls`. What a share of a quarter costs such an engine, in less than three minutes of an H200:

    python -m benchmarks.serve_gpu --no-plugin --subjects all,share --share 0.25 --at-once 32,256 --waves 1
        --budget-seconds 170

The load is one process of C (`benchmarks/proxy/load.c`); what it can do at most is measured first, against an upstream
that replays recordings.

On a machine without a GPU everything is tiny, and shows only that it runs.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
import numpy as np
import sqlalchemy
import torch

from benchmarks.on_gpu.random_model import make_model
from benchmarks.on_gpu.services import Clock, await_ready, bare_engine, plugin_of, rollout_of, service, write_settings
from benchmarks.proxy.load import built, cpu_s, load, request_body, running
from tuneloop.explorer.engines import vllm
from tuneloop.explorer.engines.packing.wire import HEADER, PACKED
from tuneloop.explorer.engines.vllm_plugin import PACKS
from tuneloop.shared.settings.hardware import api_servers_of
from tuneloop.shared.settings.settings import Settings

_PATH, _MODEL, _PORT = "/v1/chat/completions", "random", 21_600
_BARE_PORT = _PORT + 10
_MODES = ("all", "share", "none")
#: What is asked of the engine of ours itself, by subject.
_ASKED: dict[str, dict[str, object]] = {
    "plain": {},
    "ids": {"return_token_ids": True},
    "captured": {"logprobs": True, "return_token_ids": True},
    "packed": {"logprobs": True, "return_token_ids": True},
}
#: Of the keys and values of an engine, where two share a GPU and would disturb each other when they look for room.
_CACHE_BYTES = 16 << 30
_EXPLORER_S = 120.0
_ROOM_S = 15.0


class Cell(NamedTuple):
    """One turn's requests."""

    kind: str
    at_once: int


@dataclass(kw_only=True)
class Subject:
    """A system: its port and processes; `seen` are tokens per second in each round, `cores` its CPU use."""

    name: str
    port: int
    pids: Sequence[int] = ()
    settings: Settings | None = None
    more: dict[str, object] = field(default_factory=dict)
    seen: dict[Cell, list[float]] = field(default_factory=dict)
    cores: dict[Cell, list[float]] = field(default_factory=dict)
    asked: int = 0
    failed: int = 0

    @property
    def headers(self) -> list[object]:
        """Of the load's arguments, those that make it send what asks for packed log-probabilities."""
        return ["-h", f"{HEADER}: {PACKED}"] if self.name == "packed" else []

    def body(self, folder: Path, tokens: int, *, stream: bool) -> Path:
        """The file with its request."""
        path = folder / f"{self.name}-{tokens}-{stream}.json"
        message = {"role": "user", "content": "Tell me where my parcel is, please; it was sent on Monday."}
        body = {"model": _MODEL, "messages": [message], "max_tokens": tokens, "stream": stream, **self.more}
        path.write_text(json.dumps(body))
        return path


def main() -> int:
    """Measure and print; 1 if a request failed."""
    options = _options()
    clock = Clock(options.budget_seconds)
    cells = [Cell(kind, int(count)) for count in options.at_once.split(",") for kind in ("whole", "stream")]
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serve-", dir=options.work)))
        tools = _tools(work / "tools", options.built)
        model = make_model(options.size, work / "model", on_gpu=options.gpu)
        engines = _start_engines(work, model, options, stack)
        clock.say("engines start; meanwhile: " + _ceiling(tools, max(cell.at_once for cell in cells)))
        subjects = list(_start(work, model, options, stack, clock, engines=engines))
        for subject in subjects:
            _check(subject, tools, options.tokens, clock, at_once=min(cell.at_once for cell in cells))
        took, number = 0.0, 0
        while number < options.rounds and (number == 0 or clock.remaining > took + _ROOM_S):
            began = clock.remaining
            _round(number, subjects, cells, tools, options, clock)
            took, number = began - clock.remaining, number + 1
            clock.say(f"after {number} rounds, load {os.getloadavg()[0]:.1f}:\n{_table(subjects, cells)}")
        for subject in subjects:
            _tell_recorded(subject, clock)
    return 1 if any(subject.failed for subject in subjects) else 0


def _tools(folder: Path, prebuilt: Path | None) -> Path:
    """The load, and the upstream that replays, compiled here."""
    folder.mkdir(parents=True)
    if prebuilt:
        for name in ("load", "replay"):
            shutil.copy(prebuilt / name, folder / name)
    built(folder, compiled=prebuilt is not None)
    return folder


class RunningEngine(NamedTuple):
    """A started engine, perhaps not ready yet."""

    port: int
    pid: int
    log: Path


def _start_engines(work: Path, model: Path, options: argparse.Namespace, stack: ExitStack) -> list[RunningEngine]:
    """Ours, and the bare one."""
    rollout = rollout_of(on_gpu=options.gpu, memory=options.memory / 2, api_servers=options.api_servers)
    rollout |= {"kv_cache_memory_bytes": _CACHE_BYTES} if options.gpu else {}
    settings = write_settings(work / "engine" / "settings.yaml", _values(work / "engine", model, options, rollout))
    servers = api_servers_of(settings)
    print(
        f"{_machine(options.gpu)}, {len(os.sched_getaffinity(0))} cores, {vllm.installed_version()}, torch "
        f"{torch.__version__}; Qwen3 {options.size}, random, {rollout['dtype']}; API servers {servers}, "
        f"explorer.workers {options.workers}; replies of {options.tokens} tokens, {options.waves} waves\n"
        f"parts of tuneloop: explorers, which capture {options.subjects} (a share: {options.share:g}), at an engine "
        f"{'with' if options.plugin else 'without'} our vLLM plugin; bare is vLLM alone",
        flush=True,
    )
    started = []
    for port, env in ((_PORT, {PACKS: str(int(options.plugin))}), (_BARE_PORT, {PACKS: "0"})):
        log = work / f"engine-{port}.log"
        pid = stack.enter_context(bare_engine(settings, model, port, log, env=env))
        started.append(RunningEngine(port, pid, log))
    return started


def _values(folder: Path, model: Path, options: argparse.Namespace, rollout: dict[str, Any]) -> dict[str, Any]:
    return {
        "mode": "serve",
        "project": "bench",
        "name": "serving",
        "checkpoint_root_dir": str(folder),
        "model": {"model_path": str(model), "max_model_len": 4096, "served_model_name": _MODEL},
        "cluster": {"gpu_per_node": int(options.gpu)},
        "explorer": {"workers": options.workers, "rollout_model": rollout},
    }


def _start(
    work: Path,
    model: Path,
    options: argparse.Namespace,
    stack: ExitStack,
    clock: Clock,
    *,
    engines: Sequence[RunningEngine],
) -> Iterator[Subject]:
    """Start all systems; those that fail are reported and skipped."""
    names = options.subjects.split(",")
    waiting = []
    for number, mode in enumerate(each for each in names if each in _MODES):
        folder, port = work / mode, _PORT + 1 + number
        rollout = {"engine_urls": [f"http://127.0.0.1:{_PORT}"], "dtype": "bfloat16" if options.gpu else "float32"}
        values = _values(folder, model, options, rollout)
        values["explorer"] |= {"proxy_port": port, "capture": {"logprobs": mode, "share": options.share}}
        settings = write_settings(folder / "settings.yaml", values)
        pid = stack.enter_context(service(folder / "settings.yaml", "explorer", folder / "explorer.log"))
        waiting.append(Subject(name=mode, port=port, pids=[pid], settings=settings))
    for port, pid, log in engines:
        await_ready(f"http://127.0.0.1:{port}/health", pid, log, timeout_s=max(60.0, clock.remaining - 60.0))
    ours, bare = engines
    found = [plugin_of(f"http://127.0.0.1:{each.port}", _MODEL) for each in engines]
    clock.say(f"engines are up: that of the explorers {found[0]}, bare {found[1]}")
    if found != [f"{'with' if options.plugin else 'without'} our vLLM plugin", "without our vLLM plugin"]:
        raise SystemExit("not as was asked for: install tuneloop where the engines run, or measure with --no-plugin")
    yield Subject(name="bare", port=bare.port, pids=[bare.pid])
    for name in (each for each in names if each in _ASKED):
        yield Subject(name=name, port=ours.port, pids=[ours.pid], more=_ASKED[name])
    for subject in waiting:
        url, log = f"http://127.0.0.1:{subject.port}/health/ready", work / subject.name / "explorer.log"
        try:
            await_ready(url, subject.pids[0], log, timeout_s=_EXPLORER_S)
        except RuntimeError as error:
            clock.say(f"{subject.name} is left out: {error}")
        else:
            yield subject


def _check(subject: Subject, tools: Path, tokens: int, clock: Clock, *, at_once: int) -> None:
    """That a reply is as long as it should be; and a small load to warm up. What fails is seen in the rounds too."""
    body = json.loads(subject.body(tools, tokens, stream=False).read_bytes())
    url, asks = f"http://127.0.0.1:{subject.port}{_PATH}", {HEADER: PACKED} if subject.headers else {}
    try:
        reply = httpx.post(url, json=body, headers=asks, timeout=120, trust_env=False).raise_for_status().json()
        choice = reply["choices"][0]
        if subject.name == "packed" and PACKED not in (choice.get("logprobs") or {}):
            raise SystemExit("log-probabilities come as vLLM has them: tuneloop is not installed where the engine runs")
        told = {"ids": bool(choice.get("token_ids")), "log-probabilities": bool(choice.get("logprobs"))}
        length, reason = reply["usage"]["completion_tokens"], choice["finish_reason"]
        clock.say(f"{subject.name}: {length} tokens, {reason}; clients see {told}")
        few = ["-c", at_once, "-n", 2 * at_once, *subject.headers]
        for stream in (False, True):
            load(tools, subject.port, subject.body(tools, 64, stream=stream), _PATH, few)
    except (httpx.HTTPError, LookupError, ValueError, RuntimeError) as error:
        clock.say(f"{subject.name}: warming up failed: {error!r}")


def _round(
    number: int, subjects: list[Subject], cells: list[Cell], tools: Path, options: argparse.Namespace, clock: Clock
) -> None:
    for place, cell in enumerate(cells):
        first = (number + place) % len(subjects)
        for subject in [*subjects[first:], *subjects[:first]]:
            _turn(subject, cell, tools, options, clock)


def _turn(subject: Subject, cell: Cell, tools: Path, options: argparse.Namespace, clock: Clock) -> None:
    """Load one subject, and note its speed."""
    body = subject.body(tools, options.tokens, stream=cell.kind == "stream")
    count = options.waves * cell.at_once
    before = cpu_s(subject.pids)
    try:
        said = load(tools, subject.port, body, _PATH, ["-c", cell.at_once, "-n", count, *subject.headers])
    except RuntimeError as error:
        clock.say(f"{subject.name} {cell.kind} {cell.at_once}: {error}")
        subject.failed += count
        return
    cores = (cpu_s(subject.pids) - before) / said["seconds"]
    cut = said["requests"] - said["ended"] if cell.kind == "stream" else 0
    subject.asked += count
    subject.failed += said["failed"] + cut
    rate = said["requests"] * options.tokens / said["seconds"]
    subject.seen.setdefault(cell, []).append(rate)
    subject.cores.setdefault(cell, []).append(cores)
    clock.say(
        f"{subject.name:8} {cell.kind:6} {cell.at_once:4}: {rate:8,.0f} tokens/s, {cores:.2f} cores of "
        f"{'the engine' if subject.settings is None else 'the explorer'}, p50 {said['p50_us'] / 1e6:.2f} s, failed "
        f"{said['failed']}, cut {cut}, {said['events'] / max(1, said['requests']):.0f} events a reply"
    )


def _table(subjects: list[Subject], cells: list[Cell]) -> str:
    bare = next(each for each in subjects if each.name == "bare")
    others = [each for each in subjects if each is not bare]
    heads = ["", "at once", "bare", *(f"{each.name}, ratio, cores" for each in others)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for cell in cells:
        values = [cell.kind, str(cell.at_once), _rate(bare, cell)]
        for each in others:
            ratio = _ratio(_ratios(each, bare, cell))
            cores = f"{median(each.cores[cell]):.2f}" if cell in each.cores else "–"
            values.append(f"{_rate(each, cell)}, **{ratio}**, {cores}")
        lines.append("| " + " | ".join(values) + " |")
    for kinds in ({"whole"}, {"stream"}, {"whole", "stream"}):
        ratios = [[r for cell in cells if cell.kind in kinds for r in _ratios(each, bare, cell)] for each in others]
        lines.append(f"| {', '.join(sorted(kinds))} | all of these | | " + " | ".join(map(_ratio, ratios)) + " |")
    failures = ", ".join(f"{each.name} {each.failed} of {each.asked}" for each in subjects)
    return "\n".join([*lines, f"failed: {failures}"])


def _ratios(subject: Subject, bare: Subject, cell: Cell) -> list[float]:
    pairs = zip(subject.seen.get(cell, []), bare.seen.get(cell, []), strict=False)
    return [rate / most for rate, most in pairs]


def _ratio(ratios: Sequence[float]) -> str:
    """Their geometric mean, its standard error, the lowest and the highest."""
    if not ratios:
        return "–"
    logarithms = np.log(ratios)
    error = logarithms.std(ddof=1) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    return f"{np.exp(logarithms.mean()):.3f} ± {error:.3f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _rate(subject: Subject, cell: Cell) -> str:
    return f"{median(subject.seen[cell]):,.0f}" if subject.seen.get(cell) else "–"


def _tell_recorded(subject: Subject, clock: Clock) -> None:
    """How many replies the explorer has recorded of those it gave."""
    if subject.settings is None:
        return
    database = sqlalchemy.create_engine(subject.settings.database_url)
    try:
        with database.connect() as connection:
            count = connection.execute(sqlalchemy.text("SELECT count(*) FROM experiences")).scalar()
        clock.say(f"{subject.name}: {count} replies in the ledger, of {subject.asked} and those to warm up")
    except sqlalchemy.exc.SQLAlchemyError as error:
        clock.say(f"{subject.name}: its ledger cannot be read: {error}")
    finally:
        database.dispose()


def _ceiling(tools: Path, at_once: int) -> str:
    """Tokens per second that the load counts if replies cost nothing."""
    port, found = _PORT + 20, []
    try:
        with running([tools / "replay", tools, str(port), "0", "2"], tools / "replay.log"):
            for kind in ("whole", "stream"):
                body = request_body(tools, model=_MODEL, tokens=512, stream=kind == "stream")
                said = load(tools, port, body, _PATH, ["-c", at_once, "-s", 1])
                found.append(f"{kind} {said['requests'] * 512 / said['seconds']:,.0f}")
    except (RuntimeError, OSError) as error:
        return f"the load's own limit is not known: {error}"
    return f"the load's own limit in tokens/s: {', '.join(found)}"


def _machine(on_gpu: bool) -> str:
    return torch.cuda.get_device_name() if on_gpu else "CPU"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--size", default="0.6b" if on_gpu else "tiny")
    parser.add_argument("--budget-seconds", type=float, default=360.0)
    parser.add_argument("--at-once", default="32,128,256" if on_gpu else "4,8")
    parser.add_argument("--tokens", type=int, default=256 if on_gpu else 32, help="of a reply")
    parser.add_argument("--waves", type=int, default=2, help="requests of each client in a turn")
    parser.add_argument("--rounds", type=int, default=8, help="at most; the budget may end them before")
    parser.add_argument("--subjects", default="all,share,none", help="beside bare")
    parser.add_argument("--share", type=float, default=0.05, help="what `share` captures")
    parser.add_argument(
        "--plugin", action=argparse.BooleanOptionalAction, default=True, help="in the explorers' engine"
    )
    parser.add_argument("--api-servers", type=int, help="vLLM's front ends, as by default: what the cores allow")
    parser.add_argument("--workers", type=int, default=1, help="explorer.workers")
    parser.add_argument("--memory", type=float, default=0.7, help="gpu_memory_utilization of both engines together")
    parser.add_argument("--built", type=Path, help="a folder with `load` and `replay`, where there is no C compiler")
    parser.add_argument("--work", type=Path, help="where to put everything")
    parser.add_argument("--gpu", action=argparse.BooleanOptionalAction, default=on_gpu)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
