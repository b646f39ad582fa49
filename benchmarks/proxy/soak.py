"""Loads one proxy for long: do memory and latency stay constant?"""

import time
from collections.abc import Iterator
from typing import Any

from benchmarks.proxy.load import SHORT, reports, request_body, rss_mb
from benchmarks.proxy.rounds import Subject, drain

_MOST_S = 10.0
_CONNECTIONS = 32
_REPORT_S = 60.0
_REPORTS = 20


def soak(subject: Subject, *, minutes: float, share: float) -> Iterator[dict[str, Any]]:
    """Load it for so long with this share of what it can do at most, and tell each minute how it is."""
    most = subject.ask(SHORT, ["-s", _MOST_S, "-c", _CONNECTIONS])
    drain(subject, 0.0)
    rate = share * most["requests"] / most["seconds"]
    yield {"name": subject.system.name, "most_per_s": most["requests"] / most["seconds"], "offered_per_s": rate}
    every = min(_REPORT_S, 60 * minutes)
    yield from _reports_of(subject, ["-s", 60 * minutes, "-c", 2 * _CONNECTIONS, "-r", rate, "-e", every])


def many(subject: Subject, requests: int) -> Iterator[dict[str, Any]]:
    """Ask so often, as fast as it can, and tell every twentieth of the way how it is."""
    every = max(1, requests // _REPORTS)
    yield from _reports_of(subject, ["-n", requests, "-c", _CONNECTIONS, "-m", every])


def _reports_of(subject: Subject, arguments: list[object]) -> Iterator[dict[str, Any]]:
    system, started = subject.system, time.monotonic()
    body = request_body(subject.folder, model=system.model, tokens=SHORT, stream=False)
    for report in reports(subject.folder, system.port, body, system.path, arguments):
        seen = {"name": system.name, "at_s": time.monotonic() - started, **_of_interest(report)}
        if report["final"]:
            subject.answered += report["requests"]
            subject.failed += report["failed"]
            drain(subject, 0.0)
            seen["recorded"] = system.recorded() if system.recorded else None
            seen["answered"] = subject.answered
        yield seen | {"rss_mb": rss_mb(system.pids), "final": report["final"]}


def _of_interest(report: dict[str, Any]) -> dict[str, Any]:
    rate = report["requests"] / report["seconds"] if report["seconds"] else 0.0
    return {"per_s": rate, **{name: report[name] for name in ("requests", "failed", "p50_us", "p99_us", "max_us")}}
