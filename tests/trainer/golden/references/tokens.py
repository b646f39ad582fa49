"""What is learnt token by token from others: sft of verl and TRL, and distillation of verl and TRL.

`teacher` are a teacher's log-probabilities of the tokens that were said, or, beside `logits`, its own logits.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn import functional

from tests.trainer.golden.references.actors import CLIP, VOCABULARY, VerlBatch, verl_batch, verl_losses, verl_settings
from tests.trainer.golden.references.policies import MICRO_BATCHES, MODES, Case, case, numbers, replies, whole
from tests.trainer.golden.references.wheels import Wheel


def sft(wheels: Path) -> tuple[dict[str, Tensor], list[Case]]:
    """Means over all tokens; `shares` are the parts of micro-batches in the mean over the whole mini-batch."""
    x = {"logprobs": -numbers(9)(6, 9).abs() - 0.05, "mask": replies()}
    tokens = int(x["mask"].sum())
    cases = []
    for wheel, function, loss in (_verl_sft(wheels, tokens), _trl_sft(wheels, tokens)):
        outputs = whole(lambda now, loss=loss: loss(now, x["mask"]), x["logprobs"])
        shares = [loss(x["logprobs"][rows], x["mask"][rows]) for rows in MICRO_BATCHES]
        outputs |= {"shares": torch.stack(shares), "rows": MICRO_BATCHES}
        cases.append(case(wheel, function, {"loss_agg_mode": "token-mean"}, outputs))
    return x, cases


def _verl_sft(wheels: Path, tokens: int) -> tuple[Wheel, str, Any]:
    wheel, of = verl_losses(wheels, "verl/workers/utils/losses.py", ["sft_loss"])
    of["tu"] = SimpleNamespace(get_non_tensor_data=lambda **_: "left_right")
    of["DatasetPadMode"] = SimpleNamespace(NO_PADDING="no_padding")
    of["masked_sum"] = of["verl_F"].masked_sum

    def loss(now_BR: Tensor, mask_BR: Tensor) -> Tensor:
        data = VerlBatch(dp_size=1, batch_num_tokens=tokens, response_mask=mask_BR)
        return of["sft_loss"](None, {"log_probs": now_BR}, data)[0]

    return wheel, "sft_loss", loss


def _trl_sft(wheels: Path, tokens: int) -> tuple[Wheel, str, Any]:
    """`num_items_in_batch` is the mini-batch's number of tokens. It runs as in an evaluation, on one device."""
    wheel, name = Wheel(wheels, "trl"), "SFTTrainer.compute_loss"
    given = {"torch": torch, "Version": Version, "accelerate": SimpleNamespace(__version__="1.12.0")}
    of = wheel.take("trl/trainer/sft_trainer.py", [name], given)["compute_loss"]
    trainer = SimpleNamespace(aux_loss_enabled=False, compute_loss_func=None, label_smoother=None)
    trainer.model, trainer._total_train_tokens = SimpleNamespace(training=False), 0
    trainer._metrics = {"eval": defaultdict(list)}
    trainer.args = SimpleNamespace(loss_type="nll", average_tokens_across_devices=False)
    trainer.accelerator = SimpleNamespace(parallelism_config=None, gather_for_metrics=lambda each: each)

    def loss(now_BR: Tensor, mask_BR: Tensor) -> Tensor:
        said = SimpleNamespace(label_mask=mask_BR, log_probs=now_BR.masked_fill(~mask_BR, 0))
        said.entropy, said.is_top1 = torch.zeros_like(now_BR), mask_BR
        return of(trainer, lambda **_: said, {}, num_items_in_batch=tokens)

    return wheel, name, loss


def distill(wheels: Path) -> tuple[dict[str, Tensor], list[Case]]:
    """verl's policy gradient with the negative k1 as the advantage, cut at 20. Some tokens are beyond that.

    The ratios of the last reply, of which the teacher thinks little, are beyond the dual clip.
    """
    normal = numbers(10)
    sampled_BR = -normal(6, 9).abs() - 0.05
    x = {"logprobs": sampled_BR + 0.3 * normal(6, 9), "sampled": sampled_BR, "mask": replies()}
    x["teacher"] = sampled_BR + 1.5 * normal(6, 9)
    x["teacher"][0, 1], x["teacher"][1, 4] = -60.0, -30.0
    x["logprobs"][5], x["teacher"][5] = sampled_BR[5] + 1.5, sampled_BR[5] - 1
    return x, list(_verl_distill(wheels, x))


def _verl_distill(wheels: Path, x: dict[str, Tensor]) -> Iterator[Case]:
    name = "compute_distillation_loss_reverse_kl_estimator"
    file = "verl/trainer/distillation/losses.py"
    wheel, of = verl_losses(wheels, file, ["distillation_loss", "compute_distillation_loss_range", name])
    of["get_distillation_loss_fn"] = lambda _: of[name]
    for mode in MODES:
        options = verl_settings(mode, loss_mode="k1", loss_max_clamp=20.0, use_policy_gradient=True)
        options.policy_loss_mode, config = "vanilla", verl_settings(mode)
        data = VerlBatch(verl_batch(x, x["sampled"]) | {"teacher_logprobs": x["teacher"][..., None]})

        def loss(now_BR: Tensor, config: Any = config, options: Any = options, data: Any = data) -> Tensor:
            said = {"log_probs": now_BR}
            return of["distillation_loss"](config, SimpleNamespace(distillation_loss=options), said, data)[0]

        settings = {"loss_agg_mode": mode, "dual_clip": 3.0} | CLIP
        yield case(wheel, "distillation_loss", settings, whole(loss, x["logprobs"]))


def reverse_kl(wheels: Path) -> tuple[dict[str, Tensor], list[Case]]:
    """TRL's KL(student || teacher) over the whole vocabulary (beta 1), a mean over tokens, and its gradient."""
    normal, wheel = numbers(11), Wheel(wheels, "trl")
    x = {"logits": normal(6, 9, VOCABULARY), "teacher": 2 * normal(6, 9, VOCABULARY), "mask": replies()}
    name = "GKDTrainer.generalized_jsd_loss"
    given = {"torch": torch, "F": functional}
    of = wheel.take("experimental/gkd/gkd_trainer.py", [name], given)["generalized_jsd_loss"]
    labels_BR = torch.where(x["mask"], 0, -100)
    outputs = whole(lambda now_BRV: of(now_BRV, x["teacher"], labels_BR, beta=1), x["logits"])
    return x, [case(wheel, name, {"beta": 1}, outputs)]


FILES = {"sft": sft, "distill": distill, "reverse_kl": reverse_kl}
