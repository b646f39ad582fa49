"""Reports the runs of benchmarks/learning/__main__.py: tables in Markdown, and curves."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.learning.curves import Curve, panels
from benchmarks.learning.plan import BUDGET, CALCULATOR, TOOLS, TRL_OFFLINE, TRL_ONLINE

Line = Mapping[str, Any]

#: Title, pattern of the runs' kinds, and where the horizontal axis ends.
_PICTURES = {
    "in_process": ("Share of right sums by replies, in one process", r"ours-sums-([a-z_+]+)-4096", BUDGET),
    "sums": ("Share of right sums by replies, through the loop", r"loop-sums-([a-z_+]+)(?:-gpu)?-4096", BUDGET),
    "tools": ("Share of right calls by replies, through the loop", r"loop-tools-([a-z_+]+)(?:-gpu)?-2048", TOOLS),
    "calculator": (
        "Share of right runs by runs, through the loop",
        r"loop-calculator-([a-z_+]+)(?:-gpu)?-1536",
        CALCULATOR,
    ),
}


def tables(lines: Sequence[Line]) -> str:
    """A row for each kind of run, and TRL's trainers beside ours."""
    rows = ["| run | before | after, by seed | mean | steps | seconds |", "|---|---|---|---|---|---|"]
    for kind, seeds in _kinds(lines).items():
        after = [line["after"] for line in seeds]
        steps = "-" if "steps" not in seeds[0] else f"{fmean(line['steps'] for line in seeds):.0f}"
        seconds = fmean(line.get("cpu_s", line.get("wall_s", 0.0)) for line in seeds)
        cells = (
            kind,
            f"{fmean(line['before'] for line in seeds):.2f}",
            " ".join(f"{each:.3f}" for each in after),
            f"{fmean(after):.3f}",
            steps,
            f"{seconds:.0f}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, "", *_beside_trl(lines)])


def _beside_trl(lines: Sequence[Line]) -> list[str]:
    """TRL gets its best learning rate, by the mean of the seeds."""
    kinds = _kinds(lines)
    rows = ["| method | ours | TRL, best of its learning rates | difference |", "|---|---|---|---|"]
    for method in (*TRL_ONLINE, *TRL_OFFLINE):
        ours = kinds.get(f"ours-sums-{method}-{'offline-' if method in TRL_OFFLINE else ''}{BUDGET}")
        rivals = {kind: seeds for kind, seeds in kinds.items() if kind.startswith(f"trl-sums-{method}-")}
        if ours and rivals:
            kind, best = max(rivals.items(), key=lambda each: _mean(each[1]))
            rate = re.search(r"lr=([^-]+(?:-\d+)?)", kind)
            said = f"{_mean(best):.3f} ({rate.group(1) if rate else 'default'})"
            rows.append(f"| {method} | {_mean(ours):.3f} | {said} | {_mean(ours) - _mean(best):+.3f} |")
    return rows if len(rows) > 2 else []


def draw(lines: Sequence[Line], folder: Path) -> None:
    """The pictures of existing runs, as SVG files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (title, pattern, most) in _PICTURES.items():
        found: defaultdict[str, list[Curve]] = defaultdict(list)
        for kind, seeds in _kinds(lines).items():
            match = re.fullmatch(pattern, kind)
            if match:
                found[match.group(1)] += [line["curve"] for line in seeds]
        if found:
            curves = {method: {"each seed, and the mean": each} for method, each in sorted(found.items())}
            unit = "runs" if name == "calculator" else "replies sampled"
            (folder / f"{name}.svg").write_text(panels(title, curves, most=most, unit=unit))


def _kinds(lines: Sequence[Line]) -> dict[str, list[Line]]:
    kinds: defaultdict[str, list[Line]] = defaultdict(list)
    for line in sorted(lines, key=lambda each: (each["kind"], each["seed"])):
        kinds[line["kind"]].append(line)
    return dict(kinds)


def _mean(seeds: Sequence[Line]) -> float:
    return fmean(line["after"] for line in seeds)
