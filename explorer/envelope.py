"""Errors as OpenAI clients expect them: one table from exceptions to statuses, one envelope, no traceback."""

import math
from collections.abc import Mapping
from http import HTTPStatus

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from shared.errors import EngineError, LedgerUnavailable, RequestRefused, SpoolFull, TuneloopError

#: What a client is told of each of our own errors: status, code, seconds after which to try again. First match counts.
_TABLE: Mapping[type[TuneloopError], tuple[int, str, float | None]] = {
    EngineError: (502, "engine_error", None),
    LedgerUnavailable: (503, "database_unavailable", 5.0),
    SpoolFull: (503, "storage_full", 5.0),
    TuneloopError: (500, "internal", None),
}

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}

#: Trinity's two routes: its clients look for `status`.
_TRINITY_ROUTES = frozenset({"/feedback", "/commit"})


def refusal(request: Request, error: RequestRefused) -> Response:
    """The answer to a request that was refused."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    body: dict[str, object] = {
        "error": {"message": str(error), "type": kind, "param": error.param, "code": error.code},
        **error.extra,
    }
    if request.url.path in _TRINITY_ROUTES:
        body |= {"status": "error", "message": str(error)}
    headers = {}
    if error.retry_after_s is not None:
        headers = {
            "retry-after": str(math.ceil(error.retry_after_s)),
            "retry-after-ms": str(round(1000 * error.retry_after_s)),
        }
    return Response(orjson.dumps(body), error.status, headers, "application/json")


def install(app: FastAPI) -> None:
    """Answer every error of the app by the table."""

    @app.exception_handler(TuneloopError)
    async def _ours(request: Request, error: TuneloopError) -> Response:
        if isinstance(error, RequestRefused):
            return refusal(request, error)
        status, code, retry_after_s = next(answer for kind, answer in _TABLE.items() if isinstance(error, kind))
        return refusal(request, RequestRefused(str(error), status=status, code=code, retry_after_s=retry_after_s))

    @app.exception_handler(HTTPException)
    async def _routing(request: Request, error: HTTPException) -> Response:
        sentence = {404: f"no route {request.url.path}", 405: f"{request.method} is not allowed here"}
        message = sentence.get(error.status_code, str(error.detail))
        code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
        return refusal(request, RequestRefused(message, status=error.status_code, code=code))

    @app.exception_handler(Exception)
    async def _bug(request: Request, _error: Exception) -> Response:
        return refusal(request, RequestRefused("an internal error; it has been logged", status=500, code="internal"))
