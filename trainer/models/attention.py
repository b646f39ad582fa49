"""Attention over packed sequences: each attends to itself only, without padding.

Registered with transformers as PACKED, for any decoder that uses its table; transformers' arguments carry the bounds of
the sequences. A call without bounds uses `sdpa`, as generation needs. On a GPU, in 16 bits, one torch kernel reads the
row; elsewhere there is a call per run of equal lengths. Ranks that share the row exchange positions for heads before,
and back after (ulysses.py).
"""

import inspect
from functools import partial
from itertools import groupby
from typing import Any, TypedDict, cast

import structlog
import torch
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tuneloop.trainer.parallel import SequenceGroup, run_gathered
from tuneloop.trainer.transfer import hand_over

_log = structlog.get_logger()

PACKED = "packed"

_UNKNOWN = ("softcap", "s_aux", "position_bias")  # arguments of some decoders that are not supported here
_KINDS = {"full_attention", "sliding_attention"}  # supported kinds; others look beyond one sequence, or less far
_WIDEST_HEAD = 256  # the kernel's widest head; it also needs a multiple of eight
_OPTIONS = frozenset(inspect.signature(varlen.varlen_attn).parameters)
#: Whether torch's kernel has the options that we need (from 2.11), and one for heads that share keys.
_KERNEL_FITS, _KERNEL_HAS_GQA = {"scale", "window_size"} <= _OPTIONS, "enable_gqa" in _OPTIONS
_KERNEL_DEVICE = "cuda"
#: Tolerated difference of a packed row from its sequences alone, relative to the largest number.
_TOLERANCE = {torch.float32: 1e-3}
_ROUGH = 0.1


class Bounds(TypedDict):
    """Bounds of the sequences in a packed row, as arguments of a model's forward."""

    cu_seq_lens_q: Tensor
    cu_seq_lens_k: Tensor
    max_length_q: int
    max_length_k: int


class _NotPackable(Exception):
    pass


def bounds_of(lengths: list[int], device: torch.device) -> Bounds:
    ends = hand_over(torch.tensor([0, *lengths]).cumsum(0).int(), device)
    return Bounds(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=max(lengths), max_length_k=max(lengths))


def no_mask(device: torch.device) -> Tensor:
    """An empty mask of four dimensions, which stops models from making their own."""
    return torch.empty(1, 1, 0, 0, device=device)


def is_packable(network: nn.Module) -> bool:
    return bool(cast(PreTrainedModel, network).config._attn_implementation == PACKED)


def enable_packing(network: PreTrainedModel) -> None:
    """Switch the network to packed rows, if its outputs equal those of the sequences alone."""
    before = network.config._attn_implementation
    reason = _why_not(network)
    if reason is None:
        network.set_attn_implementation(PACKED)
        try:
            reason = run_gathered(network, partial(_difference, network))
        except _NotPackable as error:
            reason = str(error)
        if reason is not None:
            network.set_attn_implementation(before)
    if reason is not None:
        _log.warning("batches_padded", model=type(network).__name__, reason=reason)


def _why_not(network: PreTrainedModel) -> str | None:
    config = network.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    windows = "sliding_attention" in kinds or (not kinds and getattr(config, "sliding_window", None))
    if network.config._attn_implementation != "sdpa":
        return f"its attention is {network.config._attn_implementation}"
    if strange := kinds - _KINDS:
        return f"it has layers of {', '.join(sorted(strange))}"
    # Models with flash attention pass windows at each call; others only use a mask.
    if windows and not getattr(network, "_supports_flash_attn", False):
        return "its sliding windows are only in its masks"
    return None


@torch.no_grad()
def _difference(network: PreTrainedModel) -> str | None:
    """Why a packed row gives another output, or None."""
    lengths, device = [7, 3, 3, 1], network.device
    embeddings = cast(nn.Embedding, network.get_input_embeddings())
    ids = torch.arange(sum(lengths), device=device) % embeddings.num_embeddings
    body, parts = network.base_model, torch.split_with_sizes(ids, lengths)
    alone = [body(input_ids=part[None], use_cache=False).last_hidden_state[0].float() for part in parts]
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    packed = body(
        input_ids=ids[None],
        position_ids=positions[None],
        attention_mask=no_mask(device),
        use_cache=False,
        **bounds_of(lengths, device),
    ).last_hidden_state[0]
    expected = torch.cat(alone)
    apart = float((packed.float() - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not apart <= _TOLERANCE.get(packed.dtype, _ROUGH):
        return f"the output of a packed row differs from its sequences' by {apart:.2g}"
    return None


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Queries of shape 1 x heads x positions x width; the result has positions before heads."""
    if options.get("cu_seq_lens_q") is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if strange := [name for name in _UNKNOWN if options.get(name) is not None]:
        raise _NotPackable(f"its attention has {', '.join(strange)}")
    group: SequenceGroup | None = options.get("sequence_group")
    if group is not None:
        query, key, value = (_to_heads(each, group) for each in (query, key, value))
    ends, scale, window = options["cu_seq_lens_q"], options.get("scaling"), options.get("sliding_window")
    width = query.shape[-1]
    if (
        _KERNEL_FITS
        and query.device.type == _KERNEL_DEVICE
        and query.dtype in {torch.bfloat16, torch.float16}
        and width == value.shape[-1] <= _WIDEST_HEAD
        and width % 8 == 0
    ):
        attended = _in_one(query, key, value, ends, options["max_length_q"], scale, window)
    else:
        attended = _by_length(query, key, value, ends, scale, window)
    return attended if group is None else _to_positions(attended, group), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _to_heads(each: Tensor, group: SequenceGroup) -> Tensor:
    """Exchange all heads at some positions for some heads at all positions; too few heads are repeated."""
    if each.shape[1] < group.size:
        each = each.repeat_interleave(group.size // each.shape[1], dim=1)
    exchanged = cast(Tensor, _Exchanged.apply(each[0].transpose(0, 1), group, True))  # type: ignore[no-untyped-call]
    return exchanged.transpose(0, 1)[None]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _to_positions(attended: Tensor, group: SequenceGroup) -> Tensor:
    return cast(Tensor, _Exchanged.apply(attended[0], group, False))[None]  # type: ignore[no-untyped-call]


class _Exchanged(torch.autograd.Function):
    """Exchanges positions for heads of positions x heads x width, or back; each is the other's gradient."""

    @staticmethod
    def forward(context: Any, each_PHW: Tensor, group: SequenceGroup, to_heads: bool) -> Tensor:
        context.group, context.to_heads = group, to_heads
        return (_fewer_heads if to_heads else _fewer_positions)(each_PHW, group)

    @staticmethod
    def backward(context: Any, slopes_PHW: Tensor) -> tuple[Tensor | None, ...]:
        back = _fewer_positions if context.to_heads else _fewer_heads
        return back(slopes_PHW, context.group), None, None


def _fewer_heads(each_PHW: Tensor, group: SequenceGroup) -> Tensor:
    positions, heads, width = each_PHW.shape
    sent = each_PHW.reshape(positions, group.size, heads // group.size, width).transpose(0, 1).contiguous()
    return group.exchange(sent).flatten(0, 1)


def _fewer_positions(each_PHW: Tensor, group: SequenceGroup) -> Tensor:
    received = group.exchange(each_PHW.reshape(group.size, -1, *each_PHW.shape[1:]).contiguous())
    return received.transpose(0, 1).flatten(1, 2)


def _in_one(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    # The kernel handles heads that share keys; in torch 2.11 without that argument.
    options: dict[str, Any] = {"enable_gqa": True} if _KERNEL_HAS_GQA and key.shape[1] != query.shape[1] else {}
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    view: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    attended = varlen.varlen_attn(query, key, value, ends, ends, longest, longest, **view, **options)
    return cast(Tensor, attended)[None]


# The numbers of sequences by length must not be compiled in.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_length(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float | None, window: int | None
) -> Tensor:
    parts, start = [], 0
    for length, run in groupby(ends.diff().tolist()):  # adjacent sequences of equal length
        count = len(list(run))
        query_BHTD, key_BHTD, value_BHTD = (
            each[0, :, start : start + length * count].view(-1, count, length, each.shape[-1]).transpose(0, 1)
            for each in (query, key, value)
        )
        start, mask = start + length * count, None
        if window is not None and length > window:
            at = torch.arange(length, device=query.device)
            back = at[:, None] - at
            mask = (back >= 0) & (back < window)
        attended = scaled_dot_product_attention(
            query_BHTD,
            key_BHTD,
            value_BHTD,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        parts.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)[None]


ALL_ATTENTION_FUNCTIONS.register(PACKED, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, sdpa_mask)
