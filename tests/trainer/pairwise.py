"""What the losses of DPO and KTO, which are means over whole replies, must both satisfy."""

from collections.abc import Callable
from types import ModuleType

import torch

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms import Targets, Totals


def loss_of(page: ModuleType) -> Callable[..., object]:
    """The actor's loss of a page, which has no use for the entropy; its totals are the targets' own unless given."""

    def loss(algorithm: AlgorithmSettings, targets: Targets, logprobs_BR: torch.Tensor, totals: Totals | None = None):
        nothing = torch.zeros_like(logprobs_BR)
        return page.actor_loss(algorithm, targets, logprobs_BR, nothing, totals or targets.totals)

    return loss


def agrees_with_others(golden, loss, algorithm, targets) -> None:
    """Loss and gradient are the golden ones."""
    logprobs = golden.inputs["logprobs"].clone().requires_grad_()
    value = loss(algorithm, targets, logprobs).value
    value.backward()
    golden.agrees(value)
    golden.agrees(logprobs.grad, "grad")
