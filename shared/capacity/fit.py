"""How many tokens at once fit into a GPU's memory: the trainer chooses by it, and `tuneloop plan` prints it."""

from tuneloop.shared.capacity.memory import TrainerMemory, trainer_memory
from tuneloop.shared.capacity.model_shape import ModelShape, read_shape
from tuneloop.shared.settings.hardware import trainer_on_gpu
from tuneloop.shared.settings.settings import Settings

Shapes = tuple[ModelShape, ModelShape, ModelShape | None]

_MOST, _LEAST = 32768, 1024

#: The share of the room that is used: the model of the memory is a few percent off, most of it too little.
_USED = 0.95

#: What an engine that is asleep keeps of a GPU: CUDA itself, its graphs and its buffers. 1.4 GiB were measured.
ASLEEP_ENGINE = 2 << 30

#: What to do where nothing fits.
CURE = (
    "train an adapter (model.lora.rank: 16), its base in 4 bits (model.lora.base_bits: 4), keep AdamW's memory in 8"
    " bits (algorithm.optimizer.bits: 8) or in main memory (trainer.optimizer_offload: true), take a method without a"
    " critic (algorithm.algorithm_type: reinforce), or lower explorer.rollout_model.gpu_memory_utilization if an"
    " engine shares the GPU"
)


def shapes_of(settings: Settings) -> Shapes:
    """The model's shape, the critic's, and that of a teacher on this machine, None without one.

    Raises EnvironmentRefused where there is no model.
    """
    shape = read_shape(settings.model.model_path)
    folder = settings.algorithm.distill.teacher_path
    if settings.mode == "serve" or settings.algorithm.algorithm_type != "distill" or folder is None:
        return shape, shape, None
    return shape, shape, read_shape(folder, setting="algorithm.distill.teacher_path")


def room_for_trainer(settings: Settings, gpu_bytes: int) -> int:
    """What an engine leaves the trainer of a GPU of so many bytes."""
    rollout = settings.explorer.rollout_model
    if settings.cluster.gpu_turn is not None:
        return gpu_bytes - ASLEEP_ENGINE
    shares = settings.mode == "both" and 0 < settings.cluster.gpu_per_node <= settings.gpus_of_engines
    return gpu_bytes - int(rollout.gpu_memory_utilization * gpu_bytes) if shares else gpu_bytes


def fit_trainer(settings: Settings, shapes: Shapes, room: int | None) -> Settings | None:
    """The settings with what they leave open chosen for so many bytes of a GPU; None if nothing fits.

    Without a GPU, or where its memory is not known, that is the default of a CPU.
    """
    if settings.trainer.micro_batch_tokens is not None or room is None or not trainer_on_gpu(settings):
        return _with(settings, settings.trainer.tokens_at_once, settings.trainer.activation_checkpointing)
    fixed = settings.trainer.activation_checkpointing
    for checkpointing in (False, True) if fixed is None else (fixed,):
        tokens = _MOST
        while tokens >= _LEAST:
            chosen = _with(settings, tokens, checkpointing or fixed)
            if reckon(chosen, shapes).total <= _USED * room:
                return chosen
            tokens //= 2
    return None


def smallest(settings: Settings) -> Settings:
    """The settings with the least memory that they leave open."""
    fixed = settings.trainer.activation_checkpointing
    return _with(settings, settings.trainer.micro_batch_tokens or _LEAST, True if fixed is None else fixed)


def reckon(settings: Settings, shapes: Shapes) -> TrainerMemory:
    """What the trainer takes at the peak of a step."""
    shape, critic, teacher = shapes
    return trainer_memory(shape, critic, settings, teacher)


def _with(settings: Settings, tokens: int, checkpointing: bool | None) -> Settings:
    chosen = {"micro_batch_tokens": tokens, "activation_checkpointing": checkpointing}
    return settings.model_copy(update={"trainer": settings.trainer.model_copy(update=chosen)})
