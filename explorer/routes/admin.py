"""The admin API: reports on the raters and the versions, and administrators' decisions about versions.

The gate lets in who has a key with the scope `admin`, or `explorer.admin_key`.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from starlette.datastructures import QueryParams

from tuneloop.explorer.auth import caller_of
from tuneloop.explorer.http.bodies import optional_name, optional_text, read_object, wrong_type
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.operations.version_comparison import compare_versions
from tuneloop.shared.operations.version_decisions import (
    DecisionRequest,
    DecisionResult,
    pin,
    promote,
    reject,
    roll_back,
    unpin,
)
from tuneloop.shared.operations.version_report import list_events, list_versions, report_version
from tuneloop.shared.settings.settings import Settings

#: The longest reason, in characters.
MAX_REASON = 2000

#: The most events of one answer.
MAX_EVENTS = 1000

_MAX_BODY_BYTES = 64 << 10
_FIELDS = frozenset({"reason", "expect", "by"})
_DIGITS = 9

#: The author of a decision that names none.
_DEFAULT_AUTHOR = "api"

_Decision = Callable[[Ledger, Any, DecisionRequest], DecisionResult]


def add_routes(app: FastAPI, settings: Settings, ledger: Ledger) -> None:
    router = APIRouter(prefix="/admin/versions")

    @router.get("")
    async def get_versions() -> Response:
        return _json({"object": "list", "data": await asyncio.to_thread(list_versions, ledger)})

    @router.get("/events")
    async def get_events(request: Request) -> Response:
        query = request.query_params
        last = _parse_number_param(query, "last", MAX_EVENTS)
        if not 1 <= last <= MAX_EVENTS:
            raise RequestRefused(f"last must be from 1 to {MAX_EVENTS}", code="out_of_range", param="last")
        version = _parse_number_param(query, "version") if "version" in query else None
        return _json({"object": "list", "data": await asyncio.to_thread(list_events, ledger, version, last=last)})

    @router.get("/compare")
    async def compare(request: Request) -> Response:
        query = request.query_params
        sides = [str(_parse_number_param(query, side)) for side in ("a", "b")]
        return _json(
            await asyncio.to_thread(lambda: compare_versions(ledger, *(parse_version(side, ledger) for side in sides)))
        )

    @router.get("/{version}")
    async def get_version(version: str) -> Response:
        return _json(await asyncio.to_thread(lambda: report_version(ledger, parse_version(version, ledger))))

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
            return _json(result._asdict() | {"taken_up_within_s": within_s})

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
        return _json({"object": "list", "data": [each._asdict() for each in found]})


def parse_version(version: str, ledger: Ledger) -> int:
    """The number of an existing version. Raises RequestRefused."""
    number = _parse_number(version)
    if number is None or ledger.versions.get(number) is None:
        message = f"there is no version {version[:_DIGITS]}"
        raise RequestRefused(message, status=404, code="version_not_found", param="version")
    return number


def parse_decision(body: dict[str, Any]) -> DecisionRequest:
    """The author and the reason of a decision. Raises RequestRefused for an invalid body."""
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
    """A number in the query. Raises RequestRefused if it is missing or not a number."""
    found = default if param not in query else _parse_number(query[param])
    if found is None:
        raise wrong_type(param, "a number")
    return found


def _parse_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
