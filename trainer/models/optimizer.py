"""AdamW over float32 master weights, for models in smaller types.

Of sharded parameters, each rank has its part of masters and moments (ZeRO, Rajbhandari et al. 2020); of others, all.
Offloaded, masters and moments are in main memory, and the CPU updates them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from tuneloop.shared.capacity.memory import EIGHT_BIT_MOMENTS
from tuneloop.shared.settings import algorithm
from tuneloop.trainer.models.eight_bit import BLOCK, EightBitAdamW, decode_moment, encode_moment
from tuneloop.trainer.models.offloading import OffloadedGradients
from tuneloop.trainer.parallel import ALONE, Ranks, first_number, gather, join_parts, local_part, own_part

_MOMENTS = ("exp_avg", "exp_avg_sq")
_LARGE = 1 << 20  # from so many numbers on, our own kernel is faster despite its slower call
_LEAST_NORM = 1e-6  # as in torch.nn.utils.clip_grad_norm_

_STEP, _MASTER = "step", "master"

Room = Callable[[str, Tensor], Tensor]  # allocates memory for the named tensor like another, perhaps elsewhere


class MasterAdamW:
    """This rank's master weights of a module's trained parameters, their gradients and moments.

    A float32 parameter is its own master unless offloaded. Others have a float32 copy, whose gradients are summed in
    float32 over the micro-batches; the parameter is the rounded copy.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: algorithm.OptimizerSettings,
        ranks: Ranks = ALONE,
        *,
        offload: bool = False,
        compiled: bool = False,
    ) -> None:
        self.updates = 0
        self._settings, self._ranks = settings, ranks
        self._parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self._sums = {
            name: _Sum(each, compiled) for name, each in self._parameters.items() if each.dtype != torch.float32
        }
        home = "cpu" if offload else None
        parts = {name: local_part(each.detach()) for name, each in self._parameters.items()}
        self._masters = {
            name: nn.Parameter(part.to(home or part.device, torch.float32, copy=offload))
            for name, part in parts.items()
        }
        self.gradients: dict[str, Tensor] = {}  # the masters' gradients, on the model's device
        self._offloaded = OffloadedGradients() if offload else None
        starts = {self._masters[name]: first_number(each) for name, each in self._parameters.items()}
        self._adamw = _adamw(starts, settings, compiled=compiled and not offload)

    @property
    def moment_bytes(self) -> float:
        """Bytes of AdamW's moments per number."""
        return 8 if self._settings.bits == 32 else EIGHT_BIT_MOMENTS

    @property
    def lr(self) -> float:
        """The learning rate of the next update, after a linear warm-up."""
        return self._settings.lr * min(1.0, (self.updates + 1) / (self._settings.lr_warmup_steps + 1))

    def gradient_norm(self) -> float:
        """The norm of all gradients of all ranks; not finite if any is not."""
        parts = [each for name, each in self.gradients.items() if self._is_sharded(name)]
        norm = float(get_total_norm(each for name, each in self.gradients.items() if not self._is_sharded(name)))
        if not self._ranks.is_sharded:
            return norm
        square = self._ranks.add_up_numbers({"square": float(get_total_norm(parts)) ** 2})["square"]
        return math.sqrt(square + norm**2)

    def update(self, *, norm: float, max_norm: float) -> None:
        """One update with gradients clipped to `max_norm`; none if all are 0."""
        if norm:
            if (share := max_norm / (norm + _LEAST_NORM)) < 1:
                for each in self.gradients.values():
                    each.mul_(share)
            with (
                nullcontext(self.gradients) if self._offloaded is None else self._offloaded.take(self.gradients)
            ) as gradients:
                for name, gradient in gradients.items():
                    self._masters[name].grad = gradient
                self._adamw.param_groups[0]["lr"] = self.lr
                self.updates += 1  # first: a failed update may be partial
                self._adamw.step()
                self._publish()
        self.forget()

    def add_up(self) -> None:
        """Add the gradients of all ranks to the masters'. A parameter without gradient on all ranks gets none."""
        found = {
            name: self._sums[name].value if name in self._sums else None if each.grad is None else local_part(each.grad)
            for name, each in self._parameters.items()
        }
        shared = [name for name in found if not self._is_sharded(name)]
        if self._ranks.size > 1:
            there = torch.tensor([float(found[name] is not None) for name in shared])
            self._ranks.add_up([there])
            learnt = [name for name, count in zip(shared, there.tolist(), strict=True) if count]
            for name in learnt:
                if found[name] is None:
                    found[name] = torch.zeros_like(self._parameters[name], dtype=torch.float32)
            self._ranks.add_up(each for name in learnt if (each := found[name]) is not None)
        for name, part in found.items():
            if part is not None:
                self.gradients[name] = self.gradients[name] + part if name in self.gradients else part
        self._forget_parts()

    def forget(self) -> None:
        self.gradients.clear()
        self._adamw.zero_grad()
        self._forget_parts()

    def tensors(self) -> Iterator[Tensor]:
        yield from self._masters.values()
        for state in self._adamw.state.values():
            yield from (each for each in state.values() if isinstance(each, Tensor))

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """The state to resume from, of all ranks, which call this together, tensor by tensor with its name.

        `master.parameter` if it differs from the parameter, `moment.parameter`, and `moment_scale.parameter` in 8 bits.
        A rank that has all yields its own tensors; 8-bit moments are float32 if the ranks' parts do not end at blocks.
        """
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if name in self._sums:
                yield f"{_MASTER}.{name}", gather(master.detach(), parameter)
            state = self._adamw.state.get(master)
            if not state:
                continue
            yield f"{_STEP}.{name}", state[_STEP]
            for moment in _MOMENTS:
                yield from self._whole_moment(name, moment, state)

    @torch.no_grad()
    def restore(self, *, updates: int, kept: Mapping[str, Tensor], masters: bool = True) -> None:
        """Restore `state`, with or without its `masters`; moments of other bits are converted."""
        self.updates = updates
        for name, master in self._masters.items():
            if masters and (there := kept.get(f"{_MASTER}.{name}")) is not None:
                master.copy_(own_part(there, self._parameters[name]).view_as(master))
        self._publish()
        for name, master in self._masters.items():
            if f"{_STEP}.{name}" in kept:
                if isinstance(self._adamw, EightBitAdamW):
                    state = self._adamw.new_state(master)
                else:  # the fused optimizer's step is on the device
                    step = torch.zeros((), device=master.device)
                    state = {_STEP: step} | {each: torch.zeros_like(master) for each in _MOMENTS}
                state[_STEP].copy_(kept[f"{_STEP}.{name}"])
                for moment in _MOMENTS:
                    self._restore_moment(name, moment, state, kept)
                self._adamw.state[master] = state

    def _whole_moment(self, name: str, moment: str, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        parameter, scale = self._parameters[name], state.get(f"{moment}_scale")
        ranks = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
        if scale is None:
            yield f"{moment}.{name}", gather(state[moment], parameter).view(parameter.shape)
        elif ranks > 1 and (parameter.shape[0] % ranks or parameter.numel() % (ranks * BLOCK)):
            yield f"{moment}.{name}", gather(decode_moment(state, moment), parameter).view(parameter.shape)
        else:
            yield f"{moment}.{name}", gather(state[moment], parameter).view(parameter.shape)
            yield f"{moment}_scale.{name}", join_parts(scale, parameter)

    def _restore_moment(self, name: str, moment: str, state: dict[str, Tensor], kept: Mapping[str, Tensor]) -> None:
        """Restore this rank's part of a moment, from any bits."""
        parameter, there, in_bits = self._parameters[name], kept[f"{moment}.{name}"], f"{moment}_scale" in state
        scale, before = kept.get(f"{moment}_scale.{name}"), first_number(parameter)
        if scale is not None and in_bits and before % BLOCK == 0:
            state[moment].copy_(own_part(there, parameter).reshape(-1))
            mine = state[f"{moment}_scale"]
            mine.copy_(scale[before // BLOCK :][: len(mine)])
            return
        if scale is not None:
            there = decode_moment({moment: there.view(-1), f"{moment}_scale": scale}, moment)
        part = own_part(there, parameter).to(state[moment].device)
        if in_bits:
            encode_moment(state, moment, part.reshape(-1))
        else:
            state[moment].copy_(part.view_as(state[moment]))

    def _is_sharded(self, name: str) -> bool:
        return isinstance(self._parameters[name], DTensor)

    def _forget_parts(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = None
            if name in self._sums:
                self._sums[name].value = None

    @torch.no_grad()
    def _publish(self) -> None:
        for name, master in self._masters.items():
            if name in self._sums or self._offloaded is not None:
                local_part(self._parameters[name].detach()).copy_(master)


class _Sum:
    """A parameter's gradients since the last update, summed in float32."""

    def __init__(self, parameter: nn.Parameter, compiled: bool) -> None:
        self.value: Tensor | None = None
        self._compiled = compiled
        # The hook must not reference `parameter`: such a cycle is never freed, and a GPU has no room for two models.
        parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def _take(self, filled: Tensor) -> None:
        assert filled.grad is not None
        gradient = local_part(filled.grad)
        if self.value is None:
            self.value = gradient.float().contiguous()
        elif self._compiled and gradient.is_cuda and gradient.numel() >= _LARGE and gradient.is_contiguous():
            from tuneloop.trainer.models.kernels import add_to

            add_to(self.value, gradient)
        else:
            self.value += gradient
        filled.grad = None


def _adamw(
    starts: Mapping[nn.Parameter, int], settings: algorithm.OptimizerSettings, *, compiled: bool
) -> torch.optim.AdamW | EightBitAdamW:
    given: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "weight_decay": settings.weight_decay}
    if settings.bits == 8:
        return EightBitAdamW(starts, **given, compiled=compiled)
    return torch.optim.AdamW(list(starts), **given, fused=True)
