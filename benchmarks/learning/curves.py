"""Draws curves as SVG without a library: a panel per method, a thin line per seed, a thick one for the mean."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from xml.sax.saxutils import escape

Curve = Sequence[Sequence[float]]

_WIDTH, _HEIGHT, _LEFT, _BELOW, _ABOVE, _GAP, _COLUMNS = 230, 130, 34, 34, 24, 18, 3
_COLOURS = ("#0b6e4f", "#c8553d", "#3d5a80", "#7f4f9b")
_INK, _FAINT = "#444", "#ddd"
_BINS = 24


def panels(title: str, curves: Mapping[str, Mapping[str, Sequence[Curve]]], *, most: int, unit: str) -> str:
    """An SVG of `curves`: by panel, by the name of a line, one curve a seed: pairs of replies so far and a share.

    `most` is the end of the horizontal axis; `unit` is what is counted there.
    """
    names = list(curves)
    rows = -(-len(names) // _COLUMNS)
    columns = min(_COLUMNS, len(names))
    width = columns * (_WIDTH + _LEFT + _GAP) + _GAP
    height = rows * (_HEIGHT + _BELOW + _ABOVE) + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, name in enumerate(names):
        x = _GAP + (number % columns) * (_WIDTH + _LEFT + _GAP) + _LEFT
        y = (number // columns) * (_HEIGHT + _BELOW + _ABOVE) + _ABOVE
        parts += [f'<g transform="translate({x},{y})">', *_panel(name, curves[name], most), "</g>"]
    lines = list(dict.fromkeys(line for panel in curves.values() for line in panel))
    parts += [*_legend(lines, height), f'<text x="{width - _GAP}" y="{height - 10}" fill="{_INK}" text-anchor="end">']
    return "\n".join([*parts, f"{escape(unit)}</text>", "</svg>"]) + "\n"


def mean_of(curves: Sequence[Curve], *, most: int) -> list[tuple[float, float]]:
    """The mean of the seeds in bins of the horizontal axis, each at its middle, but those that no seed reaches."""
    edges = [most * i / _BINS for i in range(_BINS + 1)]
    found = []
    for low, high in pairwise(edges):
        shares = [share for curve in curves for at, share in curve if low < at <= high]
        if shares:
            found.append(((low + high) / 2, fmean(shares)))
    return found


def _panel(name: str, lines: Mapping[str, Sequence[Curve]], most: int) -> list[str]:
    parts = [
        f'<text x="{_WIDTH / 2}" y="-8" text-anchor="middle" font-weight="bold" fill="{_INK}">{escape(name)}</text>'
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _HEIGHT * (1 - share)
        parts.append(f'<line x1="0" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="{_FAINT}"/>')
        parts.append(f'<text x="-6" y="{y + 4}" text-anchor="end" fill="{_INK}">{share:g}</text>')
    for at in range(0, most + 1, most // 4):
        x = _WIDTH * at / most
        parts.append(f'<text x="{x}" y="{_HEIGHT + 15}" text-anchor="middle" fill="{_INK}">{at}</text>')
    for colour, curves in zip(_COLOURS, lines.values(), strict=False):
        parts += [_line(mean_of([curve], most=most), most, colour, width=1, opacity=0.35) for curve in curves]
        parts.append(_line(mean_of(curves, most=most), most, colour, width=2.5, opacity=1))
    return parts


def _line(points: Sequence[tuple[float, float]], most: int, colour: str, *, width: float, opacity: float) -> str:
    path = " ".join(f"{_WIDTH * at / most:.1f},{_HEIGHT * (1 - min(1.0, max(0.0, share))):.1f}" for at, share in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" opacity="{opacity}"/>'


def _legend(names: Sequence[str], height: int) -> list[str]:
    parts, x = [], _GAP
    for colour, name in zip(_COLOURS, names, strict=False):
        parts.append(
            f'<line x1="{x}" x2="{x + 18}" y1="{height - 14}" y2="{height - 14}" stroke="{colour}" stroke-width="2.5"/>'
        )
        parts.append(f'<text x="{x + 24}" y="{height - 10}" fill="{_INK}">{escape(name)}</text>')
        x += 40 + 7 * len(name)
    return parts
