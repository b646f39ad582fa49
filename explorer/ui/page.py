"""All of the page put together, and what answers at / and /docs: a bare curl gets no 404."""

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import RedirectResponse, Response

from tuneloop.explorer.auth import Caller, Gatekeeper
from tuneloop.explorer.feedback.routes import FeedbackRoutes
from tuneloop.explorer.http.bodies import number_in_form
from tuneloop.explorer.routes.api_operations import OPERATIONS, Operation, describe_api
from tuneloop.explorer.ui.conversation import read_calls, read_request
from tuneloop.explorer.ui.operations import add_operations
from tuneloop.explorer.ui.overview import LedgerCounts
from tuneloop.explorer.ui.pages import SENTENCES, add_exchanges, add_overview, add_versions, parse_cursor, show_exchange
from tuneloop.explorer.ui.sessions import PATH
from tuneloop.explorer.ui.site import Site, add_site
from tuneloop.shared import VERSION
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import Outcome
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings

_LINKS = {"page": PATH, "api": "/docs", "openapi": "/openapi.json", "models": "/v1/models", "ready": "/health/ready"}


def add_routes(app: FastAPI, settings: Settings, ledger: Ledger, gate: Gatekeeper) -> None:
    site = Site(settings, ledger, gate)
    counts = LedgerCounts(settings, ledger, lambda: app.state.services.drain_status())
    operations = partial(add_operations, counts=counts)
    overview = partial(add_overview, counts=counts)
    add_site(app, site, overview, add_exchanges, add_versions, add_rating, operations)
    router = APIRouter(include_in_schema=False)
    description = orjson.dumps(describe_api())
    model = site.settings.served_model_name

    @router.api_route("/", methods=["GET", "HEAD"])  # Claude Code asks whether the service is there
    async def start(request: Request) -> Response:
        if "text/html" not in request.headers.get("accept", ""):
            answer = {"name": "tuneloop", "version": VERSION, "base_url": f"{_origin(request)}/v1", "links": _LINKS}
            return Response(orjson.dumps(answer), media_type="application/json")
        known = {"path": "/", "token": "", "origin": _origin(request), "model": model, "links": _LINKS}
        return site.renderer.page("start.html", known)

    @router.get("/docs")
    async def docs(request: Request) -> Response:
        known = {"path": "/docs", "token": "", "origin": _origin(request), "groups": _GROUPS}
        return site.renderer.page("api.html", known)

    @router.get("/openapi.json")
    async def openapi() -> Response:
        return Response(description, media_type="application/json")

    app.router.routes += router.routes


def _origin(request: Request) -> str:
    return f"{request.url.scheme}://{request.url.netloc}"


def _row(operation: Operation) -> Mapping[str, object]:
    schema = operation.body or {}
    required = schema.get("required", ())
    fields = schema.get("properties", {}) or operation.query
    return {
        "name": f"{operation.method} {operation.path}",
        "summary": operation.summary,
        "guide": operation.guide,
        "scopes": " or ".join(operation.scopes),
        "streams": operation.streams,
        "fields": [
            (
                name,
                kind if isinstance(kind := each.get("type", "any"), str) else " or ".join(kind),
                name in required,
                each.get("description", ""),
            )
            for name, each in fields.items()
        ],
    }


#: The operations by group, as the template shows them.
_GROUPS = [(group, [_row(operation) for operation in operations]) for group, operations in OPERATIONS.items()]


#: Who says it, in feedback events.
SOURCE = "page"

_WORTHLESS = "It is kept, and counts for nothing here: the metric preference has no weight in reward.weights."


def add_rating(router: APIRouter, site: Site) -> None:
    @router.post("/exchanges/{msg_id}/feedback")
    async def rate(request: Request, msg_id: str) -> Response:
        session, form = await site.form(request)
        try:
            outcome = await _give(request, site.guard.caller_of(session), parse_rating(msg_id, form))
        except RequestRefused as error:
            if error.status == 404:
                raise
            return await show_exchange(request, site, msg_id, status=error.status, wrong=str(error))
        return RedirectResponse(f"{PATH}/exchanges/{msg_id}?outcome={outcome}", 303)

    @router.post("/commit")
    async def commit(request: Request) -> Response:
        session, _ = await site.form(request)
        committed = await request.app.state.services.commit.release(site.guard.caller_of(session).tenant)
        return RedirectResponse(f"{PATH}/exchanges?committed={committed}", 303)

    weight = site.settings.reward.weights.get("preference")

    @router.get("/preferences")
    async def preferences(request: Request) -> Response:
        tenant = site.tenant_of(request)
        after = parse_cursor({"after": request.query_params.get("after", "")})
        outcome = request.query_params.get("outcome", "")
        notice = SENTENCES[Outcome(outcome)] if outcome in set(SENTENCES) else ""

        def read() -> dict[str, Any]:
            pair = site.ledger.same_prompts.next_pair(tenant, after)
            view: dict[str, Any] = {"turns": [], "answers": [], "skip": "", "after": after, "notice": notice}
            view["worth"] = "It counts towards the reward." if weight else _WORTHLESS
            if pair is None:
                return view
            # In an order that reveals nothing; the older one says where to continue.
            answers = random.sample((pair.one, pair.other), 2)
            shown = [{"name": each.name, "text": each.text, "calls": read_calls(each.tool_calls)} for each in answers]
            skip = f"{pair.other.sampled_at!r}_{pair.other.id}"
            return view | {"turns": read_request(pair.request).turns, "answers": shown, "skip": skip}

        return await site.show_long(request, "preferences.html", read)

    @router.post("/preferences")
    async def prefer(request: Request) -> Response:
        session, form = await site.form(request)
        better, worse = form.get("better", ""), form.get("worse", "")
        if not better or not worse:
            raise RequestRefused("name the better of the two answers", code="missing", param="better")
        preference = {"msg_ids": [better], "preferred_over": worse, "source": SOURCE}
        outcome = await _give(request, site.guard.caller_of(session), preference)
        return RedirectResponse(f"{PATH}/preferences?outcome={outcome}", 303)


def parse_rating(msg_id: str, form: Mapping[str, str]) -> dict[str, Any]:
    """The body of /feedback for a form about one choice. Raises RequestRefused."""
    choice, thumb, reward = form.get("choice", ""), form.get("thumb", ""), form.get("reward", "").strip()
    body: dict[str, Any] = {"msg_ids": [f"{msg_id}:{choice}" if choice else msg_id], "source": SOURCE}
    if thumb and reward:
        raise RequestRefused(
            "Give a thumb or a reward, not both: nothing was recorded.", code="invalid_value", param="reward"
        )
    if thumb in {"up", "down"}:
        body["value"] = thumb == "up"
    elif reward:
        if (number := number_in_form(reward)) is None:
            raise RequestRefused("The reward must be a number.", code="invalid_value", param="reward")
        body["reward"] = number
    if comment := form.get("comment", "").strip():
        body["comment"] = comment
    edited = form.get("demonstration", "").replace("\r\n", "\n")
    if edited.strip() and edited != form.get("was", "").replace("\r\n", "\n"):
        body["demonstration"] = edited
    if not body.keys() - {"msg_ids", "source"}:
        raise RequestRefused(
            "There is nothing to record: rate the reply, write a comment, or edit the answer.", code="missing"
        )
    return body


async def _give(request: Request, caller: Caller, body: dict[str, Any]) -> str:
    feedback: FeedbackRoutes = request.app.state.services.feedback
    answer = await feedback.take(caller, body)
    outcomes = answer["outcomes"]
    assert isinstance(outcomes, dict)
    return str(next(iter(outcomes.values())))
