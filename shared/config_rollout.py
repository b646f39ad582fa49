"""The settings of how a new version comes into service: `gate` and `rollout` in the YAML."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shared.config_kinds import (
    AboveOne,
    Fraction,
    NotNegativeReal,
    Positive,
    PositiveReal,
    Seconds,
    Section,
    Share,
    UpToHalf,
)

#: The traffic that a version which is being tried gets, where the settings do not say.
SHARES = {"canary": 0.1, "shadow": 0.1, "ab": 0.5}

ErrorRate = Annotated[float, Field(gt=0, lt=0.5)]


class Replay(Section):
    """A share of the traffic that is held out of all training, and what a candidate must earn on it; 0: none is."""

    share: UpToHalf = 0.0
    rows: Positive = 1000
    margin: NotNegativeReal = 0.05
    slice_margin: NotNegativeReal = 0.1


class Gate(Section):
    """What a candidate must show before it answers anybody; a bare word is its `mode`."""

    mode: Literal["off", "report", "block"] = "off"
    margin: Fraction = 0.02
    slice_margin: Fraction = 0.05
    kl: PositiveReal | None = None
    reply_length: AboveOne | None = 2.0
    refusals: Fraction | None = 0.1
    format: Fraction | None = 0.1
    replay: Replay = Replay()

    @property
    def replays(self) -> bool:
        """Whether a candidate is compared on replies that were held out."""
        return self.mode != "off" and self.replay.share > 0

    def contradictions(self, *, tasks: bool) -> Iterator[str]:
        """What does not fit together, a sentence each; `tasks`: whether there are any."""
        if self.mode == "off" or tasks:
            return
        if not self.replays:
            yield (
                f"gate.mode: {self.mode} needs tasks to try a version on; name their file in monitor.evaluation.path,"
                " or hold traffic out with gate.replay.share, or write gate: off"
            )
        elif self.kl is not None:
            yield "gate.kl: is measured on tasks; name their file in monitor.evaluation.path, or leave it away"

    @model_validator(mode="before")
    @classmethod
    def _a_word(cls, value: Any) -> Any:
        # YAML takes a bare `off` for false.
        if value is False:
            return {"mode": "off"}
        if isinstance(value, str):
            return {"mode": value}
        if isinstance(value, dict) and value.get("mode") is False:
            return value | {"mode": "off"}
        return value


class Rollout(Section):
    """How the traffic goes over to a new version, and what brings it back."""

    mode: Literal["all", "rolling", "canary", "shadow", "ab"] = "all"
    share: Share | None = None
    window: Seconds = 3600.0
    rewards: Positive = 50
    error: ErrorRate = 0.05
    undecided: Literal["promote", "roll_back"] = "roll_back"
    failures: Fraction | None = 0.02
    latency: AboveOne | None = 1.5
    reply_length: AboveOne | None = 2.0
    refusals: Fraction | None = 0.1

    @property
    def tries(self) -> bool:
        """Whether a new version first stands beside the old one."""
        return self.mode in SHARES

    @property
    def tried_share(self) -> float:
        """The part of the traffic that a version which is being tried gets, or gets copies of."""
        return self.share if self.share is not None else SHARES.get(self.mode, 1.0)

    def contradictions(self) -> Iterator[str]:
        """What in here does not fit together, a sentence each."""
        if self.share is not None and not self.tries:
            yield f"rollout.share: means nothing with rollout.mode: {self.mode}; leave it away, or write canary or ab"
        if self.share == 1.0 and self.mode in {"canary", "ab"}:
            yield "rollout.share: 1.0 leaves nothing to compare with; write less, or rollout.mode: all"
