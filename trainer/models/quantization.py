"""Frozen linear layers in 8 or 4 bits, for a base model below an adapter (QLoRA, Dettmers et al. 2023).

8 bits: an int8 code per weight, and a float32 scale per output. 4 bits: an NF4 code per weight, and a scale per block
of 64, itself in 8 bits with a float32 offset and step per 256 blocks ("double quantisation"). A pass decodes one matrix
at a time, in the dtype of its input, and the backward pass decodes it again, so that only the codes are kept.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from tuneloop.shared.capacity.memory import NF4_BLOCK, NF4_GROUP
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.trainer.models.head import compile_if

#: NF4's quantiles of the normal distribution.
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_LEVELS = 255
_CHUNK = 1 << 24  # weights quantised at a time, which bounds temporary memory to a few hundred megabytes


class _Int8(NamedTuple):
    """Codes of shape OI, and a scale per output."""

    qweight: Tensor
    scales_O: Tensor

    @classmethod
    def of(cls, weight_OI: Tensor) -> "_Int8":
        whole_OI = weight_OI.float()
        scales_O = whole_OI.abs().amax(1).clamp_min_(torch.finfo(torch.float32).tiny) / 127
        return cls((whole_OI / scales_O[:, None]).round_().to(torch.int8), scales_O)

    def decode(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return (self.qweight * self.scales_O[:, None]).to(dtype)


class _NF4Codes(NamedTuple):
    """Two codes per byte, a scale per block, each group's offset and step; `table` maps a byte to its two numbers."""

    qweight: Tensor
    scales: Tensor
    groups: Tensor
    table: Tensor

    @classmethod
    def of(cls, weight_OI: Tensor) -> "_NF4Codes":
        numbers = torch.tensor(_NF4, device=weight_OI.device)
        parts = [_encode(part, numbers) for part in torch.split(weight_OI.reshape(-1), _CHUNK)]
        codes, largest = (torch.cat(column) for column in zip(*parts, strict=True))
        scales, groups = _encode_scales(largest)
        byte = torch.arange(256, device=weight_OI.device)
        return cls(codes, scales, groups, torch.stack([numbers[byte >> 4], numbers[byte & 15]], 1))

    def decode(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        offsets, steps = self.groups.unbind(1)
        scales = _in_groups(self.scales.float()) * steps[:, None] + offsets[:, None]
        scales = scales.reshape(-1)[: len(self.scales)]
        blocks = self.table.index_select(0, self.qweight.int()).view(len(scales), NF4_BLOCK) * scales[:, None]
        count = shape[0] * shape[1]
        return blocks.view(-1)[:count].view(shape).to(dtype)


_Codes = _Int8 | _NF4Codes
_KINDS: dict[int, type[_Int8] | type[_NF4Codes]] = {8: _Int8, 4: _NF4Codes}


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen weight in codes, without `weight`; `exact`, if set, returns the original weight."""

    def __init__(self, linear: nn.Linear, bits: int, device: torch.device, *, compiled: bool = False) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bits, self.compiled = bits, compiled
        self.exact: Callable[[], Tensor] | None = None
        self.register_parameter("weight", None)
        self.register_parameter("bias", linear.bias)
        with torch.no_grad():  # peft takes the device of `qweight` without a `weight`
            codes = _KINDS[bits].of(linear.weight.detach().to(device))
        for name, each in codes._asdict().items():
            self.register_buffer(name, each, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """The gradient is the input's alone."""
        if self.exact is not None:
            return nn.functional.linear(input, self.exact().to(input.dtype), self.bias)
        codes = list(self._codes)
        outputs = cast(Tensor, _product(input, codes, self.bits, *self._shape, False, self.compiled))
        return outputs if self.bias is None else outputs + self.bias

    @torch.no_grad()
    def decode(self, dtype: torch.dtype) -> Tensor:
        return self._codes.decode(self._shape, dtype)

    @property
    def _codes(self) -> _Codes:
        kind = _KINDS[self.bits]
        return kind(*(getattr(self, name) for name in kind._fields))

    @property
    def _shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features


@torch.library.custom_op("tuneloop::product_with_codes", mutates_args=())
def _product(
    input: Tensor, codes: list[Tensor], bits: int, outputs: int, inputs: int, transposed: bool, compiled: bool
) -> Tensor:
    """The product with a decoded weight, as one operation: compilation keeps no decoded weight for a backward pass."""
    decode = compile_if(_decode, wanted=compiled)
    weight_OI = decode(bits, codes, (outputs, inputs), input.dtype)
    return input @ weight_OI if transposed else nn.functional.linear(input, weight_OI)


@_product.register_fake
def _(
    input: Tensor, codes: list[Tensor], bits: int, outputs: int, inputs: int, transposed: bool, compiled: bool
) -> Tensor:
    return input.new_empty((*input.shape[:-1], inputs if transposed else outputs))


def _keep_codes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, *ctx.of_weight, _, ctx.compiled = inputs
    ctx.save_for_backward(*codes)


def _input_gradient(context: Any, gradient: Tensor) -> tuple[Tensor | list[None] | None, ...]:
    codes = list(context.saved_tensors)
    of_input = _product(gradient, codes, *context.of_weight, True, context.compiled)
    return (of_input, [None] * len(codes), *[None] * 5)


_product.register_autograd(_input_gradient, setup_context=_keep_codes)


def _decode(bits: int, codes: list[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return _KINDS[bits](*codes).decode(shape, dtype)


def quantize_layers(
    network: PreTrainedModel, bits: int, folder: Path, device: torch.device, *, compiled: bool = False
) -> None:
    """Quantise linear layers except the head. Raises EnvironmentRefused unless `folder` has their weights."""
    head = network.get_output_embeddings()  # type: ignore[no-untyped-call]
    names = [name for name, each in network.named_modules() if isinstance(each, nn.Linear) and each is not head]
    with _open_weights(folder) as weights:
        for name in names:
            layer = cast(nn.Linear, network.get_submodule(name))
            if not weights.has(name, layer.weight):
                raise EnvironmentRefused(
                    f"model.lora.base_bits: {folder} has no {name}.weight as this model has it; write null"
                )
            parent, _, own = name.rpartition(".")
            setattr(network.get_submodule(parent), own, QuantizedLinear(layer, bits, device, compiled=compiled))


@contextmanager
def exact_weights(network: nn.Module, folder: Path) -> Iterator[None]:
    """In the block, quantised layers use the weights in `folder`, read one at a time, uncompiled."""
    layers = {name: each for name, each in network.named_modules() if isinstance(each, QuantizedLinear)}
    if not layers:
        yield
        return
    with _open_weights(folder) as weights, torch.compiler.set_stance("force_eager"):
        for name, layer in layers.items():
            # peft wraps the layer without renaming it otherwise.
            layer.exact = weights.reader(name.removesuffix(".base_layer"), next(layer.buffers()).device)
        try:
            yield
        finally:
            for layer in layers.values():
                layer.exact = None


class _Weights:
    """The weights of layers in a Hugging Face folder, by layer name."""

    def __init__(self, files: dict[str, Any]) -> None:
        self._files = files

    def has(self, layer: str, weight: Tensor) -> bool:
        name = f"{layer}.weight"
        if name not in self._files:
            return False
        found = cast(Tensor, self._files[name].get_tensor(name))
        return torch.equal(found.to(weight.dtype), weight)

    def reader(self, layer: str, device: torch.device) -> Callable[[], Tensor]:
        name = f"{layer}.weight"
        return lambda: cast(Tensor, self._files[name].get_tensor(name)).to(device)


@contextmanager
def _open_weights(folder: Path) -> Iterator[_Weights]:
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt"))
            files |= dict.fromkeys(file.keys(), file)
        yield _Weights(files)


def _encode(part: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of codes, and each block's maximum; zeros pad the last block."""
    padded = nn.functional.pad(part.float(), (0, -len(part) % NF4_BLOCK)).view(-1, NF4_BLOCK)
    largest = padded.abs().amax(1)
    shares = padded / largest.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    between = (numbers[1:] + numbers[:-1]) / 2
    codes = torch.bucketize(shares, between, out_int32=True).to(torch.uint8).view(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], largest


def _encode_scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """A byte per scale, and each group's offset and step."""
    grouped = _in_groups(largest, pad="edge")
    offsets = grouped.amin(1)
    steps = (grouped.amax(1) - offsets) / _LEVELS
    codes = ((grouped - offsets[:, None]) / steps.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_()
    return codes.to(torch.uint8).view(-1)[: len(largest)].contiguous(), torch.stack([offsets, steps], 1)


def _in_groups(each: Tensor, *, pad: str = "zeros") -> Tensor:
    missing = -len(each) % NF4_GROUP
    filler = each[-1:].expand(missing) if pad == "edge" else each.new_zeros(missing)
    return torch.cat([each, filler]).view(-1, NF4_GROUP)
