"""What an experiment takes: memory of each process, disk of each version, seconds of each publication."""

import math
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tuneloop.shared.capacity.model_shape import ModelShape
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.hardware import trainer_on_gpu
from tuneloop.shared.settings.settings import Settings

GIB = 1 << 30

#: What processes take before there is a model, in bytes of main memory: Python with torch and transformers; vLLM's CPU
#: build; the control process and one worker of the explorer.
TRAINER_BASE, CPU_ENGINE_BASE, EXPLORER_BASE, WORKER_BASE = 500 << 20, 1150 << 20, 150 << 20, 130 << 20

#: What an engine takes of a GPU beside weights, keys and values: activations, CUDA graphs, the context.
GPU_ENGINE_BASE = 3 * GIB

#: The share of what a step takes on a CPU that malloc holds on to between two of its tensors.
_CPU_HEAP = 0.15

#: A CUDA context and what torch's allocator cannot give back.
_CUDA_BASE = 1 * GIB

#: Logits exist for so many reply tokens at a time (trainer/models/head.py), several times over in the backward pass:
#: so many bytes each, as measured on an H200.
_LOGIT_TOKENS, _LOGIT_BYTES = 2048, 16

#: The share of what layers keep for the backward pass that they keep when they are compiled, as measured there.
_COMPILED = 0.59

#: vLLM's CPU build keeps so much for keys and values unless told otherwise (explorer/engines/vllm.py).
_CPU_CACHE_BYTES = 1 * GIB

#: AdamW's two moments of a parameter in 8 bits, with a float32 scale of each for 256 of them.
EIGHT_BIT_MOMENTS = 2 + 2 * 4 / 256

#: A base model in 4 bits: so many weights share a scale, of a byte, and so many scales a float32 offset and step.
NF4_BLOCK, NF4_GROUP = 64, 256

#: Bytes of a weight of a base model in so many bits; in 8 a scale is that of a row, and nothing beside it.
_QUANTIZED = {8: 1.0, 4: 0.5 + (1 + 8 / NF4_GROUP) / NF4_BLOCK}

#: Bytes of a weight that has a master of its own.
_SMALLER = 2

_WITH_CRITIC = frozenset({"ppo"})
_PIECE, _PIECES = 4 << 20, 16


class TrainerMemory(NamedTuple):
    """Bytes of the trainer, by what they hold."""

    base: int
    weights: int
    optimizer: int
    gradients: int
    reference: int
    activations: int
    logits: int
    teacher: int = 0
    heap: int = 0

    @property
    def total(self) -> int:
        """All of it, at its peak."""
        return sum(self)


class EngineMemory(NamedTuple):
    """Bytes of one engine on one device; `cache` is what is left for keys and values, of so many `cache_tokens`."""

    base: int
    weights: int
    cache: int
    cache_tokens: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.base + self.weights + max(0, self.cache)


class VersionDisk(NamedTuple):
    """Bytes on disk: the newest version with what training goes on from, an older one, the most there is at once."""

    newest: int
    older: int
    all: int


def trained_weights(shape: ModelShape, settings: Settings) -> int:
    """The parameters that are trained: all, or an adapter's."""
    lora = settings.model.lora
    if not lora.rank:
        return shape.weights
    sides = _matrices(shape)
    return shape.layers * lora.rank * sum(sum(sides[each]) for each in lora.targets if each in sides)


def _critic_weights(critic: ModelShape, settings: Settings) -> int:
    """The weights of the critic, which is trained whole beside an adapter too; 0 without one."""
    has_critic = settings.algorithm.algorithm_type in _WITH_CRITIC
    return critic.weights - critic.head_weights if has_critic else 0


def _matrices(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """The sides of a layer's matrices."""
    queries, keys = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width
    return {
        "q_proj": (shape.width, queries),
        "k_proj": (shape.width, keys),
        "v_proj": (shape.width, keys),
        "o_proj": (queries, shape.width),
        "gate_proj": (shape.width, shape.inner_width),
        "up_proj": (shape.width, shape.inner_width),
        "down_proj": (shape.inner_width, shape.width),
    }


def _base_bytes(shape: ModelShape, settings: Settings, size: int) -> int:
    """The base model below an adapter: in few bits its layers' matrices, and one of them as it is decoded."""
    bits = settings.model.lora.base_bits
    if bits is None:
        return shape.weights * size
    sides = [one * other for one, other in _matrices(shape).values()]
    quantized = shape.layers * sum(sides)
    return int((shape.weights - quantized) * size + quantized * _QUANTIZED[bits]) + max(sides) * (8 + size)


def trainer_memory(
    shape: ModelShape, critic: ModelShape, settings: Settings, teacher: ModelShape | None = None
) -> TrainerMemory:
    """The trainer, or each of its workers, at the peak of a step, with micro-batches as full as the settings allow.

    Of several workers one has the teacher.
    """
    algorithm, lora = settings.algorithm, settings.model.lora.rank > 0
    size = 4 if settings.trainer_dtype == "float32" else 2
    trained, on_gpu = trained_weights(shape, settings), trainer_on_gpu(settings)
    frozen = _base_bytes(shape, settings, size) if lora else 0
    optimizer = int(trained * optimizer_bytes(algorithm.optimizer.bits, size))
    also = _critic_weights(critic, settings)
    optimizer += int(also * optimizer_bytes(algorithm.optimizer.bits, size))
    trained += also
    # With an adapter the reference is the model without it.
    reference = 0 if lora or not _needs_reference(settings) else shape.weights * size
    tokens = settings.trainer.tokens_at_once
    here = -(-tokens // settings.trainer.ulysses_sequence_parallel_size)
    logits = min(_LOGIT_TOKENS, here) * shape.vocabulary * _LOGIT_BYTES
    if settings.trainer.optimizer_offload:
        optimizer = 0 if on_gpu else offloaded_memory(shape, critic, settings)
    memory = TrainerMemory(
        base=_CUDA_BASE if on_gpu else TRAINER_BASE,
        weights=frozen + trained * size,
        optimizer=optimizer // settings.trainer_workers,
        gradients=trained * 4,
        reference=reference,
        activations=here * max(_kept_bytes(each, settings, size) for each in (shape, critic)),
        logits=logits,
        teacher=teacher.weights * size if teacher is not None else 0,
    )
    if on_gpu:
        return memory
    # A base in few bits is read whole and compared with its file first, both in main memory.
    read = 2 * shape.weights * size + frozen if settings.model.lora.base_bits else 0
    heap = int(_CPU_HEAP * (memory.total - memory.base))
    return memory._replace(heap=max(heap, memory.base + read - memory.total))


def offloaded_memory(shape: ModelShape, critic: ModelShape, settings: Settings) -> int:
    """Main memory of all workers together for an offloaded AdamW: moments, float32 masters and their gradients."""
    algorithm = settings.algorithm
    found = trained_weights(shape, settings) * (optimizer_bytes(algorithm.optimizer.bits, _SMALLER) + 4)
    also = _critic_weights(critic, settings)
    found += also * (optimizer_bytes(algorithm.optimizer.bits, _SMALLER) + 4)
    return int(found)


def moved_memory(engine: EngineMemory | None, trainer: TrainerMemory | None) -> int:
    """Main memory for what does not stay on a GPU that engine and trainer have by turns."""
    of_engine = engine.weights if engine else 0
    return of_engine + (trainer.weights + trainer.optimizer + trainer.reference if trainer else 0)


def optimizer_bytes(bits: int, size: int) -> float:
    """Of each parameter of `size` bytes: AdamW's two moments, and a float32 master if it is smaller."""
    return (8 if bits == 32 else EIGHT_BIT_MOMENTS) + (0 if size == 4 else 4)


def _kept_bytes(shape: ModelShape, settings: Settings, size: int) -> int:
    """What a token keeps for the backward pass: all, or each layer's input, and all of the layer that is made again."""
    whole = shape.activation_bytes(size)
    compiled = settings.trainer.compile
    if compiled or (compiled is None and trainer_on_gpu(settings)):
        whole = int(_COMPILED * whole)
    if not settings.trainer.activation_checkpointing:
        return whole
    return shape.layers * shape.width * size + whole // shape.layers


def _needs_reference(settings: Settings) -> bool:
    algorithm = settings.algorithm
    match algorithm.algorithm_type:
        case "kto" | "dpo":
            return True
        case "sft" | "raft":
            return False
        case "distill" if algorithm.distill.mode == "replies":
            return False
    return algorithm.kl_coef > 0


def engine_memory(shape: ModelShape, settings: Settings, gpu_bytes: int | None) -> EngineMemory | None:
    """One engine on one of its devices; None on a GPU whose memory is not known."""
    rollout, on_gpu = settings.explorer.rollout_model, settings.cluster.gpu_per_node > 0
    size = 4 if rollout.dtype == "float32" else 2
    split = rollout.tensor_parallel_size if on_gpu else 1
    weights, token = shape.weights * size // split, max(1, shape.cache_bytes(size) // split)
    if not on_gpu:
        cache = rollout.kv_cache_memory_bytes or _CPU_CACHE_BYTES
        return EngineMemory(CPU_ENGINE_BASE, weights, cache, cache // token)
    if gpu_bytes is None:
        return None
    room = int(rollout.gpu_memory_utilization * gpu_bytes) - weights - GPU_ENGINE_BASE
    cache = rollout.kv_cache_memory_bytes or room
    return EngineMemory(GPU_ENGINE_BASE, weights, cache, max(0, cache // token))


def version_disk(shape: ModelShape, critic: ModelShape, settings: Settings) -> VersionDisk:
    """What versions take in the job folder: the formula of docs/operations.md, Disk and memory."""
    size = 4 if settings.trainer_dtype == "float32" else 2
    algorithm, trained = settings.algorithm, trained_weights(shape, settings)
    newest = int(trained * (size + optimizer_bytes(algorithm.optimizer.bits, size)))
    also = _critic_weights(critic, settings)
    newest += int(also * (size + optimizer_bytes(algorithm.optimizer.bits, size)))
    older = trained * size
    kept = settings.trainer.max_checkpoints_to_keep
    return VersionDisk(newest, older, 2 * newest + kept * older)


def disk_speed(folder: Path) -> float:
    """Bytes a second that reach the disk below `folder`: 64 MiB are written and removed. Raises EnvironmentRefused."""
    there = next((each for each in (folder, *folder.absolute().parents) if each.is_dir()), Path("/"))
    piece = os.urandom(_PIECE)
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            started = time.monotonic()
            for _ in range(_PIECES):
                file.write(piece)
                file.flush()
                os.fdatasync(file.fileno())
            return _PIECES * _PIECE / max(1e-6, time.monotonic() - started)
    except OSError as error:
        raise EnvironmentRefused(
            f"checkpoint_root_dir: cannot write to {there}: {error.strerror}; choose another folder"
        ) from None


def gpu_memory() -> int | None:
    """Bytes of the smallest NVIDIA GPU here; None if nvidia-smi does not say."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
        return min(int(line) for line in output.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def save_interval(newest_bytes: int, speed: float, step_s: float) -> int:
    """Steps to a version so that publishing takes no longer than the steps between two."""
    return max(1, min(50, math.ceil(newest_bytes / speed / step_s)))


def step_seconds(shape: ModelShape, settings: Settings, *, on_gpu: bool) -> float:
    """A rough second count of a step: replies of 850 tokens, at the rate measured on an H200, or on one CPU core."""
    tokens = settings.buffer.train_batch_size * 850
    with_critic = 2.0 if settings.algorithm.algorithm_type in _WITH_CRITIC else 1.0
    rate = 32_500 * 6e8 if on_gpu else 2_000 * 6e6
    return float(tokens * shape.weights * with_critic / rate)


def as_numbers(value: Any) -> dict[str, int]:
    """The fields of one of the tuples above, with their total."""
    found: dict[str, int] = value._asdict()
    return {**found, "total": value.total} if hasattr(value, "total") else found
