"""What is done to the layers of a model by setting: their activations made again instead of kept, and compilation."""

import os
import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import structlog
import torch
import torch._dynamo.config
from torch import is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from tuneloop.shared.errors import SettingsError

_log = structlog.get_logger()


def checkpoint_layers(network: nn.Module) -> None:
    """Keep, for the backward pass, only what goes into each layer. Raises SettingsError if there are none.

    transformers' own way needs layers in training mode, in which they drop out and forget the cache of a generation.
    """
    for layer in _layers(network, "trainer.activation_checkpointing"):
        layer.__class__ = _checkpointing_kind(type(layer))


def is_checkpointing(network: nn.Module) -> bool:
    """Whether `checkpoint_layers` was called, or there are no layers to call it for."""
    layers = [each for each in network.modules() if isinstance(each, GradientCheckpointingLayer)]
    return all(type(each) in _known.values() for each in layers)


def compile_layers(network: nn.Module) -> None:
    """Compile each layer, for rows of any length. Raises SettingsError if there are none."""
    for layer in _layers(network, "trainer.compile"):
        layer.compile(dynamic=True)


def is_compiling(wanted: bool | None, device: torch.device) -> bool:
    """Whether layers are compiled: what the setting says, else on a GPU, where a C compiler is found to do it with."""
    if wanted is not None:
        return wanted
    if device.type != "cuda":
        return False
    compilers = [os.environ.get("CC", "gcc"), "gcc", "clang", "cc"]
    if not any(shutil.which(name) for name in compilers):
        _log.warning("not_compiled", reason="there is no C compiler; with gcc a step takes two thirds of the time")
        return False
    # A layer that torch cannot compile runs as it is.
    torch._dynamo.config.suppress_errors = True
    return True


def _layers(network: nn.Module, setting: str) -> Iterator[nn.Module]:
    found = [each for each in network.modules() if isinstance(each, GradientCheckpointingLayer)]
    if not found:
        raise SettingsError(f"{setting}: {type(network).__name__} has no layers for it; set it to false")
    yield from found


_known: dict[type[nn.Module], type[nn.Module]] = {}


def _checkpointing_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """The same layer; a subclass, since what is hung on a layer and holds it is never freed."""

    def forward(self: nn.Module, *args: Any, **options: Any) -> Any:
        run = partial(kind.forward, self)
        if not is_grad_enabled():
            return run(*args, **options)
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **options)

    if kind not in _known:
        # Not `__call__`: what is compiled is the layer with its recomputation.
        _known[kind] = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return _known[kind]
