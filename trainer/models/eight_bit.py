"""AdamW with moments of one byte, and a float32 scale per 256 of them.

A moment is stored as the logarithm of its share of the block's largest: 8 steps per octave and a sign for the first, 12
for the root of the second. A second moment changes by a thousandth at a time, far less than a step, so rounding is
dithered: by a number that is spread evenly, and follows from place and update, so that a resumed run is identical.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BLOCK = 256  # numbers per scale
_CHUNK = 1 << 22  # numbers at a time, which bounds temporary memory to a few hundred megabytes

_FIRST_STEPS, _FIRST_LEVELS = 8, 127
_SECOND_STEPS, _SECOND_LEVELS = 12, 255

#: Multiples of the golden ratio and of another irrational number, as shares of 2³², for even spread.
_BY_PLACE, _BY_UPDATE = 2654435769, 3242174889

#: Compile-time constants of the GPU kernel.
_CONSTANTS = {
    "BLOCK": BLOCK,
    "FIRST_STEPS": _FIRST_STEPS,
    "FIRST_LEVELS": _FIRST_LEVELS,
    "SECOND_STEPS": _SECOND_STEPS,
    "SECOND_LEVELS": _SECOND_LEVELS,
    "BY_PLACE": _BY_PLACE,
}


class EightBitAdamW:
    """The used interface of torch.optim.AdamW: `param_groups` with one group, `state`, `step`, `zero_grad`."""

    def __init__(
        self,
        parameters: Mapping[nn.Parameter, int],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        compiled: bool = False,
    ) -> None:
        """`parameters` map parts to offsets in the whole; `compiled` uses one GPU kernel instead of forty per chunk."""
        self._starts, self._compiled = parameters, compiled
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(parameters), "lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": 1e-8}
        ]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                if parameter not in self.state:
                    self.state[parameter] = self.new_state(parameter)
                self.state[parameter]["step"] += 1
                self._update(parameter, self.state[parameter])

    def new_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        count, device = parameter.numel(), parameter.device
        blocks = -(-count // BLOCK)
        return {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros(count, dtype=torch.int8, device=device),
            "exp_avg_scale": torch.zeros(blocks, device=device),
            "exp_avg_sq": torch.zeros(count, dtype=torch.uint8, device=device),
            "exp_avg_sq_scale": torch.zeros(blocks, device=device),
        }

    def _update(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        group, updates, start = self.param_groups[0], int(state["step"]), self._starts[parameter]
        (one, two), lr, eps = group["betas"], group["lr"], group["eps"]
        rates = (1 - lr * group["weight_decay"], lr / (1 - one**updates), (1 - two**updates) ** -0.5)
        weights, gradients = parameter.view(-1), parameter.grad.reshape(-1)  # type: ignore[union-attr]
        if self._compiled and parameter.is_cuda:
            from tuneloop.trainer.models.kernels import update_in_bytes

            constants = {"ONE": one, "TWO": two, "EPS": eps, **_CONSTANTS}
            shift = start * _BY_PLACE + updates * _BY_UPDATE
            update_in_bytes(weights, gradients, state, shift=shift, rates=rates, constants=constants)
            return
        for part in _chunks(len(weights), _CHUNK):
            step = _Step((one, two), eps, *rates, start + part.start, updates)
            _update_part(weights[part], gradients[part], dict(_parts(state, part)), step)


class _Step(NamedTuple):
    """An update: betas and epsilon, the factor of weight decay, the learning rate with the first moment's correction,
    the inverse root of the second's, the chunk's offset, and the number of updates.
    """

    betas: tuple[float, float]
    eps: float
    decay: float
    rate: float
    correction: float
    start: int
    updates: int


def decode_moment(state: Mapping[str, Tensor], name: str) -> Tensor:
    """A moment in float32, flat."""
    return _first(state) if name == "exp_avg" else _second(state).square()


def encode_moment(state: Mapping[str, Tensor], name: str, moment: Tensor) -> None:
    """Store a flat moment, rounded to the nearest step."""
    values = moment if name == "exp_avg" else moment.sqrt()
    for part in _chunks(len(values), _CHUNK):
        _keep(dict(_parts(state, part)), name, values[part], torch.full((), 0.5, device=values.device))


def _update_part(weights: Tensor, gradient: Tensor, state: dict[str, Tensor], step: _Step) -> None:
    one, two = step.betas
    places = torch.arange(step.start, step.start + len(weights), device=weights.device)  # dither from 0 to 1 by place
    mixed = (places * _BY_PLACE + step.updates * _BY_UPDATE) & 0xFFFFFFFF
    dither = (mixed >> 8).float() / (1 << 24)
    first = _first(state) * one + gradient * (1 - one)
    root = (_second(state).square() * two + gradient.square() * (1 - two)).sqrt()
    weights.mul_(step.decay).sub_(step.rate * first / (root * step.correction + step.eps))
    _keep(state, "exp_avg", first, dither)
    _keep(state, "exp_avg_sq", root, dither)


def _chunks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))


def _parts(state: Mapping[str, Tensor], part: slice) -> Iterator[tuple[str, Tensor]]:
    blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
    for name, each in state.items():
        if name != "step":
            yield name, each[blocks if name.endswith("_scale") else part]


def _spread(scale: Tensor, count: int) -> Tensor:
    return scale.repeat_interleave(BLOCK)[:count]


def _first(chunk: Mapping[str, Tensor]) -> Tensor:
    levels = chunk["exp_avg"].float()
    sizes = torch.exp2((levels.abs() - _FIRST_LEVELS) / _FIRST_STEPS) * levels.sign()
    return sizes * _spread(chunk["exp_avg_scale"], len(levels))


def _second(chunk: Mapping[str, Tensor]) -> Tensor:
    levels = chunk["exp_avg_sq"].float()
    sizes = torch.where(levels > 0, torch.exp2((levels - _SECOND_LEVELS) / _SECOND_STEPS), 0.0)
    return sizes * _spread(chunk["exp_avg_sq_scale"], len(levels))


def _keep(chunk: Mapping[str, Tensor], name: str, values: Tensor, dither: Tensor) -> None:
    steps, most = (_FIRST_STEPS, _FIRST_LEVELS) if name == "exp_avg" else (_SECOND_STEPS, _SECOND_LEVELS)
    sizes, scale = values.abs(), chunk[f"{name}_scale"]
    padded = nn.functional.pad(sizes, (0, len(scale) * BLOCK - len(sizes)))
    scale.copy_(padded.view(-1, BLOCK).amax(1))
    shares = sizes / _spread(scale, len(sizes)).clamp_min(torch.finfo(torch.float32).tiny)
    levels = (most + steps * shares.log2() + dither).floor_().clamp_(max=most)
    # A second moment rounded to 0 would make the next update unbounded; a first one rounded to 0 is harmless.
    levels = levels.clamp_(min=1).where(sizes > 0, 0) if name == "exp_avg_sq" else levels.where(levels >= 1, 0)
    chunk[name].copy_(levels * values.sign())
