"""Defines the parts that algorithms share: moments, targets, estimators, importance weights, losses, groups.

Dimension suffixes are those of trainer/batches/batch.py; besides, K runs and G groups. Targets are constants of a step,
aligned with the reply tokens.

Importance weights correct the difference between the sampling weights and those at the start of the step, which comes
from staleness and from the engine's arithmetic. A token's weight is w = exp(start - sampled), and

    truncate    min(w, high)                                        TIS, fengyao.notion.site/off-policy-rl
    mask        0 outside [low, high], else w                       MIS, IcePop

With `proximal: sampled` PPO's own ratio already is the weight: then `mask` gives 1 and 0, and `truncate` nothing. With
`recomputed` the weight multiplies a ratio against the start: decoupled PPO (arXiv 2505.24298, eq. 5).

The actor's loss of all policy-gradient methods, which differ only in their advantages:

    ratio      r = exp(logprob - logprob as sampled, or at the start of the step)     arXiv 1707.06347, eq. 6
    policy     max(-A r, -A clip(r, 1 - low, 1 + high))                   eq. 7; low and high apart: 2503.14476, eq. 8
               and for A < 0 at most -A c                                 dual clip, 1912.09729, eq. 5
    loss       policy x importance weight + kl_coef * KL(policy, base model)
               - entropy_coef * entropy                                   1707.06347, eq. 9

Each term is averaged by `loss_agg_mode` over the whole mini-batch, whatever its micro-batches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, Self, TypeVar, assert_never

import numpy as np
import torch
from torch import Tensor

from tuneloop.shared.settings.algorithm import AlgorithmSettings, OffPolicySettings
from tuneloop.trainer.transfer import hand_over


class Moments(NamedTuple):
    """Running mean and mean square, and their weight, which approaches 1."""

    mean: float
    square: float
    weight: float


Baselines = Mapping[str, Moments]  # moments by name; the trainer keeps them across steps and in the checkpoint


def update_moments(before: Moments | None, seen_C: Tensor, *, decay: float) -> Moments:
    """Exponentially weighted moments, unbiased from the first batch on (as Adam's)."""
    mean, square, weight = before or Moments(0.0, 0.0, 0.0)
    return Moments(
        decay * mean + (1 - decay) * float(seen_C.double().mean()),
        decay * square + (1 - decay) * float(seen_C.double().square().mean()),
        decay * weight + (1 - decay),
    )


def mean_of(moments: Moments) -> float:
    return moments.mean / moments.weight


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRewards:
    """The C replies of a batch; a trajectory's sequence has several.

    `rewards_C` are credited, clipped and scaled by the settings. `rows_C`, `runs_C` and `groups_C` number each call's
    sequence, run and group; `last_C` marks a run's last call; `tasks` are the keys of baselines. `of_BR` is the call of
    each action token, otherwise -1; `ends_BR` marks where rewards are paid: the end of each call or, for a reward per
    trajectory, of each sequence.
    """

    rewards_C: Tensor
    rows_C: Tensor
    runs_C: Tensor
    groups_C: Tensor
    last_C: Tensor
    tasks: tuple[str, ...]
    of_BR: Tensor
    ends_BR: Tensor

    def spread(self, each_C: Tensor) -> Tensor:
        """A value per call at each of its tokens, 0 elsewhere."""
        return each_C[self.of_BR.clamp(min=0)].masked_fill(self.of_BR < 0, 0)

    def of_runs(self, each_K: Tensor) -> Tensor:
        """A value per run at each token of its calls, 0 elsewhere."""
        return self.spread(each_K.to(self.rewards_C.dtype)[self.runs_C])

    @property
    def paid_BR(self) -> Tensor:
        return self.spread(self.rewards_C) * self.ends_BR


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Constants of one step; None if the algorithm does not need them.

    Log-probabilities as sampled, of the actor at the `start` of the step, of the reference and of the teacher; the
    critic's old values; advantages and returns; importance `weights` (0 drops the token). `fresh_BR` marks tokens
    sampled by exactly the start's weights. `signs_B` is 1 for replies to raise, -1 to lower; `units_B` numbers rows
    that stay in one mini- and micro-batch; `divergence` is KL(policy || base model) per sequence.
    """

    mask_BR: Tensor
    sampled_BR: Tensor
    start_BR: Tensor | None = None
    reference_BR: Tensor | None = None
    teacher_BR: Tensor | None = None
    values_BR: Tensor | None = None
    advantages_BR: Tensor | None = None
    returns_BR: Tensor | None = None
    weights_BR: Tensor | None = None
    fresh_BR: Tensor | None = None
    signs_B: Tensor | None = None
    units_B: Tensor | None = None
    divergence: Tensor | None = None

    def rows(self, index_B: Tensor, like_BR: Tensor) -> Self:
        """The sequences `index_B`, with the width and device of `like_BR`."""
        cut: dict[str, Tensor | None] = {}
        for name in (field.name for field in fields(self)):
            each: Tensor | None = getattr(self, name)
            if each is not None and name.endswith("_BR"):
                each = each[index_B, : like_BR.shape[1]]
            elif each is not None and name.endswith("_B"):
                each = each[index_B]
            cut[name] = None if each is None else hand_over(each, like_BR.device)
        return type(self)(**cut)  # type: ignore[arg-type]

    @property
    def totals(self) -> "Totals":
        """The denominators of a whole mini-batch."""
        rows = len(self.mask_BR)
        units = rows if self.units_B is None else len(set(self.units_B.tolist()))
        desirable = 0 if self.signs_B is None else int((self.signs_B > 0).sum())
        fresh = 0 if self.fresh_BR is None else int(self.fresh_BR.sum())
        return Totals(int(self.mask_BR.sum()), rows, units, desirable, fresh)


Prepared = tuple[Targets, Baselines]  # targets and baselines after `prepare`


class Totals(NamedTuple):
    """Denominators: action tokens, sequences and units of a mini-batch, over all its micro-batches.

    `desirable` counts sequences of sign 1, `fresh` the action tokens that the start's weights sampled.
    """

    tokens: int
    sequences: int
    units: int
    desirable: int = 0
    fresh: int = 0


class Loss(NamedTuple):
    """A micro-batch's share of a mini-batch's loss and metrics; the shares add up."""

    value: Tensor
    metrics: Mapping[str, Tensor]


def require(each: _T | None) -> _T:
    """Raises LookupError for a target that the algorithm did not require."""
    if each is None:
        raise LookupError("an algorithm uses a target that it did not require")
    return each


def sequence_sums(each_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Sums over each sequence's action tokens, in float64: float32 loses the sign of small differences."""
    return torch.where(mask_BR, each_BR, 0.0).double().sum(1)


def log_ratios(targets: Targets, logprobs_BR: Tensor) -> Tensor:
    """log(policy / base model) of each sequence, of shape B in float64."""
    return sequence_sums(logprobs_BR, targets.mask_BR) - sequence_sums(require(targets.reference_BR), targets.mask_BR)


MAX_LOG_RATIO = 20.0  # log-ratios are clamped to this, so that their exponential stays finite in float32


def token_mean(each_BR: Tensor, mask_BR: Tensor, tokens: int) -> Tensor:
    """The sum over the mask divided by `tokens`, the action tokens of the whole mini-batch."""
    return torch.where(mask_BR, each_BR, 0.0).sum() / tokens


def aggregate(algorithm: AlgorithmSettings, each_BR: Tensor, mask_BR: Tensor, totals: Totals) -> Tensor:
    """A micro-batch's share of the mini-batch's mean, by `loss_agg_mode` (verl's names).

        token-mean                 sum / tokens                               DAPO, arXiv 2503.14476, eq. 8
        seq-mean-token-sum         sum / sequences
        seq-mean-token-mean        mean of each sequence, their mean          GRPO, 2402.03300, eq. 3
        seq-mean-token-sum-norm    sum / (sequences x loss_horizon)           Dr. GRPO, 2503.20783, section 3.2

    Without a horizon, verl's last mode divides by the padded width.
    """
    if algorithm.loss_agg_mode == "token-mean":
        return token_mean(each_BR, mask_BR, totals.tokens)
    sums_B = torch.where(mask_BR, each_BR, 0.0).sum(1)
    match algorithm.loss_agg_mode:
        case "seq-mean-token-sum":
            pass
        case "seq-mean-token-mean":
            sums_B = sums_B / mask_BR.sum(1).clamp(min=1)
        case "seq-mean-token-sum-norm":
            sums_B = sums_B / algorithm.loss_horizon
        case _:
            assert_never(algorithm.loss_agg_mode)
    return sums_B.sum() / totals.sequences


def gae(
    rewards_BR: Tensor, values_BR: Tensor, mask_BR: Tensor, ends_BR: Tensor | None = None, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438) over action tokens: advantages, returns; 0 outside the mask.

    Tokens outside the mask are no time steps. An episode ends at each of `ends_BR`; None: with the sequence.
    """
    # Token by token, numpy has less overhead than torch.
    rewards_RB, values_RB, mask_RB = (np.ascontiguousarray(each.numpy().T) for each in (rewards_BR, values_BR, mask_BR))
    ends_RB = None if ends_BR is None else ends_BR.numpy().T
    advantages_RB = np.zeros_like(values_RB)
    next_value_B, advantage_B = advantages_RB[0].copy(), advantages_RB[0].copy()
    for t in reversed(range(len(values_RB))):
        if ends_RB is not None:
            next_value_B, advantage_B = next_value_B * ~ends_RB[t], advantage_B * ~ends_RB[t]
        delta_B = rewards_RB[t] + gamma * next_value_B - values_RB[t]
        advantage_B = np.where(mask_RB[t], delta_B + gamma * lam * advantage_B, advantage_B)
        next_value_B = np.where(mask_RB[t], values_RB[t], next_value_B)
        advantages_RB[t] = advantage_B
    advantages_BR = torch.from_numpy(np.ascontiguousarray(advantages_RB.T))
    returns_BR = advantages_BR + values_BR
    return torch.where(mask_BR, advantages_BR, 0.0), torch.where(mask_BR, returns_BR, 0.0)


def whiten(each_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Scale to mean 0 and variance 1 over the mask, 0 outside; fewer than two tokens stay as they are."""
    inside_N = each_BR[mask_BR]
    if len(inside_N) < 2:
        return torch.where(mask_BR, each_BR, 0.0)
    variance, mean = torch.var_mean(inside_N)
    return torch.where(mask_BR, (each_BR - mean) * torch.rsqrt(variance + 1e-8), 0.0)


def kl(logprobs_BR: Tensor, reference_BR: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """An estimate of KL(policy || reference) per token of the policy (joschu.net/blog/kl-approx.html).

    As a loss, k2 has the gradient of the true divergence; k1's has mean 0, k3's is the forward divergence's.
    """
    difference_BR = (logprobs_BR - reference_BR).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return difference_BR
        case "k2":
            return difference_BR.square() / 2
        case "k3":
            return torch.expm1(-difference_BR) + difference_BR
        case _:
            assert_never(estimator)


def explained_variance(values_BR: Tensor, returns_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """1 for exact values, 0 for their mean and for constant returns."""
    returns_N = returns_BR[mask_BR]
    if len(returns_N) < 2:
        return returns_BR.new_zeros(())
    spread = returns_N.var()
    return torch.where(spread > 0, 1 - (returns_N - values_BR[mask_BR]).var() / spread.clamp(min=1e-12), 0.0)


def needs_start(options: OffPolicySettings) -> bool:
    return options.proximal == "recomputed" or options.correction == "mask"


def importance_weights(
    options: OffPolicySettings, start_BR: Tensor, sampled_BR: Tensor, mask_BR: Tensor
) -> tuple[Tensor, Mapping[str, float]]:
    """The weight of each token, 0 outside the mask, and metrics of the weights."""
    log_ratio_BR = torch.where(mask_BR, start_BR - sampled_BR, 0.0)
    ratio_BR = log_ratio_BR.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    within_BR = (ratio_BR >= options.low) & (ratio_BR <= options.high)
    weights_BR = ratio_BR if options.proximal == "recomputed" else torch.ones_like(ratio_BR)
    match options.correction:
        case "truncate":
            weights_BR = weights_BR.clamp(max=options.high)
        case "mask":
            weights_BR = torch.where(within_BR, weights_BR, 0.0)
        case "none":
            weights_BR = torch.ones_like(ratio_BR)
    weights_BR = torch.where(mask_BR, weights_BR, 0.0)
    weights_N = weights_BR[mask_BR]
    squares = weights_N.square().sum()
    # Kish's effective sample size, as a share of the tokens.
    size = weights_N.sum().square() / squares / len(weights_N) if squares > 0 else 0.0
    return weights_BR, {
        "off_policy/weight_mean": float(ratio_BR[mask_BR].mean()),
        "off_policy/weight_max": float(ratio_BR[mask_BR].max()),
        "off_policy/outside": float(1 - within_BR[mask_BR].float().mean()),
        "off_policy/effective_sample_size": float(size),
    }


def clipped_policy_loss(
    log_ratio_BR: Tensor, advantages_BR: Tensor, *, low: float, high: float, dual: float | None
) -> tuple[Tensor, Tensor]:
    """The loss per token, and whether the clip to [1 - low, 1 + high] applied."""
    ratio_BR = log_ratio_BR.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free_BR = -advantages_BR * ratio_BR
    held_BR = -advantages_BR * ratio_BR.clamp(1 - low, 1 + high)
    loss_BR = torch.maximum(free_BR, held_BR)
    if dual is not None:
        loss_BR = torch.where(advantages_BR < 0, torch.minimum(loss_BR, -advantages_BR * dual), loss_BR)
    return loss_BR, held_BR > free_BR


#: From log-ratios, log-probabilities and targets: the policy loss per token, and whether its clip applied.
PolicyLoss = Callable[[AlgorithmSettings, Tensor, Tensor, Targets], tuple[Tensor, Tensor]]


def high_clip(algorithm: AlgorithmSettings) -> float:
    return algorithm.clip_range if algorithm.clip_range_high is None else algorithm.clip_range_high


def ppo_policy_loss(
    algorithm: AlgorithmSettings, log_ratio_BR: Tensor, logprobs_BR: Tensor, targets: Targets
) -> tuple[Tensor, Tensor]:
    return clipped_policy_loss(
        log_ratio_BR,
        require(targets.advantages_BR),
        low=algorithm.clip_range,
        high=high_clip(algorithm),
        dual=algorithm.dual_clip,
    )


def surrogate(
    algorithm: AlgorithmSettings,
    targets: Targets,
    logprobs_BR: Tensor,
    entropy_BR: Tensor,
    totals: Totals,
    policy_loss: PolicyLoss = ppo_policy_loss,
) -> Loss:
    """The actor's loss on a micro-batch, from `targets.advantages_BR`."""

    def mean(each_BR: Tensor) -> Tensor:
        return token_mean(each_BR, targets.mask_BR, totals.tokens)

    def average(each_BR: Tensor) -> Tensor:
        return aggregate(algorithm, each_BR, targets.mask_BR, totals)

    recomputed = algorithm.off_policy.proximal == "recomputed"
    log_ratio_BR = logprobs_BR - (require(targets.start_BR) if recomputed else targets.sampled_BR)
    policy_BR, clipped_BR = policy_loss(algorithm, log_ratio_BR, logprobs_BR, targets)
    if targets.weights_BR is not None:
        policy_BR = policy_BR * targets.weights_BR
    loss = average(policy_BR)
    if algorithm.entropy_coef:  # times 0 it would still cost a backward pass
        loss = loss - algorithm.entropy_coef * average(entropy_BR)
    mismatch_BR = kl(targets.sampled_BR, logprobs_BR, "k3")
    metrics = {
        "actor/pg_loss": average(policy_BR),
        "actor/ppo_kl": mean(-log_ratio_BR),
        "actor/pg_clipfrac": mean(clipped_BR.float()),
        "actor/entropy": mean(entropy_BR),
        "mismatch_kl/mean": mean(mismatch_BR),
    }
    if targets.fresh_BR is not None and totals.fresh:
        metrics["mismatch_kl/fresh"] = token_mean(mismatch_BR, targets.fresh_BR, totals.fresh)
    if targets.reference_BR is not None:
        divergence_BR = kl(logprobs_BR, targets.reference_BR, algorithm.kl_estimator)
        metrics["actor/kl_loss"] = mean(divergence_BR)
        if algorithm.kl_in == "loss":
            loss = loss + algorithm.kl_coef * average(divergence_BR)
    return Loss(loss, {name: value.detach() for name, value in metrics.items()})


def subtract_kl_penalty(algorithm: AlgorithmSettings, targets: Targets, paid_BR: Tensor) -> Tensor:
    """The rewards, less `kl_coef` times each token's divergence with `kl_in: reward`."""
    if algorithm.kl_in != "reward" or targets.reference_BR is None:
        return paid_BR
    policy_BR = targets.sampled_BR if targets.start_BR is None else targets.start_BR
    divergence_BR = kl(policy_BR, targets.reference_BR, algorithm.kl_estimator)
    return torch.where(targets.mask_BR, paid_BR - algorithm.kl_coef * divergence_BR, 0.0)


EPSILON = 1e-6  # added to a standard deviation before division, as in verl; TRL adds 1e-4


class RunScores(NamedTuple):
    """The score of each run, in float64, and its group."""

    scores_K: Tensor
    groups_K: Tensor

    @classmethod
    def of_means(cls, algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards) -> Self:
        rewards_K = sums(calls.rewards_C, calls.runs_C) / counts(calls.runs_C)
        return cls._of(rewards_K, algorithm, targets, calls)

    @classmethod
    def of_last(cls, algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards) -> Self:
        rewards_K = sums(torch.where(calls.last_C, calls.rewards_C, 0.0), calls.runs_C)
        return cls._of(rewards_K, algorithm, targets, calls)

    @classmethod
    def _of(cls, rewards_K: Tensor, algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards) -> Self:
        """With `kl_in: reward`, add the penalties of all calls."""
        paid_K = sums(kl_penalties(algorithm, targets, calls), calls.runs_C)
        groups_K = torch.zeros(len(rewards_K), dtype=torch.long).index_copy(0, calls.runs_C, calls.groups_C)
        return cls(rewards_K + paid_K, groups_K)

    @property
    def sizes_K(self) -> Tensor:
        """The number of runs in each run's group."""
        return counts(self.groups_K)[self.groups_K]

    def centre(self) -> Tensor:
        """Subtract the group's mean; exactly 0 for a lone run and for groups of equal scores."""
        means_G = sums(self.scores_K, self.groups_K) / counts(self.groups_K)
        first_G = torch.zeros_like(means_G).index_copy(0, self.groups_K, self.scores_K)
        unlike_G = sums((self.scores_K != first_G[self.groups_K]).double(), self.groups_K)
        return torch.where(unlike_G[self.groups_K] > 0, self.scores_K - means_G[self.groups_K], 0.0)

    def scale(self, by: Literal["group", "batch", "none"]) -> Tensor:
        """Centre, and divide by a standard deviation (n - 1) of the group or of the batch."""
        centred_K = self.centre()
        match by:
            case "none":
                return centred_K
            case "batch":
                deviation = self.scores_K.std() if len(centred_K) > 1 else torch.tensor(1.0)
                return centred_K / (deviation + EPSILON)
            case "group":
                variance_G = sums(centred_K.square(), self.groups_K) / (counts(self.groups_K) - 1).clamp(min=1)
                return centred_K / (variance_G.sqrt()[self.groups_K] + EPSILON)


def kl_penalties(algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards) -> Tensor:
    """Each call's penalty with `kl_in: reward` for its tokens' divergence; of shape C, <= 0."""
    paid_BR = subtract_kl_penalty(algorithm, targets, torch.zeros_like(targets.sampled_BR))
    inside_BR = calls.of_BR >= 0
    nothing_C = torch.zeros(len(calls.rewards_C), dtype=torch.float64)
    return nothing_C.index_add(0, calls.of_BR[inside_BR], paid_BR[inside_BR].double())


def sums(each: Tensor, of: Tensor) -> Tensor:
    """Sums in float64 by the numbers of `of`."""
    return torch.zeros(int(of.max()) + 1, dtype=torch.float64).index_add(0, of, each.double())


def counts(of: Tensor) -> Tensor:
    return torch.bincount(of)
