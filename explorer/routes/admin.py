"""The admin API: reports on raters and versions, decisions about versions, policies, keys, and the audit log.

The gate lets in who has a key with the scope `admin`, or `explorer.admin_key`. The administrator of a tenant sees what
its keys may use, and changes the tenant's own.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from starlette.datastructures import QueryParams

from tuneloop.explorer.auth import Caller, caller_of, operator_only
from tuneloop.explorer.http.bodies import optional_name, optional_text, read_object, wrong_type
from tuneloop.explorer.http.lists import json_response, parse_number
from tuneloop.shared.errors import KeyRefused, PolicyRefused, RequestRefused
from tuneloop.shared.experience import Scope, steady_clock
from tuneloop.shared.ledger.keys import AccessKey, KeyGrant, KeyLimits
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import Policy
from tuneloop.shared.operations.policy_report import PolicyDraft, create_policy, list_policies
from tuneloop.shared.operations.version_decisions import (
    DecisionRequest,
    DecisionResult,
    pin,
    promote,
    reject,
    roll_back,
    unpin,
)
from tuneloop.shared.operations.version_report import compare_versions, list_events, list_versions, report_version
from tuneloop.shared.settings.settings import Settings

#: The longest reason, in characters.
MAX_REASON = 2000

#: The most events of one answer.
MAX_EVENTS = 1000

#: Bytes of a decision or a policy, and of a key.
_MAX_BODY_BYTES, _MAX_KEY_BYTES = 64 << 10, 16 << 10

#: The keys that a tenant's administrators may have made.
MAX_KEYS = 1000

_FIELDS = frozenset({"reason", "expect", "by"})
_DIGITS = 9

#: The author of a decision that names none.
_DEFAULT_AUTHOR = "api"

_Number = TypeVar("_Number", int, float)

_Decision = Callable[[Ledger, Any, DecisionRequest], DecisionResult]


def add_routes(app: FastAPI, settings: Settings, ledger: Ledger) -> None:
    router = APIRouter(prefix="/admin/versions")

    @router.get("")
    async def get_versions() -> Response:
        return json_response({"object": "list", "data": await asyncio.to_thread(list_versions, ledger)})

    @router.get("/events")
    async def get_events(request: Request) -> Response:
        query = request.query_params
        last = _parse_number_param(query, "last", MAX_EVENTS)
        if not 1 <= last <= MAX_EVENTS:
            raise RequestRefused(f"last must be from 1 to {MAX_EVENTS}", code="out_of_range", param="last")
        version = _parse_number_param(query, "version") if "version" in query else None
        return json_response(
            {"object": "list", "data": await asyncio.to_thread(list_events, ledger, version, last=last)}
        )

    @router.get("/compare")
    async def compare(request: Request) -> Response:
        query = request.query_params
        sides = [str(_parse_number_param(query, side)) for side in ("a", "b")]
        return json_response(
            await asyncio.to_thread(lambda: compare_versions(ledger, *(parse_version(side, ledger) for side in sides)))
        )

    @router.get("/{version}")
    async def get_version(version: str) -> Response:
        return json_response(await asyncio.to_thread(lambda: report_version(ledger, parse_version(version, ledger))))

    within_s = settings.explorer.service_status_check_interval

    def add_decision(path: str, decision: _Decision, *, needs_reason: bool = False) -> None:
        async def decide(request: Request) -> Response:
            decided = parse_decision(await read_object(request, max_bytes=_MAX_BODY_BYTES, empty_is={}))
            if needs_reason and not decided.reason:
                message = "reason is missing: a version that is rolled back is never served again"
                raise RequestRefused(message, code="missing_required_parameter", param="reason")
            version = request.path_params.get("version")

            def make() -> DecisionResult:
                return decision(ledger, version and parse_version(version, ledger), decided)

            result = await asyncio.to_thread(make)
            return json_response(result._asdict() | {"taken_up_within_s": within_s})

        router.post(path)(decide)

    add_decision("/unpin", unpin)
    add_decision("/{version}/unpin", unpin)
    add_decision("/rollback", roll_back, needs_reason=True)
    add_decision("/{version}/rollback", roll_back, needs_reason=True)
    add_decision("/{version}/reject", reject, needs_reason=True)
    add_decision("/{version}/promote", promote)
    add_decision("/{version}/pin", pin)
    app.router.routes += router.routes  # include_router would build each of them again

    @app.get("/admin/raters")
    async def get_raters(request: Request) -> Response:
        caller, found = caller_of(request.scope), await asyncio.to_thread(ledger.raters.all)
        found = [each for each in found if caller.sees_all or each.tenant == caller.tenant]
        return json_response({"object": "list", "data": [each._asdict() for each in found]})


def add_policies(app: FastAPI, settings: Settings, ledger: Ledger) -> None:
    @app.get("/admin/policies")
    async def list_all(request: Request) -> Response:
        caller = caller_of(request.scope)
        return json_response(
            {"object": "list", "data": await asyncio.to_thread(list_policies, ledger, tenant_of(caller))}
        )

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
        return json_response(
            await asyncio.to_thread(lambda: create_policy(settings, ledger, draft, by=f"admin:{caller.name}"))
        )

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

        return json_response(await asyncio.to_thread(make))


def add_keys(app: FastAPI, ledger: Ledger) -> None:
    keys = ledger.keys

    @app.get("/admin/keys")
    async def list_keys(request: Request) -> Response:
        tenant = tenant_of(caller_of(request.scope))
        found = await asyncio.to_thread(lambda: keys.all(tenant=tenant))
        return json_response({"object": "list", "data": [_report(key) for key in found]})

    @app.post("/admin/keys")
    async def create_key(request: Request) -> Response:
        caller, body = caller_of(request.scope), await read_object(request, max_bytes=_MAX_KEY_BYTES)
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
        return json_response(_report(key) | {"key": secret}, no_store=True)

    @app.get("/admin/keys/audit")
    async def audit(request: Request) -> Response:
        tenant = tenant_of(caller_of(request.scope))
        events = await asyncio.to_thread(lambda: keys.events(last=MAX_EVENTS, tenant=tenant))
        return json_response({"object": "list", "data": [event._asdict() for event in events]})

    @app.delete("/admin/keys/{key_id}")
    async def revoke_key(key_id: str, request: Request) -> Response:
        caller = caller_of(request.scope)
        tenant = tenant_of(caller)
        if not await asyncio.to_thread(lambda: keys.revoke(key_id, actor=caller.name, tenant=tenant)):
            raise RequestRefused(f"no key {key_id[:64]!r} is in force", status=404, code="not_found", param="key_id")
        return json_response({"key_id": key_id, "revoked": True})


def tenant_of(caller: Caller) -> str | None:
    """Whose keys and policies are the caller's business; None: everybody's."""
    return None if caller.sees_all else caller.tenant


def _within(grant: KeyGrant, caller: Caller, theirs: list[AccessKey]) -> KeyGrant:
    """The grant within what the key of its maker allows; `theirs` are all keys of the tenant. Raises RequestRefused."""
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


def find_policy(ledger: Ledger, name: str, tenant: str | None, *, param: str = "policy") -> Policy:
    try:
        return ledger.policies.find(name, tenant)
    except PolicyRefused as error:
        raise RequestRefused(str(error), status=404, code="policy_not_found", param=param) from None


def _own(ledger: Ledger, caller: Caller, name: str, tenant: str | None) -> Policy:
    """A policy that the caller may change. Raises RequestRefused."""
    policy = find_policy(ledger, name, tenant if caller.sees_all else caller.tenant, param="name")
    if not caller.sees_all and policy.tenant != caller.tenant:
        raise operator_only("a policy of all tenants is changed by an operator alone")
    return policy


def parse_version(version: str, ledger: Ledger) -> int:
    number = parse_number(version)
    if number is None or ledger.versions.get(number) is None:
        message = f"there is no version {version[:_DIGITS]}"
        raise RequestRefused(message, status=404, code="version_not_found", param="version")
    return number


def parse_decision(body: dict[str, Any]) -> DecisionRequest:
    if unknown := sorted(body.keys() - _FIELDS):
        raise RequestRefused(f"unknown field {unknown[0]!r}", code="unknown_parameter", param=unknown[0])
    reason, expect = (optional_text(body, "reason") or "").strip(), body.get("expect")
    if len(reason) > MAX_REASON:
        raise RequestRefused(f"reason must have at most {MAX_REASON} characters", code="too_long", param="reason")
    if isinstance(expect, bool) or not isinstance(expect, int | None) or not -1 < (expect or 0) < 10**_DIGITS:
        raise wrong_type("expect", "the number of a version")
    by = optional_name(body, "by") or _DEFAULT_AUTHOR
    for param, text in (("reason", reason), ("by", by)):
        if not text.isprintable():
            message = f"{param} must be one line without control characters"
            raise RequestRefused(message, code="invalid_value", param=param)
    return DecisionRequest(by, reason, expect)


def _parse_number_param(query: QueryParams, param: str, default: int | None = None) -> int:
    found = default if param not in query else parse_number(query[param])
    if found is None:
        raise wrong_type(param, "a number")
    return found
