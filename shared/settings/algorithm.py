"""The settings of the trainer's algorithm: `algorithm` in the YAML. The names are the papers'."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tuneloop.shared.settings.types import (
    AboveOne,
    Address,
    BelowOne,
    Fraction,
    NotNegative,
    NotNegativeReal,
    Positive,
    PositiveReal,
    Real,
    Secret,
    Section,
)

AlgorithmType = Literal[
    "ppo",
    "reinforce",
    "reinforce++",
    "rloo",
    "grpo",
    "multi_step_grpo",
    "dpo",
    "kto",
    "sft",
    "raft",
    "distill",
]

#: Those that compare the runs of a task with each other.
OF_GROUPS = frozenset({"rloo", "grpo", "multi_step_grpo"})

_OF_ANY_REPLY = frozenset({"dpo", "kto", "sft", "raft"})


class OptimizerSettings(Section):
    """AdamW and what surrounds it."""

    lr: PositiveReal = 1e-6
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    weight_decay: NotNegativeReal = 0.0
    lr_warmup_steps: NotNegative = 0
    bits: Literal[32, 8] = 32


class CriticOptimizerSettings(OptimizerSettings):
    """The same for the critic, which learns faster."""

    lr: PositiveReal = 1e-5


class OffPolicySettings(Section):
    """What is done about tokens that other weights, or the engine's arithmetic, sampled."""

    proximal: Literal["sampled", "recomputed"] = "sampled"
    correction: Literal["none", "truncate", "mask"] = "truncate"
    level: Literal["token", "sequence", "geometric"] = "token"
    low: BelowOne = 0.5
    high: AboveOne = 2.0

    @property
    def bounded(self) -> bool:
        """Whether the bounds count: PPO's own ratio against what was sampled needs none."""
        return self.proximal == "recomputed" or self.correction == "mask"

    def contradictions(self) -> Iterator[str]:
        """What in here does not fit together, a sentence each."""
        for name in ("level", "low", "high"):
            if not self.bounded and getattr(self, name) != type(self).model_fields[name].default:
                yield (
                    f"algorithm.off_policy.{name}: nothing is bounded by it with proximal: {self.proximal} and"
                    f" correction: {self.correction}; write correction: mask or proximal: recomputed, or leave it out"
                )


class GroupAdvantageSettings(Section):
    """The advantage of a run over the others of its task."""

    scale: Literal["group", "batch", "none"] = "group"
    drop_constant: bool = True
    step_norm: bool = False


class OverlongSettings(Section):
    """Replies that came to the most tokens they were allowed (DAPO)."""

    train: bool = True
    buffer: NotNegative = 0
    penalty: NotNegativeReal = 1.0

    def contradictions(self, limit: int | None) -> Iterator[str]:
        """What does not fit the most tokens that a reply may have, a sentence each."""
        if self.buffer and limit is None:
            yield (
                "algorithm.overlong.buffer: the punishment begins so many tokens before the limit of a reply; write"
                " model.max_response_tokens, which is that limit"
            )
        elif limit is not None and self.buffer > limit:
            yield f"algorithm.overlong.buffer: {self.buffer} is more than model.max_response_tokens, {limit}; lower it"


class BaselineSettings(Section):
    """What a reward is compared with where there is no group and no critic."""

    kind: Literal["running", "task", "batch"] = "running"
    decay: Fraction = 0.95
    scale: Literal["running", "batch", "none"] = "batch"


class DpoSettings(Section):
    """Direct preference optimisation."""

    beta: PositiveReal = 0.1
    label_smoothing: Fraction = 0.0
    reference_free: bool = False


class KtoSettings(Section):
    """Kahneman-Tversky optimisation."""

    beta: PositiveReal = 0.1
    threshold: Real = 0.5
    desirable_weight: NotNegativeReal = 1.0
    undesirable_weight: NotNegativeReal = 1.0


class SftSettings(Section):
    """Supervised fine-tuning; `raft` reads `least_reward` alone."""

    targets: Literal["both", "demonstrations", "replies"] = "both"
    least_reward: Real = 0.5


class DistillSettings(Section):
    """The teacher: a local model, or one behind an OpenAI endpoint."""

    teacher_path: Path | None = None
    teacher_url: Address | None = None
    teacher_model: str | None = None
    teacher_key: Secret | None = None
    mode: Literal["reverse_kl", "replies"] = "reverse_kl"
    timeout: PositiveReal = 120.0


class AlgorithmSettings(Section):
    """How rewards become gradients."""

    algorithm_type: AlgorithmType = "ppo"
    optimizer: OptimizerSettings = OptimizerSettings()
    critic_optimizer: CriticOptimizerSettings = CriticOptimizerSettings()
    credit: Literal["call", "trajectory", "discounted"] = "call"
    turn_discount: Fraction = 0.95
    merge_calls: bool = True
    reward_clip: tuple[Real, Real] | None = None
    reward_normalization: Literal["none", "batch", "running"] = "none"
    gamma: Fraction = 1.0
    lam: Fraction = 1.0
    clip_range: Fraction = 0.2
    clip_range_high: NotNegativeReal | None = None
    dual_clip: AboveOne | None = 3.0
    value_clip_range: PositiveReal = 0.5
    negative_scale: NotNegativeReal = 1.0
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    loss_horizon: Positive | None = None
    kl_coef: NotNegativeReal = 0.001
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: Real = 0.0
    whiten_advantages: bool = True
    epochs: Positive = 1
    mini_batches: Positive = 1
    max_grad_norm: PositiveReal = 1.0
    critic_warmup_steps: NotNegative = 0
    max_skipped_steps: Positive = 3
    off_policy: OffPolicySettings = OffPolicySettings()
    group: GroupAdvantageSettings = GroupAdvantageSettings()
    overlong: OverlongSettings = OverlongSettings()
    baseline: BaselineSettings = BaselineSettings()
    dpo: DpoSettings = DpoSettings()
    kto: KtoSettings = KtoSettings()
    sft: SftSettings = SftSettings()
    distill: DistillSettings = DistillSettings()

    @property
    def of_any_reply(self) -> bool:
        """Whether it learns from any reply, however that was sampled: it needs no ratio of probabilities."""
        kind = self.algorithm_type
        return kind in _OF_ANY_REPLY or (kind == "distill" and self.distill.mode == "replies")

    @property
    def unbounded(self) -> str | None:
        """What lets one stale reply outweigh its whole batch, with its cure; None if nothing does."""
        if self.of_any_reply or self.dual_clip is not None or self.off_policy.bounded:
            return None
        return (
            "replies of negative advantage that have become much likelier since they were sampled weigh without bound:"
            " set algorithm.dual_clip, or algorithm.off_policy.proximal: recomputed"
        )

    @property
    def by_result(self) -> bool:
        """Whether the last call of a run says how all of it went."""
        return self.algorithm_type == "multi_step_grpo" or self.credit != "call"

    def contradictions(self) -> Iterator[str]:
        """What in here does not fit together, a sentence each."""
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and self.loss_horizon is None:
            yield (
                "algorithm.loss_agg_mode: seq-mean-token-sum-norm divides by algorithm.loss_horizon; write the most"
                " tokens that a reply may have"
            )
        if self.reward_clip is not None and self.reward_clip[0] >= self.reward_clip[1]:
            yield f"algorithm.reward_clip: {list(self.reward_clip)} is no range; write the smaller number first"
        yield from self.off_policy.contradictions()
        if self.baseline.decay == 1:
            yield "algorithm.baseline.decay: 1 would never learn; write less, such as 0.95"
        if self.dpo.label_smoothing >= 0.5:
            yield (
                f"algorithm.dpo.label_smoothing: {self.dpo.label_smoothing:g} of the preferences would be wrong,"
                " and nothing to be learnt from them; write less than 0.5"
            )
        if self.kto.desirable_weight == self.kto.undesirable_weight == 0:
            yield "algorithm.kto: desirable_weight and undesirable_weight are both 0: nothing would be learnt"
        if self.algorithm_type == "distill":
            yield from self._teachers_missing()

    def _teachers_missing(self) -> Iterator[str]:
        teacher = self.distill
        if (teacher.teacher_path is None) == (teacher.teacher_url is None):
            yield (
                "algorithm.distill: needs one teacher: write either teacher_path, a local model, or teacher_url, an"
                " OpenAI endpoint"
            )
        if teacher.teacher_url is not None and teacher.teacher_model is None:
            yield "algorithm.distill.teacher_url: needs algorithm.distill.teacher_model, the model's name there"
