"""The ranks that train together. Of a model whose weights are all trained each has a share (FSDP2, Zhao et al. 2023);
of a frozen base below adapters each has the whole. Each reads a share of every batch.

Rank 0 leads: it alone knows the ledger, and orders what the others do with it. Whatever may fail on one
rank only is done within `agree`, so that all ranks go on, or all raise; one that raises anything else ends, and its
death ends the others.
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

#: A rank that hangs ends the others after so long; one that dies does so at once.
_STUCK = timedelta(minutes=30)
#: Orders are waited for as long as there is no batch, or another process that rank 0 alone waits for.
_QUIET = timedelta(days=3650)

#: Numbers of small tensors that are added up in one call.
_PIECE = 1 << 24


class LoadOrder(msgspec.Struct, frozen=True, tag="load"):
    """Become the learner with the weights in `folder`, None: the base model's, and what `state` holds besides."""

    folder: str | None
    state: str | None

    @property
    def paths(self) -> tuple[Path | None, Path | None]:
        """Both folders."""
        folder, state = (None if each is None else Path(each) for each in (self.folder, self.state))
        return folder, state


class StepOrder(msgspec.Struct, frozen=True, tag="step"):
    """Learn from the samples in micro-batches of `tokens`. `halves`: rank 0 says how many if these do not fit.

    `checkpointing`: activations are made again, since it was found out that they do not fit, or by setting.
    """

    samples: list[Sample]
    version: int | None
    tokens: int
    halves: bool
    checkpointing: bool


class StateOrder(msgspec.Struct, frozen=True, tag="state"):
    """Give rank 0 what you have of the optimisers' state."""


class WeightsOrder(msgspec.Struct, frozen=True, tag="weights"):
    """Give rank 0 what you have of the actor's weights."""


class GatherOrder(msgspec.Struct, frozen=True, tag="gather"):
    """Let rank 0 have the whole of a model, to read something alone: of the actor, or of the reference."""

    reference: bool


class EndOrder(msgspec.Struct, frozen=True, tag="end"):
    """There is nothing more to do."""


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
    """Ranks that read one packed row together (models/ulysses.py): this one the stretch at `place` of `size`."""

    def __init__(self, members: Sequence[int], group: "dist.ProcessGroup", device: torch.device) -> None:
        self.place, self.size = members.index(dist.get_rank()), len(members)
        self._group = group
        # What the first exchange makes NCCL allocate is there before there may be no room.
        self.exchange(torch.zeros(self.size, device=device))

    def exchange(self, sent: Tensor) -> Tensor:
        """Send each member its part of the first dimension; what all sent this one, in their order."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received

    def add_up(self, tensor: Tensor) -> Tensor:
        """The tensor, which becomes the sum of all members'."""
        dist.all_reduce(tensor, group=self._group)
        return tensor


class Ranks:
    """A rank alone: no other follows it, and what it has is the sum of all."""

    rank, size = 0, 1
    #: The ranks that it shares rows with, if any.
    sequence: SequenceGroup | None = None
    #: Whether it has but a share of some network: then all ranks make the same passes in the same order.
    is_sharded = False

    def place(self, network: nn.Module, device: torch.device, *, shard: bool) -> None:
        """Bring a network to the device: with `shard` this rank's share of it."""
        network.to(device)

    @property
    def share(self) -> tuple[int, int]:
        """Which share of a batch it has, and how many shares there are: as many as ranks, or groups that share rows."""
        together = self.sequence.size if self.sequence is not None else 1
        return self.rank // together, self.size // together

    @property
    def reports(self) -> bool:
        """Whether it reports the numbers of its share: of those that share rows one does."""
        return self.sequence is None or self.sequence.place == 0

    def lead(self, order: Order) -> None:
        """Tell the others what to do; rank 0 does it itself besides. What the others return is ignored."""

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Make each tensor, in its place, the sum of all ranks'."""

    def add_up_numbers(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """By name the sum over those ranks that have it, which is the same to the bit on all of them."""
        return dict(numbers)

    @contextmanager
    def agree(self) -> Iterator[None]:
        """Leave the block together: if it raises one of our errors, or finds no memory, on one rank, it does on all."""
        yield

    def decide(self, decide: Callable[[], int]) -> int:
        """What rank 0 decides."""
        return decide()

    def from_rank_0(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, in the place of this one of the same shape."""
        return tensor

    def wait_for_rank_0(self) -> None:
        """Wait, for as long as it takes, until rank 0 has come here too."""


ALONE = Ranks()


class JoinedRanks(Ranks):
    """One of several ranks, once torch.distributed has been initialised. `device` is where its gradients are.

    `together` of them, one after the other, share rows.
    """

    #: Whether what is trained is sharded, where it can be; else each has the whole.
    shards = True

    def __init__(self, device: torch.device, *, together: int = 1) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._orders = dist.new_group(backend="gloo", timeout=_QUIET)
        self._mesh = init_device_mesh(device.type, (self.size,))
        # What the first sum makes NCCL allocate is there before there may be no room.
        dist.all_reduce(torch.zeros(1, device=device))
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
        """The rank that the environment names, once all are there."""
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=os.environ[RENDEZVOUS_VARIABLE],
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=_STUCK,
        )
        return cls(device, together=together)

    def lead(self, order: Order) -> None:
        """See Ranks."""
        if self.rank == 0:
            self._broadcast(_encoder.encode(order))

    def follow(self) -> Order:
        """The next order of rank 0. Raises RankFailed if it has ended without one."""
        try:
            return _decoder.decode(self._broadcast(None))
        except RuntimeError as error:
            raise RankFailed(f"rank 0 has ended: {error}") from None

    def place(self, network: nn.Module, device: torch.device, *, shard: bool) -> None:
        """See Ranks."""
        shard = self.is_sharded = shard and self.shards
        if not shard:
            return super().place(network, device, shard=shard)
        # Gradients are sums, of what each rank has of the whole batch's loss, and not means.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        layers = [each for each in network.modules() if isinstance(each, GradientCheckpointingLayer)]
        for each in (*layers, network):
            unit = fully_shard(each, mesh=self._mesh, mp_policy=policy, reshard_after_forward=True)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(enable=True)
        network.run_gathered = _run  # type: ignore[assignment]
        register_fsdp_forward_method(network, "run_gathered")
        # What is returned is a view, which is never changed in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """See Ranks."""
        for kept in _in_pieces(tensors):
            together = torch.cat([each.flatten() for each in kept]) if len(kept) > 1 else kept[0].flatten()
            dist.all_reduce(together)
            for each, summed in zip(kept, torch.split(together, [each.numel() for each in kept]), strict=True):
                each.copy_(summed.view_as(each))

    def add_up_numbers(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """See Ranks."""
        sums: defaultdict[str, float] = defaultdict(float)
        for encoded in self._gather(msgspec.msgpack.encode(numbers)):
            for name, value in msgspec.msgpack.decode(encoded, type=dict[str, float]).items():
                sums[name] += value
        return dict(sums)

    @contextmanager
    def agree(self) -> Iterator[None]:
        """See Ranks."""
        failed: Exception | None = None
        try:
            yield
        except (torch.OutOfMemoryError, TuneloopError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                # Those that share the row, or the weights, wait for what this one does not send.
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
        """See Ranks."""
        number = torch.tensor([decide() if self.rank == 0 else 0])
        dist.broadcast(number, src=0)
        return int(number)

    def from_rank_0(self, tensor: Tensor) -> Tensor:
        """See Ranks."""
        dist.broadcast(tensor, src=0)
        return tensor

    def wait_for_rank_0(self) -> None:
        """See Ranks."""
        dist.broadcast(torch.zeros(1), src=0, group=self._orders)

    def leave(self) -> None:
        """End what `join` began, without an error of any rank."""
        dist.destroy_process_group()

    def _broadcast(self, sent: bytes | None) -> bytes:
        length = torch.tensor([len(sent or b"")])
        dist.broadcast(length, src=0, group=self._orders)
        data = torch.empty(int(length), dtype=torch.uint8) if sent is None else _tensor(sent)
        dist.broadcast(data, src=0, group=self._orders)
        return data.numpy().tobytes()

    def _gather(self, own: bytes) -> list[bytes]:
        """What each rank says, in their order."""
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

#: Of what ranks may raise together, the worst is raised where they fail differently.
_NO_FAILURE = 0
_KINDS: Mapping[int, type[Exception]] = {1: torch.OutOfMemoryError, 2: NotFinite, 3: RankFailed}


def _kind(failed: Exception | None) -> int:
    if failed is None:
        return _NO_FAILURE
    return next((number for number, kind in _KINDS.items() if isinstance(failed, kind)), 3)


def _in_pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Small ones together, up to so many numbers; a large one alone."""
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
    """What `call` returns, for which a network that is sharded has its embeddings and head whole."""
    return cast(Any, network).run_gathered(call) if isinstance(network, FSDPModule) else call()


@contextmanager
def gathered_on_rank_0(network: nn.Module, *, keep: bool = True) -> Iterator[None]:
    """Within, this rank can call a sharded network alone; all ranks begin together, those that do not `keep` leave."""
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
    """What this rank has of a tensor, which may be sharded: the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather(part: Tensor, like: Tensor) -> Tensor:
    """All ranks' parts of a tensor that is sharded like another one; they ask for it together."""
    if not isinstance(like, DTensor):
        return part
    placed = (like.device_mesh, like.placements)
    part = part.view_as(local_part(like)).to(like.device)
    return DTensor.from_local(part, *placed, run_check=False, shape=like.shape, stride=like.stride()).full_tensor()


def join_parts(part: Tensor, like: Tensor) -> Tensor:
    """The parts of all ranks, as many numbers of each, one behind the other, if another tensor is sharded."""
    if not isinstance(like, DTensor):
        return part
    placed = (like.device_mesh, like.placements)
    return DTensor.from_local(part.to(like.device), *placed, run_check=False).full_tensor()


def first_number(like: Tensor) -> int:
    """The place in the whole, row after row, of the first number that this rank has of a tensor; 0 if it has none."""
    if not isinstance(like, DTensor):
        return 0
    rows = torch.arange(like.shape[0])
    mine = distribute_tensor(rows, like.device_mesh, like.placements, src_data_rank=None).to_local()
    return int(mine[0]) * (like.numel() // like.shape[0]) if len(mine) else 0


def own_part(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, which is to be sharded like another one."""
    tensor = tensor.reshape(like.shape)
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None).to_local()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
