"""Reads request bodies: bounded, strictly JSON, an object."""

import math
from datetime import UTC, datetime
from typing import Any

import orjson
from fastapi import Request
from starlette.requests import ClientDisconnect

from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import MAX_NAME


async def read_object(request: Request, *, max_bytes: int, empty_is: dict[str, Any] | None = None) -> dict[str, Any]:
    """The body as a JSON object. `empty_is` stands for a body of no bytes, where that is allowed.

    NaN, Infinity, numbers beyond a double, lone surrogates and broken UTF-8 are not JSON.
    """
    data = await read_bytes(request, max_bytes=max_bytes)
    if not data and empty_is is not None:
        return empty_is
    return object_of(data)


async def read_bytes(request: Request, *, max_bytes: int) -> bytes:
    """The body. Raises RequestRefused if it is too large."""
    data = bytearray()
    try:
        async for block in request.stream():
            data += block
            if len(data) > max_bytes:
                raise RequestRefused(f"the body is larger than {max_bytes} bytes", status=413, code="body_too_large")
    except ClientDisconnect:
        raise RequestRefused("the client left", status=499, code="client_left") from None
    return bytes(data)


def object_of(data: bytes | bytearray) -> dict[str, Any]:
    """The JSON object that these bytes are. Raises RequestRefused if they are none."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object", code="invalid_type")
    return body


def wrong_type(param: str, wanted: str) -> RequestRefused:
    """The refusal of a field of the wrong type."""
    return RequestRefused(f"{param} must be {wanted}", code="invalid_type", param=param)


def flag(body: dict[str, Any], param: str) -> bool | None:
    """A boolean; where there is none, nothing is said."""
    value = body.get(param)
    if value is not None and not isinstance(value, bool):
        raise wrong_type(param, "a boolean")
    return value


def text_or_number(body: dict[str, Any], param: str) -> str | None:
    """An id that clients send as a string or as a number; both mean the string."""
    value = body.get(param)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise wrong_type(param, "a string or an integer")
    return _storable(str(value), param)


def name(body: dict[str, Any], param: str) -> str | None:
    """A name of at most MAX_NAME characters; an empty one is none."""
    value = words(body, param)
    return None if value is None else _storable(value, param)


def words(body: dict[str, Any], param: str) -> str | None:
    """Text of any length; where there is none, nothing is said."""
    value = body.get(param)
    if value is None:
        return None
    if not isinstance(value, str):
        raise wrong_type(param, "a string")
    return value or None


def moment(body: dict[str, Any], param: str) -> float | None:
    """Seconds since 1970 of a time: that number, or ISO 8601 (UTC unless it says otherwise)."""
    value = body.get(param)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            read = datetime.fromisoformat(value)
        except ValueError:
            raise wrong_type(param, "seconds since 1970 or ISO 8601") from None
        return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    return finite(value, param, bound=1e12)


def _storable(value: str, param: str) -> str:
    if len(value) > MAX_NAME:
        raise RequestRefused(f"{param} must have at most {MAX_NAME} characters", code="too_long", param=param)
    if "\0" in value:
        raise RequestRefused(f"{param} must not contain NUL", code="invalid_value", param=param)
    return value


def finite(value: object, param: str, *, bound: float) -> float:
    """A finite number (not a bool) of at most `bound` in size."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(param, "a number")
    if not (math.isfinite(value) and abs(value) <= bound):
        raise RequestRefused(f"{param} must lie between {-bound:g} and {bound:g}", code="out_of_range", param=param)
    return float(value)
