"""AdamW over float32 master weights, for a model that may run in a smaller type."""

from collections.abc import Iterable, Mapping

import structlog
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tuneloop.shared.capacity.memory import EIGHT_BIT_MOMENTS
from tuneloop.shared.settings import algorithm
from tuneloop.trainer.models.eight_bit import EightBitAdamW

_log = structlog.get_logger()

_MOMENTS = {
    32: ("step", "exp_avg", "exp_avg_sq"),
    8: ("step", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"),
}


class MasterAdamW:
    """The master weights of what is trained of `module`, their gradients and moments.

    A float32 parameter is its own master. Any other has a float32 copy: its gradients are added up there, micro-batch
    by micro-batch, the update is made there, and the parameter becomes the copy rounded.
    """

    def __init__(self, module: nn.Module, settings: algorithm.OptimizerSettings) -> None:
        self.updates = 0
        self._settings = settings
        self._parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self._masters = {name: _master(parameter) for name, parameter in self._parameters.items()}
        self._moments = _MOMENTS[settings.bits]
        self._adamw = _adamw(self._masters.values(), settings)

    @property
    def moment_bytes(self) -> float:
        """What AdamW's memory of one parameter takes."""
        return 8 if self._settings.bits == 32 else EIGHT_BIT_MOMENTS

    @property
    def lr(self) -> float:
        """The learning rate of the next update: a line up to the setting over the first updates."""
        warmup = self._settings.lr_warmup_steps
        return self._settings.lr * min(1.0, (self.updates + 1) / (warmup + 1))

    def gradient_norm(self) -> float:
        """The norm of all gradients together; not finite as soon as one of them is not."""
        return float(get_total_norm(self._gradients()))

    def update(self, *, norm: float, max_norm: float) -> None:
        """One update with the gradients, whose norm is `norm`, scaled down to `max_norm`.

        None where all gradients are 0: AdamW's memory alone would move the weights, and nothing says where to.
        """
        if norm:
            clip_grads_with_norm_(self._masters.values(), max_norm, torch.tensor(norm))
            self._adamw.param_groups[0]["lr"] = self.lr
            self._adamw.step()
            self._publish()
            self.updates += 1
        self.forget()

    def forget(self) -> None:
        """Throw the gradients away."""
        self._adamw.zero_grad()

    def weights(self, *, hidden: bool = False) -> dict[str, Tensor]:
        """The master weights; with `hidden`, only those that the model's own parameters do not show."""
        return {
            name: master.detach()
            for name, master in self._masters.items()
            if not hidden or master is not self._parameters[name]
        }

    def moments(self) -> dict[str, Tensor]:
        """AdamW's memory, as `moment.parameter`."""
        return {
            f"{moment}.{name}": state[moment]
            for name, master in self._masters.items()
            if (state := self._adamw.state.get(master))
            for moment in self._moments
        }

    @torch.no_grad()
    def restore(self, *, updates: int, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Go back to what `weights`, `moments` and `updates` said; moments of other bits begin anew."""
        self.updates = updates
        for name, weight in weights.items():
            self._masters[name].copy_(weight)
        self._publish()
        if not self._are_ours(moments):
            _log.warning("optimizer_begins_anew", reason="algorithm.optimizer.bits was different before")
            moments = {}
        states = {
            name: {moment: moments[f"{moment}.{name}"].clone() for moment in self._moments}
            for name in self._masters
            if f"step.{name}" in moments
        }
        if isinstance(self._adamw, EightBitAdamW):
            return self._adamw.load({self._masters[name]: state for name, state in states.items()})
        groups, names = self._adamw.state_dict()["param_groups"], list(self._masters)
        by_index = {names.index(name): state for name, state in states.items()}
        self._adamw.load_state_dict({"state": by_index, "param_groups": groups})

    def _are_ours(self, moments: Mapping[str, Tensor]) -> bool:
        kinds = {moment for kind in _MOMENTS.values() for moment in kind}
        found = {moment for moment in (name.partition(".")[0] for name in moments) if moment in kinds}
        return not found or found == set(self._moments)

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self._masters.values() if master.grad is not None]

    @torch.no_grad()
    def _publish(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter is not self._masters[name]:
                parameter.copy_(self._masters[name])


def _adamw(masters: Iterable[nn.Parameter], settings: algorithm.OptimizerSettings) -> torch.optim.AdamW | EightBitAdamW:
    if settings.bits == 8:
        return EightBitAdamW(masters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay)
    return torch.optim.AdamW(
        masters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
    )


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def hand_over(filled: Tensor) -> None:
        # Not `parameter`: a hook that holds what it hangs on is never freed, and a GPU has no room for two models.
        assert filled.grad is not None
        if master.grad is None:
            master.grad = filled.grad.float()
        else:
            master.grad += filled.grad
        filled.grad = None

    parameter.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
    return master
