"""Actor and critic with a trained low-rank adapter each, on one copy of the base model's weights.

    adapter_config.json, adapter_model.safetensors      peft's format

The adapter has the dtype of the weights that it is added to, so that it is served as it was trained.
"""

import copy
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tuneloop.shared.checkpoints import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tuneloop.shared.errors import EnvironmentRefused, SettingsError
from tuneloop.shared.settings.serving import LoraSettings
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.models.model import BODY, VALUE_HEAD, Actor, Critic, compile_layers, is_compiling, load_causal
from tuneloop.trainer.models.quantization import exact_weights
from tuneloop.trainer.parallel import ALONE, Ranks

_NAME = "default"
_PREFIX = "base_model.model."  # peft's prefix of the base model's names


class Adapter:
    """A low-rank adapter in a network, and its only trained parameters."""

    def __init__(self, settings: Settings, network: PreTrainedModel, folder: Path) -> None:
        """The adapter in `folder`, otherwise a new one, which changes nothing yet."""
        base, lora = settings.model.model_path, settings.model.lora
        self._config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha_used,
            target_modules=list(lora.targets),
            base_model_name_or_path=str(base.absolute()),
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.trainer.seed)
            inject_adapter_in_model(self._config, network, _NAME)
        named = network.named_parameters()
        trained = ((name, each) for name, each in named if each.requires_grad)
        self._parameters = {
            _PREFIX + name.replace(f".{_NAME}.", "."): each for name, each in trained
        }  # as peft saves them
        for parameter in self._parameters.values():
            parameter.data = parameter.data.to(network.device, network.dtype)
        network.train(mode=False)
        if (folder / ADAPTER_CONFIG).exists():
            self._restore(lora, folder)

    def tensors(self) -> dict[str, Tensor]:
        return {name: each.detach().contiguous() for name, each in self._parameters.items()}

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the adapter and the path of its base model into `folder`."""
        folder.mkdir(parents=True)
        save_file(dict(tensors), folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        # peft's format with sorted sets, so that equal adapters have equal bytes.
        config = self._config.to_dict()  # type: ignore[no-untyped-call]
        document = {name: sorted(each) if isinstance(each, set) else each for name, each in config.items()}
        document["inference_mode"] = True
        (folder / ADAPTER_CONFIG).write_text(json.dumps(document, indent=2, sort_keys=True, default=str))

    @torch.no_grad()
    def _restore(self, lora: LoraSettings, folder: Path) -> None:
        document = json.loads((folder / ADAPTER_CONFIG).read_text())
        there = (document["r"], document["lora_alpha"], set(document["target_modules"]))
        if there != (lora.rank, lora.alpha_used, set(lora.targets)):
            raise EnvironmentRefused(
                f"model.lora: the adapter in {folder} has rank {there[0]}, alpha {there[1]} and targets "
                f"{sorted(there[2])}; write these, or begin another experiment under another name"
            )
        found = load_file(folder / ADAPTER_WEIGHTS)
        for name, parameter in self._parameters.items():
            parameter.copy_(found[name])


class AdaptedActor(Actor):
    """The base model and an adapter; critic and reference are separate networks on its weights, without the adapter."""

    def __init__(self, settings: Settings, network: PreTrainedModel, folder: Path) -> None:
        super().__init__(network, compiled=is_compiling(settings.trainer.compile, network.device))
        self._base, self._adapter = settings.model.model_path, Adapter(settings, network, folder)

    @classmethod
    def load(cls, settings: Settings, folder: Path, ranks: Ranks = ALONE, base: PreTrainedModel | None = None) -> Self:
        """The base model, or the loaded `base`, with the adapter in `folder` or a new one."""
        lora = settings.model.lora
        if base is not None:
            return cls(settings, share_base(base, compiled=is_compiling(settings.trainer.compile, base.device)), folder)
        network = load_causal(settings, settings.model.model_path, ranks, bits=lora.base_bits)
        # Raise SettingsError now for targets whose adapters engines do not serve, not at a publication.
        head = network.get_output_embeddings()  # type: ignore[no-untyped-call]
        layers = (name for name, each in network.named_modules() if isinstance(each, nn.Linear) and each is not head)
        known = sorted({name.rpartition(".")[2] for name in layers})
        unfit = [target for target in lora.targets if target not in known]
        if unfit or not lora.targets:
            wrong = f"{', '.join(unfit)}: engines serve no adapter of that" if unfit else "names no layer"
            raise SettingsError(f"model.lora.targets: {wrong}; the linear layers of this model are {', '.join(known)}")
        return cls(settings, network, folder)

    def tensors(self) -> dict[str, Tensor]:
        return self._adapter.tensors()

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        self._adapter.save(folder, tensors)

    def as_served(self) -> AbstractContextManager[None]:
        """Compute with the base weights in the folder, as engines do."""
        return exact_weights(self.network, self._base)

    def reference(self, settings: Settings, ranks: Ranks = ALONE) -> Actor:
        """The base model on the same weights, without memory of its own."""
        return Actor(self.base(), compiled=self.is_compiled)

    def critic(self, settings: Settings, folder: Path, ranks: Ranks) -> Critic:
        """The critic in `folder`, or a new one, on the same base weights."""
        return AdaptedCritic(settings, cast(PreTrainedModel, self.base().base_model), folder)

    def base(self) -> PreTrainedModel:
        return share_base(self.network, compiled=self.is_compiled)


def share_base(network: PreTrainedModel, *, compiled: bool) -> PreTrainedModel:
    """New modules around a network's layers and tensors, without its adapter."""
    kept: dict[int, Any] = {id(each): each for each in (*network.parameters(), *network.buffers())}
    layers = (each for each in network.modules() if isinstance(each, BaseTunerLayer))
    bare = copy.deepcopy(network, kept | {id(each): each.get_base_layer() for each in layers})
    vars(bare).pop("peft_config", None)
    if compiled:  # compiled code is not copied
        compile_layers(bare)
    return bare


class AdaptedCritic(Critic):
    def __init__(self, settings: Settings, body: PreTrainedModel, folder: Path) -> None:
        super().__init__(body, folder)
        self._adapter = Adapter(settings, body, folder)

    def tensors(self) -> dict[str, Tensor]:
        head = {name: each for name, each in self.state_dict().items() if name.startswith(VALUE_HEAD)}
        return {f"{BODY}{name}": each for name, each in self._adapter.tensors().items()} | head

    def _save_body(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        self._adapter.save(folder, tensors)
