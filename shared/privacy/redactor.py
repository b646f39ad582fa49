"""Removes personal data and secrets from records before any write.

Texts get `[REDACTED:kind]`. Token ids of a finding become REDACTED with log-probability 0, in equal number, so that
positions stay. Names become keyed digests: rows are found by equal names.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import orjson
from msgspec.structs import replace

from tuneloop.shared.experience import REDACTED, Exchange, Experience, Feedback, Int32s, Kind, Record, person_behind
from tuneloop.shared.privacy.detection import Detector, Span, apart, replace_spans
from tuneloop.shared.privacy.vocabulary import Spelling, Vocabulary
from tuneloop.shared.settings.settings import Settings

#: Why a reply is no sample of the policy, or cannot be trained on at all, after redaction.
REASON = "redacted"

#: Fields of a request that an engine makes no tokens of.
_BESIDE_THE_PROMPT = frozenset({"metadata", "user", "safety_identifier", "prompt_cache_key", "store"})

#: The field of a request that names a reply, and the names that are ours: they stay, for clients to continue.
_CONTINUED = "previous_response_id"
_OUR_NAME = re.compile(r"(?:resp_|chatcmpl-|cmpl-|msg_)[0-9a-vA-V]{40}(?::\d{1,8})?", re.ASCII)

_NUMBERS = frozenset({int, float})

#: A value of fewer characters is replaced where it was found only, a longer one in all of its exchange.
_SHORTEST_VALUE = 6

#: So many characters, and so many times those of the record, are looked through for what was found elsewhere in it,
#: once for each spelling: a text beyond that is replaced whole, as TOO_MUCH. Else thousands of secrets stop a service.
_MOST_LOOKED_THROUGH, _TIMES_ITS_LENGTH = 100_000_000, 10
TOO_MUCH = "too_much"

#: What it costs to begin to look through a text, in characters.
_LOOK_COSTS = 500

#: Bytes of names' digests, and what they begin with.
_DIGEST_BYTES, PSEUDONYM = 16, "redacted:"


class Redactor:
    """Redacts records. `key` is the experiment's: names are the same for all of its services."""

    def __init__(
        self,
        detector: Detector,
        *,
        key: bytes,
        vocabulary: Vocabulary | None = None,
        count: Callable[[str], object] = lambda kind: None,
    ) -> None:
        """`count` is called for each kind that a record held."""
        self._detector = detector
        self._key = key
        self._vocabulary = vocabulary
        self._count_kind = count

    @classmethod
    def open(
        cls,
        settings: Settings,
        key: bytes,
        *,
        count: Callable[[str], object] = lambda kind: None,
        timed_out: Callable[[str], object] = lambda name: None,
    ) -> Self:
        """The settings' redactor. Raises EnvironmentRefused where Presidio is asked for and not there."""
        detector = Detector(settings.privacy, timed_out=timed_out)
        vocabulary = Vocabulary.load(settings.model.model_path) if detector else None
        return cls(detector, key=key, vocabulary=vocabulary, count=count)

    @property
    def slow(self) -> bool:
        return self._detector.slow

    @property
    def spells_ids(self) -> bool:
        return self._vocabulary is not None

    def __bool__(self) -> bool:
        return bool(self._detector)

    def records(self, records: Sequence[Record]) -> list[Record]:
        # What is changed of an event, by all that it says: thousands may say the same.
        known: dict[object, tuple[dict[str, str | None], Sequence[str]]] = {}
        found: list[Record] = []
        for each in records:
            if isinstance(each, Exchange):
                found.append(self.exchange(each))
                continue
            said = each.kind, each.text, each.metric, each.task_id, each.run_id, each.source
            if said not in known:
                known[said] = self._changes(each)
            fields, kinds = known[said]
            self._count(kinds)
            found.append(replace(each, **fields) if fields else each)
        return found

    def exchange(self, exchange: Exchange) -> Exchange:
        """The exchange as it may be written. What is found in one place of it is replaced in all."""
        work = _Work(self._detector)
        request, ours = _load(exchange.request), {}
        name = request.get(_CONTINUED) if isinstance(request, dict) else None
        if isinstance(name, str) and _OUR_NAME.fullmatch(name):
            ours[_CONTINUED] = request.pop(_CONTINUED)
        beside = isinstance(request, dict)
        prompt = (
            {name: value for name, value in request.items() if name not in _BESIDE_THE_PROMPT} if beside else request
        )
        work.look(prompt)
        for each in exchange.experiences:
            work.look(_reply_parts(each))
        spellings = [self._spellings(each) for each in exchange.experiences]
        for spelling in (each for both in spellings if both for each in both):
            work.look(spelling.text)
        shown = bool(work.values)
        if beside:
            work.look({name: request[name] for name in request.keys() & _BESIDE_THE_PROMPT})
        for grammar in (each.grammar for each in exchange.experiences if each.grammar):
            work.look(grammar.spec)
        names = {name: self.name(value) if value else value for name, value in _names(exchange).items()}
        if not work.values:
            return replace(exchange, **names) if names != _names(exchange) else exchange
        self._count(work.kinds)
        # What was found beside the prompt only may stand in it all the same, where no pattern finds it by itself.
        shown = shown or (None in spellings and work.changes([prompt, *map(_reply_parts, exchange.experiences)]))
        return replace(
            exchange,
            request=orjson.dumps({**work.clean(request), **ours} if ours else work.clean(request))
            if work.changes(request)
            else exchange.request,
            experiences=tuple(
                self._experience(each, work, spelling, shown)
                for each, spelling in zip(exchange.experiences, spellings, strict=True)
            ),
            **names,
        )

    def _changes(self, event: Feedback) -> tuple[dict[str, str | None], Sequence[str]]:
        """What is to be written of an event instead of what it says, and the kinds of what was found in it."""
        work = _Work(self._detector)
        answer = _message_of(event) if event.kind is Kind.DEMONSTRATION else None
        for said in (event.text, answer, event.metric):
            work.look(said)
        names = {name: self.name(value) if value else value for name, value in _names(event).items()}
        text = event.text and work.clean(event.text)
        if answer is not None and work.changes(answer):
            text = orjson.dumps(work.clean(answer)).decode()
        fields = {"text": text, "metric": work.clean(event.metric), **names}
        return {name: value for name, value in fields.items() if value != getattr(event, name)}, work.kinds

    def name(self, name: str) -> str:
        """A name in its stored form: a keyed digest if the name holds a finding."""
        return self.hidden_name(name) if self._detector.spans(name) else name

    def hidden_name(self, name: str) -> str:
        """What is, or was by other settings, written of a name that holds what is redacted."""
        person = person_behind(name)
        return name.removesuffix(person) + pseudonym(person, self._key)

    def pairs(self, pairs: Mapping[str, str]) -> dict[str, str]:
        work = _Work(self._detector)
        work.look(pairs)
        cleaned: dict[str, str] = work.clean(dict(pairs))
        return cleaned

    def _spellings(self, experience: Experience) -> tuple[Spelling, Spelling] | None:
        """The prompt and the reply as their ids spell them; None where that is unknown."""
        vocabulary = self._vocabulary
        if vocabulary is None:
            return None
        pieces = [vocabulary.spell(_ids(each)) for each in (experience.prompt_ids, experience.completion_ids)]
        if pieces[0] is None or pieces[1] is None:
            return None
        found = Spelling(pieces[0]), Spelling(pieces[1])
        # Another model's tokenizer would spell something else.
        return found if experience.text.strip() in found[1].text else None

    def _experience(
        self, experience: Experience, work: "_Work", spellings: tuple[Spelling, Spelling] | None, shown: bool
    ) -> Experience:
        """The experience in its stored form; `shown`: the prompt or a reply holds a finding."""
        calls = _load(experience.tool_calls)
        cleaned = replace(
            experience,
            text=work.clean(experience.text),
            tool_calls=orjson.dumps(work.clean(calls)) if work.changes(calls) else experience.tool_calls,
        )
        if experience.grammar and work.changes(experience.grammar.spec):
            cleaned = replace(cleaned, grammar=None, unsampled=cleaned.unsampled or REASON)
        if spellings is None:  # it is unknown which ids they are
            if not shown:
                return cleaned
            gone = {"prompt_ids": b"", "completion_ids": b"", "logprobs": b"", "grammar": None}
            return replace(cleaned, drop_reason=cleaned.drop_reason or REASON, **gone)
        prompt, hidden = _without(experience.prompt_ids, spellings[0], work)
        completion, silent = _without(experience.completion_ids, spellings[1], work)
        if not hidden.any() and not silent.any():
            return cleaned
        logprobs = np.frombuffer(experience.logprobs, "<f4").copy()
        logprobs[silent[: len(logprobs)]] = 0
        return replace(
            cleaned,
            prompt_ids=prompt,
            completion_ids=completion,
            logprobs=logprobs.tobytes(),
            unsampled=cleaned.unsampled or REASON,
            grammar=None,
        )

    def _count(self, kinds: Sequence[str]) -> None:
        for kind in dict.fromkeys(kinds):
            self._count_kind(kind)


def pseudonym(name: str, key: bytes) -> str:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=key, digest_size=_DIGEST_BYTES)
    return PSEUDONYM + digest.hexdigest()


class _Work:
    """What was found in one record, and how it is taken out."""

    def __init__(self, detector: Detector) -> None:
        self._detector = detector
        self._found: dict[str, Sequence[Span]] = {}
        self._spellings: dict[str, str] = {}
        self._left = _MOST_LOOKED_THROUGH
        self.values: dict[str, str] = {}
        self.kinds: list[str] = []

    def look(self, value: Any) -> None:
        new = []
        for each in self._texts(value):  # one by one: what does this at once keeps the interpreter from all others
            if each not in self._found:
                self._found[each] = ()
                new.append(each)
        self._left += _TIMES_ITS_LENGTH * sum(map(len, new))
        for text, spans in self._detector.spans_of(new).items():
            self._found[text] = spans
            for span in spans:
                self.kinds.append(span.kind)
                value = text[span.start : span.end]
                if value in self.values:
                    continue
                self.values[value] = span.kind
                if len(value) >= _SHORTEST_VALUE:
                    for spelling in (value, json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1]):
                        self._spellings.setdefault(spelling, span.kind)

    def spans(self, text: str) -> Sequence[Span]:
        """What is to be replaced in a text: what was found in it, and what was found elsewhere in the record."""
        found = self._found.get(text)
        spans = self._detector.spans(text) if found is None else found
        if len(text) < _SHORTEST_VALUE or not self._spellings:
            return spans
        self._left -= (len(text) + _LOOK_COSTS) * len(self._spellings)
        if self._left < 0:
            return [Span(0, len(text), TOO_MUCH)]
        elsewhere = [Span(*place, kind) for each, kind in self._spellings.items() for place in _places(each, text)]
        return apart([*spans, *elsewhere])

    def changes(self, value: Any) -> bool:
        return any(self.spans(text) for text in self._texts(value))

    def clean(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._clean_text(value)
        if isinstance(value, list):
            return [self.clean(each) for each in value]
        if isinstance(value, dict):
            # A field's name stays what readers look for where there was too much to look through.
            return {
                name
                if self._left < 0 and not self._found.get(name) and name not in self._spellings
                else self._clean_text(name): self.clean(each)
                for name, each in value.items()
            }
        if type(value) in _NUMBERS and (text := self._detector.text_of(value)) and self.spans(text):
            return self._clean_text(text)
        return value

    def _clean_text(self, text: str) -> str:
        return replace_spans(text, self.spans(text))

    def _texts(self, value: Any) -> list[str]:
        """The texts of a JSON value, its numbers among them, and the names of its fields."""
        found: list[str] = []
        self._gather(value, found)
        return found

    def _gather(self, value: Any, found: list[str]) -> None:
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, list):
            for each in value:
                self._gather(each, found)
        elif isinstance(value, dict):
            found += value
            for each in value.values():
                self._gather(each, found)
        elif type(value) in _NUMBERS and (text := self._detector.text_of(value)):
            found.append(text)


def _places(part: str, text: str) -> Iterator[tuple[int, int]]:
    at = text.find(part)
    while at >= 0:
        yield at, at + len(part)
        at = text.find(part, at + len(part))


def _names(record: Record) -> dict[str, str | None]:
    person = {"user": record.user} if isinstance(record, Exchange) else {"source": record.source}
    return {"task_id": record.task_id, "run_id": record.run_id, **person}


def _reply_parts(experience: Experience) -> list[Any]:
    return [experience.text, _load(experience.tool_calls)]


def _load(data: bytes | str | None) -> Any:
    return None if data is None else orjson.loads(data)


def _message_of(event: Feedback) -> Any:
    if event.text is None or not event.text.startswith("{"):
        return None
    try:
        message = orjson.loads(event.text)
        orjson.dumps(message)  # what it reads may be nested more deeply than what it writes
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None
    return message


def _ids(packed: bytes) -> Int32s:
    return np.frombuffer(packed, "<i4")


def _without(packed: bytes, spelling: Spelling, work: _Work) -> tuple[bytes, npt.NDArray[np.bool_]]:
    """Token ids with REDACTED for those that spell a finding, and the mask of these."""
    ids = _ids(packed).copy()
    hidden = np.zeros(len(ids), bool)
    for span in work.spans(spelling.text):
        tokens = spelling.tokens(span.start, span.end)
        hidden[tokens.start : tokens.stop] = True
    ids[hidden] = REDACTED
    return ids.tobytes(), hidden
