"""Prints the table of the proxies' benchmark: each one's cost, and its ratio to ours and to the fastest gateway's."""

from collections.abc import Sequence
from typing import Any

from benchmarks.proxy.load import LONG, SHORT
from benchmarks.proxy.rounds import Subject

_COSTS = (f"cpu_{SHORT}", f"cpu_{LONG}", f"with_database_{SHORT}", "chunk", "added_p50")
_RIVAL = "TensorZero"
_OURS = "tuneloop"


def report(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """A line for each system: the medians of its readings."""
    lines = [_line(subject) for subject in subjects]
    nothing = next((line for line in lines if line["name"] == "direct"), None)
    for line in lines:
        for percentile in ("p50", "p99"):
            if nothing is not None and line is not nothing:
                line[f"added_{percentile}"] = line[percentile] - nothing[percentile]
        if f"cpu_{SHORT}" in line:
            line[f"with_database_{SHORT}"] = line[f"cpu_{SHORT}"] + line[f"database_{SHORT}"]
    for reference in (_OURS, _RIVAL):
        against = next((line for line in lines if line["name"].startswith(reference)), None)
        for line in lines if against else []:
            line[f"to_{reference}"] = {cost: _ratio(line, against, cost) for cost in _COSTS}
    return lines


def _line(subject: Subject) -> dict[str, Any]:
    recorded = subject.system.recorded() if subject.system.recorded else None
    return {
        "name": subject.system.name,
        **{name: subject.median(name) for name in subject.seen},
        "readings": subject.seen,
        "rss": subject.rss,
        "answered": subject.answered,
        "failed": subject.failed,
        "recorded": recorded,
    }


def _ratio(line: dict[str, Any], against: dict[str, Any] | None, cost: str) -> float | None:
    if against is None or line["name"] == "direct" or not against.get(cost) or line.get(cost) is None:
        return None
    return float(line[cost] / against[cost])


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Two tables in Markdown: what was measured, and the ratios."""
    measured = [
        "| proxy | n64 p50 / p99 (added), µs | n64 / n512 per s | CPU µs: n64 | n512 | chunk | database µs: n64, n512 "
        "| RSS MB | recorded of answered (failed) |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_figures(line) for line in lines),
    ]
    ratios = [
        "| proxy | to tuneloop: n64 CPU | n512 CPU | n64 CPU with database | chunk | added p50 "
        "| to TensorZero: n64 CPU | n512 CPU | n64 CPU with database | chunk | added p50 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(_ratios(line) for line in lines if line["name"] != "direct"),
    ]
    return "\n".join([*measured, "", *ratios])


def _figures(line: dict[str, Any]) -> str:
    added = f" ({line['added_p50']:+.0f} / {line['added_p99']:+.0f})" if "added_p50" in line else ""
    direct = line["name"] == "direct"
    databases = [line.get(f"database_{tokens}") for tokens in (SHORT, LONG)]
    kept = "-"
    if line["recorded"] is not None:
        short = "" if line["recorded"] >= line["answered"] else " **LOST**"
        kept = f"{line['recorded']} of {line['answered']}{short}"
    cells = [
        line["name"],
        f"{line['p50']:.0f} / {line['p99']:.0f}{added}",
        f"{_whole(line.get(f'rps_{SHORT}'))} / {_whole(line.get(f'rps_{LONG}'))}",
        *("-" if direct else _whole(line.get(cost)) for cost in (f"cpu_{SHORT}", f"cpu_{LONG}", "chunk")),
        ", ".join(_whole(each) for each in databases) if any(databases) else "-",
        "-" if direct else f"{line['rss'][0]:.0f} → {line['rss'][-1]:.0f}",
        f"{kept} ({line['failed']})",
    ]
    return f"| {' | '.join(cells)} |"


def _whole(number: float | None) -> str:
    return "-" if number is None else f"{number:.0f}"


def _ratios(line: dict[str, Any]) -> str:
    cells = [
        "-"
        if (each := line.get(f"to_{reference}", {}).get(cost)) is None
        else f"{each:.2g}"
        if each < 10
        else f"{each:.0f}"
        for reference in (_OURS, _RIVAL)
        for cost in _COSTS
    ]
    return f"| {line['name']} | {' | '.join(cells)} |"
