"""The learner on disk: everything it needs to go on to the bit, as safetensors and JSON.

    actor/            a Hugging Face folder: the weights to be served, and the base model's tokenizer, templates, config
    critic/           the same for the critic's body, and its value head
    trainer_state/
      actor.safetensors, critic.safetensors    AdamW's moments, and float32 master weights where the models are smaller
      random.safetensors                       the state of the generator that shuffles mini-batches
      state.json                               counters

The reference is not here: it is always the base model.
"""

import json
import shutil
from functools import cache
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from shared.checkpoint import Probe
from shared.config import Settings
from shared.errors import EnvironmentRefused
from trainer.learner import Learner
from trainer.model import Actor, Critic
from trainer.optimizer import MasterAdamW

_PROBE_LENGTH = 24
_PROBE_SEED = 1729
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack"}


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What state.json holds."""

    steps: int
    actor_updates: int
    critic_updates: int


def load(settings: Settings, folder: Path | None) -> Learner:
    """The learner saved in `folder`, or one that starts from the base model. The files must have been checked."""
    base = settings.model.model_path
    reference = None
    if settings.algorithm.kl_coef > 0:
        reference = Actor.load(settings, base)
        reference.network.requires_grad_(requires_grad=False)
    learner = Learner(
        settings,
        actor=Actor.load(settings, folder / "actor" if folder else base),
        critic=Critic.load(settings, folder / "critic" if folder else settings.model.critic_model_path or base),
        reference=reference,
    )
    if folder:
        _restore(learner, folder / "trainer_state")
    return learner


def save(learner: Learner, folder: Path, *, base: Path) -> None:
    """Write the learner into the empty `folder`; tokenizer and configuration are copied from `base`."""
    actor, critic, state = (folder / name for name in ("actor", "critic", "trainer_state"))
    learner.actor.save(actor)
    _copy_companions(base, actor)
    learner.critic.save(critic)
    for code in base.glob("*.py"):
        shutil.copyfile(code, critic / code.name)
    state.mkdir()
    save_file(_optimizer_tensors(learner.actor_optimizer), state / "actor.safetensors")
    save_file(_optimizer_tensors(learner.critic_optimizer), state / "critic.safetensors")
    save_file({"generator": learner.generator.get_state()}, state / "random.safetensors")
    counters = Counters(
        steps=learner.steps,
        actor_updates=learner.actor_optimizer.updates,
        critic_updates=learner.critic_optimizer.updates,
    )
    (state / "state.json").write_bytes(msgspec.json.encode(counters))


def size(learner: Learner) -> int:
    """How many bytes `save` writes, tokenizer aside; before the first update, how many it will."""
    parameters = [*learner.actor.network.parameters(), *learner.critic.parameters()]
    # Two float32 moments each, and a float32 master if the parameter is smaller.
    return sum(each.numel() * (each.itemsize + 8 + (4 if each.itemsize < 4 else 0)) for each in parameters)


def probe(learner: Learner, settings: Settings) -> Probe:
    """What the actor says of a fixed row of ordinary tokens. Raises EnvironmentRefused without a tokenizer."""
    ids = _ordinary_ids(settings.model.model_path, settings.model.trust_remote_code, learner.actor.vocabulary)
    generator = torch.Generator().manual_seed(_PROBE_SEED)
    chosen = [ids[i] for i in torch.randint(len(ids), (_PROBE_LENGTH,), generator=generator).tolist()]
    return Probe(
        prompt_ids=tuple(chosen),
        logprobs=tuple(learner.logprobs(chosen)),
        tolerance=_TOLERANCE[settings.trainer_dtype],
    )


@cache
def _ordinary_ids(base: Path, trust_remote_code: bool, vocabulary: int) -> list[int]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EnvironmentRefused(f"model.model_path: its tokenizer cannot be loaded: {reason}") from error
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ordinary = [token for token in range(min(vocabulary, len(tokenizer))) if token not in special]
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


def _restore(learner: Learner, state: Path) -> None:
    counters = msgspec.json.decode((state / "state.json").read_bytes(), type=Counters)
    learner.steps = counters.steps
    learner.generator.set_state(load_file(state / "random.safetensors")["generator"])
    for name, optimizer, updates in (
        ("actor", learner.actor_optimizer, counters.actor_updates),
        ("critic", learner.critic_optimizer, counters.critic_updates),
    ):
        tensors = load_file(state / f"{name}.safetensors")
        masters = {key.removeprefix("master."): each for key, each in tensors.items() if key.startswith("master.")}
        optimizer.restore(updates=updates, weights=masters, moments=tensors)
