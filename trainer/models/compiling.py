"""Functions that are compiled, each once in a process."""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


@cache
def _compile_once(function: _F) -> _F:
    return cast(_F, torch.compile(function, dynamic=True))


def compile_if(function: _F, *, wanted: bool) -> _F:
    """The function, compiled for sizes of any kind if that is wanted."""
    return _compile_once(function) if wanted else function
