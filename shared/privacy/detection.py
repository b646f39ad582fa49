"""Finds what is to be redacted in a text: the built-in kinds, the operator's patterns, and Presidio's entities."""

import importlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import regex
import structlog

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.privacy.patterns import FINDERS, PRIVATE_KEY_BEGINS
from tuneloop.shared.settings.feedback import PrivacySettings

log = structlog.get_logger()

#: Seconds that one of the operator's patterns may take for one text; then all of the text counts as found.
PATTERN_TIMEOUT_S = 0.25

#: Characters that Presidio is given at once; a longer text is cut, with an overlap in which a name has room.
_PRESIDIO_CHARACTERS, _OVERLAP = 100_000, 200

#: The least number that is a card's, the only built-in kind of digits alone, and the least that Presidio is asked about
#: unless there are patterns: a request may be thousands of token ids, each of which takes it milliseconds.
_CARD, _PRESIDIO_NUMBER = 10**12, 10**6

#: Texts up to so many characters are searched together, so many characters at once: most of what a search of a short
#: one takes is to begin it. Between them stands what no built-in kind has in it, and which none takes for a letter.
_SHORT, _TOGETHER, _BETWEEN = 256, 1 << 15, "\n"

#: A text's spans by Presidio: from, to, entity.
Analyzer = Callable[[str], Iterable[tuple[int, int, str]]]


class Span(NamedTuple):
    """Characters of a text, from `start` to before `end`, and what they were found to be."""

    start: int
    end: int
    kind: str


class Detector:
    """What the settings want to have found.

    `slow` where it may take longer than an event loop should wait. `timed_out` is called with the name of what took too
    long for a text, or failed.
    """

    def __init__(
        self,
        settings: PrivacySettings,
        *,
        analyzer: Analyzer | None = None,
        timed_out: Callable[[str], object] = lambda name: None,
    ) -> None:
        self._finders = {name: finder for name, finder in FINDERS.items() if name in settings.redact}
        self._patterns: Mapping[str, regex.Pattern[str]] = {
            name: regex.compile(pattern) for name, pattern in settings.patterns.items()
        }
        self._analyzer = analyzer or (presidio(settings) if settings.presidio else None)
        self.slow = bool(self._patterns) or self._analyzer is not None
        least = _CARD if "credit_card" in self._finders else math.inf
        self._least_number = 0 if self._patterns else _PRESIDIO_NUMBER if self._analyzer else least
        self._timed_out = timed_out

    def __bool__(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._finders or self.slow)

    def spans(self, text: str) -> list[Span]:
        """What was found, in order and apart from each other."""
        found = [Span(each[0], each[1], name) for name, finder in self._finders.items() for each in finder(text)]
        for name, pattern in self._patterns.items():
            try:
                matches = pattern.finditer(text, timeout=PATTERN_TIMEOUT_S, concurrent=True)
                found += [Span(each.start(), each.end(), name) for each in matches if each.end() > each.start()]
            except TimeoutError:
                self._timed_out(name)
                found.append(Span(0, len(text), name))  # rather too much than what may be in it
        if self._analyzer is not None:
            try:
                found += [Span(start, end, kind.lower()) for start, end, kind in self._analyzer(text) if start < end]
            except Exception as error:  # noqa: BLE001 - whatever it raises may quote the text, which must be kept back
                log.error("presidio_failed", error=type(error).__name__)
                self._timed_out("presidio")
                found.append(Span(0, len(text), "presidio"))
        return apart(found)

    def spans_of(self, texts: Sequence[str]) -> dict[str, list[Span]]:
        """The spans of those of several texts that have any, in the texts' order."""
        if self.slow:
            suspects: Iterable[str] = texts
        else:
            short = [each for each in texts if _is_short(each)]
            found = {each for some in _portions(short) for each in self._suspects(some)}
            suspects = (each for each in texts if each in found or not _is_short(each))
        return {each: spans for each in suspects if (spans := self.spans(each))}

    def _suspects(self, texts: Sequence[str]) -> Iterator[str]:
        """The texts in which something may be found; in the others there is nothing."""
        together = _BETWEEN.join(texts)
        starts = list(accumulate((len(each) + len(_BETWEEN) for each in texts), initial=0))
        for finder in self._finders.values():
            for start, _ in finder(together):
                yield texts[bisect_right(starts, start) - 1]

    def text_of(self, number: float) -> str | None:
        """A number of JSON as a text to search; None where nothing can be found in it."""
        if -self._least_number < number < self._least_number:
            return None
        if number == number // 1:
            return str(int(number))
        return str(number) if self._patterns else None  # neither a card nor a phone number

    def redact(self, text: str) -> str:
        """A text with `[REDACTED:kind]` in the place of what is found in it."""
        return replace_spans(text, self.spans(text))


def _is_short(text: str) -> bool:
    """Whether it is searched together with others."""
    return len(text) <= _SHORT and PRIVATE_KEY_BEGINS not in text


def _portions(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """The texts in their order, so many of them as are searched together."""
    begun = size = 0
    for number, text in enumerate(texts):
        size += len(text) + len(_BETWEEN)
        if size > _TOGETHER:
            yield texts[begun:number]
            begun, size = number, len(text)
    if begun < len(texts):
        yield texts[begun:]


def apart(spans: Iterable[Span]) -> list[Span]:
    """Spans in their order; those that overlap as one, which has the name of the first."""
    left: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.start, -each.end)):
        if left and span.start < left[-1].end:
            left[-1] = left[-1]._replace(end=max(span.end, left[-1].end))
        else:
            left.append(span)
    return left


def replace_spans(text: str, spans: Iterable[Span]) -> str:
    """A text with `[REDACTED:kind]` in the place of each span; they are in order and apart from each other."""
    pieces, at = [], 0
    for span in spans:
        pieces += [text[at : span.start], f"[REDACTED:{span.kind}]"]
        at = span.end
    return "".join([*pieces, text[at:]])


def presidio(settings: PrivacySettings) -> Analyzer:
    """Presidio's analyzer for the entities in the settings. Raises EnvironmentRefused where it cannot be had."""
    try:
        engine: Any = importlib.import_module("presidio_analyzer").AnalyzerEngine()
    except ImportError:
        raise EnvironmentRefused(
            'privacy.presidio: presidio-analyzer is not installed: in a clone, pip install ./runner ".[presidio]", '
            "and a model of spaCy's for the language"
        ) from None
    except OSError as error:  # spaCy's, for a model that is not there
        raise EnvironmentRefused(f"privacy.presidio: {str(error).splitlines()[0]}") from None
    wanted = list(settings.presidio)
    unknown = sorted(set(wanted) - set(engine.get_supported_entities(settings.presidio_language)))
    if unknown:
        raise EnvironmentRefused(
            f"privacy.presidio: {', '.join(unknown)} is not known to Presidio in {settings.presidio_language}"
        )

    def analyze(text: str) -> Iterator[tuple[int, int, str]]:
        for begin in range(0, len(text), _PRESIDIO_CHARACTERS):
            part = text[begin : begin + _PRESIDIO_CHARACTERS + _OVERLAP]
            for each in engine.analyze(part, entities=wanted, language=settings.presidio_language):
                yield begin + each.start, begin + each.end, each.entity_type

    return analyze
