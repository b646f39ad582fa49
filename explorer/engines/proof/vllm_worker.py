"""What vLLM's workers are given: a fingerprint of the parameters that they compute with, and an id."""

import importlib
import logging
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from tuneloop.explorer.engines.proof.fingerprint import (
    MODULUS,
    MULTIPLIERS,
    SHIFTS,
    adapter_part_of,
    part_of,
)

log = logging.getLogger(__name__)

_Sums = TypeVar("_Sums")

#: How vLLM names the class, and the method as routes call it.
EXTENSION = "tuneloop.explorer.engines.proof.vllm_worker.FingerprintWorker"
METHOD = "tuneloop_fingerprint"
INSTANCE_ID = "tuneloop_instance_id"

#: Elements that are mixed at once: 8 bytes each, several times over.
_BLOCK = 1 << 24


class _NotSummed(Exception):
    """A tensor has a type that is not summed."""


class FingerprintWorker:
    """Methods of each worker, which vLLM calls in all of them."""

    model_runner: Any
    model_config: Any
    _tuneloop_instance_id = ""

    def tuneloop_fingerprint(self, *, base: bool = True, but: Sequence[str] = ()) -> dict[str, Any]:
        """The `sums` of this worker's share of the weights; those of all workers together are the model's.

        Without the `base`, which takes longer than to load an adapter, there are those of adapters alone.
        `adapters` are those of each adapter that is ready to answer, `but` some, by vLLM's number of it. None where the
        weights are quantised, or adapters cut into shares of another kind. `dtype` is what the engine serves.
        """
        rank, runner, dtype = _rank(), self.model_runner, self.model_config.dtype
        return {
            "dtype": str(dtype).removeprefix("torch."),
            "sums": _unless_unknown(
                lambda: _add_up((part_of(name), tensor) for name, tensor in _own_share(runner.model, rank) if base)
            ),
            "adapters": _unless_unknown(lambda: _adapters(getattr(runner, "lora_manager", None), rank, dtype, but)),
        }

    def tuneloop_instance_id(self) -> str:
        """An id of this worker that all API servers get, and that no other start has."""
        self._tuneloop_instance_id = self._tuneloop_instance_id or uuid.uuid4().hex
        return self._tuneloop_instance_id


def _unless_unknown(add_up: Callable[[], _Sums]) -> _Sums | None:
    """None where this vLLM holds its weights in a way that is not known here: an error would end the engine."""
    try:
        return add_up()
    except _NotSummed:
        return None
    except Exception:
        log.exception("the weights that are held here cannot be summed")
        return None


def _add_up(tensors: Iterable[tuple[str, Any]]) -> dict[str, int]:
    sums: defaultdict[str, list[Any]] = defaultdict(list)
    for part, tensor in tensors:
        sums[part] += _mixed_sums(tensor)
    # Only now, for a GPU has begun all of them by then.
    return {part: sum(map(int, each)) % MODULUS for part, each in sums.items()}


def _adapters(of_worker: Any, rank: int, dtype: Any, but: Sequence[str] = ()) -> dict[str, dict[str, int]]:
    if of_worker is None:
        return {}
    manager = of_worker._adapter_manager
    if manager.lora_config.fully_sharded_loras or manager.lora_config.lora_dtype != dtype:
        raise _NotSummed("not in the shares or the type that are known")
    return {
        str(number): _add_up(
            (adapter_part_of(f"{name}."), tensor)
            for name, module in manager.modules.items()
            for tensor in _in_one(_share_of_adapter(module, slot, rank))
        )
        for slot, number in enumerate(manager.lora_index_to_id)
        if number is not None and str(number) not in but
    }


def _in_one(tensors: list[Any]) -> list[Any]:
    """In one piece, or none: hundreds of small ones would keep a GPU waiting for the next."""
    torch: Any = importlib.import_module("torch")
    return [torch.cat([each.reshape(-1) for each in tensors])] if tensors else []


def _share_of_adapter(module: Any, slot: int, rank: int) -> list[Any]:
    """The tensors of what a layer's adapter adds that only this worker holds, or that this one counts for all."""
    base = module.base_layer
    down, up = (
        [stack[slot] for stack in (stacks if isinstance(stacks, tuple | list) else (stacks,))]
        for stacks in (module.lora_a_stacked, module.lora_b_stacked)
    )
    if getattr(base, "tp_size", 1) == 1:
        return [*down, *up] if rank == 0 else []
    if "RowParallel" in type(base).__name__:
        return [*down, *(up if rank == 0 else [])]
    replicas = getattr(base, "num_kv_head_replicas", 1)
    if replicas > 1 and rank % replicas:
        up = up[:1] if len(up) > 1 else [each[..., : base.num_heads * base.head_size, :] for each in up]
    return [*(down if rank == 0 else []), *up]


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


def _mixed_sums(tensor: Any) -> list[Any]:
    """The sums of the tensor's blocks, where it is: int64, which wraps around."""
    torch: Any = importlib.import_module("torch")
    size = tensor.element_size()
    kinds = {2: (torch.int16, 0xFFFF), 4: (torch.int32, 0xFFFFFFFF)}
    if size not in kinds:
        raise _NotSummed(f"{tensor.dtype} is not summed")
    kind, mask = kinds[size]
    flat, sums = tensor.reshape(-1).view(kind), []
    for at in range(0, flat.numel(), _BLOCK):
        mixed = (flat[at : at + _BLOCK].to(torch.int64) & mask) * _to_signed(MULTIPLIERS[0])
        for shift, multiplier in zip(SHIFTS, MULTIPLIERS[1:], strict=True):
            mixed ^= (mixed >> shift) & ((1 << (64 - shift)) - 1)
            mixed *= _to_signed(multiplier)
        sums.append(mixed.sum())
    return sums


def _to_signed(number: int) -> int:
    """As a torch tensor of int64 multiplies by it: these wrap around as unsigned ones do."""
    return number - MODULUS if number >= MODULUS // 2 else number
