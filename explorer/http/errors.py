"""Errors as OpenAI clients expect them: one table from exceptions to statuses, one envelope, no traceback."""

import math
import re
import uuid
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from tuneloop.explorer.http.encodings import ACCEPTED
from tuneloop.shared.errors import (
    EngineError,
    JobRefused,
    KeyRefused,
    LedgerUnavailable,
    PolicyRefused,
    RequestRefused,
    StorageFull,
    TuneloopError,
    UnknownRater,
    VersionRefused,
)

Json = dict[str, Any]

#: What clients get in place of errors that name what is only the operator's: hosts, users, files, statements.
_PUBLIC_SENTENCES: Mapping[type[TuneloopError], str] = {
    LedgerUnavailable: "the database is away, or still behind; what was acknowledged is safe on disk: try again later",
}

_BUG = "an internal error; it has been logged"

#: The status, the code and the seconds until a retry of each of our own errors. First match counts.
_STATUS_TABLE: Mapping[type[TuneloopError], tuple[int, str, float | None]] = {
    EngineError: (502, "engine_error", None),
    LedgerUnavailable: (503, "database_unavailable", 5.0),
    StorageFull: (503, "storage_full", 5.0),
    KeyRefused: (400, "invalid_value", None),
    JobRefused: (400, "job_refused", None),
    PolicyRefused: (400, "policy_refused", None),
    VersionRefused: (409, "version_refused", None),
    UnknownRater: (404, "unknown_rater", None),
    TuneloopError: (500, "internal", None),
}

_INTERNAL = 500

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}

#: No key, or an unknown one.
_UNAUTHORIZED = 401

#: The body's encoding is none of ours.
_UNSUPPORTED = 415

#: The engine has had the whole timeout: a retry would most likely take as long.
_TIMED_OUT = 504

#: Without a time to wait for, waiting does not help: a person must delete something.
_TOO_MUCH = 429

#: Trinity's two routes: its clients read `status`.
_TRINITY_ROUTES = frozenset({"/feedback", "/commit", "/trinity/feedback", "/trinity/commit"})

#: Anthropic's routes, which have Anthropic's envelope.
_ANTHROPIC_PREFIX = "/v1/messages"


def refusal_of(error: Exception) -> RequestRefused:
    if isinstance(error, RequestRefused):
        return error
    for kind, (status, code, retry_after_s) in _STATUS_TABLE.items():
        if isinstance(error, kind):
            sentence = _BUG if status == _INTERNAL else _PUBLIC_SENTENCES.get(kind, str(error))
            return RequestRefused(sentence, status=status, code=code, retry_after_s=retry_after_s)
    return RequestRefused(_BUG, status=_INTERNAL, code="internal")


def error_response(error: RequestRefused, path: str, request_id: str | None) -> Response:
    kind = _OPENAI_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    body: dict[str, object] = {
        "error": {"message": str(error), "type": kind, "param": error.param, "code": error.code},
        **error.extra,
    }
    if path in _TRINITY_ROUTES:
        body |= {"status": "error", "message": str(error)}
    headers = {"x-request-id": request_id or f"req_{uuid.uuid4().hex}"}
    if path.startswith(_ANTHROPIC_PREFIX):
        body = anthropic_error(str(error), status=error.status)
        headers["request-id"] = headers["x-request-id"]
    if error.retry_after_s is not None:
        headers |= {
            "retry-after": str(math.ceil(error.retry_after_s)),
            "retry-after-ms": str(round(1000 * error.retry_after_s)),
        }
    if error.status == _UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if error.status == _UNSUPPORTED:
        headers["accept-encoding"] = ACCEPTED
    if error.status == _TIMED_OUT or (error.status == _TOO_MUCH and error.retry_after_s is None):
        headers["x-should-retry"] = "false"
    return Response(orjson.dumps(body), error.status, headers, "application/json")


#: Paths below /v1 that there are, and what is to be said of those of others.
_SERVED = re.compile(r"/(chat/completions|completions|responses|messages|models|files|uploads|fine_tuning)(/.*)?")
_OF_OTHERS: Sequence[tuple[re.Pattern[str], str]] = (
    (re.compile(r"/openai/"), "Azure's paths are not served: use OpenAI's own client, with base_url {base}"),
    (re.compile(r"/api/public/"), "of Langfuse's paths only its scores are served: nothing else is kept here"),
    (re.compile(r"/api/"), "Ollama's paths are not served: use OpenAI's client, with base_url {base}"),
    (re.compile(r".*:(generateContent|streamGenerateContent)"), "Gemini's paths are not served: use base_url {base}"),
    (re.compile(r"/v1(/v1)+/"), "the path has /v1 twice: the base URL is {base}"),
    (_SERVED, "the path has no /v1: the base URL is {base}"),
    (re.compile(r"/v1/(embeddings|moderations|audio|images|videos)\b"), "the model generates text, and nothing else"),
    (
        re.compile(r"/v1/(batches|evals|assistants|threads|vector_stores|containers|conversations)\b"),
        "not served: what was said comes in by requests or by `tuneloop import`, ratings by POST /feedback",
    ),
    (re.compile(r"/v1/responses/(compact|input_tokens)"), "not served: send all turns, or previous_response_id"),
)


def hint(scope: Mapping[str, Any]) -> str:
    """What a client should do that asks for a path that is not there; empty where nothing is known of it."""
    path, host = scope["path"], dict(scope["headers"]).get(b"host", b"localhost").decode("latin-1")
    if path != "/" and path.endswith("/") and _SERVED.fullmatch(path.removeprefix("/v1").rstrip("/")):
        return f"without the slash at its end: {path.rstrip('/')}"
    found = (each for pattern, each in _OF_OTHERS if pattern.match(path))
    return next(found, "").format(base=f"{scope.get('scheme', 'http')}://{host}/v1")


_ABOUT_ALL = "this is about all tenants: it needs explorer.admin_key, or an admin key of the tenant default"


def operator_only(reason: str = _ABOUT_ALL) -> RequestRefused:
    return RequestRefused(reason, status=403, code="operator_only")


def from_proxy() -> RequestRefused:
    return RequestRefused(
        "without keys, nothing that a proxy forwards is answered, for it may come from anywhere: make a key "
        "(tuneloop keys create -c tuneloop.yaml --name web), and send it with each request",
        status=403,
        code="proxied_without_keys",
    )


def install_error_handlers(app: FastAPI) -> None:
    def respond(request: Request, error: Exception) -> Response:
        return error_response(refusal_of(error), request.url.path, request.headers.get("x-request-id"))

    @app.exception_handler(TuneloopError)
    async def _ours(request: Request, error: TuneloopError) -> Response:
        return respond(request, error)

    @app.exception_handler(HTTPException)
    async def _routing(request: Request, error: HTTPException) -> Response:
        meant = hint(request.scope) if error.status_code in {404, 405} else ""
        status = 404 if meant else error.status_code
        sentence = {
            404: f"no route {request.url.path}" + (f"; {meant}" if meant else ""),
            405: f"{request.method} is not allowed here",
        }
        code = HTTPStatus(status).phrase.lower().replace(" ", "_")
        response = respond(request, RequestRefused(sentence.get(status, str(error.detail)), status=status, code=code))
        response.headers.update(error.headers or {})
        if status == 405:  # Starlette names those of the first route of the path alone
            allowed = (
                set(getattr(each, "methods", None) or ()) for each in app.routes if each.matches(request.scope)[0].value
            )
            response.headers["allow"] = ", ".join(sorted(set().union(*allowed)))
        return response

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> Response:
        return respond(request, error)


#: OpenAI's code of a request that the context has no room for. Clients shorten the conversation when they read it.
TOO_LONG = "context_length_exceeded"

#: How vLLM says it: the context's length and, unless it did not count that far, the prompt's tokens; ...
_PROMPT = re.compile(
    r"maximum context length is (?P<most>\d+) tokens\. However, your prompt contains (at least )?(?P<found>\d+)"
    r" (?P<of>\w+)"
    r"|prompt \(length (?P<length>\d+)\).* is longer than the maximum model length of (?P<model>\d+)"
)
#: ... or that no reply can be as long.
_REPLY = re.compile(r"max\w*_tokens=(\d+) cannot be greater than [\w=]*?=(\d+)")


def tell_too_long(error: Json) -> Json:
    message = str(error.get("message"))
    return error | {"code": TOO_LONG} if _PROMPT.search(message) or _REPLY.search(message) else error


def _as_anthropic_says(message: str) -> str:
    """An engine's message in Anthropic's words, if it is about length: Claude Code begins to compact by them."""
    if reply := _REPLY.search(message):
        wanted, most = reply.groups()
        return f"max_tokens: {wanted} > {most}, which is the maximum allowed number of output tokens for this model"
    if (prompt := _PROMPT.search(message)) is None:
        return message
    most = int(prompt["most"] or prompt["model"])
    # Characters were not read as tokens, and a prompt of just the context's length leaves none for a reply.
    found = most + 1 if prompt["of"] == "characters" else int(prompt["found"] or prompt["length"])
    return f"prompt is too long: {max(found, most + 1)} tokens > {most} maximum"


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def anthropic_error(message: str, *, status: int, kind: str | None = None) -> Json:
    by_status = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind or by_status, "message": message}}


def anthropic_engine_error(body: Json, *, status: int) -> Json:
    error = body.get("error")
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return anthropic_error(f"the engine answered {status}", status=status)
    # What its chat completions refuse on parsing a request, its messages refuse after translating one.
    kind = "BadRequestError" if error.get("type") == "Bad Request" else error.get("type")
    said = _as_anthropic_says(error["message"])
    return anthropic_error(said, status=status, kind="invalid_request_error" if said != error["message"] else kind)
