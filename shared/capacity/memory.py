"""What an experiment takes: memory of the trainer and of an engine, and the disk of a version, by plain formulas."""

import subprocess
from collections.abc import Iterator
from typing import NamedTuple

from tuneloop.shared.capacity.model_shape import ModelShape, read_shape
from tuneloop.shared.settings.hardware import trainer_on_gpu
from tuneloop.shared.settings.settings import Settings

#: The model's, the critic's, and that of a teacher on this machine.
Shapes = tuple[ModelShape, ModelShape, ModelShape | None]

GIB = 1 << 30

#: What processes take before there is a model: the explorer and each of its workers, the trainer (on a GPU: the CUDA
#: context), and an engine on a CPU and on a GPU, with its activations and CUDA graphs.
EXPLORER_BASE, WORKER_BASE, TRAINER_BASE, CUDA_BASE = 150 << 20, 130 << 20, 500 << 20, 1 * GIB
_CPU_ENGINE_BASE, _GPU_ENGINE_BASE = 1150 << 20, 3 * GIB

#: vLLM's CPU build keeps so much for keys and values unless an argument says otherwise (explorer/engines/vllm.py).
_CPU_CACHE_BYTES = 1 * GIB

#: Logits exist for so many reply tokens at a time (trainer/models/head.py), with so many bytes each on an H200.
_LOGIT_TOKENS, _LOGIT_BYTES = 2048, 16

#: The shares of what layers keep for the backward pass that they keep when compiled, and that malloc holds on a CPU.
_COMPILED, _CPU_HEAP = 0.59, 0.15

#: AdamW's two moments of a parameter in 8 bits, with a float32 scale of each for 256 of them.
EIGHT_BIT_MOMENTS = 2 + 2 * 4 / 256

#: A base model in 4 bits: so many weights share a scale, of a byte, and so many scales a float32 offset and step.
NF4_BLOCK, NF4_GROUP = 64, 256

#: Bytes of a weight of a base model in so many bits; in 8 a scale is that of a row, and nothing beside it.
_QUANTIZED = {8: 1.0, 4: 0.5 + (1 + 8 / NF4_GROUP) / NF4_BLOCK}

#: The most and the least tokens at once that are chosen, and the share of the room that they may fill.
_MOST, _LEAST, _USED = 32768, 1024, 0.95

#: The least with activations kept: a longer sequence is not cut, and takes more memory than is computed.
_LEAST_KEPT = 4096

#: Policies that a trainer keeps in memory, with adapters of actor and critic and optimizers; others go on from disk.
POLICIES_IN_MEMORY = 8

#: With so many tokens at once what shards do on the CPU takes less time than the GPU's part.
_ENOUGH = 16384


class TrainerMemory(NamedTuple):
    """Bytes of the trainer, or of each of its workers, at the peak of a step, by what they hold."""

    base: int
    weights: int
    optimizer: int
    gradients: int
    reference: int
    activations: int
    logits: int
    #: Of weights that are sharded, with their gradients, what is whole for a moment, beyond the rest of that moment.
    gathered: int
    teacher: int
    #: AdamW's part in main memory, of all workers together, where it does not stay on a GPU: not in the total.
    offloaded: int

    @property
    def total(self) -> int:
        return sum(self) - self.offloaded


class EngineMemory(NamedTuple):
    """Bytes of one engine on one device; `cache` is left for `cache_tokens`, `adapters` may sample at once."""

    base: int
    weights: int
    adapters: int
    cache: int
    cache_tokens: int

    @property
    def total(self) -> int:
        return self.base + self.weights + self.adapters + max(0, self.cache)


class VersionDisk(NamedTuple):
    """Bytes on disk: the newest version with its training state, an older version, and the peak."""

    newest: int
    older: int
    all: int


def shapes_of(settings: Settings) -> Shapes:
    """The shapes of the models' folders. Raises EnvironmentRefused where there is no model."""
    shape, folder = read_shape(settings.model.model_path), settings.algorithm.distill.teacher_path
    if settings.mode == "serve" or settings.algorithm.algorithm_type != "distill" or folder is None:
        return shape, shape, None
    return shape, shape, read_shape(folder, setting="algorithm.distill.teacher_path")


def optimizer_bytes(bits: int, size: int) -> float:
    """Of each parameter of `size` bytes: AdamW's two moments, and a float32 master if it is smaller."""
    return (8 if bits == 32 else EIGHT_BIT_MOMENTS) + (0 if size == 4 else 4)


def _trained_weights(shapes: Shapes, settings: Settings) -> tuple[int, int]:
    """The parameters that are trained of the model and of its critic: all of them, or an adapter's of each."""
    shape, critic, _ = shapes
    lora, has_critic = settings.model.lora, settings.algorithm.algorithm_type == "ppo"
    if not lora.rank:
        return shape.weights, has_critic * (critic.weights - critic.head_weights)
    adapter = _adapter_weights(shape, settings, lora.rank)
    return adapter, has_critic * adapter


def _adapter_weights(shape: ModelShape, settings: Settings, rank: int) -> int:
    return shape.layers * rank * sum(sum(shape.matrices.get(each, ())) for each in settings.model.lora.targets)


def policies_memory(shapes: Shapes, settings: Settings) -> int:
    """Bytes of main memory for adapters: those that engines keep, and those that are not trained now."""
    lora, rollout, on_gpu = settings.model.lora, settings.explorer.rollout_model, settings.cluster.gpu_per_node > 0
    engines = 0 if settings.mode == "train" or rollout.engine_urls else rollout.engine_num
    served = _adapter_weights(shapes[0], settings, lora.most_rank) * (4 if rollout.dtype == "float32" else 2)
    size, others = 4 if settings.trainer_dtype == "float32" else 2, min(len(settings.policies), POLICIES_IN_MEMORY - 1)
    learnt = sum(_trained_weights(shapes, settings)) * (size + optimizer_bytes(settings.algorithm.optimizer.bits, size))
    # Beside a GPU the trainer's part lies in main memory, and goes there to train.
    trained = int(others * learnt) if settings.mode != "serve" and on_gpu else 0
    return engines * lora.in_main_memory * served + trained


def _most_at_once(shape: ModelShape, size: int, workers: int, *, kept: int, gradients: int) -> int:
    """The most that a worker has beside its share: `kept` by a pass, what is whole for a moment, float32 sums."""
    outside = shape.vocabulary * shape.width + shape.head_weights
    layer = (shape.weights - outside) // shape.layers
    in_pass = kept + outside * size + 2 * layer * size + layer * (size + 4)
    summed = outside * (size + 4) + outside * 4 // workers
    # Between steps, without gradients, the first worker gathers the whole model, to see that engines have the same.
    return max(in_pass, summed, shape.weights * size - gradients)


def reckon(settings: Settings, shapes: Shapes, *, sharded: bool = True) -> TrainerMemory:
    """What the trainer, or each worker, takes with full micro-batches; `sharded`: workers have a share each."""
    shape, critic, teacher = shapes
    algorithm, lora, on_gpu = settings.algorithm, settings.model.lora, trainer_on_gpu(settings)
    size = 4 if settings.trainer_dtype == "float32" else 2
    trained, frozen = sum(_trained_weights(shapes, settings)), shape.weights * size if lora.rank else 0
    if lora.rank and lora.base_bits is not None:
        sides = [one * other for one, other in shape.matrices.values()]
        quantized = shape.layers * sum(sides)  # The rest is not, and one matrix is decoded at a time.
        frozen = int((shape.weights - quantized) * size + quantized * _QUANTIZED[lora.base_bits])
        frozen += max(sides) * (8 + size)
    offload = settings.trainer.optimizer_offload
    optimizer = int(trained * (optimizer_bytes(algorithm.optimizer.bits, 2 if offload else size) + 4 * offload))
    has_reference = algorithm.kl_coef > 0 if not algorithm.of_any_reply else algorithm.algorithm_type in {"dpo", "kto"}
    here = -(-settings.trainer.tokens_at_once // settings.trainer.ulysses_sequence_parallel_size)
    kept = max(shape.activation_bytes(size), critic.activation_bytes(size))
    compiled = settings.trainer.compile
    if compiled or (compiled is None and on_gpu):
        kept = int(_COMPILED * kept)
    if settings.trainer.activation_checkpointing:  # Each layer's input, and one layer whole.
        kept = shape.layers * shape.width * size + kept // shape.layers
    # Below adapters each worker has all, and all of the adapters.
    shares, copies = (settings.trainer_workers, 1) if sharded and not lora.rank else (1, settings.trainer_workers)
    gradients, activations = trained * 4 // shares, here * kept
    logits = min(_LOGIT_TOKENS, here) * shape.vocabulary * _LOGIT_BYTES
    in_pass = activations + logits
    most = in_pass if shares == 1 else _most_at_once(shape, size, shares, kept=in_pass, gradients=gradients)
    memory = TrainerMemory(
        base=CUDA_BASE if on_gpu else TRAINER_BASE,
        weights=frozen + trained * size // shares,
        optimizer=0 if offload and on_gpu else optimizer // shares,
        gradients=gradients,
        # With an adapter the reference is the model without it, as the critic's base is.
        reference=shape.weights * size // shares if has_reference and not lora.rank else 0,
        activations=activations,
        logits=logits,
        gathered=most - in_pass,
        teacher=teacher.weights * size if teacher is not None else 0,
        offloaded=optimizer * copies if offload and on_gpu else 0,
    )
    heap = 0 if on_gpu else int(_CPU_HEAP * (memory.total - memory.base))
    return memory._replace(base=memory.base + heap)


def engine_memory(shape: ModelShape, settings: Settings, gpu_bytes: int | None) -> EngineMemory | None:
    """One engine on one of its devices; None on a GPU whose memory is not known."""
    rollout, on_gpu = settings.explorer.rollout_model, settings.cluster.gpu_per_node > 0
    size = 4 if rollout.dtype == "float32" else 2
    split = rollout.tensor_parallel_size if on_gpu else 1
    weights, token = shape.weights * size // split, max(1, shape.cache_bytes(size) // split)
    lora = settings.model.lora
    adapters = lora.at_once * _adapter_weights(shape, settings, lora.most_rank) * size // split if lora.rank else 0
    if on_gpu and gpu_bytes is None:
        return None
    base = _GPU_ENGINE_BASE if on_gpu else _CPU_ENGINE_BASE
    room = (
        int(rollout.gpu_memory_utilization * (gpu_bytes or 0)) - weights - adapters - base
        if on_gpu
        else _CPU_CACHE_BYTES
    )
    cache = rollout.kv_cache_memory_bytes or room
    return EngineMemory(base, weights, adapters, cache, max(0, cache // token))


def version_disk(shapes: Shapes, settings: Settings) -> VersionDisk:
    """What versions take in the job folder: the formula of docs/one_machine.md, Disk and memory."""
    size = 4 if settings.trainer_dtype == "float32" else 2
    actor, critic = _trained_weights(shapes, settings)
    newest = int((actor + critic) * (size + optimizer_bytes(settings.algorithm.optimizer.bits, size)))
    return VersionDisk(newest, actor * size, 2 * newest + settings.trainer.max_checkpoints_to_keep * actor * size)


def room_for_trainer(settings: Settings, gpu_bytes: int) -> int:
    of_engine = settings.explorer.rollout_model.gpu_memory_utilization if shares_gpu(settings) else 0
    return gpu_bytes - int(of_engine * gpu_bytes)


def shares_gpu(settings: Settings) -> bool:
    return settings.mode == "both" and 0 < settings.cluster.gpu_per_node <= settings.gpus_of_engines


class TrainerFit(NamedTuple):
    """The settings with what they leave open chosen, what a worker takes then, whether that fits, and is sharded."""

    settings: Settings
    memory: TrainerMemory
    fits: bool
    sharded: bool


def fit_trainer(settings: Settings, shapes: Shapes, room: int | None) -> TrainerFit:
    """What is best for so many bytes of a GPU, or the least."""
    several = settings.trainer_workers > 1 and not settings.model.lora.rank
    if room is None or not trainer_on_gpu(settings):
        chosen = with_trainer(settings, micro_batch_tokens=settings.trainer.tokens_at_once)
        return TrainerFit(chosen, reckon(chosen, shapes), fits=True, sharded=several)
    fitting = []
    for sharded in (False, True) if several else (False,):
        for chosen in _choices(settings):
            memory = reckon(chosen, shapes, sharded=sharded)
            if memory.total <= _USED * room:
                fitting.append(TrainerFit(chosen, memory, fits=True, sharded=sharded))
                break
    if not fitting:
        return TrainerFit(chosen, memory, fits=settings.trainer.micro_batch_tokens is not None, sharded=several)
    return max(fitting, key=lambda fit: _efficiency(fit.settings))  # of equals the first


def _efficiency(settings: Settings) -> tuple[bool, int]:
    """What orders choices: nothing made again comes first, then tokens at once, up to what occupies a GPU."""
    return not settings.trainer.activation_checkpointing, min(settings.trainer.tokens_at_once, _ENOUGH)


def _choices(settings: Settings) -> Iterator[Settings]:
    """The settings with more tokens at once before fewer, without activations made again before with."""
    if settings.trainer.micro_batch_tokens is not None:
        yield settings
        return
    fixed = settings.trainer.activation_checkpointing
    for checkpointing in (False, True) if fixed is None else (fixed,):
        tokens, again = _MOST, checkpointing or fixed
        least = _LEAST if checkpointing or fixed is not None else _LEAST_KEPT
        while tokens >= least:
            yield with_trainer(settings, micro_batch_tokens=tokens, activation_checkpointing=again)
            tokens //= 2


def cure_of(settings: Settings) -> str:
    algorithm, trainer, adapts = settings.algorithm, settings.trainer, bool(settings.model.lora.rank)
    ways = {
        "give the trainer more GPUs, which share weights and AdamW's memory (trainer.workers)": not adapts,
        "keep AdamW's memory in 8 bits (algorithm.optimizer.bits: 8)": algorithm.optimizer.bits == 32,
        "keep masters and moments in main memory (trainer.optimizer_offload: true)": not trainer.optimizer_offload,
        "train an adapter (model.lora.rank: 16)": not adapts,
        "keep an adapter's base in 4 bits (model.lora.base_bits: 4)": settings.model.lora.base_bits != 4,
        "take a method without a critic (algorithm.algorithm_type: reinforce)": algorithm.algorithm_type == "ppo",
    }
    engine = "lower explorer.rollout_model.gpu_memory_utilization if an engine shares the GPU"
    return ", ".join([*(way for way, helps in ways.items() if helps), f"or {engine}"])


def with_trainer(settings: Settings, **values: object) -> Settings:
    return settings.model_copy(update={"trainer": settings.trainer.model_copy(update=values)})


def gpu_memory() -> int | None:
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
        return min(int(line) for line in output.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
