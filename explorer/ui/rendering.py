"""Makes HTML of templates. All that clients wrote is escaped, and what would hide or reorder text is shown."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from fastapi.responses import HTMLResponse
from markupsafe import Markup

from tuneloop.shared import VERSION
from tuneloop.shared.experience import steady_clock
from tuneloop.shared.operations.diagnosis import ago, moment

FOLDER = Path(__file__).parent

#: Nothing but our own files, and no script or style inside a page.
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with none at all, browsers send forms of ours as if from nowhere
    "cache-control": "no-store",
}

# Control characters but tab and newline, what changes the direction of text, what is not seen, and halves of pairs.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
#: Characters that are looked through at once, in which no other thread has a turn.
_AT_ONCE = 64 << 10

#: Log-probabilities from which on a token is likelier, for its colour.
_SHADES = (-0.1, -0.5, -1.2, -2.5, -5.0)


def visible(value: object) -> object:
    """The value as it is shown: of text every hidden character as its name. Applied to whatever a template writes."""
    if value is None:
        return ""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    if len(value) <= _AT_ONCE:
        return _HIDDEN.sub(_name, value)
    return "".join(_HIDDEN.sub(_name, value[begin : begin + _AT_ONCE]) for begin in range(0, len(value), _AT_ONCE))


def _name(found: re.Match[str]) -> str:
    return f"⟨U+{ord(found[0]):04X}⟩"


def plain(text: str) -> str:
    return _HIDDEN.sub("", text)


def figure(value: float | None, digits: int = 3) -> str:
    """A number of at most so many significant digits, those before the point all the same; a dash for none."""
    if value is None:
        return "–"
    shown = f"{value:.{digits}g}"
    return f"{value:,.0f}" if abs(float(shown)) >= min(1000, 10**digits) else shown


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return (
        f"{seconds * 1000:.0f} ms" if seconds < 0.995 else ago(seconds, 0.0) if seconds >= 120 else f"{seconds:.1f} s"
    )


def when(then: float | None) -> Markup:
    """A time, as how long ago that was, with the time itself beside it."""
    if then is None:
        return Markup("–")
    try:
        machine = datetime.fromtimestamp(then, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):  # an imported row may say anything
        return Markup("at {}").format(then)
    shown = f"{ago(steady_clock(), then)} ago"
    return Markup('<time datetime="{}" title="{}">{}</time>').format(machine, moment(then), shown)


def shade(logprob: float) -> int:
    """How unlikely a token was, from 0 to 5."""
    return sum(logprob < each for each in _SHADES)


class Renderer:
    def __init__(self, **site: object) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            finalize=visible,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {
            "duration": duration,
            "figure": figure,
            "plain": plain,
            "shade": shade,
            "when": when,
        }
        self._environment.globals |= {**site, "release": VERSION}

    def page(self, template: str, context: Mapping[str, Any], status: int = 200) -> HTMLResponse:
        return HTMLResponse(self._environment.get_template(template).render(context), status, HEADERS)
