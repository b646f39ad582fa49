"""What vLLM's workers are given beside their own methods: they add up the fingerprint of the weights that they hold.

Loaded by --worker-extension-cls into each worker of an engine. It counts what lies in the parameters that the model
computes with, whatever put it there.
"""

import importlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from tuneloop.explorer.engines.proof.fingerprint import MODULUS, MULTIPLIERS, SHIFTS, part_of

#: How vLLM names the class, and the method as routes call it.
EXTENSION = "tuneloop.explorer.engines.proof.vllm_worker.FingerprintWorker"
METHOD = "tuneloop_fingerprint"

#: Elements that are mixed at once: 8 bytes each, several times over.
_BLOCK = 1 << 24


class _NotSummed(Exception):
    """A tensor has a type that is not summed."""


class FingerprintWorker:
    """Methods of each worker, which vLLM calls in all of them."""

    model_runner: Any
    model_config: Any

    def tuneloop_fingerprint(self) -> dict[str, Any]:
        """The `sums` of this worker's share of the weights; those of all workers together are the model's.

        None where the weights are quantised. `dtype` is what the engine serves.
        """
        answer: dict[str, Any] = {"dtype": str(self.model_config.dtype).removeprefix("torch."), "sums": None}
        sums: defaultdict[str, int] = defaultdict(int)
        with suppress(_NotSummed):
            for name, tensor in _own_share(self.model_runner.model, _rank()):
                sums[part_of(name)] = (sums[part_of(name)] + _sum(tensor)) % MODULUS
            answer["sums"] = dict(sums)
        return answer


def _rank() -> int:
    return int(importlib.import_module("vllm.distributed").get_tensor_model_parallel_rank())


def _own_share(model: Any, rank: int) -> Iterator[tuple[str, Any]]:
    """Names and tensors such that each element of the model is one worker's; what is tied is there once."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.numel() and parameter.data_ptr() in seen:
                continue
            seen.add(parameter.data_ptr())
            for tensor in _share_of(module, name, parameter.detach(), rank):
                yield f"{path}.{name}", tensor


def _share_of(module: Any, name: str, tensor: Any, rank: int) -> list[Any]:
    """The tensors of a parameter that only this worker holds, or that this one counts for all that hold them."""
    if getattr(module, "tp_size", 1) == 1 or (name == "bias" and "RowParallel" in type(module).__name__):
        return [tensor] if rank == 0 else []
    replicas = getattr(module, "num_kv_head_replicas", 1)
    if replicas > 1 and rank % replicas:
        return [tensor[: module.num_heads * module.head_size]]
    return [tensor]


def _sum(tensor: Any) -> int:
    torch: Any = importlib.import_module("torch")
    size = tensor.element_size()
    kinds = {2: (torch.int16, 0xFFFF), 4: (torch.int32, 0xFFFFFFFF)}
    if size not in kinds:
        raise _NotSummed(f"{tensor.dtype} is not summed")
    kind, mask = kinds[size]
    flat, total = tensor.reshape(-1).view(kind), 0
    for at in range(0, flat.numel(), _BLOCK):
        total += int(_mix(flat[at : at + _BLOCK].to(torch.int64) & mask).sum())
    return total % MODULUS


def _mix(bits: Any) -> Any:
    mixed = bits * _to_signed(MULTIPLIERS[0])
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS[1:], strict=True):
        mixed ^= (mixed >> shift) & ((1 << (64 - shift)) - 1)
        mixed *= _to_signed(multiplier)
    return mixed


def _to_signed(number: int) -> int:
    """As a torch tensor of int64 multiplies by it: these wrap around as unsigned ones do."""
    return number - MODULUS if number >= MODULUS // 2 else number
