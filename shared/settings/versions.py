"""Defines the settings of monitoring: `monitor` in the YAML."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, model_validator

from tuneloop.shared.settings.types import AboveOne, Positive, Seconds, Section, Share


def _a_function(value: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
        raise ValueError("must be package.module:name")
    return value


def _a_receiver(value: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", value):
        raise ValueError("must be the http or https URL of an OTLP receiver, such as http://localhost:4318")
    return value


FunctionName = Annotated[str, AfterValidator(_a_function)]

_REFUSALS = (
    "I.?m sorry",
    "I am sorry",
    "I can.?t help",
    "I can.?t assist",
    "I cannot",
    "I.?m unable to",
    "I am unable to",
    "I.?m not able to",
    "as an AI",
    "对不起",
    "抱歉",
    "我不能",
    "我无法",
    "作为一个人工智能",
)


class EvaluationSettings(Section):
    """Tasks with known answers that are never trained on; without a `path` nothing is evaluated."""

    path: Path | None = None
    """[Tasks with known answers](versions.md#held-out-tasks); null: none."""
    every: Positive = 20
    """Steps between two evaluations. Each costs training time. _Train._"""
    judge: Literal["exact", "contains", "regex", "function", "model"] = "contains"
    """What a right reply is: the answer (`exact`), contains it (`contains`), matches it (`regex`), or what
    `monitor.evaluation.function` or the model of `judge` says."""
    function: FunctionName | None = None
    """`package.module:name`, called with question, answer and reply; it returns 0 to 1."""

    #: Tokens of an answer at most: tasks with known answers have short ones.
    most_tokens: ClassVar[int] = 256


#: The alarms that say that the feedback cannot be trusted, or that the model is worse for it.
SUSPECT = frozenset({"reward_hack", "reward_jump", "extreme_rewards", "degraded"})


class DriftSettings(Section):
    """When a monitor raises its alarm."""

    action: Literal["report", "suspect", "hold"] = "suspect"
    """What an open [alarm](troubleshooting.md#alarms) does: `report` shows it, `hold` keeps new versions from users,
    `suspect` does so if feedback cannot be trusted or the model is worse. _Train._"""

    #: Regular expressions, upper and lower case alike; a reply refuses if one is in its first 2000 characters.
    refusal_patterns: ClassVar[tuple[str, ...]] = _REFUSALS
    #: The rise of the reward that the alarm `reward_hack` needs, in the reward's own units: less is noise of a window.
    reward_rise: ClassVar[float] = 0.05
    #: The fall of the evaluation's score that `reward_hack` needs: less is chance on some hundred tasks.
    evaluation_fall: ClassVar[float] = 0.1
    #: Steps back that evaluations are compared with: ten evaluations as `monitor.evaluation.every` is on its own.
    evaluation_window: ClassVar[int] = 200
    #: So many times longer or shorter replies are another way to answer, not the spread between two windows.
    reply_length: ClassVar[float] = 2.0
    #: So many times more or less entropy comes before a collapse, or before the policy samples at random.
    entropy: ClassVar[float] = 3.0
    #: The distance from the base model, in nats a token, that a policy comes to which is learning something else.
    kl: ClassVar[float] = 0.5
    #: Steps between two measurements where the method does not look at the base model, which has to be loaded for each.
    kl_every: ClassVar[int] = 20
    #: How far the share of replies that refuse may rise: more is one user in ten who gets no answer any more.
    refusals: ClassVar[float] = 0.1
    #: How far the share of wrong calls among the replies that call tools may rise, for the same reason.
    tool_errors: ClassVar[float] = 0.1
    #: The newest replies that are looked at: enough for shares of a tenth, few enough to read at each step.
    replies: ClassVar[int] = 256
    #: The share of the newest feedback from which on one source alone says what is learnt.
    single_rater: ClassVar[float] = 0.8
    #: The newest feedback that is looked at: enough for shares of a twentieth.
    rater_events: ClassVar[int] = 200
    #: The part of `reward.clip` by which the mean reward jumps only where feedback, not the policy, has changed.
    reward_jump: ClassVar[float] = 0.25
    #: The part of the newest numbers beyond `reward.clip` that is more than slips of honest raters.
    extreme_rewards: ClassVar[float] = 0.05
    #: How far below the best one that is remembered an evaluation is worse beyond doubt, whatever the reward did.
    degraded: ClassVar[float] = 0.2
    #: The first so many steps are what later ones are compared with: enough for a mean without noise.
    baseline: ClassVar[int] = 20
    #: Steps over which a monitor takes the mean, for the same reason.
    window: ClassVar[int] = 20

    def holds(self, alarm: str) -> bool:
        """Whether the alarm of this name keeps new versions from being served."""
        return self.action == "hold" or (self.action == "suspect" and alarm in SUSPECT)

    @property
    def refusals_found(self) -> list[re.Pattern[str]]:
        """What is looked for in a reply to see whether it refuses; upper and lower case are alike."""
        return [re.compile(each, re.IGNORECASE) for each in self.refusal_patterns]


class MonitorSettings(Section):
    """Where curves are written, and the monitored figures."""

    monitor_type: Literal["tensorboard", "wandb", "mlflow"] = "tensorboard"
    """A tracker besides TensorBoard: [tracker](metrics.md#trackers). _Train._"""
    otlp_url: Annotated[str, AfterValidator(_a_receiver)] | None = None
    """Where [traces](metrics.md#traces) go, by OTLP over HTTP: `http://host:4318`; null: nowhere."""
    evaluation: EvaluationSettings = EvaluationSettings()
    drift: DriftSettings = DriftSettings()

    def contradictions(self) -> Iterator[str]:
        if (self.evaluation.judge == "function") != (self.evaluation.function is not None):
            yield (
                "monitor.evaluation.function: goes with monitor.evaluation.judge: function; write both, the one as"
                " package.module:name, or neither"
            )
        if self.evaluation.path is not None and self.drift.evaluation_window < self.evaluation.every:
            yield (
                f"monitor.evaluation.every: evaluations of the last {self.drift.evaluation_window} steps are compared,"
                f" and with one every {self.evaluation.every} there are no two; lower it"
            )


#: The traffic that a version which is being tried gets, where the settings do not say.
SHARES = {"canary": 0.1, "ab": 0.5}


class GateSettings(Section):
    """What a candidate must show before it answers requests; a bare word is its `mode`."""

    mode: Literal["off", "report", "block"] = "off"
    """What happens to a candidate [worse than the champion](versions.md#gate): nothing (`off`), an event (`report`), or
    its rejection (`block`)."""
    #: How far its score on a slice of the tasks may lie below the champion's: a slice has fewer tasks, and more chance.
    slice_margin: ClassVar[float] = 0.05
    #: How many times as long as the champion's, or as short, its answers may be: as the monitor `reply_length` has it.
    reply_length: ClassVar[float] = 2.0
    #: How far the share of its answers that refuse may lie above the champion's: as the monitor `refusals` has it.
    refusals: ClassVar[float] = 0.1
    #: How far the share of its answers without the form that their task demands may lie above the champion's.
    format: ClassVar[float] = 0.1
    #: How far its score may lie below the champion's: less is chance on some hundred tasks.
    margin: ClassVar[float] = 0.02

    def contradictions(self, *, tasks: bool) -> Iterator[str]:
        """What does not fit together, a sentence each; `tasks`: whether there are any."""
        if self.mode != "off" and not tasks:
            yield (
                f"gate.mode: {self.mode} needs tasks to try a version on; name their file in monitor.evaluation.path,"
                " or write gate: off"
            )

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


class RolloutSettings(Section):
    """How the traffic goes over to a new version, and what brings it back."""

    mode: Literal["all", "rolling", "canary", "ab"] = "all"
    """How a version takes over: `all` engines, `rolling` while others answer, or after a [trial](versions.md#rollout)
    (`canary`, `ab`) with two engines, or one with adapters. _Serve._"""
    share: Share | None = None
    """The share of the traffic on trial; null: 0.1, of `ab` 0.5. _Serve._"""
    window: Seconds = 3600.0
    """Seconds after which a version that is tried is decided about. _Serve._"""
    latency: AboveOne | None = 1.5
    """How many times the champion's seconds a token its replies may take; null: any. _Serve._"""

    #: How probable it may be that the test calls one better, or worse, when they are the same, however often it looks.
    error: ClassVar[float] = 0.05
    #: What becomes of a version of which nothing was shown when the window ends: the one that is known stays.
    undecided: ClassVar[Literal["promote", "roll_back"]] = "roll_back"
    #: How far the share of its failed requests may lie above the champion's: more than chance makes of a sound engine.
    failures: ClassVar[float] = 0.02
    #: How many times as long as the champion's, or as short, its replies may be: as in the gate.
    reply_length: ClassVar[float] = 2.0
    #: How far the share of its replies that refuse may lie above the champion's: as in the gate.
    refusals: ClassVar[float] = 0.1
    #: Rewarded replies that both versions need before their rewards are compared: fewer show nothing.
    rewards: ClassVar[int] = 50

    @property
    def tries(self) -> bool:
        """Whether a new version first serves only a share of the traffic."""
        return self.mode in SHARES

    @property
    def tried_share(self) -> float:
        """The part of the traffic that a version which is being tried gets."""
        return self.share if self.share is not None else SHARES.get(self.mode, 1.0)

    def contradictions(self) -> Iterator[str]:
        if self.share is not None and not self.tries:
            yield f"rollout.share: means nothing with rollout.mode: {self.mode}; leave it away, or write canary or ab"
        if self.share == 1.0 and self.tries:
            yield "rollout.share: 1.0 leaves nothing to compare with; write less, or rollout.mode: all"
