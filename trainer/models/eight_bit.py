"""AdamW whose two moments take a byte each, with a float32 scale for every 256 of them.

A moment is kept as the logarithm of its share of the largest of its block: 8 steps to an octave and a sign for the
first, 12 for the root of the second. A second moment moves by a thousandth at a time, far less than a step, so what
lies between two is rounded up or down in turn: by a number that is different for each place and each update, spreads
evenly, and follows from both, so that a run that is resumed is the same to the bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tuneloop.trainer.models.compiling import compile_if

#: So many numbers have a scale of their own.
BLOCK = 256
#: So many at a time: what is made of them in between takes a few hundred megabytes, compiled far less of each.
_CHUNK, _COMPILED_CHUNK = 1 << 22, 1 << 25

_FIRST_STEPS, _FIRST_LEVELS = 8, 127
_SECOND_STEPS, _SECOND_LEVELS = 12, 255

#: Multiples of the golden ratio and of another irrational number, as shares of 2³², spread evenly.
_BY_PLACE, _BY_UPDATE = 2654435769, 3242174889


class EightBitAdamW:
    """What of torch.optim.AdamW is used: `param_groups` with one group, `state`, `step`, `zero_grad`."""

    def __init__(
        self,
        parameters: Mapping[nn.Parameter, int],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        compiled: bool = False,
    ) -> None:
        """`parameters` may be parts of larger ones: with each goes where it begins there.

        With `compiled` what is done to a stretch of them is one kernel or two, instead of forty that read and write it.
        """
        self._starts = parameters
        self._update_part = compile_if(_update_part, wanted=compiled)
        self._chunk = _COMPILED_CHUNK if compiled else _CHUNK
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(parameters), "lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": 1e-8}
        ]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        group = self.param_groups[0]
        (one, two), lr = group["betas"], group["lr"]
        rates: dict[int, Sequence[Tensor]] = {}  # by updates made, which are those of all parameters in most runs
        for parameter in group["params"]:
            if parameter.grad is not None:
                if parameter not in self.state:
                    self.state[parameter] = self.new_state(parameter)
                state = self.state[parameter]
                state["step"] += 1
                updates = int(state["step"])
                if updates not in rates:
                    numbers = [1 - lr * group["weight_decay"], lr / (1 - one**updates), (1 - two**updates) ** -0.5]
                    # Tensors, for a number would be compiled in, and they are others each time.
                    rates[updates] = torch.tensor(numbers).to(parameter.device, non_blocking=True).unbind()
                self._update(parameter, state, updates, rates[updates])

    def new_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state of a parameter before its first update."""
        count, device = parameter.numel(), parameter.device
        blocks = -(-count // BLOCK)
        return {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros(count, dtype=torch.int8, device=device),
            "exp_avg_scale": torch.zeros(blocks, device=device),
            "exp_avg_sq": torch.zeros(count, dtype=torch.uint8, device=device),
            "exp_avg_sq_scale": torch.zeros(blocks, device=device),
        }

    def _update(
        self, parameter: nn.Parameter, state: Mapping[str, Tensor], updates: int, rates: Sequence[Tensor]
    ) -> None:
        group, (decay, rate, correction) = self.param_groups[0], rates
        weights, gradients = parameter.view(-1), parameter.grad.reshape(-1)  # type: ignore[union-attr]
        for part in _chunks(len(weights), self._chunk):
            first_place = self._starts[parameter] + part.start
            places = torch.tensor([first_place, updates]).to(parameter.device, non_blocking=True)
            step = _Step(group["betas"], group["eps"], decay, rate, correction, places)
            self._update_part(weights[part], gradients[part], dict(_parts(state, part)), step)


class _Step(NamedTuple):
    """An update: betas and epsilon, as numbers; the rest as tensors.

    What is left of a weight before the step; the learning rate by the first moment's correction; the root of the
    second's, inverse; where the stretch begins in the whole, and how many updates there were.
    """

    betas: tuple[float, float]
    eps: float
    decay: Tensor
    rate: Tensor
    correction: Tensor
    places: Tensor


def decode_moment(state: Mapping[str, Tensor], name: str) -> Tensor:
    """A moment in float32, flat."""
    return _first(state) if name == "exp_avg" else _second(state).square()


def encode_moment(state: Mapping[str, Tensor], name: str, moment: Tensor) -> None:
    """Keep a moment, flat, which is rounded to the nearest step."""
    values = moment if name == "exp_avg" else moment.sqrt()
    for part in _chunks(len(values), _CHUNK):
        _keep(dict(_parts(state, part)), name, values[part], torch.full((), 0.5, device=values.device))


def _update_part(weights: Tensor, gradient: Tensor, state: dict[str, Tensor], step: _Step) -> None:
    one, two = step.betas
    # Numbers from 0 to 1, one for each place.
    count = len(weights)
    places = step.places
    start, updates = places.unbind()
    mixed = ((torch.arange(count, device=places.device) + start) * _BY_PLACE + updates * _BY_UPDATE) & 0xFFFFFFFF
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
    """The scale of each place."""
    return scale.repeat_interleave(BLOCK)[:count]


def _first(chunk: Mapping[str, Tensor]) -> Tensor:
    levels = chunk["exp_avg"].float()
    sizes = torch.exp2((levels.abs() - _FIRST_LEVELS) / _FIRST_STEPS) * levels.sign()
    return sizes * _spread(chunk["exp_avg_scale"], len(levels))


def _second(chunk: Mapping[str, Tensor]) -> Tensor:
    """The roots."""
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
    # A second moment that is forgotten would make the next update endless; a first one that is, is nothing.
    levels = levels.clamp_(min=1).where(sizes > 0, 0) if name == "exp_avg_sq" else levels.where(levels >= 1, 0)
    chunk[name].copy_(levels * values.sign())
