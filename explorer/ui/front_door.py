"""What answers at / and /docs, so that nobody who comes by a browser or a bare curl meets a 404."""

from collections.abc import Mapping
from itertools import groupby

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from tuneloop.explorer.routes.api_description import describe_api, scopes_of
from tuneloop.explorer.routes.api_operations import OPERATIONS, Operation, Schema
from tuneloop.explorer.ui.sessions import PATH
from tuneloop.explorer.ui.site import Site
from tuneloop.shared import VERSION

_LINKS = {"page": PATH, "api": "/docs", "openapi": "/openapi.json", "models": "/v1/models", "ready": "/health/ready"}


def add_front_door(router: APIRouter, site: Site) -> None:
    """Add the routes to those of the app that are not below the page's path."""
    description = orjson.dumps(describe_api())
    model = site.settings.served_model_name

    @router.get("/")
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


def _origin(request: Request) -> str:
    return f"{request.url.scheme}://{request.url.netloc}"


def _row(method: str, path: str, operation: Operation) -> Mapping[str, object]:
    schema = operation.body or {}
    required = schema.get("required", ())
    fields = schema.get("properties", {}) or operation.query
    return {
        "name": f"{method} {path}",
        "summary": operation.summary,
        "guide": operation.guide,
        "scopes": " or ".join(scopes_of(method, path)),
        "streams": operation.streams,
        "fields": [
            (name, _type_of(each), name in required, each.get("description", "")) for name, each in fields.items()
        ],
    }


def _type_of(schema: Schema) -> str:
    found = schema.get("type", "any")
    return found if isinstance(found, str) else " or ".join(found)


#: The operations by group, as the template shows them.
_GROUPS = [
    (group, [_row(*route, operation) for route, operation in operations])
    for group, operations in groupby(OPERATIONS.items(), key=lambda each: each[1].group)
]
