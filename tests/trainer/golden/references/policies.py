"""Policy losses, importance weights, value losses and divergences of verl, OpenRLHF, AReaL and TRL."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import torch
from torch import Tensor, nn

from tests.trainer.golden.references.wheels import Wheel

Case = dict[str, Any]

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
HORIZON = 16
CORE = "verl/trainer/ppo/core_algos.py"
MICRO_BATCHES = [[0, 3], [1, 2, 4], [5]]


def numbers(seed: int) -> Callable[..., Tensor]:
    """Makes standard normal numbers in float64: numbers(0)(6, 9)."""
    random = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)


def replies() -> Tensor:
    """mask_BR of 6 replies of 1 to 9 action tokens, two of them with tool tokens in the middle."""
    mask_BR = torch.arange(9) < torch.tensor([9, 7, 5, 1, 8, 3])[:, None]
    mask_BR[0, 3:6] = False
    mask_BR[4, 2] = mask_BR[4, 5] = False
    return mask_BR


def inputs() -> dict[str, Tensor]:
    """Log-probabilities of now, of the step's start, as sampled, of a reference; advantages; mask.

    The ratios of the last reply, whose advantages are negative, are beyond the dual clip.
    """
    normal = numbers(1)
    sampled_BR = -normal(6, 9).abs() - 0.05
    start_BR = sampled_BR + 0.35 * normal(6, 9)
    x = {
        "sampled": sampled_BR,
        "start": start_BR,
        "logprobs": start_BR + 0.5 * normal(6, 9),
        "reference": sampled_BR + 0.5 * normal(6, 9),
        "advantages": normal(6, 1) + 0.3 * normal(6, 9),
        "mask": replies(),
    }
    x["logprobs"][5] += 1.5
    return x


def whole(loss: Callable[[Tensor], Tensor], of_BR: Tensor) -> dict[str, Any]:
    """The loss and its gradient."""
    of_BR = of_BR.clone().requires_grad_()
    value = loss(of_BR)
    value.backward()
    return {"loss": value, "grad": of_BR.grad}


def verl(wheels: Path) -> tuple[Wheel, dict[str, Any]]:
    """verl's functions of losses and advantages."""
    wheel = Wheel(wheels, "verl")
    tensors = ["masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value"]
    given = {"torch": torch, "Optional": Optional, "Any": Any}
    given["verl_F"] = SimpleNamespace(**wheel.take("verl/utils/torch_functional.py", tensors, given))
    names = ["agg_loss", "compute_policy_loss_vanilla", "compute_value_loss", "kl_penalty", "kl_penalty_forward"]
    names += ["compute_gae_advantage_return", "compute_reinforce_plus_plus_outcome_advantage"]
    given |= {"ActorConfig": object, "AlgoConfig": tuple}
    return wheel, wheel.take(CORE, names, given)


def case(wheel: Wheel, function: str, settings: dict[str, Any], outputs: dict[str, Any], **more: Any) -> Case:
    """One of a file's cases."""
    named = {"package": wheel.package, "version": wheel.version, "function": function, "settings": settings}
    return {**named, "outputs": outputs} | ({"inputs": more} if more else {})


class VerlSettings(SimpleNamespace):
    """As much of verl's ActorConfig as the policy loss reads."""

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


def verl_policy(wheels: Path, x: dict[str, Tensor]) -> Iterator[Case]:
    """Every aggregation, with and without a higher upper clip; whole and as the sum of micro-batches."""
    wheel, of = verl(wheels)
    totals = {"batch_num_tokens": int(x["mask"].sum()), "global_batch_size": 6, "loss_scale_factor": HORIZON}

    def loss(rows: list[int], mode: str, high: float | None, weights: Tensor | None) -> Callable[[Tensor], Tensor]:
        config = VerlSettings(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=high, global_batch_info=totals)
        cut = {name: each[rows] for name, each in x.items()}
        return lambda logprobs_BR: of["compute_policy_loss_vanilla"](
            cut["start"], logprobs_BR, cut["advantages"], cut["mask"].double(), mode, config, weights
        )[0]

    for mode in MODES:
        for high in (None, 0.28):
            settings = {"loss_agg_mode": mode, "clip_range_high": high, "dual_clip": 3.0, "loss_horizon": HORIZON}
            outputs = whole(loss(list(range(6)), mode, high, None), x["logprobs"])
            shares = [whole(loss(rows, mode, high, None), x["logprobs"][rows])["loss"] for rows in MICRO_BATCHES]
            outputs |= {"shares": torch.stack(shares), "rows": MICRO_BATCHES}
            yield case(wheel, "compute_policy_loss_vanilla", settings, outputs)


def openrlhf_policy(wheels: Path, x: dict[str, Tensor]) -> Iterator[Case]:
    """PPO with and without dual clip, and decoupled from the sampling weights: clamped (TIS) and masked (MIS)."""
    wheel = Wheel(wheels, "openrlhf")
    given = {"torch": torch, "Optional": Optional}
    given |= wheel.take("openrlhf/models/utils.py", ["masked_mean"], given)
    given |= {"nn": nn, "Tuple": tuple}
    of = wheel.take("openrlhf/models/loss.py", ["aggregate_loss", "PolicyLoss"], given)
    for dual in (None, 3.0):
        for correction in ("none", "truncate", "mask"):
            for mode in ("token-mean", "seq-mean-token-mean"):
                low = 0.0 if correction == "truncate" else 0.5
                policy = of["PolicyLoss"](
                    0.2,
                    0.28,
                    dual_clip=dual,
                    token_level_loss=mode == "token-mean",
                    is_correction_level="off" if correction == "none" else "token",
                    is_correction_mode="clip" if correction == "truncate" else "mask",
                    is_correction_threshold=(low, 2.0),
                )
                outputs = whole(
                    lambda logprobs_BR, policy=policy: policy(
                        logprobs_BR, x["start"], x["advantages"], x["mask"].double(), x["sampled"]
                    )[0],
                    x["logprobs"],
                )
                settings = {"loss_agg_mode": mode, "clip_range_high": 0.28, "dual_clip": dual}
                settings |= {"correction": correction, "low": low, "high": 2.0, "level": "token"}
                yield case(wheel, "PolicyLoss", settings, outputs)


def areal_policy(wheels: Path, x: dict[str, Tensor]) -> Iterator[Case]:
    """The decoupled loss with rejection sampling by token and by the geometric mean over a sequence.

    Its weights are made in float32.
    """
    wheel = Wheel(wheels, "areal")
    names = ["RejectionSamplingResult", "_check_bounds", "apply_rejection_sampling", "ppo_actor_loss_fn"]
    of = wheel.take("areal/utils/functional/functional.py", names, {"torch": torch})
    of["RejectionSamplingResult"].__init__ = lambda self, **fields: self.__dict__.update(fields)
    for level in ("token", "geometric"):
        for correction in ("none", "truncate", "mask"):
            rejection = SimpleNamespace(
                level="token" if level == "token" else "sequence",
                action="clamp" if correction == "truncate" else "mask",
                metric="ratio",
                agg="mean",
                upper=1.2 if level == "geometric" else 2.0,
                lower=0.9 if level == "geometric" else 0.5,
            )
            if correction == "truncate":
                rejection.lower = None
            outputs = whole(
                lambda logprobs_BR, rejection=rejection, correction=correction: of["ppo_actor_loss_fn"](
                    logprobs_BR,
                    x["start"],
                    x["sampled"],
                    x["advantages"],
                    0.2,
                    x["mask"],
                    0.28,
                    None,
                    None if correction == "none" else rejection,
                )[0],
                x["logprobs"],
            )
            settings = {"loss_agg_mode": "token-mean", "clip_range_high": 0.28, "dual_clip": None}
            settings |= {
                "correction": correction,
                "low": rejection.lower or 0.0,
                "high": rejection.upper,
                "level": level,
            }
            yield case(wheel, "ppo_actor_loss_fn", settings, outputs)


def policy_loss(wheels: Path) -> tuple[dict[str, Tensor], list[Case]]:
    """The clipped policy loss."""
    x = inputs()
    return x, [*verl_policy(wheels, x), *openrlhf_policy(wheels, x), *areal_policy(wheels, x)]


def trl_grpo(wheels: Path) -> tuple[dict[str, Tensor], list[Case]]:
    """TRL's loss types, without and with a k3 divergence, without and with vLLM's importance weights.

    Its bound from below when it truncates, and `delta`, a bound on the ratio whatever the advantage, are left out.
    """
    x, wheel = inputs(), Wheel(wheels, "trl")
    given = wheel.take("trl/trainer/utils.py", ["nanmin", "nanmax"], {"torch": torch})
    loss_of = wheel.take("trl/trainer/grpo_trainer.py", ["GRPOTrainer._compute_loss"], given)["_compute_loss"]
    ratios = {"none": None, **{mode: _trl_weights(wheel, x, mode) for mode in TRL_WEIGHTS}}
    modes = {"grpo": MODES[2], "bnpo": MODES[0], "dapo": MODES[0], "dr_grpo": MODES[3]}
    cases = []
    for loss_type, mode in modes.items():
        for beta in (0.0, 0.04):
            for correction, weights in ratios.items():
                trainer = trl_trainer(x, loss_type, beta, correction != "none")
                given = trl_batch(x, x["start"]) | {"importance_sampling_ratio": weights}

                def loss(logprobs_BR: Tensor, trainer: Any = trainer, given: dict[str, Any] = given) -> Tensor:
                    trainer.logprobs = logprobs_BR
                    return loss_of(trainer, None, given)

                settings = {"loss_agg_mode": mode, "loss_horizon": HORIZON, "clip_range_high": 0.28, "dual_clip": None}
                settings |= {"kl_coef": beta, "kl_estimator": "k3", "correction": "none", "loss_type": loss_type}
                settings |= TRL_WEIGHTS.get(correction, {})
                cases.append(case(wheel, "GRPOTrainer._compute_loss", settings, whole(loss, x["logprobs"])))
    return x, cases


TRL_WEIGHTS = {
    f"{level}_{correction}": {"correction": correction, "level": level, "low": low, "high": 2.0}
    for level in ("token", "sequence")
    for correction, low in (("truncate", 0.0), ("mask", 0.5))
}


def _trl_weights(wheel: Wheel, x: dict[str, Tensor], mode: str) -> Tensor:
    trainer = SimpleNamespace(use_vllm=True, vllm_importance_sampling_correction=True)
    trainer.vllm_importance_sampling_mode = mode
    trainer.vllm_importance_sampling_clip_min = 0.5 if mode.endswith("mask") else None
    trainer.vllm_importance_sampling_clip_max = 2.0
    given = {"torch": torch, "math": math, "self": trainer, "tool_mask": None, "completion_mask": x["mask"].double()}
    given |= {"old_per_token_logps": x["start"], "sampling_per_token_logps": x["sampled"]}
    test = "self.use_vllm and self.vllm_importance_sampling_correction"
    function = "GRPOTrainer._generate_and_score_completions"
    ran = wheel.run("trl/trainer/grpo_trainer.py", function, test, given, assigns="sequence_level_is")
    return ran["vllm_importance_sampling_ratio"]


class _Anything(dict[str, Any]):
    """Metrics that nobody reads."""

    def __missing__(self, name: str) -> list[float]:
        return []


def trl_batch(x: dict[str, Tensor], old_BR: Tensor) -> dict[str, Any]:
    """The replies, with the log-probabilities that the ratio is taken against."""
    given = {"prompt_ids": torch.zeros(6, 1), "prompt_mask": torch.zeros(6, 1)}
    given |= {"completion_ids": torch.zeros(6, 9), "completion_mask": x["mask"].double()}
    given |= {"advantages": x["advantages"], "old_per_token_logps": old_BR, "num_items_in_batch": x["mask"].sum()}
    return given | {"ref_per_token_logps": x.get("reference")}


def trl_trainer(x: dict[str, Tensor], loss_type: str, beta: float, weighted: bool) -> SimpleNamespace:
    """As much of a GRPOTrainer as its loss reads; it runs as in an evaluation, without gradient accumulation."""
    trainer = SimpleNamespace(loss_type=loss_type, beta=beta, use_vllm=weighted, aux_loss_enabled=False)
    trainer.vllm_importance_sampling_correction = weighted
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
    trainer.importance_sampling_level, trainer.epsilon_low, trainer.epsilon_high = "token", 0.2, 0.28
    trainer.max_completion_length, trainer._entropy_bonus_enabled = HORIZON, False
    trainer.args = SimpleNamespace(use_bias_correction_kl=False, delta=None)
    trainer.model, trainer._metrics = SimpleNamespace(training=False), {"eval": _Anything()}
    trainer.accelerator = SimpleNamespace(
        num_processes=1, gather=lambda each: each, reduce=lambda each, reduction: each
    )
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (trainer.logprobs, torch.zeros(6, 9), None)
    return trainer


def off_policy(wheels: Path) -> tuple[dict[str, Tensor], list[Case]]:
    """The weights of TRL by token and sequence, truncated and masked."""
    x, wheel = inputs(), Wheel(wheels, "trl")
    function = "GRPOTrainer._generate_and_score_completions"
    return x, [
        case(wheel, function, settings, {"weights": _trl_weights(wheel, x, mode).expand(6, 9)})
        for mode, settings in TRL_WEIGHTS.items()
    ]


def divergences(wheels: Path) -> tuple[dict[str, Tensor], list[Case]]:
    """verl's estimators of KL(policy || reference), per token; `grad` is of their sum."""
    x, (wheel, of) = inputs(), verl(wheels)
    cases = []
    for estimator in ("k1", "k2", "k3"):
        each_BR = of["kl_penalty"](x["logprobs"], x["reference"], estimator)
        gradient = whole(lambda now, e=estimator: of["kl_penalty"](now, x["reference"], e).sum(), x["logprobs"])
        outputs = {"each": each_BR, "grad": gradient["grad"]}
        cases.append(case(wheel, "kl_penalty", {"kl_estimator": estimator}, outputs))
    return x, cases


def value_loss(wheels: Path) -> tuple[dict[str, Tensor], list[Case]]:
    """The clipped value loss of verl and OpenRLHF, as a mean over tokens."""
    normal, (wheel, of) = numbers(2), verl(wheels)
    x = {"values": normal(6, 9), "returns": normal(6, 9), "mask": replies()}
    x["old"] = x["values"] + 0.5 * normal(6, 9)
    other = Wheel(wheels, "openrlhf")
    given = other.take("openrlhf/models/utils.py", ["masked_mean"], {"torch": torch, "Optional": Optional})
    given |= {"nn": nn, "Tuple": tuple}
    of_other = other.take("openrlhf/models/loss.py", ["aggregate_loss", "ValueLoss"], given)["ValueLoss"]
    cases = []
    for clip in (0.2, 0.5):
        ours = whole(
            lambda values, c=clip: of["compute_value_loss"](values, x["returns"], x["old"], x["mask"].double(), c)[0],
            x["values"],
        )
        theirs = whole(
            lambda values, c=clip: of_other(c)(values, x["old"], x["returns"], x["mask"].double()), x["values"]
        )
        cases.append(case(wheel, "compute_value_loss", {"value_clip_range": clip}, ours))
        cases.append(case(other, "ValueLoss", {"value_clip_range": clip}, theirs))
    return x, cases


FILES = {
    "policy_loss": policy_loss,
    "trl_grpo": trl_grpo,
    "off_policy": off_policy,
    "divergences": divergences,
    "value_loss": value_loss,
}
