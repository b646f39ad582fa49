"""AdamW over float32 master weights, for a model that may run in a smaller type.

Of parameters that are sharded each rank has its own part of masters and moments (ZeRO, Rajbhandari et al. 2020); of
others all. Offloaded, masters and moments are in main memory, and the CPU makes the update.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, TypeGuard, cast

import structlog
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from tuneloop.shared.capacity.memory import EIGHT_BIT_MOMENTS
from tuneloop.shared.settings import algorithm
from tuneloop.trainer.models.offloading import OffloadedGradients
from tuneloop.trainer.ranks.ranks import ALONE, Ranks, first_number, local, own_part, whole

_log = structlog.get_logger()

_MOMENTS = ("exp_avg", "exp_avg_sq")
_BLOCK = 256
#: As torch.nn.utils.clip_grad_norm_ has it.
_LEAST_NORM = 1e-6

_STEP, _MASTER = "step", "master"

#: Makes memory for a tensor of this name that is like another one, but may be elsewhere.
Room = Callable[[str, Tensor], Tensor]


class MasterAdamW:
    """The master weights of what is trained of `module`, their gradients and moments: what this rank has of them.

    A float32 parameter is its own master, unless that is offloaded. Any other has a float32 copy, and its gradients
    are added up in float32, micro-batch by micro-batch; the parameter becomes the copy rounded. With 8 `bits` moments
    are torchao's, in blocks of 256 of a byte each (Dettmers et al. 2022); those of less than 4 096 are float32.
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
        self._sums = {name: _Sum(each) for name, each in self._parameters.items() if each.dtype != torch.float32}
        self._masters = {
            name: nn.Parameter(_master(local(each.detach()), offload=offload))
            for name, each in self._parameters.items()
        }
        #: What the masters' gradients are, where the model is.
        self.gradients: dict[str, Tensor] = {}
        self._offloaded = OffloadedGradients() if offload else None
        self._compiled = compiled
        self._adamw = _adamw(list(self._masters.values()), settings)

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
        """The norm of all gradients together, of all ranks; not finite as soon as one of them is not."""
        parts = [each for name, each in self.gradients.items() if self._is_sharded(name)]
        norm = float(get_total_norm(each for name, each in self.gradients.items() if not self._is_sharded(name)))
        if not self._ranks.is_sharded:
            return norm
        square = self._ranks.add_up_numbers({"square": float(get_total_norm(parts)) ** 2})["square"]
        return math.sqrt(square + norm**2)

    def update(self, *, norm: float, max_norm: float) -> None:
        """One update with the gradients, whose norm is `norm`, scaled down to `max_norm`.

        None where all gradients are 0: AdamW's memory alone would move the weights, and nothing says where to.
        """
        if norm:
            _scale_down(self.gradients.values(), norm, max_norm)
            with (
                nullcontext(self.gradients) if self._offloaded is None else self._offloaded.take(self.gradients)
            ) as gradients:
                for name, gradient in gradients.items():
                    self._masters[name].grad = gradient
                rate = self.lr
                self.updates += 1  # Before it is made: one that fails may have been made in part.
                _step(self._adamw, rate, compiled=self._compiled)
                self._publish()
        self.forget()

    def add_up(self) -> None:
        """Add the gradients of all ranks to the masters'. What has one on no rank gets none."""
        found = {name: self._gradient(name) for name in self._parameters}
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
        """Throw the gradients away."""
        self.gradients.clear()
        self._adamw.zero_grad()
        self._forget_parts()

    def tensors(self) -> Iterator[Tensor]:
        """All that lasts from one update to the next, where it lies."""
        yield from self._masters.values()
        for state in self._adamw.state.values():
            for each in state.values():
                yield from (each.codes, each.scale) if _is_quantized(each) else (each,)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """What going on needs, of all ranks, who ask for it together: one tensor after the other, by its name.

        `master.parameter` where a parameter does not show it, `moment.parameter`, and `moment_scale.parameter` of
        those in 8 bits. They are the rank's own tensors where it has all.
        """
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if name in self._sums:
                yield f"{_MASTER}.{name}", whole(master.detach(), parameter)
            state = self._adamw.state.get(master)
            if not state:
                continue
            yield f"{_STEP}.{name}", state[_STEP]
            for moment in _MOMENTS:
                yield from _whole_moment(f"{moment}.{name}", state[moment], parameter)

    @torch.no_grad()
    def restore(self, *, updates: int, kept: Mapping[str, Tensor], masters: bool = True) -> None:
        """Go back to what `state` said, with its `masters` or without; moments of other bits are converted."""
        self.updates = updates
        for name, master in self._masters.items():
            if masters and (there := kept.get(f"{_MASTER}.{name}")) is not None:
                master.copy_(own_part(there, self._parameters[name]).view_as(master))
        self._publish()
        known = [name for name in self._masters if f"{_STEP}.{name}" in kept]
        if any(kept[f"{_MOMENTS[0]}.{name}"].dtype == torch.int8 for name in known):
            _log.warning("optimizer_begins_anew", reason="its moments in 8 bits are of an older release")
            return
        for name in known:
            master, state = self._masters[name], self._adamw.state[self._masters[name]]
            state[_STEP] = kept[f"{_STEP}.{name}"].clone()
            for moment in _MOMENTS:
                state[moment] = self._new_moment(master, signed=moment == _MOMENTS[0])
                _restore_moment(f"{moment}.{name}", state[moment], kept, self._parameters[name])

    def _new_moment(self, master: Tensor, *, signed: bool) -> Tensor:
        if isinstance(self._adamw, AdamW8bit):
            return cast(Tensor, self._adamw._new_buffer(master, signed))
        return torch.zeros_like(master)

    def _is_sharded(self, name: str) -> bool:
        return isinstance(self._parameters[name], DTensor)

    def _gradient(self, name: str) -> Tensor | None:
        if name in self._sums:
            return self._sums[name].value
        gradient = self._parameters[name].grad
        return None if gradient is None else local(gradient)

    def _forget_parts(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = None
            if name in self._sums:
                self._sums[name].value = None

    @torch.no_grad()
    def _publish(self) -> None:
        for name, master in self._masters.items():
            if name in self._sums or self._offloaded is not None:
                local(self._parameters[name].detach()).copy_(master)


class _Sum:
    """The gradients of a parameter added up in float32, since the last update."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.value: Tensor | None = None
        # What it calls must not hold `parameter`: a hook that holds what it hangs on is never freed, and a GPU has no
        # room for two models.
        parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def _take(self, filled: Tensor) -> None:
        assert filled.grad is not None
        gradient = local(filled.grad)
        if self.value is None:
            self.value = gradient.float()
        else:
            self.value += gradient
        filled.grad = None


def _master(part: Tensor, *, offload: bool) -> Tensor:
    return part.to("cpu", torch.float32, copy=True) if offload else part.float()


def _scale_down(gradients: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Clip gradients that together, with those of other ranks, have the norm."""
    if (share := max_norm / (norm + _LEAST_NORM)) < 1:
        for each in gradients:
            each.mul_(share)


def _adamw(masters: list[nn.Parameter], settings: algorithm.OptimizerSettings) -> torch.optim.Optimizer:
    given: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "weight_decay": settings.weight_decay}
    return AdamW8bit(masters, **given) if settings.bits == 8 else torch.optim.AdamW(masters, **given, fused=True)


def _step(adamw: torch.optim.Optimizer, lr: float, *, compiled: bool) -> None:
    if isinstance(adamw, torch.optim.AdamW):
        adamw.param_groups[0]["lr"] = lr
    else:
        adamw.param_groups[0]["lr"].fill_(lr)
    with nullcontext() if compiled else torch.compiler.set_stance("force_eager"):  # torchao's compiles itself
        adamw.step()


def _is_quantized(moment: Tensor) -> TypeGuard[OptimState8bit]:
    return isinstance(moment, OptimState8bit)


def _decode(moment: Tensor) -> Tensor:
    return cast(Tensor, moment.dequantize()) if _is_quantized(moment) else moment


def _scale_name(name: str) -> str:
    return name.replace(".", "_scale.", 1)


def _whole_moment(name: str, moment: Tensor, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A moment of all ranks: in 8 bits where all have it so, in blocks that are also those of the whole."""
    ranks = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
    even = parameter.shape[0] % ranks == 0 and parameter.numel() % (ranks * _BLOCK) == 0
    if not (_is_quantized(moment) and even):
        yield name, whole(_decode(moment), parameter).view(parameter.shape)
        return
    yield name, whole(moment.codes, parameter)
    scale = moment.scale
    if isinstance(parameter, DTensor):
        scale = DTensor.from_local(scale, parameter.device_mesh, parameter.placements, run_check=False).full_tensor()
    yield _scale_name(name), scale


def _restore_moment(name: str, moment: Tensor, kept: Mapping[str, Tensor], parameter: Tensor) -> None:
    """Fill this rank's part of a moment from what was kept of the whole."""
    there = kept[name]
    if there.dtype == torch.float32:
        moment.copy_(own_part(there, parameter).view_as(moment))
        return
    scale = kept[_scale_name(name)]
    whole_moment = OptimState8bit.zeros(there.shape, name.startswith(f"{_MOMENTS[0]}."), _BLOCK)
    whole_moment.codes.copy_(there)
    whole_moment.scale.copy_(scale)
    before = first_number(parameter)
    if _is_quantized(moment) and before % _BLOCK == 0:
        moment.codes.copy_(own_part(there, parameter))
        moment.scale.copy_(scale[before // _BLOCK :][: len(moment.scale)])
    else:
        moment.copy_(own_part(whole_moment.dequantize(), parameter).view_as(moment))
