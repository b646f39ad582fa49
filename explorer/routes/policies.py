"""The admin API of policies, /admin/policies: makes, lists, pauses, deletes and promotes them.

The administrator of a tenant sees the policies that its keys may use, and changes the tenant's own.
"""

import asyncio

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from tuneloop.explorer.auth import Caller, caller_of, operator_only
from tuneloop.explorer.http.bodies import optional_name, read_object
from tuneloop.explorer.routes.keys import tenant_of
from tuneloop.shared.errors import PolicyRefused, RequestRefused
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import Policy
from tuneloop.shared.operations.policy_report import PolicyDraft, create_policy, list_policies
from tuneloop.shared.settings.settings import Settings

_MAX_BODY_BYTES = 64 << 10


def add_routes(app: FastAPI, settings: Settings, ledger: Ledger) -> None:
    @app.get("/admin/policies")
    async def list_all(request: Request) -> Response:
        caller = caller_of(request.scope)
        return _json({"object": "list", "data": await asyncio.to_thread(list_policies, ledger, tenant_of(caller))})

    @app.post("/admin/policies")
    async def create(request: Request) -> Response:
        caller, body = caller_of(request.scope), await read_object(request, max_bytes=_MAX_BODY_BYTES)
        try:
            draft = msgspec.convert(body, PolicyDraft)
        except msgspec.ValidationError as error:
            raise RequestRefused(str(error), code="invalid_value") from None
        if not caller.sees_all:
            if draft.tenant not in {"", caller.tenant}:
                raise operator_only("the administrator of a tenant makes policies of that tenant alone")
            draft = msgspec.structs.replace(draft, tenant=caller.tenant)
        return _json(await asyncio.to_thread(lambda: create_policy(settings, ledger, draft, by=f"admin:{caller.name}")))

    @app.post("/admin/policies/{name}/{action}")
    async def change(name: str, action: str, request: Request) -> Response:
        caller = caller_of(request.scope)
        body = await read_object(request, max_bytes=_MAX_BODY_BYTES, empty_is={})
        tenant, into = optional_name(body, "tenant"), optional_name(body, "into")
        by = f"admin:{caller.name}"

        def make() -> object:
            policy = _own(ledger, caller, name, tenant)
            if action == "promote":
                target = _own(ledger, caller, into or "default", None)
                return {"version": ledger.policies.promote(policy.id, into=target.id, by=by)}
            if action == "delete":
                ledger.policies.delete(policy.id, by=by)
            elif action in {"pause", "resume"}:
                ledger.policies.pause(policy.id, paused=action == "pause")
            else:
                raise RequestRefused(
                    f"no route /admin/policies/{name[:64]}/{action[:64]}", status=404, code="not_found"
                )
            return {"name": name, "done": action}

        return _json(await asyncio.to_thread(make))


def _own(ledger: Ledger, caller: Caller, name: str, tenant: str | None) -> Policy:
    """A policy that the caller may change. Raises RequestRefused."""
    try:
        policy = ledger.policies.find(name, tenant if caller.sees_all else caller.tenant)
    except PolicyRefused as error:
        raise RequestRefused(str(error), status=404, code="policy_not_found", param="name") from None
    if not caller.sees_all and policy.tenant != caller.tenant:
        raise operator_only("a policy of all tenants is changed by an operator alone")
    return policy


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
