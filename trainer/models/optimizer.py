"""AdamW over float32 master weights, for a model that may run in a smaller type.

Of several ranks each has the masters and moments of its shards alone (ZeRO, Rajbhandari et al. 2020): gradients are
added up at their owners, who make the update and hand the new weights to all. Offloaded, masters and moments are in
main memory, and the CPU makes the update.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from tuneloop.shared.capacity.memory import EIGHT_BIT_MOMENTS
from tuneloop.shared.settings import algorithm
from tuneloop.trainer.models.eight_bit import EightBitAdamW
from tuneloop.trainer.models.offloading import OffloadedGradients
from tuneloop.trainer.ranks.ranks import ALONE, BLOCK, Ranks, Shard, cut

_log = structlog.get_logger()

_MOMENTS = {
    32: {"exp_avg": torch.float32, "exp_avg_sq": torch.float32},
    8: {
        "exp_avg": torch.int8,
        "exp_avg_scale": torch.float32,
        "exp_avg_sq": torch.uint8,
        "exp_avg_sq_scale": torch.float32,
    },
}
#: As torch.nn.utils.clip_grad_norm_ has it.
_LEAST_NORM = 1e-6

_STEP, _MASTER = "step", "master"

#: Makes memory for a tensor of this name that is like another one, but may be elsewhere.
Room = Callable[[str, Tensor], Tensor]


class MasterAdamW:
    """The master weights of what is trained of `module`, their gradients and moments: of the rank's shards.

    A float32 parameter is its own master, unless that is offloaded. Any other has a float32 copy, and its gradients
    are added up in float32, micro-batch by micro-batch; the parameter becomes the copy rounded.
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
        self._shards = cut({name: each.numel() for name, each in self._parameters.items()}, ranks.size)
        own = [shard for shard in self._shards if shard.owner == ranks.rank]
        self._masters = {shard: nn.Parameter(_master(self._part(shard), offload=offload)) for shard in own}
        #: What the masters' gradients are, where the model is.
        self.gradients: dict[Shard, Tensor] = {}
        self._offloaded = OffloadedGradients() if offload else None
        self._moments = _MOMENTS[settings.bits]
        self._adamw = _adamw(self._masters, settings, compiled=compiled and not offload)

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
        own = float(get_total_norm(self.gradients.values()))
        return own if self._ranks.size == 1 else math.sqrt(self._ranks.add_up_numbers({"square": own**2})["square"])

    def update(self, *, norm: float, max_norm: float) -> None:
        """One update with the gradients, whose norm is `norm`, scaled down to `max_norm`.

        None where all gradients are 0: AdamW's memory alone would move the weights, and nothing says where to.
        """
        if norm:
            _scale_down(self.gradients.values(), norm, max_norm)
            self._adamw.param_groups[0]["lr"] = self.lr
            with (
                nullcontext(self.gradients) if self._offloaded is None else self._offloaded.take(self.gradients)
            ) as gradients:
                for shard, gradient in gradients.items():
                    self._masters[shard].grad = gradient
                self.updates += 1  # Before it is made: one that fails may have been made in part.
                self._adamw.step()
                self._publish()
        self.forget()

    def add_up(self) -> None:
        """Add the gradients of all ranks to the masters'. What has one on no rank gets none."""
        names = list(self._parameters)
        there = torch.tensor([float(self._gradient(name) is not None) for name in names])
        self._ranks.add_up([there])
        learnt = {name for name, count in zip(names, there.tolist(), strict=True) if count}
        parts = [(shard, self._gradient_part(shard)) for shard in self._shards if shard.name in learnt]
        for shard, part in self._ranks.add_up_shards(parts).items():
            self.gradients[shard] = self.gradients[shard] + part if shard in self.gradients else part
        self._forget_parts()

    def forget(self) -> None:
        """Throw the gradients away."""
        self.gradients.clear()
        self._adamw.zero_grad()
        self._forget_parts()

    def weights(self, *, hidden: bool = False) -> dict[str, Tensor]:
        """The master weights of a rank alone; with `hidden`, only those that the model's own parameters do not show."""
        return {
            shard.name: master.detach().view_as(self._parameters[shard.name])
            for shard, master in self._masters.items()
            if not hidden or shard.name in self._sums
        }

    def tensors(self) -> Iterator[Tensor]:
        """All that lasts from one update to the next, where it lies."""
        yield from self._masters.values()
        for state in self._adamw.state.values():
            yield from (each for each in state.values() if isinstance(each, Tensor))

    def moments(self) -> dict[str, Tensor]:
        """AdamW's memory of a rank alone, as `moment.parameter`."""
        return {
            f"{moment}.{shard.name}": _shape_like(state[moment], self._parameters[shard.name])
            for shard, master in self._masters.items()
            if (state := self._adamw.state.get(master))
            for moment in (_STEP, *self._moments)
        }

    @torch.no_grad()
    def copy(self, room: Room | None) -> dict[str, Tensor]:
        """What `weights(hidden=True)` and `moments` say of all ranks, in memory that `room` makes on rank 0.

        The masters are called `master.parameter`. All ranks do it at once; those but 0 have no room, and get nothing.
        """
        masters = (self._masters.get(shard) for shard in self._shards)
        updated = torch.tensor([float(master is not None and master in self._adamw.state) for master in masters])
        self._ranks.add_up([updated])
        copied: dict[str, Tensor] = {}
        for shard, has_moments in zip(self._shards, updated.tolist(), strict=True):
            kinds = [_MASTER] if shard.name in self._sums else []
            for kind in [*kinds, *((_STEP, *self._moments) if has_moments else ())]:
                self._bring(kind, shard, room, copied)
        return copied

    @torch.no_grad()
    def restore(self, *, updates: int, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Go back to what `weights`, `moments` and `updates` said; moments of other bits begin anew."""
        self.updates = updates
        for shard, master in self._masters.items():
            if shard.name in weights:
                master.copy_(weights[shard.name].reshape(-1)[shard.span])
        self._publish()
        if not self._are_ours(moments):
            _log.warning("optimizer_begins_anew", reason="algorithm.optimizer.bits was different before")
            moments = {}
        states = {
            master: {_STEP: moments[f"{_STEP}.{shard.name}"].clone()}
            | {kind: moments[f"{kind}.{shard.name}"].reshape(-1)[_place(kind, shard)].clone() for kind in self._moments}
            for shard, master in self._masters.items()
            if f"{_STEP}.{shard.name}" in moments
        }
        if isinstance(self._adamw, EightBitAdamW):
            return self._adamw.load(states)
        groups, masters = self._adamw.state_dict()["param_groups"], list(self._masters.values())
        by_index = {index: states[master] for index, master in enumerate(masters) if master in states}
        self._adamw.load_state_dict({"state": by_index, "param_groups": groups})

    def _are_ours(self, moments: Mapping[str, Tensor]) -> bool:
        kinds = {moment for kind in _MOMENTS.values() for moment in kind}
        found = {moment for moment in (name.partition(".")[0] for name in moments) if moment in kinds}
        return not found or found == set(self._moments)

    def _part(self, shard: Shard) -> Tensor:
        return self._parameters[shard.name].detach().view(-1)[shard.span]

    def _gradient(self, name: str) -> Tensor | None:
        return self._sums[name].value if name in self._sums else self._parameters[name].grad

    def _gradient_part(self, shard: Shard) -> Tensor | None:
        gradient = self._gradient(shard.name)
        return None if gradient is None else gradient.reshape(-1)[shard.span]

    def _forget_parts(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = None
            if name in self._sums:
                self._sums[name].value = None

    def _bring(self, kind: str, shard: Shard, room: Room | None, copied: dict[str, Tensor]) -> None:
        """Let rank 0 copy a shard's master or moment."""
        name, parameter, place = f"{kind}.{shard.name}", self._parameters[shard.name], _place(kind, shard)
        dtype, part = self._moments.get(kind, torch.float32), None
        if (master := self._masters.get(shard)) is not None:
            part = (master.detach() if kind == _MASTER else self._adamw.state[master][kind]).view(-1)
        like = part if part is not None else torch.empty(place.stop - place.start, dtype=dtype, device="meta")
        if room is not None and name not in copied:
            copied[name] = room(name, torch.empty(_whole(kind, parameter), dtype=dtype, device="meta"))
        into = copied[name].view(-1)[place] if room is not None else None
        self._ranks.bring(shard.owner, part, like, into)

    @torch.no_grad()
    def _publish(self) -> None:
        for shard, master in self._masters.items():
            if shard.name in self._sums or self._offloaded is not None:
                self._part(shard).copy_(master)
        self._ranks.spread([(shard, self._part(shard)) for shard in self._shards])


class _Sum:
    """The gradients of a parameter added up in float32, since the last update."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.value: Tensor | None = None
        # What it calls must not hold `parameter`: a hook that holds what it hangs on is never freed, and a GPU has no
        # room for two models.
        parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def _take(self, filled: Tensor) -> None:
        assert filled.grad is not None
        if self.value is None:
            self.value = filled.grad.float()
        else:
            self.value += filled.grad
        filled.grad = None


def _master(part: Tensor, *, offload: bool) -> Tensor:
    return part.to("cpu", torch.float32, copy=True) if offload else part.float()


def _scale_down(gradients: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Clip gradients that together, with those of other ranks, have the norm."""
    if (share := max_norm / (norm + _LEAST_NORM)) < 1:
        for each in gradients:
            each.mul_(share)


def _place(kind: str, shard: Shard) -> slice:
    if kind == _STEP:
        return slice(0, 1)
    return shard.blocks if kind.endswith("_scale") else shard.span


def _whole(kind: str, parameter: Tensor) -> Sequence[int]:
    """The shape of a master or moment, as one tensor of all shards."""
    if kind == _STEP:
        return ()
    return (-(-parameter.numel() // BLOCK),) if kind.endswith("_scale") else parameter.shape


def _shape_like(moment: Tensor, parameter: Tensor) -> Tensor:
    """A moment in the shape of its parameter; scales and counts of updates have none."""
    return moment.view_as(parameter) if moment.dim() and moment.numel() == parameter.numel() else moment


def _adamw(
    masters: Mapping[Shard, nn.Parameter],
    settings: algorithm.OptimizerSettings,
    *,
    compiled: bool,
) -> torch.optim.AdamW | EightBitAdamW:
    given: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "weight_decay": settings.weight_decay}
    if settings.bits == 8:
        return EightBitAdamW({each: shard.start for shard, each in masters.items()}, **given, compiled=compiled)
    # torch takes no empty list, and a rank of many may have no shard of an adapter.
    return torch.optim.AdamW(list(masters.values()) or [nn.Parameter(torch.empty(0))], **given, fused=True)
