"""Joins the ranks that train together. Fully trained models are sharded (FSDP2, Zhao et al. 2023); a frozen base below
adapters is whole on each rank. Each rank reads a share of every batch.

Only rank 0 knows the ledger, and orders the others. Whatever may fail on one rank runs within `agree`, so that all
ranks continue, or all raise; a rank that raises anything else exits, which ends the others.
"""

import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, cast, get_origin

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from tuneloop.shared.errors import EnvironmentRefused, NotFinite, RankFailed, RankOutOfMemory, TuneloopError
from tuneloop.shared.experience import Sample
from tuneloop.trainer.rendezvous import RENDEZVOUS_VARIABLE

_STUCK = timedelta(minutes=30)  # timeout of a hanging rank; a dead one ends the others at once
_QUIET = timedelta(days=3650)  # timeout of orders, which may have to wait for a batch or for another process
_PIECE = 1 << 24  # numbers of small tensors that are reduced in one call


class LoadOrder(msgspec.Struct, frozen=True, tag="load"):
    """Load the learner with the weights in `folder` (None: the base model's) and the optimisers in `state`."""

    folder: str | None
    state: str | None

    @property
    def paths(self) -> tuple[Path | None, Path | None]:
        folder, state = (None if each is None else Path(each) for each in (self.folder, self.state))
        return folder, state


class StepOrder(msgspec.Struct, frozen=True, tag="step"):
    """Train on samples; `halves`: rank 0 may reduce `tokens` per pass; `checkpointing`: recompute activations."""

    samples: list[Sample]
    version: int | None
    tokens: int
    halves: bool
    checkpointing: bool


class StateOrder(msgspec.Struct, frozen=True, tag="state"):
    """Send rank 0 your part of the optimisers' state."""


class WeightsOrder(msgspec.Struct, frozen=True, tag="weights"):
    """Send rank 0 your part of the actor's weights."""


class GatherOrder(msgspec.Struct, frozen=True, tag="gather"):
    """Let rank 0 gather the actor, or the reference, to use it alone."""

    reference: bool


class EndOrder(msgspec.Struct, frozen=True, tag="end"):
    pass


Order = LoadOrder | StepOrder | StateOrder | WeightsOrder | GatherOrder | EndOrder


def _encode_array(what: Any) -> Any:
    if isinstance(what, np.ndarray):
        return [what.dtype.str, what.shape, what.tobytes()]
    raise NotImplementedError(type(what))


def _decode_array(kind: type, encoded: Any) -> Any:
    if (get_origin(kind) or kind) is np.ndarray:
        dtype, shape, data = encoded
        return np.frombuffer(bytearray(cast(bytes, data)), dtype).reshape(shape)
    raise NotImplementedError(kind)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order, dec_hook=_decode_array)


class SequenceGroup:
    """Ranks that read one packed row together (models/ulysses.py): this one the part `place` of `size`."""

    def __init__(self, members: Sequence[int], group: "dist.ProcessGroup", device: torch.device) -> None:
        self.place, self.size = members.index(dist.get_rank()), len(members)
        self._group = group
        self.exchange(torch.zeros(self.size, device=device))  # makes NCCL allocate its memory now, while there is some

    def exchange(self, sent: Tensor) -> Tensor:
        """Send each member its part of the first dimension; the parts received, in rank order."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received

    def add_up(self, tensor: Tensor) -> Tensor:
        """The tensor, summed in place over the members."""
        dist.all_reduce(tensor, group=self._group)
        return tensor


class Ranks:
    """A single rank: no followers, and its values are the sums."""

    rank, size = 0, 1
    sequence: SequenceGroup | None = None  # the ranks that share rows with it, if any
    is_sharded = False  # whether a network is sharded: then all ranks make the same passes in the same order

    def place(self, network: nn.Module, device: torch.device, *, shard: bool) -> None:
        """Move a network, or with `shard` this rank's share of it, to the device."""
        network.to(device)

    @property
    def share(self) -> tuple[int, int]:
        """The number of its share of a batch, and the number of shares: ranks, or groups that share rows."""
        together = self.sequence.size if self.sequence is not None else 1
        return self.rank // together, self.size // together

    @property
    def reports(self) -> bool:
        """Whether it reports the figures of its share: one rank per group that shares rows."""
        return self.sequence is None or self.sequence.place == 0

    def lead(self, order: Order) -> None:
        """Order the others; rank 0 does the same itself. Their results are dropped."""

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Sum each tensor in place over all ranks."""

    def add_up_numbers(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Sums by name over the ranks that have it, bitwise equal on all."""
        return dict(numbers)

    @contextmanager
    def agree(self) -> Iterator[None]:
        """If the block raises one of our errors or runs out of memory on one rank, raise on all."""
        yield

    def decide(self, decide: Callable[[], int]) -> int:
        """The result on rank 0."""
        return decide()

    def from_rank_0(self, tensor: Tensor) -> Tensor:
        return tensor

    def wait_for_rank_0(self) -> None:
        """Wait without a timeout until rank 0 gets here."""


ALONE = Ranks()


class JoinedRanks(Ranks):
    """One of several ranks, after torch.distributed is initialised; `together` consecutive ranks share rows."""

    shards = True  # whether trained models are sharded if possible

    def __init__(self, device: torch.device, *, together: int = 1) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._orders = dist.new_group(backend="gloo", timeout=_QUIET)
        self._mesh = init_device_mesh(device.type, (self.size,))
        dist.all_reduce(torch.zeros(1, device=device))  # makes NCCL allocate its memory now, while there is some
        if self.size % together:
            raise EnvironmentRefused(
                f"trainer.ulysses_sequence_parallel_size: {together} workers share each row, and there are {self.size}"
            )
        for first in range(0, self.size, together) if together > 1 else ():
            members = range(first, first + together)
            group = dist.new_group(list(members))
            if self.rank in members:
                self.sequence = SequenceGroup(members, group, device)

    @classmethod
    def join(cls, device: torch.device, *, together: int = 1) -> Self:
        """The rank that the environment names, once all have joined."""
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=os.environ[RENDEZVOUS_VARIABLE],
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=_STUCK,
        )
        return cls(device, together=together)

    def lead(self, order: Order) -> None:
        if self.rank == 0:
            self._broadcast(_encoder.encode(order))

    def follow(self) -> Order:
        """The next order of rank 0. Raises RankFailed if it exited."""
        try:
            return _decoder.decode(self._broadcast(None))
        except RuntimeError as error:
            raise RankFailed(f"rank 0 has ended: {error}") from None

    def place(self, network: nn.Module, device: torch.device, *, shard: bool) -> None:
        shard = self.is_sharded = shard and self.shards
        if not shard:
            return super().place(network, device, shard=shard)
        # Gradients are sums, not means: each rank has its part of the whole batch's loss.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        layers = [each for each in network.modules() if isinstance(each, GradientCheckpointingLayer)]
        for each in (*layers, network):
            unit = fully_shard(each, mesh=self._mesh, mp_policy=policy, reshard_after_forward=True)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(enable=True)
        network.run_gathered = _run  # type: ignore[assignment]
        register_fsdp_forward_method(network, "run_gathered")
        # The returned view is never changed in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        for kept in _in_pieces(tensors):
            together = torch.cat([each.flatten() for each in kept]) if len(kept) > 1 else kept[0].flatten()
            dist.all_reduce(together)
            for each, summed in zip(kept, torch.split(together, [each.numel() for each in kept]), strict=True):
                each.copy_(summed.view_as(each))

    def add_up_numbers(self, numbers: Mapping[str, float]) -> dict[str, float]:
        sums: defaultdict[str, float] = defaultdict(float)
        for encoded in self._gather(msgspec.msgpack.encode(numbers)):
            for name, value in msgspec.msgpack.decode(encoded, type=dict[str, float]).items():
                sums[name] += value
        return dict(sums)

    @contextmanager
    def agree(self) -> Iterator[None]:
        failed: Exception | None = None
        try:
            yield
        except (torch.OutOfMemoryError, TuneloopError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                # Ranks that share the row or the weights wait for this one.
                if self.sequence is not None:
                    raise EnvironmentRefused(_TOO_LONG.format(error)) from None
                if self.is_sharded:
                    raise RankOutOfMemory(str(error)) from None
            failed = error
        failures = [
            msgspec.msgpack.decode(each, type=tuple[int, str])
            for each in self._gather(msgspec.msgpack.encode((_kind(failed), str(failed or ""))))
        ]
        worst, reason = max(failures, key=lambda each: each[0])
        if worst == _NO_FAILURE:
            return
        if failed is not None and _kind(failed) == worst:
            raise failed
        raise _KINDS[worst](f"on another rank: {reason}")

    def decide(self, decide: Callable[[], int]) -> int:
        number = torch.tensor([decide() if self.rank == 0 else 0])
        dist.broadcast(number, src=0)
        return int(number)

    def from_rank_0(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=0)
        return tensor

    def wait_for_rank_0(self) -> None:
        dist.broadcast(torch.zeros(1), src=0, group=self._orders)

    def leave(self) -> None:
        dist.destroy_process_group()

    def _broadcast(self, sent: bytes | None) -> bytes:
        length = torch.tensor([len(sent or b"")])
        dist.broadcast(length, src=0, group=self._orders)
        data = torch.empty(int(length), dtype=torch.uint8) if sent is None else _tensor(sent)
        dist.broadcast(data, src=0, group=self._orders)
        return data.numpy().tobytes()

    def _gather(self, own: bytes) -> list[bytes]:
        """The bytes of each rank, in order."""
        lengths = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(own)]))
        longest = max(int(each) for each in lengths)
        received = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(received, _tensor(own.ljust(longest, b"\0")))
        return [each.numpy().tobytes()[: int(length)] for each, length in zip(received, lengths, strict=True)]


_TOO_LONG = (
    "trainer.micro_batch_tokens: memory ran out within a row that several workers share, where it cannot be cut smaller"
    " ({}). Lower it, or raise trainer.ulysses_sequence_parallel_size"
)

#: Errors that ranks raise together; if they differ, the one with the highest number.
_NO_FAILURE = 0
_KINDS: Mapping[int, type[Exception]] = {1: torch.OutOfMemoryError, 2: NotFinite, 3: RankFailed}


def _kind(failed: Exception | None) -> int:
    if failed is None:
        return _NO_FAILURE
    return next((number for number, kind in _KINDS.items() if isinstance(failed, kind)), 3)


def _in_pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of small tensors up to a size; large ones alone."""
    together: list[Tensor] = []
    numbers = 0
    for each in tensors:
        numbers += each.numel()
        if together and numbers > _PIECE:
            yield together
            together, numbers = [], each.numel()
        together.append(each)
    if together:
        yield together


def _run(call: Callable[[], Any]) -> Any:
    return call()


def run_gathered(network: nn.Module, call: Callable[[], Any]) -> Any:
    """Run `call` while a sharded network's embeddings and head are whole."""
    return cast(Any, network).run_gathered(call) if isinstance(network, FSDPModule) else call()


@contextmanager
def gathered_on_rank_0(network: nn.Module, *, keep: bool = True) -> Iterator[None]:
    """In the block, this rank may call a sharded network alone; all ranks enter together; without `keep` they leave."""
    units = [each for each in network.modules() if isinstance(each, FSDPModule)]
    for unit in units:
        unit.unshard()
        if not keep:
            unit.reshard()
    for unit in units if keep else ():
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units if keep else ():
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather(part: Tensor, like: Tensor) -> Tensor:
    """All ranks' parts of a tensor sharded like another one; a collective call."""
    if not isinstance(like, DTensor):
        return part
    placed = (like.device_mesh, like.placements)
    part = part.view_as(local_part(like)).to(like.device)
    return DTensor.from_local(part, *placed, run_check=False, shape=like.shape, stride=like.stride()).full_tensor()


def join_parts(part: Tensor, like: Tensor) -> Tensor:
    """The ranks' equal parts, concatenated, if another tensor is sharded."""
    if not isinstance(like, DTensor):
        return part
    placed = (like.device_mesh, like.placements)
    return DTensor.from_local(part.to(like.device), *placed, run_check=False).full_tensor()


def first_number(like: Tensor) -> int:
    """The flat offset of this rank's part in the whole; 0 if it has none."""
    if not isinstance(like, DTensor):
        return 0
    rows = torch.arange(like.shape[0])
    mine = distribute_tensor(rows, like.device_mesh, like.placements, src_data_rank=None).to_local()
    return int(mine[0]) * (like.numel() // like.shape[0]) if len(mine) else 0


def own_part(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, sharded like another one."""
    tensor = tensor.reshape(like.shape)
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None).to_local()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
