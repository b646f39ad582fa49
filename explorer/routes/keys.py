"""The admin API of keys, /admin/keys: makes, lists and revokes them, and shows the audit log."""

import asyncio
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from tuneloop.explorer.auth import Caller, caller_of, operator_only
from tuneloop.explorer.http.bodies import optional_name, read_object
from tuneloop.shared.errors import KeyRefused, RequestRefused
from tuneloop.shared.experience import Scope, steady_clock
from tuneloop.shared.ledger.keys import AccessKey, KeyGrant, KeyLimits
from tuneloop.shared.ledger.ledger import Ledger

_MAX_BODY_BYTES = 16 << 10

#: The entries of the audit log that one answer has.
_MAX_EVENTS = 1000

#: The keys that a tenant's administrators may have made.
MAX_KEYS = 1000

_Number = TypeVar("_Number", int, float)


def add_routes(app: FastAPI, ledger: Ledger) -> None:
    keys = ledger.keys

    @app.get("/admin/keys")
    async def list_keys(request: Request) -> Response:
        tenant = tenant_of(caller_of(request.scope))
        found = await asyncio.to_thread(lambda: keys.all(tenant=tenant))
        return _json({"object": "list", "data": [_report(key) for key in found]})

    @app.post("/admin/keys")
    async def create_key(request: Request) -> Response:
        caller, body = caller_of(request.scope), await read_object(request, max_bytes=_MAX_BODY_BYTES)
        if not caller.sees_all:
            body.setdefault("tenant", caller.tenant)
        policy = optional_name(body, "policy")
        grant = parse_grant({name: value for name, value in body.items() if name != "policy"})
        if not caller.sees_all:
            theirs = await asyncio.to_thread(lambda: keys.all(tenant=caller.tenant))
            grant = _within(grant, caller, theirs)
        if policy is not None:
            number = (await asyncio.to_thread(ledger.policies.find, policy, grant.tenant)).id
            grant = msgspec.structs.replace(grant, policy=number)
        key, secret = await asyncio.to_thread(lambda: keys.create(grant, actor=caller.name))
        return _json(_report(key) | {"key": secret}, no_store=True)

    @app.get("/admin/keys/audit")
    async def audit(request: Request) -> Response:
        tenant = tenant_of(caller_of(request.scope))
        events = await asyncio.to_thread(lambda: keys.events(last=_MAX_EVENTS, tenant=tenant))
        return _json({"object": "list", "data": [event._asdict() for event in events]})

    @app.delete("/admin/keys/{key_id}")
    async def revoke_key(key_id: str, request: Request) -> Response:
        caller = caller_of(request.scope)
        tenant = tenant_of(caller)
        if not await asyncio.to_thread(lambda: keys.revoke(key_id, actor=caller.name, tenant=tenant)):
            raise RequestRefused(f"no key {key_id[:64]!r} is in force", status=404, code="not_found", param="key_id")
        return _json({"key_id": key_id, "revoked": True})


def tenant_of(caller: Caller) -> str | None:
    """Whose keys and policies are the caller's business; None: everybody's."""
    return None if caller.sees_all else caller.tenant


def _within(grant: KeyGrant, caller: Caller, theirs: list[AccessKey]) -> KeyGrant:
    """The grant within what the key of its maker allows, who administers the tenant of which `theirs` are all keys.

    Raises RequestRefused where it would allow more.
    """
    if grant.tenant != caller.tenant or Scope.METRICS in grant.scopes:
        raise operator_only(
            "the administrator of a tenant makes keys of that tenant alone, none with the scope metrics"
        )
    if len(theirs) >= MAX_KEYS:
        raise operator_only(
            f"a tenant has {MAX_KEYS} keys at most, revoked ones included, unless an operator makes more"
        )
    own = next(key for key in theirs if key.key_id == caller.key_id)
    bounds = msgspec.structs.asdict(own.limits)
    limits = {name: _cap(f"limits.{name}", getattr(grant.limits, name), most) for name, most in bounds.items()}
    left = None if own.expires_at is None else max(1.0, own.expires_at - steady_clock())
    expires_in = _cap("expires_in", grant.expires_in, left)
    return msgspec.structs.replace(grant, limits=KeyLimits(**limits), expires_in=expires_in)


def _cap(name: str, asked: _Number | None, most: _Number | None) -> _Number | None:
    """What is asked for, or all there is."""
    if asked is not None and most is not None and asked > most:
        raise operator_only(f"{name}: {asked:g} is more than the key that makes it allows, {most:g}")
    return most if asked is None else asked


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
