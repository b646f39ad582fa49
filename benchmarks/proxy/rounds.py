"""Measures proxies: the same loads on each, round by round, so that other work of the machine affects all."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.proxy.load import LONG, SHORT, cpu_s, load, loads, request_body, rss_mb
from benchmarks.proxy.systems import System

_LOOK_S = 0.25
_QUIET_LOOKS = 3
_DRAINED_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The loads of a round."""

    #: Of each closed loop, and of the requests that come one at a time.
    seconds: float = 3.0
    connections: int = 32
    #: Processes that make the closed loops' requests, and as many that answer them upstream.
    loads: int = 1
    wait_us: int = 5000
    streams: int = 32
    chunks_per_s: float = 5000.0
    #: Lengths of the replies; chunks are those of the long ones.
    tokens: tuple[int, ...] = (SHORT, LONG)

    @property
    def pace(self) -> float:
        """Chunks a second of one stream."""
        return self.chunks_per_s / self.streams


@dataclass(kw_only=True)
class Subject:
    """A system under measurement, and its readings."""

    system: System
    folder: Path
    #: The database server that it uses, if it is a process of its own.
    server: tuple[int, ...] = ()
    seen: dict[str, list[float]] = field(default_factory=dict)
    answered: int = 0
    failed: int = 0
    rss: list[float] = field(default_factory=list)

    def note(self, name: str, value: float) -> None:
        """One more reading."""
        self.seen.setdefault(name, []).append(value)

    def median(self, name: str) -> float | None:
        """The median of the readings; None without any."""
        return median(self.seen[name]) if name in self.seen else None

    def ask(self, tokens: int, arguments: list[object], *, stream: bool = False, at_once: int = 1) -> dict[str, Any]:
        """Load it once, from so many processes at once."""
        system = self.system
        body = request_body(self.folder, model=system.model, tokens=tokens, stream=stream)
        whole = (self.folder, system.port, body, system.path, arguments)
        said = load(*whole) if at_once == 1 else loads(at_once, *whole)
        self.answered += said["requests"]
        self.failed += said["failed"]
        if stream and said["ended"] != said["requests"]:
            raise RuntimeError(f"{system.name}: {said['requests'] - said['ended']} streams ended without [DONE]")
        return said


def warm_up(subjects: list[Subject]) -> None:
    """Let each have its connections open and its caches filled."""
    for subject in subjects:
        # The peer makes its tables at its first request, and fails those that come meanwhile.
        subject.ask(SHORT, ["-n", 1, "-c", 1])
        for tokens in (SHORT, LONG):
            subject.ask(tokens, ["-s", 0.5, "-c", 32])
            subject.ask(tokens, ["-n", 4, "-c", 4], stream=True)
        drain(subject, 0.0)
        subject.rss.append(rss_mb(subject.system.pids))


def one_round(subjects: list[Subject], plan: Plan, *, backwards: bool) -> None:
    """Every load on every system, in turns."""
    idle = idle_rates(subjects)
    for subject, rates in list(zip(subjects, idle, strict=True))[:: -1 if backwards else 1]:
        _closed_loops(subject, plan, rates)
        _one_at_a_time(subject, plan)
        if LONG in plan.tokens:
            _streams(subject, plan, rates)
        subject.rss.append(rss_mb(subject.system.pids))


def idle_rates(subjects: list[Subject], seconds: float = 2.0) -> list[tuple[float, float]]:
    """CPU seconds per second of each idle proxy and its database."""
    before = [_cpu(subject) for subject in subjects]
    time.sleep(seconds)
    after = [_cpu(subject) for subject in subjects]
    return [
        ((ours - ours_before) / seconds, (database - database_before) / seconds)
        for (ours_before, database_before), (ours, database) in zip(before, after, strict=True)
    ]


def drain(subject: Subject, idle: float) -> None:
    """Return when the proxy and its database are idle again: later flushes count too."""
    deadline, quiet, before = time.monotonic() + _DRAINED_S, 0, sum(_cpu(subject))
    while quiet < _QUIET_LOOKS:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{subject.system.name} has not come to rest within {_DRAINED_S:g} s")
        time.sleep(_LOOK_S)
        now = sum(_cpu(subject))
        quiet = quiet + 1 if now - before <= (1.5 * idle + 0.05) * _LOOK_S + 0.01 else 0
        before = now


def _cpu(subject: Subject) -> tuple[float, float]:
    return cpu_s(subject.system.pids), cpu_s(subject.server)


def _measure(
    subject: Subject,
    rates: tuple[float, float],
    tokens: int,
    arguments: list[object],
    *,
    stream: bool = False,
    at_once: int = 1,
) -> tuple[dict[str, Any], float, float]:
    """The load's report, and the CPU seconds of the proxy and its database above idle."""
    before, started = _cpu(subject), time.monotonic()
    said = subject.ask(tokens, arguments, stream=stream, at_once=at_once)
    drain(subject, sum(rates))
    after, seconds = _cpu(subject), time.monotonic() - started
    ours, database = (b - a - rate * seconds for a, b, rate in zip(before, after, rates, strict=True))
    return said, ours, database


def _closed_loops(subject: Subject, plan: Plan, rates: tuple[float, float]) -> None:
    arguments: list[object] = ["-s", plan.seconds, "-c", plan.connections // plan.loads]
    for tokens in plan.tokens:
        said, ours, database = _measure(subject, rates, tokens, arguments, at_once=plan.loads)
        subject.note(f"rps_{tokens}", said["requests"] / said["seconds"])
        subject.note(f"cpu_{tokens}", 1e6 * ours / said["requests"])
        subject.note(f"database_{tokens}", 1e6 * database / said["requests"])


def _one_at_a_time(subject: Subject, plan: Plan) -> None:
    said = subject.ask(SHORT, ["-s", plan.seconds, "-c", 1, "-w", plan.wait_us])
    subject.note("p50", said["p50_us"])
    subject.note("p99", said["p99_us"])


def _streams(subject: Subject, plan: Plan, rates: tuple[float, float]) -> None:
    streams = plan.streams // 4 if subject.system.slow else plan.streams
    arguments: list[object] = ["-n", streams, "-c", streams, "-g", 1e6 / plan.pace]
    said, ours, database = _measure(subject, rates, LONG, arguments, stream=True)
    subject.note("chunk", 1e6 * ours / said["events"])
    subject.note("chunk_database", 1e6 * database / said["events"])
    subject.note("chunks_per_s", said["events"] / said["seconds"])
