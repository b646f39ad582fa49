"""The admin API: what is known of the versions, and what administrators decide about them.

Without `explorer.admin_key` there is none: its paths are answered like any other that does not exist.
"""

import asyncio
import hmac
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import Response
from starlette.datastructures import QueryParams

from tuneloop.explorer.http.bodies import name, read_object, words, wrong_type
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.operations.version_comparison import compare_versions
from tuneloop.shared.operations.version_decisions import DecisionRequest, DecisionResult, pin, promote, roll_back, unpin
from tuneloop.shared.operations.version_report import list_events, list_versions, report_version
from tuneloop.shared.settings.settings import Settings

#: The longest reason, in characters.
MAX_REASON = 2000

#: The most events that are told at once.
MAX_EVENTS = 1000

_MAX_BODY_BYTES = 64 << 10
_FIELDS = frozenset({"reason", "expect", "by"})
_DIGITS = 9

#: Who decides, where nobody says so.
_NOBODY = "api"

_Decision = Callable[[Ledger, DecisionRequest], DecisionResult]


def add_routes(app: FastAPI, settings: Settings, ledger: Ledger) -> None:
    """Add them to the app, if there is a key to them."""
    key = settings.explorer.admin_key
    if key is None:
        return

    def known(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {key.get_secret_value()}".encode()):
            told = "send explorer.admin_key as `Authorization: Bearer <key>`"
            raise HTTPException(401, told, {"WWW-Authenticate": "Bearer"})

    router = APIRouter(prefix="/admin/versions", dependencies=[Depends(known)])
    _add_questions(router, ledger)
    _add_decisions(router, ledger, within_s=settings.explorer.service_status_check_interval)
    app.include_router(router)


def version_of(version: str, ledger: Ledger) -> int:
    """The number of a version that there is. Raises RequestRefused."""
    number = _number(version)
    if number is None or ledger.versions.get(number) is None:
        message = f"there is no version {version[:_DIGITS]}"
        raise RequestRefused(message, status=404, code="version_not_found", param="version")
    return number


def decided_of(body: dict[str, Any]) -> DecisionRequest:
    """Who decides and why. Raises RequestRefused for a body that says something else."""
    if unknown := sorted(body.keys() - _FIELDS):
        raise RequestRefused(f"there is no field {unknown[0]!r} here", code="unknown_parameter", param=unknown[0])
    reason, expect = (words(body, "reason") or "").strip(), body.get("expect")
    if len(reason) > MAX_REASON:
        raise RequestRefused(f"reason must have at most {MAX_REASON} characters", code="too_long", param="reason")
    if isinstance(expect, bool) or not isinstance(expect, int | None) or not -1 < (expect or 0) < 10**_DIGITS:
        raise wrong_type("expect", "the number of a version")
    return DecisionRequest(name(body, "by") or _NOBODY, reason, expect)


def _add_questions(router: APIRouter, ledger: Ledger) -> None:
    @router.get("")
    async def all_() -> Response:
        return _json({"object": "list", "data": await asyncio.to_thread(list_versions, ledger)})

    @router.get("/events")
    async def happened(request: Request) -> Response:
        query = request.query_params
        last = _asked(query, "last", MAX_EVENTS)
        if not 1 <= last <= MAX_EVENTS:
            raise RequestRefused(f"last must be from 1 to {MAX_EVENTS}", code="out_of_range", param="last")
        version = _asked(query, "version") if "version" in query else None
        return _json({"object": "list", "data": await asyncio.to_thread(list_events, ledger, version, last=last)})

    @router.get("/compare")
    async def compare(request: Request) -> Response:
        query = request.query_params
        sides = [str(_asked(query, side)) for side in ("a", "b")]
        return _json(
            await asyncio.to_thread(lambda: compare_versions(ledger, *(version_of(side, ledger) for side in sides)))
        )

    @router.get("/{version}")
    async def one(version: str) -> Response:
        return _json(await asyncio.to_thread(lambda: report_version(ledger, version_of(version, ledger))))


def _add_decisions(router: APIRouter, ledger: Ledger, *, within_s: float) -> None:
    async def ruled(decision: _Decision, decided: DecisionRequest) -> Response:
        ruling = await asyncio.to_thread(decision, ledger, decided)
        return _json(ruling._asdict() | {"taken_up_within_s": within_s})

    @router.post("/unpin")
    async def unpinned(decided: DecidedOf) -> Response:
        return await ruled(unpin, decided)

    @router.post("/rollback")
    async def rolled_back(decided: DecidedOf) -> Response:
        _require_reason(decided)
        return await ruled(lambda ledger, decided: roll_back(ledger, None, decided), decided)

    @router.post("/{version}/rollback")
    async def one_rolled_back(version: str, decided: DecidedOf) -> Response:
        _require_reason(decided)
        return await ruled(lambda ledger, decided: roll_back(ledger, version_of(version, ledger), decided), decided)

    @router.post("/{version}/promote")
    async def promoted(version: str, decided: DecidedOf) -> Response:
        return await ruled(lambda ledger, decided: promote(ledger, version_of(version, ledger), decided), decided)

    @router.post("/{version}/pin")
    async def pinned(version: str, decided: DecidedOf) -> Response:
        return await ruled(lambda ledger, decided: pin(ledger, version_of(version, ledger), decided), decided)


async def _decided(request: Request) -> DecisionRequest:
    return decided_of(await read_object(request, max_bytes=_MAX_BODY_BYTES, empty_is={}))


DecidedOf = Annotated[DecisionRequest, Depends(_decided)]


def _require_reason(decided: DecisionRequest) -> None:
    if not decided.reason:
        message = "reason is missing: a version that is rolled back is never served again"
        raise RequestRefused(message, code="missing_required_parameter", param="reason")


def _asked(query: QueryParams, param: str, default: int | None = None) -> int:
    """A number of the query. Raises RequestRefused if there is none."""
    found = default if param not in query else _number(query[param])
    if found is None:
        raise wrong_type(param, "a number")
    return found


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


def _json(told: object) -> Response:
    return Response(msgspec.json.encode(told), media_type="application/json")
