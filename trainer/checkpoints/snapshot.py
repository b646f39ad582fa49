"""The learner on disk: everything it needs to go on to the bit, as safetensors and JSON.

    actor/            a Hugging Face folder: the weights to be served, and the base model's tokenizer, templates, config
                      (where only an adapter is trained: that alone, as trainer/models/lora.py writes it)
    critic/           the same for the critic's body, and its value head; methods without a critic have none
    trainer_state/
      actor.safetensors, critic.safetensors    AdamW's moments, and float32 master weights where the models are smaller
      random.safetensors                       the state of the generator that shuffles mini-batches
      state.json                               counters, and what the algorithm remembers of rewards

The reference is not here: it is always the base model. Of an older version the critic and the first line of the
trainer's state are deleted: who goes on from it has its weights and counters, and begins AdamW's memory and the critic
anew.
"""

import json
import math
import shutil
from pathlib import Path

import msgspec
import structlog
import torch
from safetensors.torch import load_file

from tuneloop.shared.checkpoints.layout import (
    ACTOR,
    ADAPTER_CONFIG,
    COUNTERS,
    CRITIC,
    RANDOM,
    TRAINER_STATE,
    is_weights_only,
)
from tuneloop.shared.checkpoints.manifest import PROBE_LENGTH, PROBE_ROOM, Probe
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.algorithms import ALGORITHMS
from tuneloop.trainer.algorithms.terms.moments import Moments
from tuneloop.trainer.batches.tokenizer import tokenizer_of
from tuneloop.trainer.checkpoints.tensor_file import piecewise_save_pretrained, write_tensors
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.models.model import Actor, Critic
from tuneloop.trainer.models.optimizer import MasterAdamW

_log = structlog.get_logger()

_PROBE_SEED = 1729
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack"}


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What state.json holds. A learner without a critic has made no updates of it."""

    steps: int
    actor_updates: int
    critic_updates: int = 0
    critic_since: int = 0
    baselines: dict[str, Moments] = {}


def load(settings: Settings, folder: Path | None) -> Learner:
    """The learner saved in `folder`, or one that starts from the base model. The files must have been checked."""
    base = settings.model.model_path
    page = ALGORITHMS[settings.algorithm.algorithm_type]
    reference = critic = None
    if page.critic_loss is not None:
        saved = folder is not None and _has_critic(folder)
        start = folder / CRITIC if folder and saved else settings.model.critic_model_path or base
        critic = Critic.load(settings, start)
    actor = actor_in(settings, folder / ACTOR if folder else base)
    if page.asks(settings.algorithm).reference:
        reference = actor.reference(settings)
    learner = Learner(settings, actor=actor, critic=critic, reference=reference)
    if folder:
        _restore(learner, folder)
    return learner


def _has_critic(folder: Path) -> bool:
    """Whether there is one to go on with. A version that another method trained has none: it is learnt anew."""
    return (folder / CRITIC).exists() and not is_weights_only(folder)


def save(learner: Learner, folder: Path, *, base: Path) -> None:
    """Write the learner into the empty `folder`; tokenizer and configuration are copied from `base`."""
    actor, critic, state = (folder / name for name in (ACTOR, CRITIC, TRAINER_STATE))
    with piecewise_save_pretrained():
        learner.actor.save(actor)
        if learner.critic is not None:
            learner.critic.save(critic)
    if not (actor / ADAPTER_CONFIG).exists():
        _copy_companions(base, actor)
    if learner.critic is not None:
        for code in base.glob("*.py"):
            shutil.copyfile(code, critic / code.name)
    state.mkdir()
    for name, optimizer in learner.optimizers.items():
        write_tensors(_optimizer_tensors(optimizer), state / f"{name}.safetensors")
    write_tensors({"generator": learner.generator.get_state()}, state / RANDOM)
    updates = {f"{name}_updates": optimizer.updates for name, optimizer in learner.optimizers.items()}
    counters = Counters(
        steps=learner.steps, critic_since=learner.critic_since, **updates, baselines=dict(learner.baselines)
    )
    (state / COUNTERS).write_bytes(msgspec.json.encode(counters))


def size(learner: Learner) -> int:
    """How many bytes `save` writes, tokenizer aside; before the first update, how many it will."""
    models = {"actor": learner.actor.network} | ({"critic": learner.critic} if learner.critic else {})
    found = 0.0
    for name, model in models.items():
        moments = learner.optimizers[name].moment_bytes
        for each in model.parameters():
            # A float32 master, too, if the parameter is smaller.
            found += each.requires_grad * each.numel() * (each.itemsize + moments + (4 if each.itemsize < 4 else 0))
    return math.ceil(found)


def probe(learner: Learner, settings: Settings) -> Probe:
    """What the actor says of a fixed row of ordinary tokens. Raises EnvironmentRefused without a tokenizer."""
    ids = _ordinary_ids(settings, learner.actor.vocabulary)
    generator = torch.Generator().manual_seed(_PROBE_SEED)
    longest = settings.model.max_model_len
    length = PROBE_LENGTH if longest is None else max(2, min(PROBE_LENGTH, longest - PROBE_ROOM))
    chosen = [ids[i] for i in torch.randint(len(ids), (length,), generator=generator).tolist()]
    return Probe(
        prompt_ids=tuple(chosen),
        logprobs=tuple(learner.logprobs(chosen)),
        tolerance=_TOLERANCE[settings.trainer_dtype],
    )


def actor_in(settings: Settings, folder: Path) -> Actor:
    """The actor in the folder `actor` of a version, or in that of the base model. The files must have been checked."""
    base, rank = settings.model.model_path, settings.model.lora.rank
    if folder != base and (folder / ADAPTER_CONFIG).exists() != bool(rank):
        there = "all weights, which no adapter can be begun on" if rank else "an adapter only"
        raise EnvironmentRefused(
            f"model.lora.rank: is {rank}, but the newest version, {folder}, holds {there}; set it back, or begin "
            "another experiment under another name"
        )
    if not rank:
        return Actor.load(settings, folder)
    from tuneloop.trainer.models.lora import AdaptedActor  # peft takes seconds to import

    return AdaptedActor.load(settings, folder)


def _ordinary_ids(settings: Settings, vocabulary: int) -> list[int]:
    words, base = tokenizer_of(settings), settings.model.model_path
    special = {*words.all_special_ids, *words.added_tokens_decoder}
    ordinary = [token for token in range(min(vocabulary, len(words))) if token not in special]
    if not ordinary:
        raise EnvironmentRefused(f"model.model_path: {base} has no tokenizer; put tokenizer.json beside the weights")
    return ordinary


def _copy_companions(base: Path, actor: Path) -> None:
    """Copy all but the weights: what can load the base model can load this folder.

    The base model's own config.json replaces that of transformers, whose newest dialect not every engine reads.
    """
    dtype = json.loads((actor / "config.json").read_text())["dtype"]
    for source in base.iterdir():
        if source.is_file() and source.suffix not in _WEIGHTS and not source.name.endswith((".index.json", ".lock")):
            shutil.copyfile(source, actor / source.name)
    if (base / "additional_chat_templates").is_dir():
        shutil.copytree(base / "additional_chat_templates", actor / "additional_chat_templates")
    config = json.loads((base / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (actor / "config.json").write_text(json.dumps(config, indent=2))


def _optimizer_tensors(optimizer: MasterAdamW) -> dict[str, torch.Tensor]:
    masters = {f"master.{name}": weight for name, weight in optimizer.weights(hidden=True).items()}
    return {name: tensor.contiguous() for name, tensor in (masters | optimizer.moments()).items()}


def _restore(learner: Learner, folder: Path) -> None:
    state, whole = folder / TRAINER_STATE, not is_weights_only(folder)
    counters = msgspec.json.decode((state / COUNTERS).read_bytes(), type=Counters)
    learner.steps = counters.steps
    learner.critic_since = counters.critic_since if _has_critic(folder) else counters.steps
    if not whole:
        _log.warning("optimizer_begins_anew", folder=folder.name, critic_too=learner.critic is not None)
    learner.baselines = counters.baselines
    learner.generator.set_state(load_file(state / RANDOM)["generator"])
    updates = {"actor": counters.actor_updates, "critic": counters.critic_updates}
    for name, optimizer in learner.optimizers.items():
        if whole and (state / f"{name}.safetensors").exists():
            tensors = load_file(state / f"{name}.safetensors")
            masters = {key.removeprefix("master."): each for key, each in tensors.items() if key.startswith("master.")}
            optimizer.restore(updates=updates[name], weights=masters, moments=tensors)
