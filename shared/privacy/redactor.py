"""Takes personal data and secrets out of records before they are written anywhere.

In texts `[REDACTED:kind]` stands in the place of each. The token ids that spell one become REDACTED, and their
log-probabilities 0: as many as there were, so that all others keep their position. Names, by which rows are found
again, become a keyed digest: the same for the same name.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self

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

#: Fields that name what is ours.
_OURS = frozenset({"previous_response_id"})

#: A value of fewer characters is replaced where it was found only, a longer one in all of its exchange.
_SHORTEST_VALUE = 6

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
        """Whether a record may take longer than an event loop should wait."""
        return self._detector.slow

    @property
    def spells_ids(self) -> bool:
        """Whether it knows which token ids spell what."""
        return self._vocabulary is not None

    def __bool__(self) -> bool:
        return bool(self._detector)

    def record(self, record: Record) -> Record:
        """The record as it may be written."""
        return self.exchange(record) if isinstance(record, Exchange) else self.feedback(record)

    def exchange(self, exchange: Exchange) -> Exchange:
        """The exchange as it may be written. What is found in one place of it is replaced in all."""
        work = _Work(self._detector)
        request = _load(exchange.request)
        beside = isinstance(request, dict)
        prompt = (
            {name: value for name, value in request.items() if name not in _BESIDE_THE_PROMPT} if beside else request
        )
        work.look(prompt)
        for each in exchange.experiences:
            work.look(each.text)
            work.look(_load(each.tool_calls))
        spellings = [self._spellings(each) for each in exchange.experiences]
        for spelling in (each for both in spellings if both for each in both):
            work.look(spelling.text)
        in_tokens = bool(work.values)
        if beside:
            work.look({name: request[name] for name in request.keys() & _BESIDE_THE_PROMPT})
        for grammar in (each.grammar for each in exchange.experiences if each.grammar):
            work.look(grammar.spec)
        names = {name: self.name(value) if value else value for name, value in _names(exchange).items()}
        if not work.values:
            return replace(exchange, **names) if names != _names(exchange) else exchange
        self._count(work)
        return replace(
            exchange,
            request=orjson.dumps(work.clean(request)) if work.changes(request) else exchange.request,
            experiences=tuple(
                self._experience(each, work, spelling, in_tokens)
                for each, spelling in zip(exchange.experiences, spellings, strict=True)
            ),
            **names,
        )

    def feedback(self, event: Feedback) -> Feedback:
        """The event as it may be written."""
        work = _Work(self._detector)
        answer = _message_of(event) if event.kind is Kind.DEMONSTRATION else None
        for said in (event.text, answer, event.metric):
            work.look(said)
        names = {name: self.name(value) if value else value for name, value in _names(event).items()}
        self._count(work)
        text = event.text and work.clean(event.text)
        if answer is not None and work.changes(answer):
            text = orjson.dumps(work.clean(answer)).decode()
        return replace(event, text=text, metric=work.clean(event.metric), **names)

    def name(self, name: str) -> str:
        """A name as it may be written: a keyed digest of one that holds what is redacted."""
        if not self._detector.spans(name):
            return name
        person = person_behind(name)
        return name.removesuffix(person) + pseudonym(person, self._key)

    def pairs(self, pairs: Mapping[str, str]) -> dict[str, str]:
        """Metadata as it may be written."""
        work = _Work(self._detector)
        work.look(pairs)
        cleaned: dict[str, str] = work.clean(dict(pairs))
        return cleaned

    def _spellings(self, experience: Experience) -> "_Spellings | None":
        """The prompt and the reply as their ids spell them; None where that cannot be told."""
        vocabulary = self._vocabulary
        if vocabulary is None:
            return None
        pieces = [vocabulary.spell(_ids(each).tolist()) for each in (experience.prompt_ids, experience.completion_ids)]
        if pieces[0] is None or pieces[1] is None:
            return None
        found = _Spellings(Spelling(pieces[0]), Spelling(pieces[1]))
        # Another model's tokenizer would spell something else.
        return found if experience.text.strip() in found.completion.text else None

    def _experience(
        self, experience: Experience, work: "_Work", spellings: "_Spellings | None", in_tokens: bool
    ) -> Experience:
        calls = _load(experience.tool_calls)
        cleaned = replace(
            experience,
            text=work.clean(experience.text),
            tool_calls=orjson.dumps(work.clean(calls)) if work.changes(calls) else experience.tool_calls,
        )
        if experience.grammar and work.changes(experience.grammar.spec):
            cleaned = replace(cleaned, grammar=None, unsampled=cleaned.unsampled or REASON)
        if not in_tokens:
            return cleaned
        if spellings is None:  # nobody knows which ids they are
            gone = {"prompt_ids": b"", "completion_ids": b"", "logprobs": b"", "grammar": None}
            return replace(cleaned, drop_reason=cleaned.drop_reason or REASON, **gone)
        prompt, hidden = _without(experience.prompt_ids, spellings.prompt, work)
        completion, silent = _without(experience.completion_ids, spellings.completion, work)
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

    def _count(self, work: "_Work") -> None:
        for kind in dict.fromkeys(work.kinds):
            self._count_kind(kind)


def pseudonym(name: str, key: bytes) -> str:
    """A name's digest under the experiment's key."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=key, digest_size=_DIGEST_BYTES)
    return PSEUDONYM + digest.hexdigest()


class _Spellings(NamedTuple):
    prompt: Spelling
    completion: Spelling


class _Work:
    """What was found in one record, and how it is taken out."""

    def __init__(self, detector: Detector) -> None:
        self._detector = detector
        self._found: dict[str, list[Span]] = {}
        self.values: dict[str, str] = {}
        self.kinds: list[str] = []

    def look(self, value: Any) -> None:
        """Find what is in a text, or in the texts of a JSON value."""
        for text in _texts(value):
            if text in self._found:
                continue
            spans = self._detector.spans(text)
            self._found[text] = spans
            for span in spans:
                self.kinds.append(span.kind)
                self.values.setdefault(text[span.start : span.end], span.kind)

    def spans(self, text: str) -> list[Span]:
        """What is to be replaced in a text: what was found in it, and what was found elsewhere in the record."""
        found = self._found.get(text)
        spans = list(self._detector.spans(text) if found is None else found)
        for value, kind in self.values.items():
            if len(value) >= _SHORTEST_VALUE:
                spans += [Span(*place, kind) for written in _spellings_of(value) for place in _places(written, text)]
        return apart(spans)

    def changes(self, value: Any) -> bool:
        """Whether anything in a value is to be replaced."""
        return any(self.spans(text) for text in _texts(value))

    def clean(self, value: Any) -> Any:
        """A text or a JSON value without it."""
        if isinstance(value, str):
            return self._clean_text(value)
        if isinstance(value, list):
            return [self.clean(each) for each in value]
        if isinstance(value, dict):
            return {self._clean_text(name): each if name in _OURS else self.clean(each) for name, each in value.items()}
        return value

    def _clean_text(self, text: str) -> str:
        return replace_spans(text, self.spans(text))


def _texts(value: Any) -> Iterator[str]:
    """The texts of a JSON value, and the names of its fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            if name not in _OURS:
                yield from _texts(each)


def _spellings_of(value: str) -> set[str]:
    """A value as it stands in a text, and in JSON that stands in one, such as a tool's arguments."""
    return {value, json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1]}


def _places(part: str, text: str) -> Iterator[tuple[int, int]]:
    at = text.find(part)
    while at >= 0:
        yield at, at + len(part)
        at = text.find(part, at + len(part))


def _names(record: Record) -> dict[str, str | None]:
    person = {"user": record.user} if isinstance(record, Exchange) else {"source": record.source}
    return {"task_id": record.task_id, "run_id": record.run_id, **person}


def _load(data: bytes | str | None) -> Any:
    return None if data is None else orjson.loads(data)


def _message_of(event: Feedback) -> Any:
    """The message that an edited answer is the JSON of, None for a text."""
    if event.text is None or not event.text.startswith("{"):
        return None
    try:
        return orjson.loads(event.text)
    except orjson.JSONDecodeError:
        return None


def _ids(packed: bytes) -> Int32s:
    return np.frombuffer(packed, "<i4")


def _without(packed: bytes, spelling: Spelling, work: _Work) -> tuple[bytes, npt.NDArray[np.bool_]]:
    """Token ids without those that spell what is redacted, and which those were."""
    ids = _ids(packed).copy()
    hidden = np.zeros(len(ids), bool)
    for span in work.spans(spelling.text):
        tokens = spelling.tokens(span.start, span.end)
        hidden[tokens.start : tokens.stop] = True
    ids[hidden] = REDACTED
    return ids.tobytes(), hidden
