"""GPU kernels of eight_bit.py and optimizer.py: 50 µs of CPU per call, a compiled function takes 250."""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_ROWS, _NUMBERS = 8, 2048  # scales per program, and numbers per program of an addition


def update_in_bytes(
    weights: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    *,
    shift: int,
    rates: tuple[float, float, float],
    constants: Mapping[str, Any],
) -> None:
    """AdamW's update of a flat parameter with byte moments; `shift` changes the dither."""
    shift = (shift + (1 << 31)) % (1 << 32) - (1 << 31)  # as int32, so that one kernel serves all values
    scales = state["exp_avg_scale"]
    moments = (state["exp_avg"], scales, state["exp_avg_sq"], state["exp_avg_sq_scale"])
    grid = (triton.cdiv(len(scales), _ROWS),)
    update_kernel[grid](weights, gradient, *moments, len(weights), shift, *rates, ROWS=_ROWS, **constants)


def add_to(total: Tensor, part: Tensor) -> None:
    """Add a part of another dtype in place: torch's mixed kernel takes half as long again."""
    adding_kernel[(triton.cdiv(total.numel(), _NUMBERS),)](total, part, total.numel(), NUMBERS=_NUMBERS)


@triton.jit  # type: ignore[untyped-decorator]
def adding_kernel(total, part, count, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    there = at < count
    tl.store(total + at, tl.load(total + at, there) + tl.load(part + at, there).to(tl.float32), there)


@triton.jit(do_not_specialize=["shift"])  # type: ignore[untyped-decorator]
def update_kernel(  # type: ignore[no-untyped-def]
    weights, gradient, first_levels, first_scales, second_levels, second_scales,
    count, shift, decay, rate, correction,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr, EPS: tl.constexpr,
    FIRST_STEPS: tl.constexpr, FIRST_LEVELS: tl.constexpr,
    SECOND_STEPS: tl.constexpr, SECOND_LEVELS: tl.constexpr, BY_PLACE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_row, there = row * BLOCK < count, at < count
    change = tl.load(gradient + at, there, 0.0)
    old = tl.load(first_levels + at, there, 0).to(tl.float32)
    sign = tl.where(old > 0, 1.0, tl.where(old < 0, -1.0, 0.0))
    first = tl.exp2((tl.abs(old) - FIRST_LEVELS) / FIRST_STEPS) * sign * tl.load(first_scales + row, is_row)[:, None]
    old = tl.load(second_levels + at, there, 0).to(tl.float32)
    root = tl.where(old > 0, tl.exp2((old - SECOND_LEVELS) / SECOND_STEPS), 0.0)
    root = root * tl.load(second_scales + row, is_row)[:, None]
    first = first * ONE + change * (1 - ONE)
    root = tl.sqrt(root * root * TWO + change * change * (1 - TWO))
    weight = tl.load(weights + at, there) * decay - rate * first / (root * correction + EPS)
    tl.store(weights + at, weight, there)

    mixed = at.to(tl.uint32) * BY_PLACE + shift.to(tl.uint32)
    dither = (mixed >> 8).to(tl.float32) / 16777216.0
    sizes = tl.abs(first)
    scale = tl.max(sizes, 1)
    tl.store(first_scales + row, scale, is_row)
    shares = sizes / tl.maximum(scale, 1.1754943508222875e-38)[:, None]
    level = tl.minimum(tl.floor(FIRST_LEVELS + FIRST_STEPS * tl.log2(shares) + dither), FIRST_LEVELS)
    level = tl.where(level >= 1, level, 0.0)
    tl.store(first_levels + at, tl.where(first < 0, -level, level).to(tl.int8), there)
    scale = tl.max(root, 1)
    tl.store(second_scales + row, scale, is_row)
    shares = root / tl.maximum(scale, 1.1754943508222875e-38)[:, None]
    level = tl.minimum(tl.floor(SECOND_LEVELS + SECOND_STEPS * tl.log2(shares) + dither), SECOND_LEVELS)
    level = tl.where(root > 0, tl.maximum(level, 1.0), 0.0)
    tl.store(second_levels + at, level.to(tl.uint8), there)
