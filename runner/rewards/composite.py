"""A reward made of named components, each times its weight: penalties are components with a negative one. Pure."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuneloop.runner.rewards.reply import Reply

#: What one thing about a reply is worth, such as 1 for right and 0 for wrong; None: it says nothing of this reply.
Component = Callable[[Reply], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The reward, and what it is made of: `values` before and `parts` after the weights. None said nothing."""

    total: float
    values: Mapping[str, float | None]
    parts: Mapping[str, float]

    def as_feedback(self, *msg_ids: str, source: str | None = None) -> dict[str, Any]:
        """The body of a POST to /feedback: the total under `reward`, each component's value under its own name."""
        values: dict[str, float] = {"reward": self.total}
        values |= {name: value for name, value in self.values.items() if value is not None}
        about: dict[str, Any] = {"msg_ids": list(msg_ids)} | ({"source": source} if source else {})
        return {"feedback": [about | {"metric": name, "value": value} for name, value in values.items()]}


class Composite:
    """A reward by components, which have the same names as `weights`. The total is clipped to `clip`.

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
        """Raises ValueError for weights that do not fit the components, or a clip that is no range."""
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
        """The reward of a reply. Raises ValueError for a component that is not finite, and what components raise."""
        values = {name: component(reply) for name, component in self._components.items()}
        if wrong := [name for name, value in values.items() if value is not None and not math.isfinite(value)]:
            raise ValueError(f"component {wrong[0]}: {values[wrong[0]]} is not a reward")
        values = {name: None if value is None else float(value) for name, value in values.items()}
        parts = {name: self._weights[name] * value for name, value in values.items() if value is not None}
        total = math.fsum(parts.values())
        if self._clip is not None:
            total = min(max(total, self._clip[0]), self._clip[1])
        return Score(total=total, values=values, parts=parts)
