"""Attention over sequences that lie side by side in one row: each sees itself alone, and nothing is padded.

It stands in transformers' table of attention functions under the name PACKED, so that any decoder that looks there can
read such a row. Where its sequences begin comes by the names that transformers has for it. A call that does not say
is answered by `sdpa`, which is what generation needs.

On a GPU, in 16 bits, one kernel of torch's reads the whole row. Elsewhere sequences of one length are one call. Ranks
that share the row exchange positions for heads before, and back behind (ulysses.py).
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

#: What some decoders hand to attention that is left out here.
_UNKNOWN = ("softcap", "s_aux", "position_bias")
#: Attention of other kinds looks further than one sequence, or not as far as it seems.
_KINDS = {"full_attention", "sliding_attention"}
#: The kernel's widest head; it also wants a multiple of eight.
_WIDEST_HEAD = 256
_OPTIONS = frozenset(inspect.signature(varlen.varlen_attn).parameters)
#: Whether torch's kernel has what we need of it, from 2.11 on, and has an argument for heads that share keys.
_KERNEL_FITS, _KERNEL_IS_TOLD = {"scale", "window_size"} <= _OPTIONS, "enable_gqa" in _OPTIONS
_KERNEL_DEVICE = "cuda"
#: How far a packed row may be from its sequences alone, relative to the largest number.
_TOLERANCE = {torch.float32: 1e-3}
_ROUGH = 0.1


class Bounds(TypedDict):
    """Where the sequences of a packed row begin and end, as a model's forward takes it."""

    cu_seq_lens_q: Tensor
    cu_seq_lens_k: Tensor
    max_length_q: int
    max_length_k: int


class _NotPackable(Exception):
    pass


def bounds_of(lengths: list[int], device: torch.device) -> Bounds:
    """The bounds of sequences of such lengths."""
    ends = hand_over(torch.tensor([0, *lengths]).cumsum(0).int(), device)
    return Bounds(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=max(lengths), max_length_k=max(lengths))


def no_mask(device: torch.device) -> Tensor:
    """A mask that says nothing: where one of four dimensions is given, no model makes any of its own."""
    return torch.empty(1, 1, 0, 0, device=device)


def is_packable(network: nn.Module) -> bool:
    """Whether the network reads packed rows."""
    return bool(cast(PreTrainedModel, network).config._attn_implementation == PACKED)


def enable_packing(network: PreTrainedModel) -> None:
    """Let the network read packed rows, if it says of one what it says of its sequences alone."""
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
    # Models that run in flash attention say at each call how far a layer looks; others only in a mask.
    if windows and not getattr(network, "_supports_flash_attn", False):
        return "its sliding windows are in its masks alone"
    return None


@torch.no_grad()
def _difference(network: PreTrainedModel) -> str | None:
    """What is wrong with a packed row; None if nothing is."""
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
        return f"a packed row says something else than its sequences alone, by {apart:.2g}"
    return None


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Queries of shape 1 x heads x positions x width; the answer has positions before heads."""
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
    """Of all heads at some positions, some heads at all positions; heads that are too few are there several times."""
    if each.shape[1] < group.size:
        each = each.repeat_interleave(group.size // each.shape[1], dim=1)
    exchanged = cast(Tensor, _Exchanged.apply(each[0].transpose(0, 1), group, True))  # type: ignore[no-untyped-call]
    return exchanged.transpose(0, 1)[None]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _to_positions(attended: Tensor, group: SequenceGroup) -> Tensor:
    return cast(Tensor, _Exchanged.apply(attended[0], group, False))[None]  # type: ignore[no-untyped-call]


class _Exchanged(torch.autograd.Function):
    """Positions x heads x width, of fewer heads and more positions, or the other way; each is the other's gradient."""

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
    # The kernel reads the keys of several heads once, in torch 2.11 without that argument.
    options: dict[str, Any] = {"enable_gqa": True} if _KERNEL_IS_TOLD and key.shape[1] != query.shape[1] else {}
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    view: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    attended = varlen.varlen_attn(query, key, value, ends, ends, longest, longest, **view, **options)
    return cast(Tensor, attended)[None]


# How many sequences there are of which length is not to be compiled in.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_length(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float | None, window: int | None
) -> Tensor:
    parts, start = [], 0
    for length, run in groupby(ends.diff().tolist()):  # Sequences of one length that follow each other.
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
