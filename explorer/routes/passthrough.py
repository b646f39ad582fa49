"""Routes that only pass on what an engine says: nothing is sampled there, so nothing is kept."""

import asyncio
from typing import Annotated, Any

import orjson
from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response

from tuneloop.explorer.engines.adapter_names import without_adapters
from tuneloop.explorer.engines.fleet import Fleet
from tuneloop.explorer.engines.version_routing import PinParser, VersionPin
from tuneloop.explorer.http.bodies import read_bytes
from tuneloop.shared.errors import EngineError, RequestRefused

#: What an engine may be asked by anybody. All else that it can do, such as swapping weights, is answered with 404.
_PASSED = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")

#: Nothing is sampled for these answers: an engine that takes longer is ill.
_TIMEOUT_S = 60.0


def _fleet(request: Request) -> Fleet:
    fleet: Fleet = request.app.state.road.fleet
    return fleet


FleetOf = Annotated[Fleet, Depends(_fleet)]


def add_routes(app: FastAPI, pins: PinParser, *, max_body_bytes: int) -> None:
    """Add them to the app."""

    async def passed(request: Request, fleet: FleetOf) -> Response:
        body, pin = _of_a_version(await read_bytes(request, max_bytes=max_body_bytes), pins)
        return await _asked(fleet, "POST", request.url.path, body, pin)

    for path in _PASSED:
        app.post(path)(passed)

    @app.get("/v1/models")
    async def models(fleet: FleetOf) -> Response:
        if pins.allowed:
            return _json({"object": "list", "data": await listed(fleet)})
        told = await _asked(fleet, "GET", "/v1/models")
        return Response(without_adapters(bytes(told.body)), told.status_code, media_type="application/json")

    @app.get("/v1/models/{name:path}")
    async def model(name: str, fleet: FleetOf) -> Response:
        for each in await listed(fleet):
            if each.get("id") == name:
                return _json(each)
        raise RequestRefused(f"the model {name!r} does not exist", status=404, code="model_not_found", param="model")

    async def listed(fleet: Fleet) -> list[dict[str, Any]]:
        return list(pins.listed(await _models(fleet), fleet.served))


def _of_a_version(body: bytes, pins: PinParser) -> tuple[bytes, VersionPin | None]:
    """What the engine gets, and the version that the body names. Raises RequestRefused if that is no number."""
    if not pins.allowed:
        return body, None
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        said = None
    if not isinstance(said, dict) or (pin := pins.of(said)) is None:
        return body, None  # the engine says what it makes of it
    return orjson.dumps(said | {"model": pins.name}), pin


async def longest_sequence(fleet: Fleet) -> int | None:
    """How many tokens the engines' prompts and replies may have together; None if they don't say."""
    try:
        known = await _models(fleet)
    except (EngineError, RequestRefused):
        return None
    return next((each.get("max_model_len") for each in known), None)


async def _models(fleet: Fleet) -> list[dict[str, Any]]:
    """What an engine says of its models. Raises EngineError if it says something else."""
    told = await _asked(fleet, "GET", "/v1/models")
    try:
        found = orjson.loads(without_adapters(bytes(told.body)))["data"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        found = None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise EngineError(f"the engine's list of models cannot be read (it answered {told.status_code})")
    return found


async def _asked(fleet: Fleet, method: str, path: str, body: bytes = b"", pin: VersionPin | None = None) -> Response:
    """An engine's answer, which it said itself or in an envelope; of one that has the version, where that matters."""
    engine = await fleet.take(pin)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reply = await engine.http.ask(method, path, body, {"Content-Type": "application/json"} if body else None)
            try:
                told = await reply.read()
            finally:
                reply.close()
    except TimeoutError:
        raise RequestRefused("the engine did not answer in time", status=504, code="engine_timeout") from None
    finally:
        fleet.give_back(engine)
    if reply.status != 200 and not _is_refusal(told):
        status = reply.status if 400 <= reply.status < 600 else 502
        raise RequestRefused(f"the engine answered {reply.status}", status=status, code="engine_error")
    return Response(told, reply.status, media_type="application/json")


def _is_refusal(body: bytes) -> bool:
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(told, dict) and isinstance(told.get("error"), dict)


def _json(told: object) -> Response:
    return Response(orjson.dumps(told), media_type="application/json")
