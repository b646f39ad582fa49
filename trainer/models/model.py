"""Defines the models of a step: the served actor, the critic, and the reference.

All run without dropout on packed rows (trainer/models/attention.py). A few models whose attention cannot be packed read
rows padded on the right, without a mask, since no real token sees the padding. Settings add activation checkpointing
and compilation to their layers. Dimension suffixes are those of trainer/batches/batch.py.
"""

import gc
import inspect
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import structlog
import torch
import torch._dynamo.config
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tuneloop.shared.errors import EnvironmentRefused, SettingsError
from tuneloop.shared.settings.base_model import named_folders
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.batch import Batch, Positions, packed_rows, padded_rows, scatter_tokens
from tuneloop.trainer.models.attention import bounds_of, enable_packing, is_packable, no_mask
from tuneloop.trainer.models.head import CHUNK, IMPOSSIBLE, AllowedSets, Head, ScoredTokens
from tuneloop.trainer.models.quantization import quantize_layers
from tuneloop.trainer.models.ulysses import gather_tokens
from tuneloop.trainer.parallel import ALONE, Ranks, SequenceGroup, run_gathered
from tuneloop.trainer.transfer import hand_over

_log = structlog.get_logger()


def checkpoint_layers(network: nn.Module) -> None:
    """Keep only the layers' inputs for the backward pass. Raises SettingsError without layers.

    transformers' own way needs training mode, in which layers drop out and lose the cache of a generation.
    """
    for layer in _layers(network, "trainer.activation_checkpointing"):
        layer.__class__ = _checkpointing_kind(type(layer))


def is_checkpointing(network: nn.Module) -> bool:
    """Whether `checkpoint_layers` was called, or has nothing to do."""
    layers = [each for each in network.modules() if isinstance(each, GradientCheckpointingLayer)]
    return all(type(each) in _known.values() for each in layers)


def compile_layers(network: nn.Module) -> None:
    """Compile each layer for dynamic lengths. Raises SettingsError without layers."""
    for layer in _layers(network, "trainer.compile"):
        layer.compile(dynamic=True)


def is_compiling(wanted: bool | None, device: torch.device) -> bool:
    """Whether layers are compiled: by the setting, otherwise on a GPU if there is a C compiler."""
    if wanted is not None:
        return wanted
    if device.type != "cuda":
        return False
    compilers = [os.environ.get("CC", "gcc"), "gcc", "clang", "cc"]
    if not any(shutil.which(name) for name in compilers):
        _log.warning("not_compiled", reason="there is no C compiler; with gcc a step takes two thirds of the time")
        return False
    torch._dynamo.config.suppress_errors = True  # a layer that torch cannot compile runs uncompiled
    return True


def _layers(network: nn.Module, setting: str) -> Iterator[nn.Module]:
    found = [each for each in network.modules() if isinstance(each, GradientCheckpointingLayer)]
    if not found:
        raise SettingsError(f"{setting}: {type(network).__name__} has no layers for it; set it to false")
    yield from found


_known: dict[type[nn.Module], type[nn.Module]] = {}


def _checkpointing_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the layer's type: attributes that reference the layer would never be freed."""

    def forward(self: nn.Module, *args: Any, **options: Any) -> Any:
        run = partial(kind.forward, self)
        if not is_grad_enabled():
            return run(*args, **options)
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **options)

    if kind not in _known:
        # Not `__call__`, so that compilation includes the recomputation.
        _known[kind] = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return _known[kind]


_HEAD_FILE = "value_head.safetensors"
BODY, VALUE_HEAD = "body.", "value_head."  # prefixes of a critic's tensors
_SHARD = "250MB"  # size of a weights file; several are written and read in parallel, of small models too


class Actor:
    """The causal language model. `positions` counts what it reads; `compiled` concerns functions after its head."""

    def __init__(self, network: PreTrainedModel, *, compiled: bool = False) -> None:
        self.network = network
        self.positions = Positions()
        self.is_compiled = compiled
        self._body: nn.Module = network.base_model
        self._head = cast(nn.Module, cast(Any, network).get_output_embeddings())
        self._head_is_all = False  # whether the logits are the head's output on the body: some models scale or cap them
        if self._body is not network:
            ids_BT = torch.arange(min(8, self.vocabulary), device=network.device)[None]

            def head_after_body() -> Tensor:
                hidden_BTD = self._body(input_ids=ids_BT, use_cache=False).last_hidden_state
                return cast(Tensor, self._head(hidden_BTD))

            # Eager: a function compiled for these eight ids would seldom be reused.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                logits_BTV = network(input_ids=ids_BT, use_cache=False).logits
                self._head_is_all = torch.equal(run_gathered(network, head_after_body), logits_BTV)

    @classmethod
    def load(cls, settings: Settings, folder: Path, ranks: Ranks = ALONE) -> Self:
        network = load_causal(settings, folder, ranks)
        return cls(network, compiled=is_compiling(settings.trainer.compile, network.device))

    @property
    def vocabulary(self) -> int:
        return cast(int, cast(Any, self.network).get_input_embeddings().num_embeddings)

    @property
    def width(self) -> int:
        return cast(int, self.network.config.get_text_config().hidden_size)

    @property
    def longest(self) -> float:
        return getattr(self.network.config.get_text_config(), "max_position_embeddings", None) or math.inf

    def reference(self, settings: Settings, ranks: Ranks = ALONE) -> "Actor":
        """The frozen base model."""
        base = Actor.load(settings, settings.model.model_path, ranks)
        base.network.requires_grad_(requires_grad=False)
        return base

    def base(self) -> PreTrainedModel | None:
        """The base model without the adapter, on the same weights; None without adapters."""
        return None

    def critic(self, settings: Settings, folder: Path, ranks: Ranks) -> "Critic":
        """The critic in `folder`, or a new one that starts as the model there."""
        return Critic.load(settings, folder, ranks)

    @property
    def is_packed(self) -> bool:
        return is_packable(self.network)

    def score(self, batch: Batch, group: SequenceGroup | None = None) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each reply token at its temperature, in float32: two of shape BR.

        Under a grammar or truncation both are of the distribution among the allowed tokens. The batch is on the CPU,
        the result on the model's device. The ranks of a `group` read the batch together.
        """

        def score() -> tuple[Tensor, Tensor]:
            features = self._features(batch, group)
            scored, head = self._reply_tokens(batch).part(features.chosen), self._fused_head()
            logprobs_N, entropy_N = head.score(features.ND, scored) if head else self._by_chunks(features.ND, scored)
            return features.scatter(logprobs_N, batch), features.scatter(entropy_N, batch)

        return cast(tuple[Tensor, Tensor], run_gathered(self.network, score))

    @torch.no_grad()
    def logprobs(self, batch: Batch, group: SequenceGroup | None = None) -> Tensor:
        def score() -> Tensor:
            features = self._features(batch, group)
            scored, head = self._reply_tokens(batch).part(features.chosen), self._fused_head()
            logprobs_N = head.logprobs(features.ND, scored) if head else self._by_chunks(features.ND, scored)[0]
            return features.scatter(logprobs_N, batch)

        return cast(Tensor, run_gathered(self.network, score))

    def as_served(self) -> AbstractContextManager[None]:
        """In the block, compute with the weights that engines have."""
        return nullcontext()

    def tensors(self) -> dict[str, Tensor]:
        """The weights that `save` writes, not copied."""
        return dict(self.network.state_dict())

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write `tensors`, or a copy of them, and the configuration into `folder`."""
        self.network.save_pretrained(folder, state_dict=dict(tensors), max_shard_size=_SHARD)

    def _features(self, batch: Batch, group: SequenceGroup | None) -> "Features":
        """The hidden state before each reply token, or the logits if the head alone does not give them."""
        network = self._body if self._head_is_all else self.network
        return _read(network, batch, self.positions, group, logits=not self._head_is_all)

    def _reply_tokens(self, batch: Batch) -> ScoredTokens:
        device, mask_BR = self.network.device, batch.mask_BR
        temperatures_N = batch.temperatures_BR[mask_BR]
        allowed = None
        if batch.held_BR is not None:
            sets = (each if each is None else hand_over(each, device) for each in (batch.allowed_KW, batch.left_LS))
            allowed = AllowedSets(hand_over(batch.held_BR[mask_BR], device), *sets)
        tempered = bool((temperatures_N != 1).any())
        tokens_N = hand_over(batch.replies_BR[mask_BR], device)
        return ScoredTokens(tokens_N, hand_over(temperatures_N, device) if tempered else None, allowed)

    def _fused_head(self) -> Head | None:
        """The head, if the logits are exactly its product."""
        if self._head_is_all and type(self._head) is nn.Linear:
            return Head.of(self._head, compiled=self.is_compiled)
        return None

    def _by_chunks(self, features_ND: Tensor, scored: ScoredTokens) -> tuple[Tensor, Tensor]:
        """Keeps only the features for the backward pass, and recomputes the rest."""
        if not len(features_ND):  # a part without reply tokens
            nothing_N = features_ND.float().sum(1)
            return nothing_N, nothing_N
        parts = []
        for chosen, part in scored.parts(CHUNK):
            temperatures_N = part.temperatures_N
            if temperatures_N is None:
                temperatures_N = torch.ones_like(part.tokens_N, dtype=torch.float32)
            head = self._head if self._head_is_all else nn.Identity()
            arguments = (head, features_ND[chosen], part.tokens_N, temperatures_N, part.allowed)
            if torch.is_grad_enabled():
                # Untyped in torch 2.13.
                parts.append(cast(tuple[Tensor, Tensor], checkpoint(_logprobs, *arguments, use_reentrant=False)))
            else:
                parts.append(_logprobs(*arguments))
        logprobs_N, entropy_N = (torch.cat(column) for column in zip(*parts, strict=True))
        return logprobs_N, entropy_N


class Critic(nn.Module):
    """A language model's body and a linear head, initially zero: the expected reward before each reply token."""

    def __init__(self, body: PreTrainedModel, folder: Path) -> None:
        super().__init__()
        self.body = body
        self.positions = Positions()
        width = body.config.get_text_config().hidden_size
        self.value_head = nn.Linear(width, 1, device=body.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        if (folder / _HEAD_FILE).exists():
            self.value_head.load_state_dict(load_file(folder / _HEAD_FILE))

    @classmethod
    def load(cls, settings: Settings, folder: Path, ranks: Ranks) -> Self:
        """The critic in `folder`; from another Hugging Face folder, the body."""
        return cls(_load_pretrained(AutoModel.from_pretrained, settings, folder, ranks), folder)

    @property
    def is_packed(self) -> bool:
        return is_packable(self.body)

    def values(self, batch: Batch, group: SequenceGroup | None = None) -> Tensor:
        """The value before each reply token, in float32, of shape BR. The batch is on the CPU."""
        features = _read(self.body, batch, self.positions, group)
        values_N1 = cast(Tensor, self.value_head(features.ND.float()))
        return features.scatter(values_N1[:, 0], batch)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.state_dict())

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write `tensors`, or a copy of them, and the configuration into `folder`."""
        body, head = (
            {name.removeprefix(part): each for name, each in tensors.items() if name.startswith(part)}
            for part in (BODY, VALUE_HEAD)
        )
        self._save_body(folder, body)
        save_file(head, folder / _HEAD_FILE)

    def _save_body(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        self.body.save_pretrained(folder, state_dict=tensors, max_shard_size=_SHARD)


def load_causal(settings: Settings, folder: Path, ranks: Ranks = ALONE, *, bits: int | None = None) -> PreTrainedModel:
    """The causal model in a Hugging Face folder, on its device; with `bits`, its layers are frozen and quantised."""
    return _load_pretrained(AutoModelForCausalLM.from_pretrained, settings, folder, ranks, bits=bits)


def device_of(settings: Settings) -> torch.device:
    """The models' device. Also sets torch's number of CPU threads and its current GPU."""
    if "OMP_NUM_THREADS" not in os.environ:
        # Engines share the machine, and two threads that wait for each other are slower than one. Beside a GPU the CPU
        # has little work.
        torch.set_num_threads(1)
    wanted, gpus = settings.trainer.device, settings.cluster.gpu_per_node
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        cause = "trainer.device: cuda" if wanted == "cuda" else f"cluster.gpu_per_node: {gpus}"
        raise EnvironmentRefused(
            f"{cause}: torch {torch.__version__} sees no GPU; set trainer.device to cpu to train without"
        )
    rank, gpus_here = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    number = gpu_of(settings, gpus_here=gpus_here)
    if rank and number + rank >= gpus_here:
        raise EnvironmentRefused(
            f"trainer.workers: worker {rank} has no GPU of its own: torch sees {gpus_here}; lower it, or"
            " cluster.gpu_per_node"
        )
    device = torch.device(f"cuda:{number + rank}")
    torch.cuda.set_device(device)  # for functions that use the current GPU
    return device


@contextmanager
def room_for_weights() -> Iterator[None]:
    """Raise EnvironmentRefused if the GPU has no memory for what no smaller micro-batch reduces."""
    gc.collect()  # a compiled layer references itself
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise EnvironmentRefused(
            f"model.model_path: the GPU's memory has no room for the weights and optimisers: {reason}. Lower "
            "explorer.rollout_model.gpu_memory_utilization if an engine shares it, raise trainer.workers, or train an"
            " adapter: model.lora.rank"
        ) from None


def gpu_of(settings: Settings, *, gpus_here: int) -> int:
    """The trainer's first GPU: the first without an engine of ours, otherwise the last."""
    return min(settings.gpus_of_engines if settings.mode == "both" else 0, gpus_here - 1)


def _load_pretrained(
    load: Callable[..., PreTrainedModel], settings: Settings, folder: Path, ranks: Ranks, *, bits: int | None = None
) -> PreTrainedModel:
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
        settings_of = {named: setting for setting, named in reversed(named_folders(settings).items())}
        setting = settings_of.get(folder, "model.model_path")
        raise EnvironmentRefused(f"{setting}: the model in {folder} cannot be loaded: {reason}") from error
    compiled = is_compiling(settings.trainer.compile, device)
    if bits is not None:
        quantize_layers(network, bits, folder, device, compiled=compiled)
    # Quantised layers, and those below adapters, are frozen and whole on each rank.
    ranks.place(network.train(mode=False), device, shard=not settings.model.lora.rank)
    if getattr(network.config.get_text_config(), "attn_logit_softcapping", None):
        # transformers 5's faster kernels skip the capping (Gemma 2), engines do not.
        network.set_attn_implementation("eager")
    enable_packing(network)
    if compiled:
        compile_layers(network)
    if settings.trainer.activation_checkpointing:
        checkpoint_layers(network)
    return network


class Features(NamedTuple):
    """A network's outputs before the `chosen` reply tokens; the group's other ranks have the rest."""

    ND: Tensor
    chosen: slice
    group: SequenceGroup | None

    def scatter(self, part_N: Tensor, batch: Batch) -> Tensor:
        """Gather a value per token from all ranks, each in its place."""
        if self.group is not None:
            part_N = gather_tokens(part_N, self.chosen, batch.tokens, self.group)
        return scatter_tokens(part_N, batch.mask_BR)


def _read(
    network: nn.Module, batch: Batch, positions: Positions, group: SequenceGroup | None, *, logits: bool = False
) -> Features:
    """The hidden state before each reply token, or with `logits` the logits."""
    device = cast(PreTrainedModel, network).device
    rows, chosen = packed_rows(batch) if is_packable(network) else padded_rows(batch), slice(None)
    if group is not None:
        rows, chosen = rows.part(group.place, group.size)
    positions.add(rows, batch, group.place if group else 0)
    packed = is_packable(network)
    ids_BT, predicts_N = hand_over(rows.ids_BT, device), hand_over(rows.predicts_N, device)
    options: dict[str, Any] = {"input_ids": ids_BT, "use_cache": False}
    if packed:
        options |= {"position_ids": hand_over(rows.positions_BT, device), "attention_mask": no_mask(device)}
        options |= bounds_of(list(rows.lengths), device)
    if group is not None:
        options["sequence_group"] = group
    if logits and packed and "logits_to_keep" in inspect.signature(network.forward).parameters:
        return Features(network(logits_to_keep=predicts_N, **options).logits[0], chosen, group)
    found = network(**options)
    outputs = found.logits if logits else found.last_hidden_state
    return Features(outputs.flatten(0, 1).index_select(0, predicts_N), chosen, group)


def _logprobs(
    logits_of: Callable[[Tensor], Tensor],
    features_ND: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    held: AllowedSets | None,
) -> tuple[Tensor, Tensor]:
    logits_NV = logits_of(features_ND).float() / temperatures_N[:, None]
    if held is not None:
        # Not -inf: the entropy multiplies it by probability 0, which gives NaN.
        logits_NV = logits_NV.masked_fill(held.forbidden(logits_NV.shape[1]), IMPOSSIBLE)
    norm_N = logits_NV.logsumexp(1)
    chosen_N = logits_NV.gather(1, targets_N[:, None])[:, 0]
    entropy_N = norm_N - (logits_NV.softmax(1) * logits_NV).sum(1)
    return chosen_N - norm_N, entropy_N
