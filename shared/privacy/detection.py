"""Finds what to redact in a text: built-in kinds, the operator's patterns and Presidio's entities.

Each built-in search is linear in the text's length, so no client text can force backtracking. A cheap test for required
characters comes first, and skips most texts.
"""

import importlib
import ipaddress
import math
import re
import resource
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import regex
import structlog

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.logging import clean_errors
from tuneloop.shared.settings.feedback import PrivacySettings

log = structlog.get_logger()

Range = tuple[int, int]
Finder = Callable[[str], Iterator[Range]]

# What continues a word. From U+0E00 on come Thai, Chinese, Japanese and Korean, which put no blank before a number.
_WORD = r"(?:[^\W\u0e00-\U0010ffff]|\d)"
# Begun only at the first character of a run, and possessive: else a run without an @ would be read over and over.
# Either side of a border between scripts is a part of its own, in a name as in a domain.
_LABEL = rf"(?:(?:{_WORD}|-)++|(?:(?!{_WORD})\w)++)"
_EMAIL = re.compile(
    rf"(?:(?<!{_WORD})(?<![.%+-])(?:{_WORD}|[.%+-])++|(?<![\w.%+-])[\w.%+-]++(?<!{_WORD})(?<=\w))"
    rf"@{_LABEL}(?:\.{_LABEL})++"
)
_IPV4 = re.compile(rf"(?<!{_WORD})(?<!\.)\d{{1,3}}(?:\.\d{{1,3}}){{3}}(?!{_WORD}|\.\d)")
_IPV6 = re.compile(
    rf"(?<!{_WORD})(?<!:)(?:[0-9A-Fa-f]{{0,4}}:){{2,7}}(?:[0-9A-Fa-f]{{1,4}}|(?:\d{{1,3}}\.){{3}}\d{{1,3}})?(?!{_WORD}|:)"
)
# Each begins with what a search can run to, and looks back from there: looking back everywhere takes longer.
_SSN = re.compile(r"\d(?<!\d\d)(?<!\d-\d)(\d\d)([- ])(\d\d)\2(\d{4})(?!-?\d)")
_DIGIT_GROUPS = re.compile(r"\d(?<![0-9A-Za-z]\d)\d{2,}+(?:[ -]\d{3,}+)*+")
_GROUP, _DIGIT = re.compile(r"\d+"), re.compile(r"\d")
# What follows is only looked at: it may be words, and the number after them.
_IBAN = re.compile(
    r"\d\d(?<=[A-Za-z][A-Za-z]\d\d)(?<![0-9A-Za-z][A-Za-z][A-Za-z]\d\d)(?=((?:[ -]?[0-9A-Za-z]){11,30}))"
)
_PHONES = (
    re.compile(rf"\+(?<!{_WORD}\+)(?<!\+\+)[1-9](?:[ ().\/-]{{0,3}}\d){{6,13}}(?!\d)"),
    re.compile(rf"00(?<!{_WORD}00)(?<!\+00)[1-9](?:[ ().\/-]{{0,3}}\d){{6,13}}(?!\d)"),
    re.compile(rf"\((?<!{_WORD}\()(?<![.-]\()\d{{3}}\) ?\d{{3}}[ .-]\d{{4}}(?![.-]?\d)"),
    re.compile(rf"\d(?<!{_WORD}\d)(?<![.-]\d)\d\d[ .-]\d{{3}}[ .-]\d{{4}}(?![.-]?\d)"),
    re.compile(rf"0(?<!{_WORD}0)(?<![.:/-]0)[1-9]\d{{0,3}}[ /-]\d(?:[ -]?\d){{4,9}}(?!\d)"),
)
_DATE = re.compile(r"\d\d[-/ ]\d\d[-/ ]\d{2,4}")
_JWT = re.compile(rf"(?<!{_WORD})(?<!-)eyJ[A-Za-z0-9_-]{{8,}}+(?:\.[A-Za-z0-9_-]*+){{2,4}}+")
PRIVATE_KEY_BEGINS = "-----BEGIN "
_KEY_BEGINS = re.compile(PRIVATE_KEY_BEGINS + r"(?:[A-Z0-9]{1,16} ){0,4}PRIVATE KEY(?: BLOCK)?-----")
_KEY_ENDS = re.compile(r"-----END (?:[A-Z0-9]{1,16} ){0,4}PRIVATE KEY(?: BLOCK)?-----")

#: What the keys of well-known services begin with, and what follows.
_API_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "sk-": r"[\w-]{16,}",  # OpenAI, Anthropic and those who took after them
        "tl-": r"[\w-]{40,}",  # our own
        "sk_live_": r"\w{16,}",  # Stripe
        "sk_test_": r"\w{16,}",
        "rk_live_": r"\w{16,}",
        "AKIA": "[0-9A-Z]{16}",  # AWS
        "ASIA": "[0-9A-Z]{16}",
        "AIza": r"[\w-]{35}",  # Google
        "ya29.": r"[\w-]{20,}",
        "ghp_": r"\w{36,}",  # GitHub
        "gho_": r"\w{36,}",
        "ghu_": r"\w{36,}",
        "ghs_": r"\w{36,}",
        "ghr_": r"\w{36,}",
        "github_pat_": r"\w{22,}",
        "glpat-": r"[\w-]{20,}",  # GitLab
        "xoxa-": r"[\w-]{10,}",  # Slack
        "xoxb-": r"[\w-]{10,}",
        "xoxp-": r"[\w-]{10,}",
        "xoxr-": r"[\w-]{10,}",
        "xoxs-": r"[\w-]{10,}",
        "hf_": "[A-Za-z]{30,}",  # Hugging Face
        "npm_": r"\w{36,}",
        "pypi-": r"[\w-]{40,}",
        "SG.": r"[\w-]{16,}\.[\w-]{16,}",  # SendGrid
        "dop_v1_": "[0-9a-f]{64}",  # DigitalOcean
    }
)
#: The keys that hold no digits.
_LETTERS_ONLY = "hf_"

#: By a sign that stands in it, what is in every text that holds a key: each search runs to the sign, and looks back.
_API_KEY_BEGINS = {
    sign: re.compile(f"{re.escape(sign)}(?:{'|'.join(f'(?<={re.escape(each)})' for each in starts)})").search
    for sign in "-_."
    if (starts := [each for each in _API_KEYS if each.endswith(sign)])
} | {"A": re.compile("|".join(each for each in _API_KEYS if each.isalpha())).search}
_API_KEY = re.compile(
    "(?<![0-9A-Za-z])(?:" + "|".join(re.escape(start) + rest for start, rest in _API_KEYS.items()) + ")", re.ASCII
)

_IBAN_LENGTHS: Mapping[str, int] = MappingProxyType(
    {
        country: int(length)
        for country, length in re.findall(
            r"([A-Z]{2})(\d\d)",
            "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18 DO28 EE20"
            " EG29 ES24 FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HN28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30"
            " KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27 MT31 MU30 NI28 NL18 NO15 OM23"
            " PK24 PL28 PS29 PT25 QA29 RO24 RS22 RU33 SA24 SC31 SD18 SE24 SI19 SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26"
            " UA29 VA22 VG24 XK20 YE30",
        )
    }
)

_CARD_STARTS, _CARD_DIGITS = "123456", range(13, 20)

#: Twice each digit, or the sum of the two digits of that.
_DOUBLED = bytes.maketrans(b"0123456789", b"0246813579")


def emails(text: str) -> Iterator[Range]:
    """Addresses whose domain ends in letters."""
    if "@" in text:
        for found in _EMAIL.finditer(text):
            last = found.group().rpartition(".")[2]
            if len(last) > 1 and not last.isdigit():
                yield found.span()


def phones(text: str) -> Iterator[Range]:
    """Numbers with a country's code, American ones in three groups, and national ones that begin with 0."""
    for pattern in _PHONES if _has_digits(text) else ():
        for found in pattern.finditer(text):
            if not _DATE.fullmatch(found.group()):
                yield found.span()


def credit_cards(text: str) -> Iterator[Range]:
    """13 to 19 digits with Luhn's check digit, in groups or not."""
    for run in _DIGIT_GROUPS.finditer(text) if _has_digits(text) else ():
        groups = [(each.start(), each.end()) for each in _GROUP.finditer(text, *run.span())]
        at = 0
        while at < len(groups):
            end = _card_end(text, groups, at) if text[groups[at][0]] in _CARD_STARTS else None
            if end is not None:
                yield groups[at][0], groups[end][1]
            at = at + 1 if end is None else end + 1


def _card_end(text: str, groups: list[Range], first: int) -> int | None:
    """The group with which a card's number ends that begins with the first one."""
    digits = ""
    for at in range(first, min(first + _CARD_DIGITS.stop, len(groups))):
        digits += text[groups[at][0] : groups[at][1]]
        if len(digits) >= _CARD_DIGITS.stop:
            return None
        if len(digits) in _CARD_DIGITS and passes_luhn(digits):
            return at
    return None


def passes_luhn(digits: str) -> bool:
    """Whether the last of the digits is the check digit of those before (ISO/IEC 7812-1)."""
    read = digits.encode()
    total = sum(read[-1::-2]) + sum(read[-2::-2].translate(_DOUBLED)) - ord("0") * len(read)
    return total % 10 == 0 and total > 0


def ibans(text: str) -> Iterator[Range]:
    """Account numbers of a country's length whose remainder modulo 97 is 1 (ISO 13616)."""
    for found in _IBAN.finditer(text) if _has_digits(text) else ():
        start = found.start() - 2
        length = _IBAN_LENGTHS.get(text[start : start + 2].upper())
        end, letters = start, ""
        while length is not None and end < found.end(1) and len(letters) < length:
            letters += text[end] if text[end].isalnum() else ""
            end += 1
        if length is not None and len(letters) == length and passes_mod_97(letters):
            yield start, end


def passes_mod_97(iban: str) -> bool:
    """Whether the check digits of an IBAN without blanks are right."""
    return int("".join(str(int(each, 36)) for each in iban[4:] + iban[:4])) % 97 == 1


def ip_addresses(text: str) -> Iterator[Range]:
    """IPv4 and IPv6 addresses in their usual spelling."""
    if "." in text:
        yield from _valid(_IPV4, text, ipaddress.IPv4Address)
    if "::" in text or text.count(":") > 6:
        yield from _valid(_IPV6, text, ipaddress.IPv6Address)


def _valid(pattern: re.Pattern[str], text: str, kind: Callable[[str], object]) -> Iterator[Range]:
    for found in pattern.finditer(text):
        try:
            kind(found.group())
        except ValueError:
            continue
        if found.group() != "::":
            yield found.span()


def api_keys(text: str) -> Iterator[Range]:
    """Keys that their first characters identify."""
    if any(sign in text and search(text) for sign, search in _API_KEY_BEGINS.items()):
        for found in _API_KEY.finditer(text):
            if found.group().startswith(_LETTERS_ONLY) or any(map(str.isdigit, found.group())):  # else joined words
                yield found.span()


def jwts(text: str) -> Iterator[Range]:
    """JSON web tokens, signed or encrypted."""
    if "eyJ" in text:
        for found in _JWT.finditer(text):
            yield found.span()


def private_keys(text: str) -> Iterator[Range]:
    """Keys in PEM, from the first line to the last; without a last one, all that follows."""
    at = 0 if PRIVATE_KEY_BEGINS in text else len(text)
    while begun := _KEY_BEGINS.search(text, at):
        ended = _KEY_ENDS.search(text, begun.end())
        at = ended.end() if ended else len(text)
        yield begun.start(), at


def us_ssns(text: str) -> Iterator[Range]:
    """Social security numbers of the USA in three groups."""
    for found in _SSN.finditer(text) if _has_digits(text) else ():
        area = found.group()[:3]
        if not area.startswith(("000", "666", "9")) and found[3] != "00" and found[4] != "0000":
            yield found.span()


def _has_digits(text: str) -> bool:
    return any(map(text.__contains__, "0123456789")) or (not text.isascii() and _DIGIT.search(text) is not None)


#: What `privacy.redact` may name. A kind that contains another comes before it: its name stands in the text.
FINDERS: Mapping[str, Finder] = MappingProxyType(
    {
        "private_key": private_keys,
        "jwt": jwts,
        "api_key": api_keys,
        "email": emails,
        "iban": ibans,
        "credit_card": credit_cards,
        "us_ssn": us_ssns,
        "ip_address": ip_addresses,
        "phone": phones,
    }
)


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
    start: int
    end: int
    kind: str


class Detector:
    """What the settings want found; `slow`: longer than an event loop waits; `timed_out` gets what took too long."""

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
        return bool(self._finders or self.slow)

    def spans(self, text: str) -> list[Span]:
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
        """A text with `[REDACTED:kind]` in place of each finding."""
        return replace_spans(text, self.spans(text))


def _is_short(text: str) -> bool:
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


def redact_crash_reports(settings: PrivacySettings) -> None:
    """Redact errors, without Presidio, and write no core file: of this process and those that it starts."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    clean_errors(Detector(settings.model_copy(update={"presidio": ()})).redact)
