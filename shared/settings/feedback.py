"""The settings of what is said of replies and what is kept: `judge`, `reward`, `feedback`, `retention`, `privacy`."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import regex
from pydantic import AfterValidator, Field

from tuneloop.shared.settings.types import (
    Address,
    Fraction,
    NotNegative,
    NotNegativeReal,
    Positive,
    PositiveReal,
    Real,
    Seconds,
    Secret,
    Section,
    Share,
)

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
    model: str | None = None
    key: Secret | None = None
    rubric: Path | None = None
    criteria: Criteria = Field(default_factory=lambda: dict(_CRITERIA))
    weights: dict[str, PositiveReal] = Field(default_factory=dict)
    scale: tuple[int, int] = (1, 5)
    samples: Positive = 1
    temperature: NotNegativeReal | None = 0.0
    which: Literal["all", "unrewarded"] = "all"
    share: Share = 1.0
    after: NotNegativeReal = 0.0
    max_age: Seconds = 86400.0
    concurrency: Positive = 4
    timeout: Seconds = 60.0
    retries: NotNegative = 2

    @property
    def source(self) -> str:
        """Who its feedback is from."""
        return f"judge:{self.model}"

    def contradictions(self) -> Iterator[str]:
        """What does not fit together."""
        if self.url and not self.model:
            yield "judge.model: needed with judge.url: the name of the model there"
        if self.model and len(self.source) > 256:
            yield "judge.model: is too long; a source has at most 256 characters"
        if self.scale[0] >= self.scale[1]:
            yield f"judge.scale: {list(self.scale)} is no range; write the smaller number first"
        odd = sorted(self.weights.keys() - self.criteria.keys())
        if odd and self.rubric is None:
            yield f"judge.weights: {', '.join(odd)} is no criterion; judge.criteria has {', '.join(self.criteria)}"
        if self.after >= self.max_age:
            yield f"judge.after: {self.after:g} s leave nothing to judge before judge.max_age, {self.max_age:g} s"


class RewardRule(Section):
    """How feedback becomes the reward that training uses."""

    weights: dict[str, Real] = Field(default_factory=lambda: {"reward": 1.0})
    boolean_values: tuple[Real, Real] = (0.0, 1.0)
    label_values: dict[str, Real] = Field(default_factory=dict)
    clip: tuple[Real, Real] | None = (-1.0, 1.0)
    aggregate: Literal["median", "mean"] = "median"
    attribution_window: Seconds | None = None
    default: Real | None = None
    demonstration_value: Real | None = None

    def contradictions(self, *, of_pairs: bool) -> Iterator[str]:
        """What makes no sense together; `of_pairs`: the method learns from pairs that preferences make."""
        if self.default is not None and self.attribution_window is None:
            yield (
                "reward.default: needs reward.attribution_window: a reply gets the default when the window closes and"
                " no feedback has come"
            )
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            yield f"reward.clip: {list(self.clip)} is no range; write the smaller number first"
        if of_pairs and not self.weights.get("preference"):
            yield (
                "reward.weights: the metric preference has none, so both replies of a preference get the same reward"
                " and dpo learns nothing of them. Write reward.weights: {preference: 1}"
            )


class FeedbackSettings(Section):
    """What is done with feedback beside the reward."""

    compensate_late: bool = False
    max_rater_share: Share = 0.1
    trusted_raters: tuple[str, ...] = ()
    quarantine_below: Fraction | None = 0.5
    quarantine_after: Positive = 20

    def all_trusted(self, judge: JudgeSettings) -> frozenset[str]:
        """The sources whose verdicts are taken for true, the judge's among them."""
        return frozenset({*self.trusted_raters, *([judge.source] if judge.url else [])})


class RetentionSettings(Section):
    """Seconds after its sampling that an experience is kept, by its state; null: for ever."""

    recorded: Seconds | None = None
    rewarded: Seconds | None = None
    trained: Seconds | None = None
    expired: Seconds | None = None
    dropped: Seconds | None = None


class TenantSettings(Section):
    """What holds for a tenant whose requests say nothing else; of retention, what is not written is as for all."""

    store: bool = True
    train: bool = True
    retention: RetentionSettings = RetentionSettings()


#: What is found by itself; `shared/privacy/patterns.py` says how.
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
            raise ValueError(f"{name} is no regular expression: {error}") from None
        if found:
            raise ValueError(f"{name} matches nothing at all, which stands everywhere")
    return value


Patterns = Annotated[dict[str, str], AfterValidator(_named_patterns)]


class PrivacySettings(Section):
    """What is replaced in requests, replies and feedback before they are written anywhere."""

    redact: tuple[BuiltIn, ...] = ("private_key", "jwt", "api_key")
    patterns: Patterns = Field(default_factory=dict)
    presidio: tuple[str, ...] = ()
    presidio_language: str = "en"

    def contradictions(self) -> Iterator[str]:
        """What does not fit together."""
        for name in sorted(self.patterns.keys() & set(self.redact)):
            yield f"privacy.patterns: {name} is the name of a kind in privacy.redact; give the pattern another one"
