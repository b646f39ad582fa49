"""Computes rewards as weighted sums of named components. Pure."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuneloop.runner.rewards.reply import Reply

#: Scores one aspect of a reply, such as 1 for right and 0 for wrong; None: not applicable.
Component = Callable[[Reply], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward with its component values before (`values`) and after (`parts`) weighting."""

    total: float
    values: Mapping[str, float | None]
    parts: Mapping[str, float]

    def as_feedback(self, *msg_ids: str, source: str | None = None) -> dict[str, Any]:
        """The body of POST /feedback: the total as `reward`, components under their names."""
        values: dict[str, float] = {"reward": self.total}
        values |= {name: value for name, value in self.values.items() if value is not None}
        about: dict[str, Any] = {"msg_ids": list(msg_ids)} | ({"source": source} if source else {})
        return {"feedback": [about | {"metric": name, "value": value} for name, value in values.items()]}


class Composite:
    """A weighted sum of components, clipped to `clip`. `weights` has the components' names.

    >>> from tuneloop.runner.rewards.components import fact, numeric
    >>> components = {"correct": numeric(), "seconds": fact("seconds")}
    >>> reward = Composite(components, weights={"correct": 3.0, "seconds": -0.1})
    >>> score = reward(Reply(text="That makes 12.", expected=12, facts={"seconds": 5.0}))
    >>> score.total, dict(score.values)
    (2.5, {'correct': 1.0, 'seconds': 5.0})
    """

    def __init__(
        self,
        components: Mapping[str, Component],
        *,
        weights: Mapping[str, float],
        clip: tuple[float, float] | None = None,
    ) -> None:
        """Raises ValueError for other names in `weights`, or an invalid clip."""
        if components.keys() != weights.keys():
            odd = ", ".join(sorted(components.keys() ^ weights.keys()))
            raise ValueError(f"every component needs a weight, and every weight a component: {odd}")
        if "reward" in components:
            raise ValueError("no component may be called reward: that is the total's name")
        if not all(map(math.isfinite, weights.values())):
            raise ValueError(f"weights must be finite: {dict(weights)}")
        if clip is not None and not clip[0] < clip[1]:
            raise ValueError(f"clip: {clip} is not a range; write the smaller number first")
        self._components = dict(components)
        self._weights = dict(weights)
        self._clip = clip

    def __call__(self, reply: Reply) -> Score:
        """Score a reply. Raises ValueError for a component that is not finite, and errors of components."""
        values = {name: component(reply) for name, component in self._components.items()}
        if wrong := [name for name, value in values.items() if value is not None and not math.isfinite(value)]:
            raise ValueError(f"component {wrong[0]}: {values[wrong[0]]} is not a reward")
        values = {name: None if value is None else float(value) for name, value in values.items()}
        parts = {name: self._weights[name] * value for name, value in values.items() if value is not None}
        total = math.fsum(parts.values())
        if self._clip is not None:
            total = min(max(total, self._clip[0]), self._clip[1])
        return Score(total=total, values=values, parts=parts)
