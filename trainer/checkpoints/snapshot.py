"""Saves and restores a learner exactly, as safetensors and JSON.

    actor/            a Hugging Face folder: the weights to be served, and the base model's tokenizer, templates, config
                      (with an adapter: only the adapter, as trainer/models/lora.py writes it)
    critic/           the same for the critic's body, and its value head, for methods with a critic
    trainer_state/
      actor.safetensors, critic.safetensors    AdamW's moments, and float32 master weights of models in smaller types
      random.safetensors                       the state of the generator that shuffles mini-batches
      state.json                               counters, and the algorithm's moments of rewards

The reference is always the base model. The critic and the optimisers' files are written last, or not at all, and
deleted from older versions; a resumption from such a version takes them from an older one, or restarts them.

Written data stays in memory until an fsync, and an fsync on a journaling file system waits for all earlier writes. At
memory speed, a checkpoint would block the requests' fsyncs for seconds. So files are synced piece by piece, several at
once, each with a thread that hashes the pieces. Critic and optimisers wait while a version is written (`DiskPriority`).
"""

import hashlib
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import msgspec
import structlog
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers import modeling_utils as _modeling_utils

from tuneloop.shared.checkpoints import (
    ACTOR,
    ADAPTER_CONFIG,
    COUNTERS,
    CRITIC,
    PROBE_LENGTH,
    PROBE_ROOM,
    RANDOM,
    TRAINER_STATE,
    Probe,
    is_marked_weights_only,
    sha256_of,
)
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.algorithms import ALGORITHMS
from tuneloop.trainer.algorithms.terms import Moments
from tuneloop.trainer.batches.batch import all_but_first
from tuneloop.trainer.batches.tokenizer import tokenizer_of
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.models.model import Actor, Critic
from tuneloop.trainer.models.optimizer import Room
from tuneloop.trainer.models.ulysses import require_divisible
from tuneloop.trainer.parallel import ALONE, LoadOrder, Ranks, StateOrder, WeightsOrder, gather, local_part
from tuneloop.trainer.transfer import bring_back

PIECE = 16 << 20  # bytes written between two syncs: a thirtieth of a second at 500 MB/s
_WRITERS = 4  # files written at once; each has one more thread for its hash
_PATIENCE_S = 1.0  # longest wait of a piece for more urgent ones

_ALIGNMENT = 8

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class DiskPriority:
    """Lets pieces of files wait, up to `_PATIENCE_S` each, while something more urgent is written."""

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """Writes in the block go first; one block at a time."""
        self._free.clear()
        try:
            yield
        finally:
            self._free.set()

    def wait(self) -> None:
        """Call before a piece that is not urgent."""
        self._free.wait(_PATIENCE_S)


class TensorFiles:
    """Writes safetensors files in threads, by `write` or by save_pretrained within `saving`.

    The tensors must not change until `digests` returns or the block ends. With a `priority` the files are not urgent.
    """

    def __init__(self, priority: DiskPriority | None = None) -> None:
        self._priority = priority
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="tensors")
        self._written: dict[Path, Future[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def write(
        self, tensors: Mapping[str, Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
    ) -> None:
        work = self._pool.submit(write_tensors, tensors, path, metadata, priority=self._priority)
        self._written[Path(path)] = work

    @contextmanager
    def saving(self) -> Iterator[None]:
        _here.files = self
        try:
            yield
        finally:
            _here.files = None

    def digests(self) -> dict[Path, str]:
        """The sha256 of each file, once all are written. Raises OSError or SafetensorError."""
        return {path: each.result() for path, each in self._written.items()}


def write_tensors(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    priority: DiskPriority | None = None,
) -> str:
    """Write a safetensors file with at most PIECE unsynced bytes; its sha256. Raises OSError."""
    if any(each.dtype not in _TYPES for each in tensors.values()):
        save_file(dict(tensors), path, None if metadata is None else dict(metadata))
        return sha256_of(Path(path))
    with Path(path).open("wb", buffering=0) as file, ThreadPoolExecutor(1, thread_name_prefix="sha256") as hasher:
        waiting, digest = 0, hashlib.sha256()
        hashed: Future[None] | None = None
        for piece in _pieces(tensors, metadata):
            if priority is not None and not waiting:
                priority.wait()
            if hashed is not None:
                hashed.result()
            hashed = hasher.submit(digest.update, piece)
            rest = memoryview(piece)
            while rest:
                rest = rest[file.write(rest) :]
            waiting += len(piece)
            if waiting >= PIECE:
                os.fdatasync(file.fileno())
                waiting = 0
        os.fdatasync(file.fileno())
    return digest.hexdigest()


def _pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[bytes | memoryview]:
    # Widest first, which aligns each tensor to its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    yield _header(ordered, metadata)
    for _, tensor in ordered:
        flat = tensor.detach().reshape(-1)
        for part in torch.split(flat, PIECE // flat.element_size()):
            yield part.cpu().contiguous().view(torch.uint8).numpy().data


def _header(ordered: list[tuple[str, Tensor]], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in ordered:
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


_here = threading.local()
_transformers: Any = _modeling_utils
_save_file = _transformers.safe_save_file


def _write(tensors: Mapping[str, Tensor], path: str, metadata: Mapping[str, str] | None = None) -> None:
    """Replaces the function in save_pretrained of transformers 5.5 to 5.19, which has no option for a writer."""
    files: TensorFiles | None = getattr(_here, "files", None)
    if files is None:
        _save_file(tensors, path, metadata=metadata)
    else:
        files.write(tensors, path, metadata)


_transformers.safe_save_file = _write


_log = structlog.get_logger()

_PROBE_SEED = 1729
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack"}


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    steps: int
    actor_updates: int
    critic_updates: int = 0
    baselines: dict[str, Moments] = {}


class CapturedWeights(NamedTuple):
    """The weights served after `step`, and the counters to resume with."""

    step: int
    actor: Actor
    tensors: Mapping[str, Tensor]
    generator: Tensor
    counters: bytes
    size: int


class CapturedState(NamedTuple):
    """The rest of an exact resumption: the tensors of optimisers and critic."""

    optimizers: Mapping[str, Mapping[str, Tensor]]
    critic: Critic | None
    critic_tensors: Mapping[str, Tensor]


def load(settings: Settings, folder: Path | None, ranks: Ranks = ALONE) -> Learner:
    """The learner saved in `folder`, or a new one of the base model. The files must have been verified."""
    return resume(settings, folder, None if folder is None or is_marked_weights_only(folder) else folder, ranks)


def resume(
    settings: Settings,
    folder: Path | None,
    state: Path | None,
    ranks: Ranks = ALONE,
    *,
    begins: bool = False,
    network: PreTrainedModel | None = None,
) -> Learner:
    """The learner with the weights of `folder`, and critic and optimisers of `state`, the same or an older version.

    Without `state` these restart, and if it `begins` with the weights, all else too. `network` is a loaded base
    model for an adapter. Rank 0 makes the others load the same. The files must have been verified. Raises
    EnvironmentRefused for settings that do not fit.
    """
    ranks.lead(LoadOrder(None if folder is None else str(folder), None if state is None else str(state)))
    base = settings.model.model_path
    page = ALGORITHMS[settings.algorithm.algorithm_type]
    actor = actor_in(settings, folder / ACTOR if folder else base, ranks, network)
    reference = critic = kept_critic = None
    if page.critic_loss is not None:
        if state and (state / CRITIC).exists():  # another method may have trained the version without one
            kept_critic = state / CRITIC
        critic = actor.critic(settings, kept_critic or base, ranks)
    if page.asks(settings.algorithm).reference:
        reference = actor.reference(settings, ranks)
    if ranks.sequence is not None:
        for network in (actor.network, *([critic.body] if critic else ())):
            require_divisible(network, ranks.sequence.size)
    learner = Learner(settings, actor=actor, critic=critic, reference=reference, ranks=ranks)
    if folder and not begins:
        counters = _counters(folder)
        kept = _counters(state) if state else Counters(steps=counters.steps, actor_updates=0)
        learner.steps = counters.steps
        if not state:
            _log.warning("optimizer_begins_anew", folder=folder.name, critic_too=learner.critic is not None)
        learner.baselines = counters.baselines
        learner.generator.set_state(load_file(folder / TRAINER_STATE / RANDOM)["generator"])
        # The actor's weights have had all updates, even if its moments are older.
        updates = {"actor": counters.actor_updates, "critic": kept.critic_updates}
        kept_states = {"actor": state, "critic": state if kept_critic else None}
        for name, optimizer in learner.optimizers.items():
            if (there := kept_states[name]) and (file := there / TRAINER_STATE / f"{name}.safetensors").exists():
                masters = name != "actor" or state == folder  # masters older than the weights would replace them
                optimizer.restore(updates=updates[name], kept=KeptTensors(file), masters=masters)
    return learner


def save(learner: Learner, folder: Path, *, base: Path) -> None:
    """Write the whole learner into the empty `folder`; tokenizer and configuration are copied from `base`."""
    save_weights(weights_of(learner), folder, base=base)
    save_state(state_of(learner), folder, base=base)


class KeptTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, read on access."""

    def __init__(self, file: Path) -> None:
        self._file: Any = safe_open(file, "pt")
        self._names = frozenset(self._file.keys())  # type: ignore[no-untyped-call]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return cast(Tensor, self._file.get_tensor(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def weights_of(learner: Learner) -> CapturedWeights:
    """The learner's own tensors, which its next step changes; a copy if ranks share them."""
    if learner.ranks.is_sharded:
        return copy_weights(learner, allocate_on_cpu)
    return _describe(learner, learner.actor.tensors())


def _describe(learner: Learner, tensors: Mapping[str, Tensor]) -> CapturedWeights:
    updates = {f"{name}_updates": optimizer.updates for name, optimizer in learner.optimizers.items()}
    counters = Counters(steps=learner.steps, **updates, baselines=dict(learner.baselines))
    return CapturedWeights(
        step=learner.steps,
        actor=learner.actor,
        tensors=tensors,
        generator=learner.generator.get_state(),
        counters=msgspec.json.encode(counters),
        size=size_of_weights(learner),
    )


def copy_weights(learner: Learner, room: Room | None) -> CapturedWeights:
    """A copy in memory from `room`, perhaps still in progress; all ranks call it together."""
    if learner.ranks.is_sharded:
        learner.ranks.lead(WeightsOrder())
    return _describe(learner, _copy_tensors(learner.actor.tensors(), room))


def save_weights(weights: CapturedWeights, folder: Path, *, base: Path) -> dict[Path, str]:
    """Write the served weights and the counters into the empty `folder`; sha256 of the large files."""
    actor, state = folder / ACTOR, folder / TRAINER_STATE
    with TensorFiles() as files:
        with files.saving():
            weights.actor.save(actor, weights.tensors)
        if not (actor / ADAPTER_CONFIG).exists():
            # Copy all but the weights, so that each tool that loads the base model loads this folder. The base model's
            # config.json replaces transformers', whose newest format some engines cannot read.
            dtype = json.loads((actor / "config.json").read_text())["dtype"]
            for source in base.iterdir():
                if (
                    source.is_file()
                    and source.suffix not in _WEIGHTS
                    and not source.name.endswith((".index.json", ".lock"))
                ):
                    shutil.copyfile(source, actor / source.name)
            if (base / "additional_chat_templates").is_dir():
                shutil.copytree(base / "additional_chat_templates", actor / "additional_chat_templates")
            config = json.loads((base / "config.json").read_text())
            config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
            (actor / "config.json").write_text(json.dumps(config, indent=2))
        state.mkdir()
        files.write({"generator": weights.generator}, state / RANDOM)
        (state / COUNTERS).write_bytes(weights.counters)
        return files.digests()


def state_of(learner: Learner) -> CapturedState:
    """The learner's own tensors, which its next step changes; a copy if there are several ranks."""
    if learner.ranks.size > 1:
        return copy_state(learner, allocate_on_cpu)
    optimizers = {}
    for name, optimizer in learner.optimizers.items():
        optimizers[name] = {key: tensor.contiguous() for key, tensor in optimizer.state()}
    return CapturedState(optimizers, learner.critic, learner.critic.tensors() if learner.critic else {})


def allocate_on_cpu(_: str, like: Tensor) -> Tensor:
    return torch.empty_like(like, device="cpu")


def copy_state(learner: Learner, room: Room | None) -> CapturedState:
    """A copy of all ranks' state, as in `copy_weights`."""
    learner.ranks.lead(StateOrder())
    optimizers = {
        name: _without_none({key: _copy(f"{name}/{key}", each, room) for key, each in optimizer.state()})
        for name, optimizer in learner.optimizers.items()
    }
    critic = learner.critic.tensors() if learner.critic else {}
    return CapturedState(optimizers, learner.critic, _copy_tensors(critic, room))


def _copy_tensors(tensors: Mapping[str, Tensor], room: Room | None) -> dict[str, Tensor]:
    """Tied weights are one tensor with two names, and stay so."""
    names: dict[tuple[int | str, torch.Size], str] = {}
    copied: dict[str, Tensor | None] = {}
    for name, tensor in tensors.items():
        here = local_part(tensor)
        first = names.setdefault((here.data_ptr() if here.numel() else name, tensor.shape), name)
        copied[name] = _copy(name, tensor, room) if first == name else copied[first]
    return _without_none(copied)


def _without_none(copied: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: each for name, each in copied.items() if each is not None}


@torch.no_grad()
def _copy(name: str, tensor: Tensor, room: Room | None) -> Tensor | None:
    found = gather(local_part(tensor), tensor)
    return None if room is None else room(name, found).copy_(found, non_blocking=True)


def save_state(
    state: CapturedState, folder: Path, *, base: Path, priority: DiskPriority | None = None
) -> dict[Path, str]:
    """Write critic and optimisers into `folder` after urgent files; sha256 of the large files."""
    critic, optimizers = folder / CRITIC, folder / TRAINER_STATE
    with TensorFiles(priority) as files:
        optimizers.mkdir(exist_ok=True)
        for name, tensors in state.optimizers.items():
            files.write(tensors, optimizers / f"{name}.safetensors")
        if state.critic is not None:
            with files.saving():
                state.critic.save(critic, state.critic_tensors)
            for code in base.glob("*.py"):
                shutil.copyfile(code, critic / code.name)
        return files.digests()


def size_of_weights(learner: Learner) -> int:
    """Bytes that `save_weights` writes, without the tokenizer."""
    return sum(each.numel() * each.itemsize for each in _learnt_parameters(learner.actor.network))


def size_of_state(learner: Learner) -> int:
    """Bytes that `save_state` writes, also before the first update."""
    models: dict[str, nn.Module] = {"actor": learner.actor.network} | (
        {"critic": learner.critic} if learner.critic else {}
    )
    found = 0.0
    for name, model in models.items():
        moments, saved = learner.optimizers[name].moment_bytes, name == "critic"
        for each in _learnt_parameters(model):
            # A float32 master too, if the parameter is smaller.
            found += each.numel() * (each.itemsize * saved + moments + (4 if each.itemsize < 4 else 0))
    return math.ceil(found)


def _learnt_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [each for each in module.parameters() if each.requires_grad]


def probe(learner: Learner, settings: Settings) -> Callable[[], Probe]:
    """The actor's log-probabilities of fixed ordinary tokens, on call. Raises EnvironmentRefused."""
    longest = settings.model.max_model_len
    length = PROBE_LENGTH if longest is None else max(2, min(PROBE_LENGTH, longest - PROBE_ROOM))
    chosen = _probe_ids(tokenizer_of(settings), learner.actor.vocabulary, length)
    if not chosen:
        base = settings.model.model_path
        raise EnvironmentRefused(f"model.model_path: {base} has no tokenizer; put tokenizer.json beside the weights")
    tolerance = _TOLERANCE[settings.trainer_dtype]
    with learner.actor.as_served(), learner.reading_alone(learner.actor):
        measured = bring_back(learner.actor.logprobs(all_but_first(chosen))[0])
    return lambda: Probe(prompt_ids=chosen, logprobs=tuple(measured().tolist()), tolerance=tolerance)


def actor_in(settings: Settings, folder: Path, ranks: Ranks = ALONE, network: PreTrainedModel | None = None) -> Actor:
    """The actor in a version's or the base model's folder; `network` is a loaded base model for an adapter."""
    base, rank = settings.model.model_path, settings.model.lora.rank
    if folder != base and (folder / ADAPTER_CONFIG).exists() != bool(rank):
        there = "all weights, which no adapter can start from" if rank else "only an adapter"
        raise EnvironmentRefused(
            f"model.lora.rank: is {rank}, but the newest version, {folder}, holds {there}; restore it, or start "
            "another experiment under another name"
        )
    if not rank:
        return Actor.load(settings, folder, ranks)
    from tuneloop.trainer.models.lora import AdaptedActor  # importing peft takes seconds

    return AdaptedActor.load(settings, folder, ranks, network)


@cache
def _probe_ids(words: PreTrainedTokenizerBase, vocabulary: int, length: int) -> tuple[int, ...]:
    """So many ordinary tokens, always the same; empty if there are none."""
    special = {*words.all_special_ids, *words.added_tokens_decoder}
    ordinary = [token for token in range(min(vocabulary, len(words))) if token not in special]
    generator = torch.Generator().manual_seed(_PROBE_SEED)
    chosen = torch.randint(len(ordinary), (length,), generator=generator).tolist() if ordinary else []
    return tuple(ordinary[place] for place in chosen)


def _counters(folder: Path) -> Counters:
    return msgspec.json.decode((folder / TRAINER_STATE / COUNTERS).read_bytes(), type=Counters)
