"""The settings of the trainer's algorithm: `algorithm` in the YAML. The names are the papers'."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import model_validator

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
    "dapo",
    "gspo",
    "cispo",
    "multi_step_grpo",
    "dpo",
    "kto",
    "sft",
    "raft",
    "distill",
]

#: Those that compare the runs of a task with each other.
OF_GROUPS = frozenset({"rloo", "grpo", "dapo", "gspo", "cispo", "multi_step_grpo"})

#: What a method's paper says where the settings say nothing, if that is not everybody's default.
_OF_PAPERS: Mapping[str, Mapping[str, object]] = {
    "dapo": {"clip_range_high": 0.28, "kl_coef": 0.0},
    "gspo": {
        "clip_range": 3e-4,
        "clip_range_high": 4e-4,
        "loss_agg_mode": "seq-mean-token-mean",
        "kl_coef": 0.0,
        # An engine's arithmetic alone moves a ratio further than this clip allows.
        "off_policy": {"proximal": "recomputed"},
    },
    "cispo": {"clip_range": 1.0, "clip_range_high": 0.28, "kl_coef": 0.0},
}

_OF_ANY_REPLY = frozenset({"dpo", "kto", "sft", "raft"})


class OptimizerSettings(Section):
    """AdamW and what surrounds it."""

    lr: PositiveReal = 1e-6
    """The learning rate. _Train._"""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """AdamW's decay rates. _Train._"""
    bits: Literal[32, 8] = 32
    """Bits of AdamW's two moments; 8 take [a quarter of the memory](one_machine.md#disk-and-memory). After a change
    they begin again. _Train._"""
    lr_warmup_steps: NotNegative = 0
    """Updates over which the learning rate rises to `lr`. _Train._"""

    #: Weights do not decay: what holds a policy near its base model is `kl_coef`.
    weight_decay: ClassVar[float] = 0.0


class CriticOptimizerSettings(Section):
    """The same for the critic, which learns faster."""

    lr: PositiveReal = 1e-5
    """The critic's learning rate. _Train._"""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """AdamW's decay rates. _Train._"""

    #: A critic that decays predicts less than there is.
    weight_decay: ClassVar[float] = 0.0
    #: A critic is behind the policy at the start, when a warm-up would hold it back.
    lr_warmup_steps: ClassVar[int] = 0


class OffPolicySettings(Section):
    """What is done about tokens that other weights, or the engine's arithmetic, sampled."""

    proximal: Literal["sampled", "recomputed"] = "sampled"
    """What the clipped ratio is against: the log-probabilities as sampled, or [those of the step's
    start](methods.md#replies-that-other-weights-sampled). _Train._"""
    correction: Literal["none", "truncate", "mask"] = "truncate"
    """What happens to [importance weights](methods.md#replies-that-other-weights-sampled) beyond the bounds: nothing,
    cut, or their tokens masked. _Train._"""

    #: The least importance weight that `mask` leaves in, the inverse of `high`.
    low: ClassVar[float] = 0.5
    #: The largest importance weight: a token that has become twice as likely.
    high: ClassVar[float] = 2.0

    @property
    def bounded(self) -> bool:
        """Whether the bounds count: PPO's own ratio against what was sampled needs none."""
        return self.proximal == "recomputed" or self.correction == "mask"


class GroupAdvantageSettings(Section):
    """The advantage of a run over the others of its task."""

    scale: Literal["group", "batch", "none"] = "group"
    """What the advantage is divided by: the group's standard deviation (GRPO), the batch's, or nothing (Dr. GRPO).
    _Train._"""


class OverlongSettings(Section):
    """Replies that came to the most tokens they were allowed (DAPO)."""

    buffer: NotNegative = 0
    """DAPO's soft penalty: over the last so many tokens before `model.max_response_tokens` the reward falls by 1; 0:
    none. _Train._"""

    #: How much the reward of a reply that fills its limit falls: as in DAPO's paper, where rewards are 1 and -1.
    penalty: ClassVar[float] = 1.0

    def contradictions(self, limit: int | None) -> Iterator[str]:
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
    """What [reinforce](methods.md#reinforce-and-reinforce) compares a reward with: the decaying mean, the task's mean,
    or the batch's. _Train._"""

    #: How much of the running mean stays after a batch: the last twenty batches count, for a policy that changes.
    decay: ClassVar[float] = 0.95


class DpoSettings(Section):
    """Direct preference optimisation."""

    beta: PositiveReal = 0.1
    """How strongly the policy is held to the base model. _Train._"""


class KtoSettings(Section):
    """Kahneman-Tversky optimisation."""

    beta: PositiveReal = 0.1
    """How strongly the policy is held to the base model. _Train._"""
    threshold: Real = 0.5
    """Replies with at least this reward are desirable, the others are not. _Train._"""


class SftSettings(Section):
    """Supervised fine-tuning; `raft` reads `least_reward` alone."""

    targets: Literal["both", "demonstrations", "replies"] = "both"
    """What is imitated: edited answers, well-rewarded replies, or both. _Train._"""
    least_reward: Real = 0.5
    """The least reward of a reply that is imitated, by `sft` and `raft`. _Train._"""


class DistillSettings(Section):
    """The teacher: a local model, or one behind an OpenAI endpoint."""

    teacher_path: Path | None = None
    """The teacher: a local model folder with the same tokenizer. _Train._"""
    teacher_url: Address | None = None
    """The teacher: an OpenAI endpoint; vLLM for `reverse_kl`. _Train._"""
    teacher_model: str | None = None
    """The name of the model behind `teacher_url`. _Train._"""
    teacher_key: Secret | None = None
    """The key for `teacher_url`. _Train._"""
    mode: Literal["reverse_kl", "replies"] = "reverse_kl"
    """Learn from the teacher's log-probabilities of the model's own replies, or imitate the teacher's replies.
    _Train._"""

    #: Seconds to wait for an answer of the teacher: a long reply of a large model takes a minute.
    timeout: ClassVar[float] = 120.0


class MixSettings(Section):
    """Conversations that are imitated beside what is learnt from rewards."""

    file: Path | None = None
    """[A JSON Lines file](files.md#a-file-beside-rewards) of conversations that each step also imitates; null: none.
    _Train._"""
    share: Fraction = 0.1
    """The file's share of a step's rows and loss. _Train._"""


class AlgorithmSettings(Section):
    """How rewards become gradients."""

    algorithm_type: AlgorithmType = "ppo"
    """The method: [which for which feedback](methods.md). `dapo`, `gspo` and `cispo` have [other
    defaults](methods.md#dapo-gspo-cispo). _Train._"""
    optimizer: OptimizerSettings = OptimizerSettings()
    critic_optimizer: CriticOptimizerSettings = CriticOptimizerSettings()
    credit: Literal["call", "trajectory", "discounted"] = "call"
    """The reward of a [call of a run](concepts.md#credit): its own, its run's at the end,
    or its run's times 0.95 for each later call. _Train._"""
    gamma: Fraction = 1.0
    """Discount per token; 1: none. _Train._"""
    lam: Fraction = 1.0
    """GAE's lambda: 1 trusts the reward alone, smaller values trust the critic more. _Train._"""
    clip_range: Fraction = 0.2
    """How far below 1 the probability ratio may move the policy, and above 1 unless `clip_range_high` is set.
    _Train._"""
    clip_range_high: NotNegativeReal | None = None
    """How far above 1 the probability ratio may move the policy; null: as `clip_range`. _Train._"""
    dual_clip: AboveOne | None = 3.0
    """Bound on the loss of a token with a negative advantage, in advantages; null:
    [none](methods.md#replies-that-other-weights-sampled). _Train._"""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How the losses of tokens become one: over all tokens (DAPO), or over sequences ([table](methods.md#ppo)).
    _Train._"""
    kl_coef: NotNegativeReal = 0.001
    """Weight of the divergence from the base model, or where the policy began, in the actor's loss; 0 needs no
    reference. _Train._"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    """The estimator of that divergence. _Train._"""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where that divergence counts: in the actor's loss, or in each token's reward. _Train._"""
    entropy_coef: Real = 0.0
    """Weight of the entropy bonus in the actor's loss. _Train._"""
    epochs: Positive = 1
    """Passes over a batch in a step. _Train._"""
    mini_batches: Positive = 1
    """Updates in a pass over a batch. _Train._"""
    off_policy: OffPolicySettings = OffPolicySettings()
    group: GroupAdvantageSettings = GroupAdvantageSettings()
    overlong: OverlongSettings = OverlongSettings()
    baseline: BaselineSettings = BaselineSettings()
    dpo: DpoSettings = DpoSettings()
    kto: KtoSettings = KtoSettings()
    sft: SftSettings = SftSettings()
    distill: DistillSettings = DistillSettings()
    mix: MixSettings = MixSettings()

    #: The discount of `credit: discounted`: of a run of twenty calls the first is paid a third.
    turn_discount: ClassVar[float] = 0.95
    #: How far an update may move the critic's value of a token before the loss stops rewarding it: half of a reward.
    value_clip_range: ClassVar[float] = 0.5
    #: So many steps in a row that were not finite stop the trainer: one is bad data, three are a policy that is lost.
    max_skipped_steps: ClassVar[int] = 3
    #: What seq-mean-token-sum-norm divides by, in tokens: any constant does, for AdamW takes the scale out.
    loss_horizon: ClassVar[int] = 1024
    #: Gradients with a larger norm are scaled down to it: what the papers of these methods use.
    max_grad_norm: ClassVar[float] = 1.0

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_paper(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not (found := _OF_PAPERS.get(str(value.get("algorithm_type")))):
            return value
        both = {
            name: {**default, **value[name]}
            for name, default in found.items()
            if isinstance(default, dict) and isinstance(value.get(name), dict)
        }
        return {**found, **value, **both}

    @property
    def adamw_of_critic(self) -> OptimizerSettings:
        """The critic's optimiser: its moments have as many bits as the policy's."""
        own = self.critic_optimizer
        return OptimizerSettings(lr=own.lr, betas=own.betas, bits=self.optimizer.bits)

    @property
    def of_any_reply(self) -> bool:
        """Whether it learns from any reply, however that was sampled: it needs no ratio of probabilities."""
        kind = self.algorithm_type
        return kind in _OF_ANY_REPLY or (kind == "distill" and self.distill.mode == "replies")

    @property
    def of_edited_answers(self) -> bool:
        """Whether it learns edited answers: it needs no reward of what they stand for."""
        return self.algorithm_type == "sft" and self.sft.targets != "replies"

    @property
    def of_imported_replies(self) -> bool:
        """Whether it learns from single replies that were not sampled here."""
        imitates = self.algorithm_type == "sft" and self.sft.targets != "demonstrations"
        alone = self.algorithm_type in {"raft", "kto"}
        return imitates or alone or (self.algorithm_type == "distill" and self.of_any_reply)

    @property
    def unbounded(self) -> str | None:
        """What lets one stale reply outweigh its whole batch, with its cure; None if nothing does."""
        if self.of_any_reply or self.dual_clip is not None or self.off_policy.bounded or self.algorithm_type == "cispo":
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
        teacher = self.distill
        if self.algorithm_type == "distill" and (teacher.teacher_path is None) == (teacher.teacher_url is None):
            yield (
                "algorithm.distill: needs one teacher: write either teacher_path, a local model, or teacher_url, an"
                " OpenAI endpoint"
            )
        if self.algorithm_type == "distill" and teacher.teacher_url is not None and teacher.teacher_model is None:
            yield "algorithm.distill.teacher_url: needs algorithm.distill.teacher_model, the model's name there"
        if self.mix.file is not None and not 0 < self.mix.share < 1:
            yield "algorithm.mix.share: must lie between 0 and 1: a step learns from rewards too"
        if self.mix.file is not None and self.of_any_reply:
            yield f"algorithm.mix.file: {self.algorithm_type} imitates or compares replies itself: `tuneloop import` it"
