"""The models of a step: the actor that is served, the critic, and the reference that the actor must not stray from.

All three run with dropout off and without an attention mask: the padding is on the right, where no real token looks.
Dimension suffixes are explained in trainer/batches/batch.py.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol, Self, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.batch import Batch, scatter_tokens

# Logits of so many reply tokens exist at a time: in float32, 1.2 GiB for a vocabulary of 150 000.
_CHUNK = 2048
#: The logit of a token that a grammar forbids: its probability underflows to 0 beside any other.
_IMPOSSIBLE = -1e30
_VALUE_HEAD = "value_head.safetensors"


class _Output(Protocol):
    last_hidden_state: Tensor
    logits: Tensor


class _Layers(Protocol):
    def get_input_embeddings(self) -> nn.Embedding: ...

    def get_output_embeddings(self) -> nn.Module: ...


class Actor:
    """The causal language model: a distribution over the next token."""

    def __init__(self, network: PreTrainedModel) -> None:
        self.network = network
        self._body: nn.Module = network.base_model
        self._head = cast(_Layers, network).get_output_embeddings()
        self._head_is_all = self._compare()

    @classmethod
    def load(cls, settings: Settings, folder: Path) -> Self:
        """The model in the Hugging Face folder `folder`."""
        return cls(_load_pretrained(AutoModelForCausalLM.from_pretrained, settings, folder))

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""
        return cast(_Layers, self.network).get_input_embeddings().num_embeddings

    def reference(self, settings: Settings) -> "Actor":
        """The base model, which is not trained."""
        base = Actor.load(settings, settings.model.model_path)
        base.network.requires_grad_(requires_grad=False)
        return base

    def score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each reply token at its temperature, in float32: two of shape BR.

        Where a grammar held a reply, both are those of the distribution among the tokens that it allowed.
        """
        targets_N = batch.replies_BR[batch.mask_BR]
        temperatures_N = batch.temperatures_BR[batch.mask_BR]
        held_N = None if batch.held_BR is None else batch.held_BR[batch.mask_BR]
        features_N = self._features(batch.ids_BT)[batch.predicts_BT]
        parts = []
        for i in range(0, len(targets_N), _CHUNK):
            part = slice(i, i + _CHUNK)
            held = None if held_N is None or batch.allowed_KW is None else _Held(held_N[part], batch.allowed_KW)
            parts.append(self._chunk(features_N[part], targets_N[part], temperatures_N[part], held))
        logprobs_N, entropy_N = (torch.cat(column) for column in zip(*parts, strict=True))
        return scatter_tokens(logprobs_N, batch.mask_BR), scatter_tokens(entropy_N, batch.mask_BR)

    def save(self, folder: Path) -> None:
        """Write weights and configuration into `folder`."""
        self.network.save_pretrained(folder)

    def _features(self, ids_BT: Tensor) -> Tensor:
        """Hidden states if the head makes logits of them, else logits."""
        if self._head_is_all:
            return _run(self._body, ids_BT).last_hidden_state
        return _run(self.network, ids_BT).logits

    def _chunk(
        self, features_ND: Tensor, targets_N: Tensor, temperatures_N: Tensor, held: "_Held | None"
    ) -> tuple[Tensor, Tensor]:
        """Only the features are kept for the backward pass; the logits are computed again there."""
        arguments = (self._logits, features_ND, targets_N, temperatures_N, held)
        if not torch.is_grad_enabled():
            return _logprobs(*arguments)
        # Untyped in torch 2.13.
        return cast(tuple[Tensor, Tensor], checkpoint(_logprobs, *arguments, use_reentrant=False))

    def _logits(self, features_ND: Tensor) -> Tensor:
        return cast(Tensor, self._head(features_ND)) if self._head_is_all else features_ND

    @torch.no_grad()
    def _compare(self) -> bool:
        """Whether the head on the body's output is the whole model: some scale or cap the logits after it."""
        ids_BT = torch.arange(min(8, self.vocabulary), device=self.network.device)[None]
        if self._body is self.network:
            return False
        return torch.equal(self._head(_run(self._body, ids_BT).last_hidden_state), _run(self.network, ids_BT).logits)


class Critic(nn.Module):
    """A language model's body and a linear head, zero at first: the reward to be expected before each reply token."""

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.body = body
        width = body.config.get_text_config().hidden_size
        self.value_head = nn.Linear(width, 1, device=body.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @classmethod
    def load(cls, settings: Settings, folder: Path) -> Self:
        """The critic saved in `folder`; of any other Hugging Face folder, the body."""
        critic = cls(_load_pretrained(AutoModel.from_pretrained, settings, folder))
        if (folder / _VALUE_HEAD).exists():
            critic.value_head.load_state_dict(load_file(folder / _VALUE_HEAD))
        return critic

    def values(self, batch: Batch) -> Tensor:
        """The value before each reply token, in float32, of shape BR."""
        features_ND = _run(self.body, batch.ids_BT).last_hidden_state[batch.predicts_BT]
        values_N1 = cast(Tensor, self.value_head(features_ND.float()))
        return scatter_tokens(values_N1[:, 0], batch.mask_BR)

    def save(self, folder: Path) -> None:
        """Write weights and configuration into `folder`."""
        self.body.save_pretrained(folder)
        save_file(self.value_head.state_dict(), folder / _VALUE_HEAD)


def device_of(settings: Settings) -> torch.device:
    """Where the models run. On a CPU this also settles the number of threads."""
    wanted, gpus = settings.trainer.device, settings.cluster.gpu_per_node
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        if "OMP_NUM_THREADS" not in os.environ:
            # Engines share the machine; two threads waiting for each other are slower than one.
            torch.set_num_threads(1)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        cause = "trainer.device: cuda" if wanted == "cuda" else f"cluster.gpu_per_node: {gpus}"
        raise EnvironmentRefused(
            f"{cause}: torch {torch.__version__} sees no GPU; set trainer.device to cpu to train without"
        )
    return torch.device(f"cuda:{gpu_of(settings, gpus_here=torch.cuda.device_count())}")


def gpu_of(settings: Settings, *, gpus_here: int) -> int:
    """The number of the trainer's GPU: the first that no engine of ours takes, else the last."""
    return min(settings.gpus_of_engines if settings.mode == "both" else 0, gpus_here - 1)


def require_folders(settings: Settings) -> None:
    """Raise EnvironmentRefused unless the models to start from are there."""
    for setting, folder in _folders(settings).items():
        if not ((folder / "config.json").is_file() and any(folder.glob("*.safetensors"))):
            what = "is not a model folder" if folder.is_dir() else "is not there"
            raise EnvironmentRefused(
                f"{setting}: {folder} {what}; name a local folder that holds config.json and *.safetensors"
            )


def _folders(settings: Settings) -> dict[str, Path]:
    """The models that the settings name, by the setting."""
    model, algorithm = settings.model, settings.algorithm
    named = {"model.model_path": model.model_path, "model.critic_model_path": model.critic_model_path}
    if algorithm.algorithm_type == "distill":
        named["algorithm.distill.teacher_path"] = algorithm.distill.teacher_path
    return {setting: folder for setting, folder in named.items() if folder is not None}


def _load_pretrained(load: Callable[..., PreTrainedModel], settings: Settings, folder: Path) -> PreTrainedModel:
    device = device_of(settings)
    try:
        network: PreTrainedModel = load(
            folder,
            dtype=getattr(torch, settings.trainer_dtype),
            trust_remote_code=settings.model.trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        settings_of = {named: setting for setting, named in reversed(_folders(settings).items())}
        setting = settings_of.get(folder, "model.model_path")
        raise EnvironmentRefused(f"{setting}: the model in {folder} cannot be loaded: {reason}") from error
    if getattr(network.config.get_text_config(), "attn_logit_softcapping", None):
        # The faster kernels leave the capping out (transformers 5), and engines do not: Gemma 2.
        network.set_attn_implementation("eager")
    network.train(mode=False).to(device)
    return network


def _run(network: nn.Module, ids_BT: Tensor) -> _Output:
    return cast(_Output, network(input_ids=ids_BT, use_cache=False))


class _Held(NamedTuple):
    """Which set of `allowed_KW` a grammar allowed at each of some reply tokens, -1 where it allowed all."""

    held_N: Tensor
    allowed_KW: Tensor

    def forbidden(self, vocabulary: int) -> Tensor:
        """The tokens that were not allowed, of shape NV."""
        free_N = self.held_N < 0
        if free_N.all():
            return free_N.new_zeros(1, 1)
        # Byte by byte: word by word would take four times the memory.
        bytes_NX = self.allowed_KW.view(torch.uint8)[self.held_N.clamp(min=0)]
        bits = torch.arange(8, dtype=torch.uint8, device=bytes_NX.device)
        allowed_NV = ((bytes_NX[:, :, None] >> bits) & 1).flatten(1)[:, :vocabulary].bool()
        return ~(allowed_NV | free_N[:, None])


def _logprobs(
    logits_of: Callable[[Tensor], Tensor],
    features_ND: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    held: _Held | None,
) -> tuple[Tensor, Tensor]:
    logits_NV = logits_of(features_ND).float() / temperatures_N[:, None]
    if held is not None:
        # Not minus infinity: the entropy multiplies it by probability 0, and would not be a number.
        logits_NV = logits_NV.masked_fill(held.forbidden(logits_NV.shape[1]), _IMPOSSIBLE)
    norm_N = logits_NV.logsumexp(1)
    chosen_N = logits_NV.gather(1, targets_N[:, None])[:, 0]
    entropy_N = norm_N - (logits_NV.softmax(1) * logits_NV).sum(1)
    return chosen_N - norm_N, entropy_N
