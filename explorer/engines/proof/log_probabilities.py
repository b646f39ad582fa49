"""Weights known by the log-probabilities that they give the tokens of a row."""

import random
import string
from collections.abc import Sequence
from typing import NamedTuple

from tuneloop.explorer.engines.proof.fingerprint import describe_part
from tuneloop.shared.checkpoints import PROBE_LENGTH

#: How many parts a reason names.
_NAMED = 4


class ProbeFindings(NamedTuple):
    """How far an engine's log-probabilities are from what they should be (mean absolute difference, nats).

    `weights`: from those of the probe. `cache`: those with its prefix cache from those without. `parts` are those whose
    weights are not the files', to the bit; None where the engine or the version has no fingerprint.
    """

    weights: float
    cache: float
    allowed: float
    parts: Sequence[str] | None = None

    @property
    def proof(self) -> str:
        """What the weights are proven by; empty if they are not."""
        if self.problem is not None:
            return ""
        return "log-probabilities only" if self.parts is None else "fingerprint"

    @property
    def problem(self) -> str | None:
        """What is wrong, None if nothing is."""
        if self.parts:
            named = ", ".join(map(describe_part, self.parts[:_NAMED]))
            return f"the engine's weights are not the version's: {len(self.parts)} parts differ, {named}"
        if not self.weights <= self.allowed:
            off = f"{self.weights:.2g} nats from the trainer's"
        elif not self.cache <= self.allowed:
            off = f"{self.cache:.2g} nats apart with and without its prefix cache"
        else:
            return None
        return f"the engine's log-probabilities are {off}; allowed: {self.allowed:.2g}"


def mean_distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return sum(abs(one - other) for one, other in zip(ours, theirs, strict=True)) / len(ours)


def probe_text() -> str:
    """Random words, always the same: what a model expects after them depends on its weights alone."""
    chance = random.Random(PROBE_LENGTH)
    return " ".join("".join(chance.choices(string.ascii_lowercase, k=6)) for _ in range(PROBE_LENGTH))
