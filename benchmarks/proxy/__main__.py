"""What a proxy in front of vLLM costs: ours beside nginx, gateways and the peer's, in one run, on the same load.

    .venv/bin/python -m benchmarks.proxy [--systems nginx tuneloop …] [--rounds 3] [--seconds 2] [--work FOLDER]

The upstream replays recorded bytes of vLLM (`load.py`, `replay.c`): 1 000 prompt ids, 64 or 512 tokens. Measured:
(a) CPU: user and system time of all of the proxy's processes per request, under a closed loop of 32 connections, until
    it is at rest again, less what it burns when idle. "database" is what its database server takes beside that;
(b) latency: p50 and p99 of the whole round trip, one request at a time; "added" is that less the direct one;
(c) chunk: CPU per streamed chunk, 5 000 chunks a second asked of 32 streams (of 8, 1 250 a second, where a request
    takes milliseconds);
(d) RSS of its processes after warming up and in the end, and how many exchanges its store has of those it answered.
Each is the median over the rounds, in which the systems take turns. All of them run side by side, each in an
environment of its own, which is made below the work folder when it is first needed; nginx is taken from the system
(Debian's package nginx-light). The peer's runs in this environment, for its torch.

    … --systems "tuneloop, SQLite" --source BEFORE AFTER --tokens 64     two checkouts of ours side by side
    … --systems "tuneloop, SQLite" --workers 1 2 4 --loads 2   how it grows with its workers
    … --systems "tuneloop, SQLite, fsync" --soak 30      per minute: latency and RSS at 70 % of the most it can do
    … --systems "tuneloop, SQLite, fsync" --requests 1000000        RSS over a million requests
"""

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.proxy.kinds import KINDS
from benchmarks.proxy.load import LONG, SHORT, built, running, wait_until_ready
from benchmarks.proxy.rounds import Plan, Subject, one_round, warm_up
from benchmarks.proxy.soak import many, soak
from benchmarks.proxy.systems import Kind, Place, postgres_server, tuneloop
from benchmarks.proxy.table import report, table

_PORT = 21_900


def main() -> int:
    """Measure what was asked for and print the table, then all of it as JSON."""
    options = _options()
    long = options.soak or options.requests
    kinds = [
        kind
        for kind in KINDS
        if any(name in kind.name for name in options.systems) or (kind.name == "direct" and not long)
    ]
    kinds = _with_sources(_with_workers(kinds, options.workers), options.source)
    plan = Plan(
        seconds=options.seconds,
        connections=options.connections,
        loads=options.loads,
        chunks_per_s=options.chunks,
        tokens=tuple(options.tokens),
    )
    with ExitStack() as stack:
        subjects = _start(kinds, options, plan, stack)
        warm_up(subjects)
        if long:
            return _long(subjects, options)
        for number in range(options.rounds):
            one_round(subjects, plan, backwards=bool(number % 2))
            print(f"round {number + 1}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        lines = report(subjects)
    print(table(lines))
    print(json.dumps(json.loads(json.dumps(lines), parse_float=lambda number: float(f"{float(number):.4g}"))))
    return 0


def _long(subjects: list[Subject], options: argparse.Namespace) -> int:
    """Load one system after the other for long, a line for each report."""
    for subject in subjects:
        if options.soak:
            lines = soak(subject, minutes=options.soak, share=options.load)
        else:
            lines = many(subject, options.requests)
        for line in lines:
            print("  ".join(f"{name}={_cell(value)}" for name, value in line.items()), flush=True)
    return 0


def _cell(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _with_workers(kinds: list[Kind], workers: list[int]) -> list[Kind]:
    """Ours once for each number of workers, the others as they are."""
    return [
        replace(kind, name=f"{kind.name}, {number} workers", workers=number) if number > 1 else kind
        for kind in kinds
        for number in (workers if kind.start is tuneloop else [1])
    ]


def _with_sources(kinds: list[Kind], sources: list[Path]) -> list[Kind]:
    """Ours once for each checkout, named by its folder if there are several; the others as they are."""
    measured: list[Kind] = []
    for kind in kinds:
        if kind.start is not tuneloop:
            measured.append(kind)
            continue
        for source in sources:
            name = f"{kind.name}, {source.name}" if len(sources) > 1 else kind.name
            measured.append(replace(kind, name=name, source=source))
    return measured


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proxy", description=__doc__)
    parser.add_argument(
        "--systems", nargs="+", default=[""], metavar="NAME", help="those with one of these in their names"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each load")
    parser.add_argument("--connections", type=int, default=32, help="of the closed loop")
    parser.add_argument("--loads", type=int, default=1, help="processes of the closed loop and of the upstream")
    parser.add_argument("--chunks", type=float, default=5000.0, help="asked per second of all streams")
    parser.add_argument("--captured", action="store_true", help="token ids and log-probabilities for all, asked or not")
    parser.add_argument("--packed", action="store_true", help="log-probabilities as engines with our plugin tell them")
    parser.add_argument("--workers", nargs="+", type=int, default=[1], help="measure ours with each of these numbers")
    parser.add_argument(
        "--tokens", nargs="+", type=int, choices=(SHORT, LONG), default=[SHORT, LONG], help="of the replies asked for"
    )
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES", help="load each for so long instead")
    parser.add_argument("--load", type=float, default=0.7, help="share of what it can do at most, in --soak")
    parser.add_argument("--requests", type=int, default=0, help="ask each so often instead")
    parser.add_argument("--work", type=Path, default=Path("~/.cache/tuneloop-bench").expanduser())
    parser.add_argument(
        "--source",
        nargs="+",
        type=lambda name: Path(name).resolve(),
        default=[Path(__file__).parents[2]],
        help="the checkouts of ours to measure",
    )
    return parser.parse_args()


def _start(kinds: list[Kind], options: argparse.Namespace, plan: Plan, stack: ExitStack) -> list[Subject]:
    """All systems, running side by side."""
    options.work.mkdir(parents=True, exist_ok=True)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="proxy-", dir=options.work)))
    built(folder, captured=options.captured, packed=options.packed)
    log = folder / "replay.log"
    pid = stack.enter_context(running([folder / "replay", folder, str(_PORT), str(plan.pace), str(plan.loads)], log))
    upstream = f"http://127.0.0.1:{_PORT}"
    wait_until_ready(f"{upstream}/health", pid, log)
    server = stack.enter_context(postgres_server()) if any(kind.postgres for kind in kinds) else None
    subjects = []
    for number, kind in enumerate(kinds, 1):
        place = Place(
            folder=folder / str(number),
            work=options.work,
            port=_PORT + number,
            upstream=upstream,
            database=stack.enter_context(server.fresh()) if server and kind.postgres else None,
        )
        place.folder.mkdir()
        system = stack.enter_context(kind.start(kind, place))
        subjects.append(Subject(system=system, folder=folder, server=server.pids if server and kind.postgres else ()))
    return subjects


if __name__ == "__main__":
    sys.exit(main())
