"""Weights known by sums over all their elements, which no fusing, transposing, padding or sharding changes.

Each element is worth a mixed hash of its bits, 0 for the number 0, and a part of the model is worth the sum modulo 2^64
of its elements. An engine adds up what it holds, the verifier what the files hold: they must be equal, to the bit.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

#: The sum of each part of a model, by the number of the layer, or "" for what belongs to none: 0 to 2^64 - 1.
Fingerprint = Mapping[str, int]

MODULUS = 1 << 64

#: What an element's bits are mixed by: multipliers, and the shifts between them.
MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (32, 29)

#: What the parts of an adapter begin with, beside those of the weights that it is added to.
_ADAPTER = "adapter "

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
#: Numbers that are mixed or counted at once: what is made of them stays in a processor's cache.
_BLOCK = 1 << 18

_BITS = {"BF16": "<u2", "F16": "<u2", "F32": "<u4", "F64": "<u8"}
#: What safetensors calls the types that engines serve.
SERVED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

Bits = npt.NDArray[np.unsignedinteger]


def part_of(name: str) -> str:
    found = _LAYER.search(name)
    return found[1] if found else ""


def adapter_part_of(name: str) -> str:
    return f"{_ADAPTER}{part_of(name)}"


def describe_part(part: str) -> str:
    of_adapter, number = part.startswith(_ADAPTER), part.removeprefix(_ADAPTER)
    what = f"layer {number}" if number else "what is in no layer"
    return f"the adapter of {what}" if of_adapter else what


def differing_parts(one: Fingerprint, other: Fingerprint) -> list[str]:
    parts = {part for part in {*one, *other} if (one.get(part, 0) - other.get(part, 0)) % MODULUS}
    return sorted(parts, key=lambda part: (part.startswith(_ADAPTER), int(part.removeprefix(_ADAPTER) or sys.maxsize)))


def differing_from_files(
    shares: Sequence[Mapping[str, Any]], fingerprints: Mapping[str, Fingerprint], *, base: bool = True
) -> list[str] | None:
    """The parts of `shares` that are not as in the files, by dtype; None where either is not known."""
    wanted = fingerprints.get(shares[0]["dtype"])
    if wanted is None or any(share["sums"] is None for share in shares):
        return None
    held = _total(share["sums"] for share in shares if base)
    adapter = {part: total for part, total in wanted.items() if part.startswith(_ADAPTER)}
    if adapter:
        if any(share.get("adapters") is None for share in shares):
            return None
        held += _most_like(shares, adapter)[1]
    return differing_parts(held, wanted if base else adapter)


def number_of_adapter(shares: Sequence[Mapping[str, Any]], fingerprints: Mapping[str, Fingerprint]) -> str:
    """The engine's number of the adapter that is most like that of the files, which it has; they must have one."""
    wanted = fingerprints[shares[0]["dtype"]]
    return _most_like(shares, {part: total for part, total in wanted.items() if part.startswith(_ADAPTER)})[0]


def _most_like(shares: Sequence[Mapping[str, Any]], adapter: Fingerprint) -> tuple[str, Counter[str]]:
    numbers = {number for share in shares for number in share["adapters"]}
    adapters = [(number, _total(share["adapters"].get(number, {}) for share in shares)) for number in numbers]
    return min(adapters, key=lambda each: len(differing_parts(each[1], adapter)), default=("", Counter[str]()))


def has_adapter(fingerprints: Mapping[str, Fingerprint]) -> bool:
    return any(part.startswith(_ADAPTER) for parts in fingerprints.values() for part in parts)


def _total(shares: Iterable[Fingerprint]) -> Counter[str]:
    return sum((Counter[str](share) for share in shares), Counter[str]())


def stored_sums(pieces: Iterable[npt.NDArray[np.uint8]], stored: str, *, scale: float = 1.0) -> dict[str, int]:
    """The sum over pieces of tensors of a safetensors file as engines hold them, by the dtype that they serve.

    `pieces` are their bytes, `stored` is the file's name of their type; engines multiply them by `scale`, in the dtype
    that they serve. Raises KeyError for types that are not summed.
    """
    each = (piece.view(_BITS[stored]) for piece in pieces)
    blocks = (bits[at : at + _BLOCK] for bits in each for at in range(0, len(bits), _BLOCK))
    if _BITS[stored] != "<u2":
        sums = dict.fromkeys(SERVED, 0)
        for block in blocks:
            for served in SERVED:
                mixed = _mix(_scale(served, _as(served, block, stored), scale))
                sums[served] = (sums[served] + int(mixed.sum(dtype=np.uint64))) % MODULUS
        return sums
    counts = np.zeros(1 << 16, np.uint64)
    for block in blocks:
        counts += np.bincount(block, minlength=1 << 16).view(np.uint64)
    return {served: int((counts * _worth(stored, served, scale)).sum(dtype=np.uint64)) for served in SERVED}


@cache
def _worth(stored: str, served: str, scale: float) -> npt.NDArray[np.uint64]:
    """What each number of 16 bits is worth."""
    with np.errstate(invalid="ignore", over="ignore"):
        return _mix(_scale(served, _as(served, np.arange(1 << 16, dtype=np.uint16), stored), scale))


def _as(served: str, bits: Bits, stored: str) -> Bits:
    """The bits of numbers of one type after their conversion to another, rounded to the nearest even."""
    kind = SERVED[served]
    if kind == stored:
        return bits
    return _round(_as_single(bits, stored), kind)


def _scale(served: str, bits: Bits, scale: float) -> Bits:
    """As torch multiplies in place: in single precision, rounded to the type at once."""
    kind = SERVED[served]
    return bits if scale == 1 else _round(_as_single(bits, kind) * np.float32(scale), kind)


def _as_single(bits: Bits, kind: str) -> npt.NDArray[np.float32]:
    if kind == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view({"F16": np.float16, "F32": np.float32, "F64": np.float64}[kind]).astype(np.float32)


def _round(single: npt.NDArray[np.float32], kind: str) -> Bits:
    if kind == "F32":
        return single.view(np.uint32)
    if kind == "F16":
        with np.errstate(over="ignore"):
            return single.astype(np.float16).view(np.uint16)
    exact = single.view(np.uint32)
    return ((exact + 0x7FFF + ((exact >> 16) & 1)) >> 16).astype(np.uint16)


def _mix(bits: Bits) -> npt.NDArray[np.uint64]:
    mixed = bits.astype(np.uint64) * np.uint64(MULTIPLIERS[0])
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS[1:], strict=True):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(multiplier)
    return mixed


#: How many parts a reason names.
_NAMED = 4


class ProbeFindings(NamedTuple):
    """How far an engine's log-probabilities are from what they should be (mean absolute difference, nats).

    `weights`: from those of the probe. `cache`: those with its prefix cache from those without. `parts` are those whose
    weights are not the files', to the bit; None where the engine or the version has no fingerprint.
    """

    weights: float
    cache: float
    allowed: float
    parts: Sequence[str] | None = None

    @property
    def proof(self) -> str:
        """What the weights are proven by; empty if they are not."""
        if self.problem is not None:
            return ""
        return "log-probabilities only" if self.parts is None else "fingerprint"

    @property
    def problem(self) -> str | None:
        """What is wrong, None if nothing is."""
        if self.parts:
            named = ", ".join(map(describe_part, self.parts[:_NAMED]))
            return f"the engine's weights are not the version's: {len(self.parts)} parts differ, {named}"
        if not self.weights <= self.allowed:
            off = f"{self.weights:.2g} nats from the trainer's"
        elif not self.cache <= self.allowed:
            off = f"{self.cache:.2g} nats apart with and without its prefix cache"
        else:
            return None
        return f"the engine's log-probabilities are {off}; allowed: {self.allowed:.2g}"


def mean_distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return sum(abs(one - other) for one, other in zip(ours, theirs, strict=True)) / len(ours)
