"""Routes that only pass on an engine's answer: nothing is sampled there, so nothing is recorded."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import orjson
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import Response

from tuneloop.explorer.auth import TRINITY, caller_of
from tuneloop.explorer.dialects.dialect import merged_header
from tuneloop.explorer.engines.adapter_names import without_adapters
from tuneloop.explorer.engines.fleet import Fleet, PinParser
from tuneloop.explorer.engines.model_routes import PolicyView, VersionPin
from tuneloop.explorer.http.bodies import as_utf8, check_template, parse_object, read_bytes
from tuneloop.explorer.http.lists import json_response
from tuneloop.explorer.limits import Admission, tokens_of
from tuneloop.explorer.proxy.media import refuse_remote_files, with_own_uuids
from tuneloop.shared.errors import EngineError, RequestRefused
from tuneloop.shared.experience import JobState

#: The engine routes that any client may use. All others, such as those that swap weights, are answered with 404.
_COUNT = "/v1/messages/count_tokens"
_PASSTHROUGH_PATHS = ("/tokenize", "/detokenize", _COUNT)

#: The same of those without a body. vLLM has the second one only with its option --enable-tokenizer-info-endpoint.
_PASSTHROUGH_QUERIES = ("/version", "/tokenizer_info")

#: An engine reads text in the process that also answers chats, about 3 MB a second: what is longer would stop them, and
#: a worker lets it read one at a time.
_MAX_TEXT_BYTES = 512 << 10
_MAX_WAITING = 64

_OVER = {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}

#: Nothing is sampled for these answers: an engine that takes longer is stuck.
_TIMEOUT_S = 60.0


def _fleet(request: Request) -> Fleet:
    fleet: Fleet = request.app.state.services.fleet
    return fleet


async def _policies(request: Request, fleet: Fleet, name: str | None = None) -> list[PolicyView]:
    """The policies of a tenant, as the ledger has them now where a job was not over, or none has the `name`."""
    tenant, known = caller_of(request.scope).tenant, fleet.policies
    policies = [] if known is None else known.of_tenant(tenant)
    is_new = name is not None and not any(name in each.names for each in policies)
    if is_new or any(each.job is not None and each.job.state not in _OVER for each in policies):
        await fleet.learn_policies()
    return [] if fleet.policies is None else fleet.policies.of_tenant(tenant)


FleetOf = Annotated[Fleet, Depends(_fleet)]


def add_routes(app: FastAPI, pins: PinParser, *, max_body_bytes: int) -> None:
    _add_forwarded(app, pins, max_body_bytes)

    @app.get("/v1/models")
    @app.get(f"{TRINITY}/v1/models")
    async def models(request: Request, fleet: FleetOf) -> Response:
        policies = await _policies(request, fleet)
        if pins.allowed or pins.aliases or policies:
            return json_response({"object": "list", "data": await list_models(fleet, policies)})
        response = await ask_engine(fleet, "GET", "/v1/models")
        return Response(without_adapters(bytes(response.body)), response.status_code, media_type="application/json")

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str, fleet: FleetOf) -> Response:
        if not name:
            raise HTTPException(404)
        for each in await list_models(fleet, await _policies(request, fleet, name)):
            if each.get("id") == name:
                return json_response(each)
        message = "the model does not exist: GET /v1/models lists those that do"  # a key may stand in its place
        raise RequestRefused(message, status=404, code="model_not_found", param="model")

    async def list_models(fleet: Fleet, policies: Sequence[PolicyView]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        pinned = {pins.model_name: fleet.served_versions}
        pinned |= {each.name: sorted(each.versions) for each in policies if each.job is None}
        # The name of a job's model is that of one version.
        for each in await _models(fleet):
            found.append(each)
            if each.get("id") == pins.model_name:
                names = [*pins.aliases, *(name for policy in policies for name in policy.names)]
                found += [each | {"id": name, "parent": pins.model_name} for name in names]
                for name, versions in pinned.items() if pins.allowed else ():
                    found += [each | {"id": f"{name}@{version}"} for version in versions]
        return found


def _add_forwarded(app: FastAPI, pins: PinParser, max_body_bytes: int) -> None:
    admission = Admission(limit=1, max_waiting=_MAX_WAITING, wait_timeout_s=_TIMEOUT_S)

    async def pass_through(request: Request, fleet: FleetOf) -> Response:
        data = as_utf8(await read_bytes(request, max_bytes=min(max_body_bytes, _MAX_TEXT_BYTES)))
        parsed = parse_object(data)
        check_template(parsed)
        refuse_remote_files(parsed)
        caller, turns = caller_of(request.scope), request.app.state.services.proxy.system_turns
        merge = turns.merge_counted if request.url.path == _COUNT else turns.merge
        merged, count = await merge(parsed)
        policy, pin, name = await pins.route(merged, caller, fleet)
        upstream = with_own_uuids(merged, caller.tenant)
        if pin is not None or name:
            upstream = upstream | {"model": pins.model_name}
        body = data if upstream is parsed else orjson.dumps(upstream)
        caller.meter.count_tokens(tokens_of(len(data)))
        await admission.acquire(caller.identity)
        try:
            answer = await ask_engine(fleet, "POST", request.url.path, body, None if policy else pin)
        finally:
            admission.release(caller.identity)
        answer.raw_headers += merged_header(count)
        return answer

    for path in _PASSTHROUGH_PATHS:
        app.post(path)(pass_through)

    async def pass_query_through(request: Request, fleet: FleetOf) -> Response:
        return await ask_engine(fleet, "GET", request.url.path)

    for path in _PASSTHROUGH_QUERIES:
        app.get(path)(pass_query_through)


def remembered_context_length(fleet: Fleet) -> Callable[[], Awaitable[int | None]]:
    found: int | None = None

    async def find() -> int | None:
        nonlocal found
        if found is None:
            found = await context_length(fleet)
        return found

    return find


async def context_length(fleet: Fleet) -> int | None:
    """How many tokens a prompt and its reply may have together; None if no engine answers that."""
    try:
        models = await _models(fleet)
    except (EngineError, RequestRefused):
        return None
    return next((each.get("max_model_len") for each in models), None)


async def _models(fleet: Fleet) -> list[dict[str, Any]]:
    """An engine's list of models. Raises EngineError if it cannot be read."""
    response = await ask_engine(fleet, "GET", "/v1/models")
    try:
        models = orjson.loads(without_adapters(bytes(response.body)))["data"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        models = None
    if not isinstance(models, list) or not all(isinstance(each, dict) for each in models):
        raise EngineError(f"the engine's list of models cannot be read (it answered {response.status_code})")
    return models


async def ask_engine(
    fleet: Fleet, method: str, path: str, body: bytes = b"", pin: VersionPin | None = None
) -> Response:
    """An engine's answer, one of the pinned version. Raises RequestRefused unless it is JSON of the engine's API."""
    engine = await fleet.acquire(pin)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reply = await engine.http.request(
                method, path, body, {"Content-Type": "application/json"} if body else None
            )
            try:
                answer = await reply.read()
            finally:
                reply.close()
    except TimeoutError:
        raise RequestRefused("the engine did not answer in time", status=504, code="engine_timeout") from None
    finally:
        fleet.release(engine)
    try:
        parsed = orjson.loads(answer)
    except orjson.JSONDecodeError:
        parsed = None
    if reply.status != 200 and not (isinstance(parsed, dict) and isinstance(parsed.get("error"), dict)):
        status = reply.status if 400 <= reply.status < 600 else 502
        raise RequestRefused(f"the engine answered {reply.status}", status=status, code="engine_error")
    return Response(answer, reply.status, media_type="application/json")
