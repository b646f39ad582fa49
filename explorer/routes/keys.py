"""The admin API of keys, /admin/keys: makes, lists and revokes them, and shows the audit log."""

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response

from tuneloop.explorer.http.bodies import read_object
from tuneloop.explorer.http.caller import Caller, caller_of
from tuneloop.shared.errors import KeyRefused, RequestRefused
from tuneloop.shared.ledger.keys import AccessKey, KeyGrant, Keys

_MAX_BODY_BYTES = 16 << 10

#: The entries of the audit log that one answer has.
_MAX_EVENTS = 1000


def _caller(request: Request) -> Caller:
    return caller_of(request.scope)


CallerOf = Annotated[Caller, Depends(_caller)]


def add_routes(app: FastAPI, keys: Keys) -> None:
    """Add the routes to the app."""

    @app.get("/admin/keys")
    async def list_keys() -> Response:
        found = await asyncio.to_thread(keys.all)
        return _json({"object": "list", "data": [_report(key) for key in found]})

    @app.post("/admin/keys")
    async def create_key(request: Request, caller: CallerOf) -> Response:
        grant = parse_grant(await read_object(request, max_bytes=_MAX_BODY_BYTES))
        key, secret = await asyncio.to_thread(lambda: keys.create(grant, actor=caller.name))
        return _json(_report(key) | {"key": secret}, no_store=True)

    @app.get("/admin/keys/audit")
    async def audit() -> Response:
        events = await asyncio.to_thread(lambda: keys.events(last=_MAX_EVENTS))
        return _json({"object": "list", "data": [event._asdict() for event in events]})

    @app.delete("/admin/keys/{key_id}")
    async def revoke_key(key_id: str, caller: CallerOf) -> Response:
        if not await asyncio.to_thread(lambda: keys.revoke(key_id, actor=caller.name)):
            raise RequestRefused(f"no key {key_id[:64]!r} is in force", status=404, code="not_found", param="key_id")
        return _json({"key_id": key_id, "revoked": True})


def parse_grant(body: dict[str, Any]) -> KeyGrant:
    """What a key is to allow. Raises KeyRefused."""
    if unknown := sorted(body.keys() - set(KeyGrant.__struct_fields__)):
        raise KeyRefused(f"unknown field {unknown[0][:64]!r}; there are {', '.join(KeyGrant.__struct_fields__)}")
    try:
        return msgspec.convert(body, KeyGrant)
    except msgspec.ValidationError as error:
        raise KeyRefused(str(error)) from None


def _report(key: AccessKey) -> dict[str, Any]:
    report: dict[str, Any] = msgspec.to_builtins(key)
    del report["digest"]
    return report


def _json(body: object, *, no_store: bool = False) -> Response:
    headers = {"cache-control": "no-store"} if no_store else None
    return Response(msgspec.json.encode(body), headers=headers, media_type="application/json")
