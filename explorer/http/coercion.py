"""The values that vLLM accepts in the place of others: its request models are pydantic's, which coerce.

Every field of vLLM's that is read here is read by these functions, so that a request means the same in both places.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from tuneloop.explorer.http.bodies import wrong_type

T = TypeVar("T")

_BOOL: TypeAdapter[bool] = TypeAdapter(bool)
_INT: TypeAdapter[int] = TypeAdapter(int)
_FLOAT: TypeAdapter[float] = TypeAdapter(float)


def coerce_bool(value: object, param: str) -> bool:
    """A boolean, or what stands for one: 1, 0.0, "true", "off". Raises RequestRefused."""
    return value if isinstance(value, bool) else _coerce(_BOOL, value, param, "a boolean")


def coerce_int(value: object, param: str) -> int:
    """An integer, or what stands for one: 2.0, "2", true. Raises RequestRefused."""
    return value if type(value) is int else _coerce(_INT, value, param, "an integer")


def coerce_float(value: object, param: str) -> float:
    """A number, or what stands for one: "0.5", true. Raises RequestRefused."""
    return value if type(value) is float else _coerce(_FLOAT, value, param, "a number")


def flag_of(body: Mapping[str, Any], param: str) -> bool:
    """A boolean field; False where it is absent. Raises RequestRefused."""
    value = body.get(param)
    return value is not None and coerce_bool(value, param)


def equals(value: object, wanted: object) -> bool:
    """Whether a value means the `wanted` one to vLLM, perhaps as a string."""
    if value == wanted or not isinstance(value, str):
        return value == wanted
    adapter = _BOOL if isinstance(wanted, bool) else _FLOAT if isinstance(wanted, int | float) else None
    try:
        return adapter is not None and adapter.validate_python(value) == wanted
    except ValidationError:
        return False


def _coerce(adapter: TypeAdapter[T], value: object, param: str, wanted: str) -> T:
    try:
        return adapter.validate_python(value)
    except ValidationError:
        raise wrong_type(param, wanted) from None
