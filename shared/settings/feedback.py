"""Defines the settings of feedback and retention: `judge`, `reward`, `feedback`, `retention`, `privacy`."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

import regex
from pydantic import AfterValidator, Field

from tuneloop.shared.experience import DEFAULT_TENANT, TrustedRaters, is_tenant_name
from tuneloop.shared.settings.types import Address, NotNegativeReal, Real, Seconds, Secret, Section, Share

_CRITERIA: Mapping[str, str] = MappingProxyType(
    {
        "relevance": "Does the reply answer what was asked?",
        "accuracy": "Is what the reply says correct?",
        "completeness": "Does the reply say all that the asker needs?",
    }
)


def _named_criteria(value: dict[str, str]) -> dict[str, str]:
    if not 1 <= len(value) <= 20:
        raise ValueError("must be 1 to 20 names with their descriptions")
    for name, words in value.items():
        if not re.fullmatch("[A-Za-z0-9_-]{1,64}", name):
            raise ValueError(f"the name {name!r} must be 1 to 64 of A-Z a-z 0-9 _ -")
        if not words.strip() or len(words) > 2000:
            raise ValueError(f"{name} needs a description of at most 2000 characters")
    return value


Criteria = Annotated[dict[str, str], AfterValidator(_named_criteria)]


class JudgeSettings(Section):
    """A model that scores replies by itself; without a `url` there is none."""

    url: Address | None = None
    """An OpenAI-compatible endpoint, with its `/v1`: `https://api.openai.com/v1`. null: no judge."""
    model: str | None = None
    """The name of the model behind `url`. The source of its feedback is `judge:` and this name."""
    key: Secret | None = None
    """The key for `url`."""
    rubric: Path | None = None
    """A file written by `runner.Rubric.save`, with weights and a scale, instead of `criteria`."""
    criteria: Criteria = Field(default_factory=lambda: dict(_CRITERIA))
    """What is scored: names of 1 to 64 of `A-Z a-z 0-9 _ -`, and for each the question that the judge reads."""
    which: Literal["all", "unrewarded"] = "all"
    """Which replies are judged: all that could be trained on, or only those that have no reward by then. _Serve._"""
    share: Share = 1.0
    """Judge this share of them, chosen by their ids. _Serve._"""
    after: NotNegativeReal = 0.0
    """Seconds after the request from which on a reply is judged. _Serve._"""

    #: All criteria count alike: those of a rubric have weights of their own.
    weights: ClassVar[dict[str, float]] = {}
    #: Replies that were asked for more than so many seconds ago are not judged any more: a judge that was away for a
    #: weekend need not catch up.
    max_age: ClassVar[float] = 86400.0
    #: Questions to the judge at once: few enough for an endpoint that others use too.
    concurrency: ClassVar[int] = 4
    #: Seconds that an answer may take: a reasoning judge takes half a minute.
    timeout: ClassVar[float] = 60.0
    #: How often a question is asked again that found the judge busy or away, before all replies wait for it.
    retries: ClassVar[int] = 2
    #: The least and the greatest score: people and models distinguish five; a rubric has its own.
    scale: ClassVar[tuple[int, int]] = (1, 5)
    #: How often a reply is judged: at temperature 0 once says all.
    samples: ClassVar[int] = 1
    #: The judge's temperature: the same reply gets the same score.
    temperature: ClassVar[float | None] = 0.0

    @property
    def source(self) -> str:
        return f"judge:{self.model}"

    @property
    def own_source(self) -> str | None:
        """The same, which no other caller may use; None where there is no judge."""
        return self.source if self.url else None

    def contradictions(self) -> Iterator[str]:
        if self.url and not self.model:
            yield "judge.model: needed with judge.url: the name of the model there"
        if self.model and len(self.source) > 256:
            yield "judge.model: is too long; a source has at most 256 characters"
        if self.after >= self.max_age:
            yield f"judge.after: {self.after:g} s leave nothing: replies older than {self.max_age:g} s are not judged"


class RewardRule(Section):
    """How feedback becomes the reward that training uses."""

    weights: dict[str, Real] = Field(default_factory=lambda: {"reward": 1.0})
    """The metrics that count, and how much. Other metrics are stored and do not count. _Serve._"""
    boolean_values: tuple[Real, Real] = (0.0, 1.0)
    """What a thumb down and a thumb up count; also the worse and the better reply of a preference. _Serve._"""
    label_values: dict[str, Real] = Field(default_factory=dict)
    """What labels are worth; others do not count. _Serve._"""
    clip: tuple[Real, Real] | None = (-1.0, 1.0)
    """The least and the greatest reward, and of each rater's value, times its weight; null: ±1e6. _Serve._"""
    aggregate: Literal["median", "mean"] = "median"
    """What is made of several raters' values: the `median` (of two the mean), or the `mean`. [Trusted
    feedback](feedback.md#many-raters) decides a median alone. _Serve._"""
    run_feedback: Literal["fallback", "add"] = "fallback"
    """What [feedback on a run](feedback.md#runs) does to its replies: it counts where a reply has none of its own
    (`fallback`), or is added (`add`). _Serve._"""
    unfinished_runs: Literal["ignore", "count"] = "ignore"
    """What feedback on a run counts whose last call was [cut off](feedback.md#runs): nothing, or as usual. _Serve._"""
    attribution_window: Seconds | None = None
    """Seconds after the request in which feedback counts; later feedback is `late`. null: no limit. _Serve._"""
    default: Real | None = None
    """The reward of a reply that had no feedback when its window closed; null: it is not trained on. _Serve._"""

    def contradictions(self, *, of_pairs: bool) -> Iterator[str]:
        """What makes no sense together; `of_pairs`: the method learns from pairs that preferences make."""
        if self.default is not None and self.attribution_window is None:
            yield (
                "reward.default: needs reward.attribution_window: a reply gets the default when the window closes and"
                " no feedback has come"
            )
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            yield f"reward.clip: {list(self.clip)} is not a range; write the smaller number first"
        if of_pairs and not self.weights.get("preference"):
            yield (
                "reward.weights: the metric preference has none, so both replies of a preference get the same reward"
                " and dpo learns nothing of them. Write reward.weights: {preference: 1}"
            )


def _trusted_rater(entry: str) -> tuple[str, str]:
    """The tenant and the source that an entry names.

    >>> _trusted_rater("acme/key:web/ann"), _trusted_rater("key:web/ann"), _trusted_rater("ann")
    (('acme', 'key:web/ann'), ('default', 'key:web/ann'), ('default', 'ann'))
    """
    tenant, slash, source = entry.partition("/")
    return (tenant, source) if slash and is_tenant_name(tenant) else (DEFAULT_TENANT, entry)


class FeedbackSettings(Section):
    """What is done with feedback beside the reward."""

    compensate_late: bool = False
    """Train again on a trained reply whose reward [feedback changes](feedback.md#after-training)."""
    trusted_raters: tuple[str, ...] = ()
    """Sources whose feedback is [trusted](feedback.md#many-raters): `tenant/source`; without a tenant, of
    `default`."""

    score_metrics: dict[str, str] = Field(default={"user-feedback": "reward", "user_feedback": "reward"})
    """The metrics of [Langfuse scores](feedback.md#scores), by the scores' names; others are metrics of their own name.
    _Serve._"""

    #: The part of a batch that one rater's word may make up, as soon as so many raters are there that each can have it.
    max_rater_share: ClassVar[float] = 0.1

    def all_trusted(self, judge: JudgeSettings) -> TrustedRaters:
        return TrustedRaters(frozenset(map(_trusted_rater, self.trusted_raters)), judge.own_source)


class RetentionSettings(Section):
    """Seconds after its sampling that an experience is kept, by its state; null: no limit."""

    recorded: Seconds | None = None
    """Experiences without feedback, and feedback whose reply never came."""
    rewarded: Seconds | None = None
    """Rewarded experiences that were never committed."""
    trained: Seconds | None = None
    """Trained experiences."""
    expired: Seconds | None = None
    """Expired experiences, after they were sampled."""
    dropped: Seconds | None = None
    """Dropped experiences."""


class TenantSettings(Section):
    """What holds for a tenant whose requests say nothing else; of retention, what is not written is as for all."""

    store: bool | Literal["always"] = True
    """Whether an exchange is kept. False: the tenant's replies are answered and forgotten. `always`: they are kept
    whatever a request's own `store` says."""
    train: bool = True
    """Whether an exchange may be trained on."""
    retention: RetentionSettings = RetentionSettings()


#: What is found by itself; `shared/privacy/detection.py` says how.
BuiltIn = Literal["private_key", "jwt", "api_key", "email", "iban", "credit_card", "us_ssn", "ip_address", "phone"]

_LONGEST_PATTERN = 1000


def _named_patterns(value: dict[str, str]) -> dict[str, str]:
    for name, pattern in value.items():
        if not regex.fullmatch("[a-z][a-z0-9_]{0,63}", name):
            raise ValueError(f"the name {name!r} must be 1 to 64 of a-z 0-9 _, and begin with a letter")
        if len(pattern) > _LONGEST_PATTERN:
            raise ValueError(f"{name} is longer than {_LONGEST_PATTERN} characters")
        try:
            found = regex.compile(pattern).fullmatch("")
        except regex.error as error:
            raise ValueError(f"{name} is not a regular expression: {error}") from None
        if found:
            raise ValueError(f"{name} matches nothing at all, which stands everywhere")
    return value


Patterns = Annotated[dict[str, str], AfterValidator(_named_patterns)]


class PrivacySettings(Section):
    """What is replaced in requests, replies and feedback before they are written anywhere."""

    redact: tuple[BuiltIn, ...] = ("private_key", "jwt", "api_key")
    """_Serve._ What is replaced by `[REDACTED:kind]` in requests, replies and feedback."""
    patterns: Patterns = Field(default_factory=dict)
    r"""_Serve._ Regular expressions of your own, by name: `{ticket: 'TCK-\d+'}`. A text for which one takes over 0.25 s
    is replaced whole."""
    presidio: tuple[str, ...] = ()
    """_Serve._ Entities that Microsoft Presidio looks for: `[PERSON, LOCATION]`. Needs `pip install ./runner
    ".[presidio]"` and spaCy's English model."""

    #: The language of Presidio's analyzer as it comes: others need one that is configured by hand.
    presidio_language: ClassVar[str] = "en"

    def contradictions(self) -> Iterator[str]:
        for name in sorted(self.patterns.keys() & set(self.redact)):
            yield f"privacy.patterns: {name} is the name of a kind in privacy.redact; give the pattern another one"
