"""An actor of which only a low-rank adapter is trained, saved as peft saves it; the base model's weights stay.

    adapter_config.json, adapter_model.safetensors      what any tool that knows peft loads on top of the base model

The adapter is of the type of the weights that it is added to, so that it is served as it was trained.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Self

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tuneloop.shared.checkpoints.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tuneloop.shared.errors import EnvironmentRefused, SettingsError
from tuneloop.shared.settings.serving import LoraSettings
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.batch import Batch
from tuneloop.trainer.models.layers import is_compiling
from tuneloop.trainer.models.model import Actor, Features, load_causal
from tuneloop.trainer.models.quantization import exact_weights
from tuneloop.trainer.ranks.sequence_group import SequenceGroup

_NAME = "default"
#: What peft puts before the base model's own names.
_PREFIX = "base_model.model."


class AdaptedActor(Actor):
    """The base model and an adapter, which alone has gradients."""

    def __init__(self, network: PreTrainedModel, config: LoraConfig, base: Path, *, compiled: bool = False) -> None:
        super().__init__(network, compiled=compiled)
        self._config, self._base = config, base

    @classmethod
    def load(cls, settings: Settings, folder: Path) -> Self:
        """The base model with the adapter in `folder`, or with a new one, which changes nothing yet, if it has none."""
        base, lora = settings.model.model_path, settings.model.lora
        network = load_causal(settings, base, bits=lora.base_bits)
        # Raise SettingsError for targets that no engine would serve an adapter of: it would only show at a
        # publication.
        head = network.get_output_embeddings()  # type: ignore[no-untyped-call]
        layers = (name for name, each in network.named_modules() if isinstance(each, nn.Linear) and each is not head)
        known = sorted({name.rpartition(".")[2] for name in layers})
        unfit = [target for target in lora.targets if target not in known]
        if unfit or not lora.targets:
            wrong = f"{', '.join(unfit)}: engines serve no adapter of that" if unfit else "names no layer"
            raise SettingsError(f"model.lora.targets: {wrong}; the linear layers of this model are {', '.join(known)}")
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha_used,
            target_modules=list(lora.targets),
            base_model_name_or_path=str(base.absolute()),
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.trainer.seed)
            inject_adapter_in_model(config, network, _NAME)
            for parameter in network.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(network.device, network.dtype)
            network.train(mode=False)
        actor = cls(network, config, base, compiled=is_compiling(settings.trainer.compile, network.device))
        if (folder / ADAPTER_CONFIG).exists():
            actor._restore(lora, folder)
        return actor

    def tensors(self) -> dict[str, Tensor]:
        """The adapter's weights, as peft names them."""
        return {_saved_name(name): each.detach().contiguous() for name, each in self._adapter().items()}

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the adapter into `folder`, and the base model's place."""
        folder.mkdir(parents=True)
        save_file(dict(tensors), folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        # As peft writes it, but with its sets in order: the same adapter is the same bytes.
        config = self._config.to_dict()  # type: ignore[no-untyped-call]
        document = {name: sorted(each) if isinstance(each, set) else each for name, each in config.items()}
        document["inference_mode"] = True
        (folder / ADAPTER_CONFIG).write_text(json.dumps(document, indent=2, sort_keys=True, default=str))

    def as_served(self) -> AbstractContextManager[None]:
        """Within, it computes with the base model's weights as they are in its folder: engines serve these."""
        return exact_weights(self.network, self._base)

    def reference(self, settings: Settings) -> Actor:
        """The base model, on the same weights: it takes no memory of its own."""
        return BareActor(self)

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Run the base model alone."""
        layers = [each for each in self.network.modules() if isinstance(each, BaseTunerLayer)]
        for layer in layers:
            layer.enable_adapters(enabled=False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(enabled=True)

    def _adapter(self) -> dict[str, nn.Parameter]:
        return {name: each for name, each in self.network.named_parameters() if each.requires_grad}

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
        for name, parameter in self._adapter().items():
            parameter.copy_(found[_saved_name(name)])


class BareActor(Actor):
    """The base model below an adapter, as the reference that the actor must not stray from."""

    def __init__(self, adapted: AdaptedActor) -> None:
        super().__init__(adapted.network, compiled=adapted.is_compiled)
        self._adapted = adapted

    def _features(self, batch: Batch, group: SequenceGroup | None) -> Features:
        """The same, without the adapter, which never is at the head."""
        with self._adapted.disable():
            return super()._features(batch, group)


def _saved_name(name: str) -> str:
    """What peft calls a parameter on disk."""
    return _PREFIX + name.replace(f".{_NAME}.", ".")
