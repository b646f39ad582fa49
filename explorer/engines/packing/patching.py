"""Replaces methods of vLLM's classes, where they are as they are known; and how a marked request is known."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

#: In `extra_args` of the sampling parameters of a request whose log-probabilities are packed, with its `mask_width`;
#: under the same name they travel from the engine's core to its API servers.
MARK = "tuneloop_packed_logprobs"
#: Under this name, what truncation left of the vocabulary at each token: so many ids as int32, and then all of these.
MASK = "tuneloop_sampling_mask"


class UnknownVllm(Exception):
    """This vLLM is not built as it would have to be."""


def find(module: str, name: str) -> Any:
    """A class or function of vLLM. Raises UnknownVllm."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, RuntimeError, OSError) as error:  # a library may be missing, or its device
        raise UnknownVllm(f"{module}.{name}: {error}") from error


def method(owner: Any, name: str, *parameters: str) -> Callable[..., Any]:
    """The function that is this method, which takes these parameters first, after itself. Raises UnknownVllm."""
    found = inspect.getattr_static(owner, name, None)
    function = getattr(found, "__func__", found)
    if not inspect.isfunction(function):
        raise UnknownVllm(f"{owner.__qualname__} has no method {name}")
    _, *names = inspect.signature(function).parameters
    if tuple(names[: len(parameters)]) != parameters:
        raise UnknownVllm(f"{owner.__qualname__}.{name} takes {', '.join(names)}")
    return function


def require_fields(owner: Any, *names: str) -> None:
    """Raises UnknownVllm unless the class has all of these fields."""
    annotated = {name for each in owner.__mro__ for name in inspect.get_annotations(each)}
    known = {*getattr(owner, "__struct_fields__", ()), *getattr(owner, "model_fields", ()), *annotated}
    if missing := [name for name in names if name not in known]:
        raise UnknownVllm(f"{owner.__qualname__} has no {', '.join(missing)}")


def is_marked(sampling: Any) -> bool:
    """Whether these sampling parameters are of a request whose log-probabilities are packed."""
    return sampling is not None and sampling.extra_args is not None and MARK in sampling.extra_args


def mask_width(sampling: Any) -> int:
    """How many of the most probable tokens a marked request's mask is looked for among; 1 if it wants none."""
    return int(sampling.extra_args[MARK])
