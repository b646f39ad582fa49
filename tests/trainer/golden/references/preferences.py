"""DPO and KTO of TRL, Liger and OpenRLHF, from log-probabilities of tokens."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.trainer.golden.references.policies import Case, case, numbers, whole
from tests.trainer.golden.references.wheels import Wheel


def inputs(seed: int) -> dict[str, Tensor]:
    """Log-probabilities of 8 replies by the policy and the reference; mask, with a tool token in the middle."""
    normal = numbers(seed)
    mask_BR = torch.arange(9) < torch.tensor([9, 7, 5, 1, 8, 3, 4, 6])[:, None]
    mask_BR[0, 4] = mask_BR[4, 2] = False
    reference_BR = -normal(8, 9).abs() - 0.05
    return {"logprobs": reference_BR + 0.6 * normal(8, 9), "reference": reference_BR, "mask": mask_BR}


def _sums(each_BR: Tensor, x: dict[str, Tensor]) -> Tensor:
    return (each_BR * x["mask"]).sum(1)


def dpo(wheels: Path) -> tuple[dict[str, Tensor], list[Case]]:
    """Replies 0 to 3 are chosen, 4 to 7 rejected: 4 to 0, 5 to 1, and so on. The loss is a mean over pairs."""
    x = inputs(6)
    return x, [*_dpo_trl(wheels, x), *_dpo_liger(wheels, x), *_dpo_openrlhf(wheels, x)]


def _dpo_trl(wheels: Path, x: dict[str, Tensor]) -> Iterator[Case]:
    wheel, name = Wheel(wheels, "trl"), "DPOTrainer._compute_loss"
    of = wheel.take("trl/trainer/dpo_trainer.py", [name], {"torch": torch, "F": functional})["_compute_loss"]
    reference_B = _sums(x["reference"], x)
    for beta in (0.1, 0.5):
        trainer = _trainer(beta=beta, loss_types=["sigmoid"], loss_weights=[1.0], f_divergence_type="reverse_kl")
        trainer.ld_alpha, trainer.use_weighting = None, False
        batch = _batch(x) | {"ref_chosen_logps": reference_B[:4], "ref_rejected_logps": reference_B[4:]}
        outputs = whole(_of_trl(of, trainer, batch, x), x["logprobs"])
        yield case(wheel, name, {"beta": beta, "label_smoothing": 0.0, "reference_free": False}, outputs)


def _dpo_liger(wheels: Path, x: dict[str, Tensor]) -> Iterator[Case]:
    wheel, name = Wheel(wheels, "liger_kernel"), "LigerFusedLinearDPOFunction.preference_loss_fn"
    given = {"torch": torch, "F": functional}
    of = wheel.take("chunked_loss/dpo_loss.py", [name], given)["preference_loss_fn"]
    reference_B = _sums(x["reference"], x)
    for free in (False, True):
        references = (None, None) if free else (reference_B[:4], reference_B[4:])

        def loss(now_BR: Tensor, references: Any = references) -> Tensor:
            now_B = _sums(now_BR, x)
            return of(now_B[:4], now_B[4:], now_B, *references, beta=0.1)[0]

        settings = {"beta": 0.1, "label_smoothing": 0.0, "reference_free": free}
        yield case(wheel, name, settings, whole(loss, x["logprobs"]))


def _dpo_openrlhf(wheels: Path, x: dict[str, Tensor]) -> Iterator[Case]:
    wheel = Wheel(wheels, "openrlhf")
    of = wheel.take("openrlhf/models/loss.py", ["DPOLoss"], {"torch": torch, "nn": nn, "F": functional, "Tuple": tuple})
    reference_B = _sums(x["reference"], x)
    for smoothing in (0.0, 0.1):

        def loss(now_BR: Tensor, smoothing: float = smoothing) -> Tensor:
            now_B = _sums(now_BR, x)
            return of["DPOLoss"](0.1, smoothing)(now_B[:4], now_B[4:], reference_B[:4], reference_B[4:])[0]

        settings = {"beta": 0.1, "label_smoothing": smoothing, "reference_free": False}
        yield case(wheel, "DPOLoss", settings, whole(loss, x["logprobs"]))


def kto(wheels: Path) -> tuple[dict[str, Tensor], list[Case]]:
    """`desirable` says which replies are; `divergence` is of mismatched pairs, not below 0. A mean over replies."""
    x = inputs(7) | {"desirable": torch.tensor([True, False, True, True, False, False, True, False])}
    return x, [*_kto_trl(wheels, x), *_kto_liger(wheels, x)]


def _kto_trl(wheels: Path, x: dict[str, Tensor]) -> Iterator[Case]:
    wheel, name = Wheel(wheels, "trl"), "KTOTrainer._compute_loss"
    of = wheel.take("trl/trainer/kto_trainer.py", [name], {"torch": torch, "F": functional})["_compute_loss"]
    for mismatched in (0.7, -0.4):
        for good, bad in ((1.0, 1.0), (1.0, 1.33)):
            trainer = _trainer(beta=0.1, loss_type="kto", desirable_weight=good, undesirable_weight=bad)
            trainer.calculate_KL = True
            trainer._compute_kl_logps = lambda model, batch, kl=mismatched: torch.full((8,), kl, dtype=torch.float64)
            batch = _batch(x) | {"label": x["desirable"], "ref_logps": _sums(x["reference"], x)}
            batch["ref_KL_logps"] = torch.zeros(8, dtype=torch.float64)
            settings = {"beta": 0.1, "desirable_weight": good, "undesirable_weight": bad}
            outputs = whole(_of_trl(of, trainer, batch, x), x["logprobs"])
            divergence = torch.tensor(max(0.0, mismatched), dtype=torch.float64)
            yield case(wheel, name, settings, outputs, mismatched=mismatched, divergence=divergence)


def _kto_liger(wheels: Path, x: dict[str, Tensor]) -> Iterator[Case]:
    wheel, name = Wheel(wheels, "liger_kernel"), "LigerFusedLinearKTOFunction.preference_loss_fn"
    of = wheel.take("chunked_loss/kto_loss.py", [name], {"torch": torch, "F": functional})["preference_loss_fn"]
    for beta in (0.1, 0.5):

        def loss(now_BR: Tensor, beta: float = beta) -> Tensor:
            reference_B = _sums(x["reference"], x)
            return of(_sums(now_BR, x), x["desirable"], x["mask"], reference_B, beta, torch.tensor(0.7))[0]

        settings = {"beta": beta, "desirable_weight": 1.0, "undesirable_weight": 1.0}
        divergence = torch.tensor(0.7, dtype=torch.float32).double()
        yield case(wheel, name, settings, whole(loss, x["logprobs"]), divergence=divergence)


class _Anything(dict[str, Any]):
    """Metrics that nobody reads."""

    def __missing__(self, name: str) -> list[float]:
        self[name] = []
        return self[name]


def _trainer(**settings: Any) -> SimpleNamespace:
    """As much of TRL's trainers as their losses read; they run as in an evaluation."""
    trainer = SimpleNamespace(**settings, aux_loss_enabled=False, precompute_ref_logps=True)
    trainer.model, trainer._total_train_tokens = SimpleNamespace(training=False), 0
    trainer._metrics = {"eval": _Anything()}
    trainer.accelerator = SimpleNamespace(device="cpu", gather=lambda each: each, gather_for_metrics=lambda each: each)
    return trainer


def _batch(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The replies behind a prompt of one token."""
    prompt = torch.zeros(8, 1, dtype=torch.long)
    mask = torch.cat([prompt, x["mask"].long()], 1)
    return {"input_ids": torch.zeros(8, 10, dtype=torch.long), "completion_mask": mask, "attention_mask": mask}


def _of_trl(
    compute_loss: Callable[..., Tensor], trainer: SimpleNamespace, batch: dict[str, Tensor], x: dict[str, Tensor]
) -> Callable[[Tensor], Tensor]:
    def loss(now_BR: Tensor) -> Tensor:
        outputs = SimpleNamespace(log_probs=now_BR * x["mask"], entropy=torch.zeros(8, 9))
        outputs.mean_logits, outputs.is_top1 = torch.zeros(8, 9), torch.zeros(8, 9, dtype=torch.bool)
        return compute_loss(trainer, lambda **_: outputs, batch, False)

    return loss


FILES = {"dpo": dpo, "kto": kto}
