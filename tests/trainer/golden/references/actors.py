"""The actor's whole loss: the ratio against the log-probabilities as sampled, the divergence, the entropy.

Of verl, TRL and OpenRLHF. Where `inputs` have `logits`, of a vocabulary of 5, gradients are by those.
"""

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.trainer.golden.references.policies import (
    CORE,
    HORIZON,
    MODES,
    Case,
    VerlSettings,
    case,
    inputs,
    numbers,
    replies,
    trl_batch,
    trl_trainer,
    verl,
    whole,
)
from tests.trainer.golden.references.wheels import Wheel

#: What the tests must give an Algorithm; `dual_clip` is verl's own default.
CLIP = {"clip_range_high": 0.28, "loss_horizon": HORIZON}
ENTROPY_COEF = 0.05
VOCABULARY = 5


class VerlBatch(dict[str, Any]):
    """As much of a TensorDict as verl's losses read."""

    def select(self, *names: str) -> "VerlBatch":
        return VerlBatch({name: self[name] for name in names})

    def to_padded_tensor(self) -> "VerlBatch":
        return self


class VerlMetric:
    """Metrics that nobody reads."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @staticmethod
    def from_dict(data: dict[str, Any], **_: Any) -> dict[str, Any]:
        return data


def verl_losses(wheels: Path, file: str, names: list[str]) -> tuple[Wheel, dict[str, Any]]:
    """Functions of one of verl's files of losses, which take padded tensors as they are."""
    wheel, of = verl(wheels)
    of |= {"Metric": VerlMetric, "AggregationType": SimpleNamespace(SUM=0, MEAN=1, MIN=2, MAX=3)}
    of |= {"no_padding_2_padding": lambda each, data: each}
    of["get_policy_loss_fn"] = lambda name: of["compute_policy_loss_vanilla"]
    return wheel, wheel.take(file, names, of)


def verl_settings(mode: str, **more: Any) -> VerlSettings:
    """As much of an ActorConfig as the whole loss reads."""
    settings = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": 0.28, "loss_agg_mode": mode}
    settings |= {"loss_scale_factor": HORIZON, "global_batch_info": {}, "policy_loss": {}}
    return VerlSettings(**settings | {"entropy_coeff": 0.0, "use_kl_loss": False} | more)


def verl_batch(x: dict[str, Tensor], old_BR: Tensor) -> VerlBatch:
    """The replies, with the log-probabilities that the ratio is taken against."""
    data = VerlBatch(dp_size=1, batch_num_tokens=int(x["mask"].sum()), global_batch_size=6, old_log_probs=old_BR)
    return VerlBatch(data | {"response_mask": x["mask"], "advantages": x.get("advantages")})


def sampled(wheels: Path) -> tuple[dict[str, Tensor], list[Case]]:
    """The ratio is taken against the log-probabilities as sampled: theirs are given these as the old ones."""
    x = inputs()
    return x, [*_verl_sampled(wheels, x), *_verl_bypass(wheels, x), *_trl_sampled(wheels, x), *_openrlhf(wheels, x)]


def _verl_sampled(wheels: Path, x: dict[str, Tensor]) -> Iterator[Case]:
    """Every aggregation, without and with the divergence in the loss."""
    wheel, of = verl_losses(wheels, "verl/workers/utils/losses.py", ["ppo_loss"])
    for mode in MODES:
        for coefficient in (0.0, 0.05):
            config = verl_settings(mode, use_kl_loss=coefficient > 0, kl_loss_type="k2", kl_loss_coef=coefficient)
            data = VerlBatch(verl_batch(x, x["sampled"]) | {"ref_log_prob": x["reference"]})
            outputs = whole(
                lambda now, c=config, d=data: of["ppo_loss"](c, {"log_probs": now}, d)[0],
                x["logprobs"],
            )
            settings = {"loss_agg_mode": mode, "kl_coef": coefficient, "kl_estimator": "k2", "dual_clip": 3.0} | CLIP
            yield case(wheel, "ppo_loss", settings, outputs)


def _verl_bypass(wheels: Path, x: dict[str, Tensor]) -> Iterator[Case]:
    """Tokens and sequences left out by their ratio, and no weight for the others: verl's bypass mode.

    verl's bounds are of the inverse ratio. It takes that ratio from the weights of the moment, not those at the start
    of the step: in a step's first update these are the same, and so they are in here.
    """
    wheel, of = verl(wheels)
    helper = ModuleType("verl.trainer.ppo.rollout_corr_helper")
    names = ["_parse_rollout_rs_thresholds", "compute_rollout_rejection_mask"]
    names.append("compute_rollout_correction_and_rejection_mask")
    modes = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
    given = of | {"math": math, "DataProto": object, "SAFETY_BOUND": 20.0}
    given |= {"SUPPORTED_ROLLOUT_RS_OPTIONS": set(modes.values()), "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS": {"token_k1"}}
    given |= {"compute_rs_metrics": lambda **_: {}, "compute_offpolicy_metrics": lambda **_: {}}
    vars(helper).update(wheel.take("verl/trainer/ppo/rollout_corr_helper.py", names, given))
    of = wheel.take(CORE, ["compute_policy_loss_bypass_mode"], of)
    sys.modules[helper.__name__] = helper
    low, high = 0.8, 1.5
    for level, rejection in modes.items():
        for mode in ("token-mean", "seq-mean-token-sum"):
            config = verl_settings(mode, global_batch_info={"batch_num_tokens": int(x["mask"].sum())})
            config.global_batch_info["global_batch_size"] = 6
            correction = {"rollout_rs": rejection, "rollout_rs_threshold": f"{1 / high}_{1 / low}"}
            config.policy_loss = {"rollout_correction": correction}
            outputs = whole(
                lambda now, c=config, m=mode: of["compute_policy_loss_bypass_mode"](
                    x["sampled"], now, x["advantages"], x["mask"].double(), m, c
                )[0],
                x["logprobs"],
            )
            settings = {"loss_agg_mode": mode, "correction": "mask", "level": level, "low": low, "high": high}
            settings |= {"dual_clip": 3.0} | CLIP
            yield case(wheel, "compute_policy_loss_bypass_mode", settings, outputs, start=x["logprobs"])
    del sys.modules[helper.__name__]


def _trl_sampled(wheels: Path, x: dict[str, Tensor]) -> Iterator[Case]:
    """TRL's loss types, with a k3 divergence."""
    wheel = Wheel(wheels, "trl")
    modes = {"grpo": MODES[2], "bnpo": MODES[0], "dapo": MODES[0], "dr_grpo": MODES[3]}
    for loss_type, mode in modes.items():
        trainer = trl_trainer(x, loss_type, 0.04, weighted=False)
        outputs = whole(_trl_loss(wheel, trainer, trl_batch(x, x["sampled"])), x["logprobs"])
        settings = {"loss_agg_mode": mode, "kl_coef": 0.04, "kl_estimator": "k3", "dual_clip": None} | CLIP
        yield case(wheel, "GRPOTrainer._compute_loss", settings | {"loss_type": loss_type}, outputs)


def _trl_loss(wheel: Wheel, trainer: Any, given: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    names = wheel.take("trl/trainer/utils.py", ["nanmin", "nanmax"], {"torch": torch})
    of = wheel.take("trl/trainer/grpo_trainer.py", ["GRPOTrainer._compute_loss"], names)["_compute_loss"]

    def loss(logprobs_BR: Tensor) -> Tensor:
        trainer.logprobs = logprobs_BR
        return of(trainer, None, given)

    return loss


def _openrlhf(wheels: Path, x: dict[str, Tensor]) -> Iterator[Case]:
    wheel = Wheel(wheels, "openrlhf")
    given = wheel.take("openrlhf/models/utils.py", ["masked_mean"], {"torch": torch, "Optional": Optional})
    given |= {"nn": nn, "Tuple": tuple}
    of = wheel.take("openrlhf/models/loss.py", ["aggregate_loss", "PolicyLoss"], given)["PolicyLoss"]
    for mode in ("token-mean", "seq-mean-token-mean"):
        policy = of(0.2, 0.28, dual_clip=3.0, token_level_loss=mode == "token-mean", is_correction_level="off")
        outputs = whole(
            lambda now, p=policy: p(now, x["sampled"], x["advantages"], x["mask"].double(), x["sampled"])[0],
            x["logprobs"],
        )
        yield case(wheel, "PolicyLoss", {"loss_agg_mode": mode, "dual_clip": 3.0} | CLIP, outputs)


def entropy(wheels: Path) -> tuple[dict[str, Tensor], list[Case]]:
    """The loss with an entropy bonus, from logits. TRL's is always a mean over tokens, whatever the loss type."""
    normal = numbers(8)
    x = {"logits": 1.5 * normal(6, 9, VOCABULARY), "said": normal(6, 9, VOCABULARY).argmax(-1), "mask": replies()}
    x["sampled"] = said_BR(x["logits"], x["said"]) + 0.4 * normal(6, 9)
    x["advantages"] = normal(6, 1) + 0.3 * normal(6, 9)
    return x, [*_verl_entropy(wheels, x), *_trl_entropy(wheels, x)]


def said_BR(logits_BRV: Tensor, said: Tensor) -> Tensor:
    """The log-probabilities of the tokens that were said."""
    return logits_BRV.log_softmax(-1).gather(-1, said[..., None])[..., 0]


def _verl_entropy(wheels: Path, x: dict[str, Tensor]) -> Iterator[Case]:
    wheel, of = verl_losses(wheels, "verl/workers/utils/losses.py", ["ppo_loss"])
    name = "entropy_from_logits"
    entropy_of = wheel.take("verl/utils/torch_functional.py", [name], {"torch": torch})[name]
    for mode in MODES:
        config = verl_settings(mode, entropy_coeff=ENTROPY_COEF)

        def loss(logits_BRV: Tensor, config: Any = config) -> Tensor:
            said = {"log_probs": said_BR(logits_BRV, x["said"]), "entropy": entropy_of(logits_BRV)}
            return of["ppo_loss"](config, said, verl_batch(x, x["sampled"]))[0]

        settings = {"loss_agg_mode": mode, "entropy_coef": ENTROPY_COEF, "dual_clip": 3.0} | CLIP
        outputs = whole(loss, x["logits"]) | {"entropy": entropy_of(x["logits"])}
        yield case(wheel, "ppo_loss", settings, outputs)


def _trl_entropy(wheels: Path, x: dict[str, Tensor]) -> Iterator[Case]:
    wheel = Wheel(wheels, "trl")
    given = {"torch": torch, "F": functional, "is_triton_available": lambda: False}
    entropy_of = wheel.take("trl/trainer/utils.py", ["entropy_from_logits"], given)["entropy_from_logits"]
    for loss_type in ("bnpo", "dapo"):
        trainer = trl_trainer(x, loss_type, 0.0, weighted=False)
        trainer._entropy_bonus_enabled, trainer.use_adaptive_entropy = True, False
        trainer.entropy_coef = ENTROPY_COEF
        of = _trl_loss(wheel, trainer, trl_batch(x, x["sampled"]))

        def loss(logits_BRV: Tensor, trainer: Any = trainer, of: Any = of) -> Tensor:
            entropies = entropy_of(logits_BRV)
            trainer._get_per_token_logps_and_entropies = lambda *_, **__: (trainer.logprobs, entropies, None)
            return of(said_BR(logits_BRV, x["said"]))

        settings = {"loss_agg_mode": MODES[0], "entropy_coef": ENTROPY_COEF, "dual_clip": None} | CLIP
        outputs = whole(loss, x["logits"]) | {"entropy": entropy_of(x["logits"])}
        yield case(wheel, "GRPOTrainer._compute_loss", settings | {"loss_type": loss_type}, outputs)


FILES = {"sampled": sampled, "entropy": entropy}
