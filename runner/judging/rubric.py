"""Defines rubrics: criteria and weights, written by hand or by a model."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tuneloop.runner.errors import JudgeFailed
from tuneloop.runner.judging.endpoint import Endpoint
from tuneloop.runner.judging.prompts import object_in, rubric_prompt

DEFAULT_CRITERIA: Mapping[str, str] = MappingProxyType(
    {
        "relevance": "Does the reply answer what was asked?",
        "accuracy": "Is what the reply says correct?",
        "completeness": "Does the reply say all that the asker needs?",
    }
)

#: Names become part of metric names, whose length a database index limits.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}").fullmatch
MAX_CRITERIA = 20
MAX_DESCRIPTION = 2000

_WRITTEN = {
    "type": "object",
    "properties": {
        "criteria": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "description": {"type": "string"},
                    "weight": {"type": "number"},
                },
                "required": ["name", "description", "weight"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["criteria"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question with a good and a bad answer."""

    prompt: str
    good: str
    bad: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """Criteria by name with their descriptions; `weights` default to 1; scores are whole numbers. Raises ValueError.

    >>> rubric = Rubric(criteria={"tone": "Is it friendly?", "truth": "Is it true?"}, weights={"truth": 3.0})
    >>> rubric.total({"tone": 5, "truth": 1}), rubric.normalise(2.0)
    (2.0, 0.25)
    """

    criteria: Mapping[str, str] = field(default_factory=lambda: dict(DEFAULT_CRITERIA))
    weights: Mapping[str, float] = field(default_factory=dict)
    scale: tuple[int, int] = (1, 5)

    def __post_init__(self) -> None:
        if mistake := next(_mistakes(self), None):
            raise ValueError(mistake)

    def weight(self, criterion: str) -> float:
        return self.weights.get(criterion, 1.0)

    def total(self, scores: Mapping[str, float]) -> float:
        whole = math.fsum(map(self.weight, self.criteria))
        return math.fsum(self.weight(name) * scores[name] for name in self.criteria) / whole

    def normalise(self, score: float) -> float:
        """Map a score from the scale to [0, 1]."""
        low, high = self.scale
        return (score - low) / (high - low)

    @classmethod
    def generate(cls, examples: Sequence[Example], endpoint: Endpoint, *, criteria: int = 4) -> "Rubric":
        """A rubric of about so many criteria that a model writes from examples. Raises JudgeError."""
        if not examples:
            raise ValueError("a rubric needs at least one example")
        pairs = [(each.prompt, each.good, each.bad) for each in examples]
        written = object_in(endpoint.ask(rubric_prompt(pairs, criteria), _WRITTEN).text, "criteria")["criteria"]
        try:
            by_name = {each["name"]: each for each in written}
            if len(by_name) != len(written):
                raise ValueError("two criteria have one name")
            return cls(
                criteria={name: each["description"] for name, each in by_name.items()},
                weights={name: each["weight"] for name, each in by_name.items()},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise JudgeFailed("the judge wrote no rubric", str(error)) from None

    def save(self, path: Path) -> None:
        """Write JSON for people and `load`."""
        shown = {"criteria": dict(self.criteria), "weights": dict(self.weights), "scale": list(self.scale)}
        path.write_text(json.dumps(shown, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Rubric":
        """Raises OSError, or ValueError with the file's name."""
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(read, dict) or read.keys() - {"criteria", "weights", "scale"} or "criteria" not in read:
                raise ValueError("it must be an object of criteria, weights and scale")
            fields = read | ({"scale": tuple(read["scale"])} if isinstance(read.get("scale"), list) else {})
            return cls(**fields)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a rubric: {error}") from None


def _mistakes(rubric: Rubric) -> Any:
    if not isinstance(rubric.criteria, Mapping) or not 1 <= len(rubric.criteria) <= MAX_CRITERIA:
        yield f"criteria: must be 1 to {MAX_CRITERIA} names with their descriptions"
        return
    for name, words in rubric.criteria.items():
        if not isinstance(name, str) or not _NAME(name):
            yield f"criteria: the name {name!r} must be 1 to 64 of A-Z a-z 0-9 _ -"
        if not isinstance(words, str) or not words.strip() or len(words) > MAX_DESCRIPTION:
            yield f"criteria: {name} needs a description of at most {MAX_DESCRIPTION} characters"
    if not isinstance(rubric.weights, Mapping) or rubric.weights.keys() - rubric.criteria.keys():
        yield "weights: must be numbers by the names of criteria"
        return
    for name, weight in rubric.weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            yield f"weights: {name} must be a number above 0"
    scale = rubric.scale
    if not (isinstance(scale, tuple) and len(scale) == 2 and all(type(each) is int for each in scale)):
        yield "scale: must be two whole numbers"
    elif not scale[0] < scale[1]:
        yield "scale: write the smaller number first"
