"""Reads request bodies: bounded, strictly JSON, an object."""

import math
from typing import Any

import orjson
from fastapi import Request
from starlette.requests import ClientDisconnect

from shared.errors import RequestRefused


async def read_object(request: Request, *, max_bytes: int, empty_is: dict[str, Any] | None = None) -> dict[str, Any]:
    """The body as a JSON object. `empty_is` stands for a body of no bytes, where that is allowed.

    NaN, Infinity, numbers beyond a double, lone surrogates and broken UTF-8 are not JSON.
    """
    data = bytearray()
    try:
        async for block in request.stream():
            data += block
            if len(data) > max_bytes:
                raise RequestRefused(f"the body is larger than {max_bytes} bytes", status=413, code="body_too_large")
    except ClientDisconnect:
        raise RequestRefused("the client left", status=499, code="client_left") from None
    if not data and empty_is is not None:
        return empty_is
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


def text_or_number(body: dict[str, Any], param: str) -> str | None:
    """An id that clients send as a string or as a number; both mean the string."""
    value = body.get(param)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise wrong_type(param, "a string or an integer")
    if len(str(value)) > 512:
        raise RequestRefused(f"{param} must have at most 512 characters", code="too_long", param=param)
    if "\0" in str(value):
        raise RequestRefused(f"{param} must not contain NUL", code="invalid_value", param=param)
    return str(value)


def finite(value: object, param: str, *, bound: float) -> float:
    """A finite number (not a bool) of at most `bound` in size."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(param, "a number")
    if not (math.isfinite(value) and abs(value) <= bound):
        raise RequestRefused(f"{param} must lie between {-bound:g} and {bound:g}", code="out_of_range", param=param)
    return float(value)
