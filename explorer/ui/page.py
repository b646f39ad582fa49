"""All of the page put together, and what answers at / and /docs: nobody who comes by a bare curl meets a 404."""

from collections.abc import Mapping
from functools import partial

import orjson
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from tuneloop.explorer.auth import Gatekeeper
from tuneloop.explorer.routes.api_operations import OPERATIONS, Operation, describe_api
from tuneloop.explorer.ui.operations import add_operations
from tuneloop.explorer.ui.overview import LedgerCounts
from tuneloop.explorer.ui.pages import add_exchanges, add_overview
from tuneloop.explorer.ui.rating import add_rating
from tuneloop.explorer.ui.sessions import PATH
from tuneloop.explorer.ui.site import Site, add_site
from tuneloop.explorer.ui.version_pages import add_versions
from tuneloop.shared import VERSION
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

    @router.api_route("/", methods=["GET", "HEAD"])  # Claude Code asks whether somebody is there
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
