"""Reads request bodies: bounded, strictly JSON; and values as vLLM's pydantic models coerce them."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np
import orjson
from fastapi import Request
from pydantic import TypeAdapter, ValidationError

from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import MAX_NAME

T = TypeVar("T")

_BOOL: TypeAdapter[bool] = TypeAdapter(bool)
_INT: TypeAdapter[int] = TypeAdapter(int)
_FLOAT: TypeAdapter[float] = TypeAdapter(float)

#: What a body may be nested, and have of values.
MAX_DEPTH, MAX_CONTAINERS, MAX_VALUES = 200, 200_000, 1_000_000

#: Bodies of more bytes and more commas than this are parsed in a thread: 200,000 names take a tenth of a second. A
#: picture, however large, does not.
_LARGE, _MANY = 256 << 10, 10_000

#: How deep orjson writes.
_MOST_WRITTEN = 254


async def read_object(request: Request, *, max_bytes: int, empty_is: dict[str, Any] | None = None) -> dict[str, Any]:
    """The body as a JSON object, `empty_is` where it is empty. NaN, lone surrogates and broken UTF-8 are not JSON."""
    data = await read_bytes(request, max_bytes=max_bytes)
    return empty_is if not data and empty_is is not None else await parse_body(as_utf8(data))


async def read_bytes(request: Request, *, max_bytes: int) -> bytes:
    """The body. Raises RequestRefused if it is too large, too slow, or there is no room for it."""
    return await read_body(request.receive, request.headers.get("content-length"), max_bytes)


async def read_body(receive: Callable[[], Awaitable[Any]], length: str | None, max_bytes: int) -> bytes:
    """A body of ASGI's, of which the head says how long it is. Raises RequestRefused if it is too large."""
    came, blocks, more = 0, list[bytes](), int(length or 0) <= max_bytes
    is_too_large = not more
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestRefused("the client disconnected", status=499, code="client_left")
        blocks.append(message.get("body", b""))
        came += len(blocks[-1])
        is_too_large = came > max_bytes
        more = message.get("more_body", False) and not is_too_large
    if is_too_large:
        raise RequestRefused(f"the body is larger than {max_bytes} bytes", status=413, code="body_too_large")
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


async def parse_body(data: bytes) -> dict[str, Any]:
    """The JSON object in a body; a large one is parsed in a thread. Raises RequestRefused if there is none."""
    if len(data) <= _LARGE or data.count(b",") <= _MANY:
        return parse_object(data)
    return await asyncio.to_thread(parse_object, data)


def as_utf8(data: bytes) -> bytes:
    """The body as UTF-8 without a byte order mark: JSON may come as UTF-16 or UTF-32 too. Raises RequestRefused."""
    encoding = json.detect_encoding(data)
    if encoding == "utf-8":
        return data
    try:
        return data.decode(encoding).encode()
    except UnicodeError as error:
        raise RequestRefused(f"the body is not JSON: {error}", code="invalid_json") from None


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in these bytes. Raises RequestRefused if there is none, or one nested too deeply or too large."""
    # What would take very much more memory parsed than in bytes. The brackets and commas of strings count first, too.
    if len(data) >= 2 * MAX_CONTAINERS and (
        data.count(b"[") + data.count(b"{") > MAX_CONTAINERS or data.count(b",") > MAX_VALUES
    ):
        containers, commas = count_structure(data)
        if containers > MAX_CONTAINERS or commas > MAX_VALUES:
            reason = f"the body has more than {MAX_CONTAINERS} objects and lists, or {MAX_VALUES} values"
            raise RequestRefused(reason, status=413, code="too_many_values")
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object", code="invalid_type")
    _check_depth(body, data)
    return body


def count_structure(data: bytes) -> tuple[int, int]:
    """The opening brackets and braces of some JSON, and its commas, without those in strings.

    In memory and time that do not depend on how many strings there are.

    >>> count_structure(rb'{"a,[": ["\\"{", 1, {}]}')
    (3, 2)
    """
    if b"\\" in data:
        data = data.replace(rb"\\", b"__").replace(rb"\"", b"__")
    characters = np.frombuffer(data, np.uint8)
    outside = ~np.logical_xor.accumulate(characters == ord('"'))
    opening = (characters == ord("[")) | (characters == ord("{"))
    return int(np.count_nonzero(outside & opening)), int(np.count_nonzero(outside & (characters == ord(","))))


def _check_depth(body: object, data: bytes) -> None:
    """Raise RequestRefused for what could not be written again, with a little around it."""
    if len(data) < 2 * MAX_DEPTH or data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    for _ in range(_MOST_WRITTEN - MAX_DEPTH):
        body = [body]
    try:
        orjson.dumps(body)
    except orjson.JSONEncodeError as error:
        if isinstance(error.__cause__, UnicodeError):  # it has lone surrogates: the routes say so
            return
        raise RequestRefused(f"the body is nested more than {MAX_DEPTH} deep", code="nested_too_deeply") from None


def wrong_type(param: str, wanted: str) -> RequestRefused:
    return RequestRefused(f"{param} must be {wanted}", code="invalid_type", param=param)


def optional_bool(body: dict[str, Any], param: str) -> bool | None:
    """A boolean field; None if it is absent."""
    value = body.get(param)
    if value is not None and not isinstance(value, bool):
        raise wrong_type(param, "a boolean")
    return value


def optional_id(body: dict[str, Any], param: str) -> str | None:
    """An id field: a string, or a number that stands for its digits; None if it is absent."""
    value = body.get(param)
    return None if value is None else id_of(value, param)


def id_of(value: object, param: str) -> str:
    """An id: a string, or a number that stands for its digits. Raises RequestRefused."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise wrong_type(param, "a string or an integer")
    return _storable(str(value), param)


def optional_name(body: dict[str, Any], param: str) -> str | None:
    """A name field of at most MAX_NAME characters; None if it is absent or empty."""
    value = optional_text(body, param)
    return None if value is None else _storable(value, param)


def optional_text(body: dict[str, Any], param: str) -> str | None:
    """A text field of any length; None if it is absent or empty."""
    value = body.get(param)
    if value is None:
        return None
    if not isinstance(value, str):
        raise wrong_type(param, "a string")
    return value or None


def optional_time(body: dict[str, Any], param: str) -> float | None:
    """A time field in seconds since 1970: that number, or ISO 8601 (UTC without an offset); None if it is absent."""
    value = body.get(param)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            raise wrong_type(param, "seconds since 1970 or ISO 8601") from None
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return finite_number(value, param, bound=1e12)


def _storable(value: str, param: str) -> str:
    if len(value) > MAX_NAME:
        raise RequestRefused(f"{param} must have at most {MAX_NAME} characters", code="too_long", param=param)
    if "\0" in value:
        raise RequestRefused(f"{param} must not contain NUL", code="invalid_value", param=param)
    return value


def finite_number(value: object, param: str, *, bound: float) -> float:
    """A finite number (not a bool) of at most `bound` in size."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(param, "a number")
    if not (math.isfinite(value) and abs(value) <= bound):
        raise RequestRefused(f"{param} must lie between {-bound:g} and {bound:g}", code="out_of_range", param=param)
    return float(value)


def number_in_form(text: str) -> float | None:
    """The number that a field of a form is; None for anything else, such as `1_0` or digits that JSON does not have."""
    try:
        return float(text) if text.isascii() and "_" not in text else None
    except ValueError:
        return None


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


def check_template(body: Mapping[str, Any]) -> None:
    """Raise RequestRefused for a chat template of a request's own, which engines of others may trust."""
    inner = body.get("chat_template_kwargs")
    for holder, param in ((body, "chat_template"), (inner, "chat_template_kwargs.chat_template")):
        if isinstance(holder, Mapping) and holder.get("chat_template") is not None:
            raise RequestRefused(
                "a chat template is a program: the model's own is used", code="chat_template_not_allowed", param=param
            )
