"""The routes below /ui."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, urlsplit

import jinja2
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from fastapi.routing import APIRoute
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from tuneloop.explorer.auth import Gatekeeper
from tuneloop.explorer.http.bodies import read_bytes
from tuneloop.explorer.http.errors import refusal_of
from tuneloop.explorer.ui.sessions import (
    COOKIE,
    PATH,
    BrowserSession,
    EndedSessions,
    LoginNeeded,
    SessionGuard,
    require_same_origin,
)
from tuneloop.shared import VERSION
from tuneloop.shared.errors import EnvironmentRefused, LedgerUnavailable, RequestRefused, TuneloopError
from tuneloop.shared.experience import steady_clock
from tuneloop.shared.job_marks import ENDED_SESSIONS, KEY, load_key
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.operations.diagnosis import ago, moment
from tuneloop.shared.settings.settings import Settings

#: The pages that every page leads to, by their addresses.
PAGES = (
    ("", "Overview"),
    ("/exchanges", "Exchanges"),
    ("/versions", "Versions"),
    ("/policies", "Policies"),
    ("/preferences", "Preferences"),
    ("/trainer", "Trainer"),
    ("/doctor", "Doctor"),
)

_T = TypeVar("_T")

_MAX_FORM_BYTES, _MAX_FIELDS = 1 << 20, 50


class Site:
    def __init__(self, settings: Settings, ledger: Ledger, gate: Gatekeeper) -> None:
        self.settings, self.ledger = settings, ledger
        ended = EndedSessions(settings.job_dir / ENDED_SESSIONS)
        self.guard = SessionGuard(gate, load_key(settings.job_dir / KEY), ended)
        self.renderer = Renderer(
            project=settings.project,
            experiment=settings.name,
            ui=PATH,
            pages=PAGES,
            automatic=settings.buffer.commit == "auto",
        )

    def show(self, request: Request, template: str, status: int = 200, **context: Any) -> Response:
        session = self.guard.admit(request)
        response = self.renderer.page(template, {**self._context_of(request, session), **context}, status)
        self.guard.keep(response, session, secure=request.url.scheme == "https")
        return response

    async def show_long(
        self, request: Request, template: str, read: Callable[[], Mapping[str, Any]], status: int = 200
    ) -> Response:
        """A page of what `read` finds, which may be long: read and made HTML when it is the turn of who asks."""
        session = self.guard.admit(request)
        known = self._context_of(request, session)
        response = await self.in_thread(request, lambda: self.renderer.page(template, {**known, **read()}, status))
        self.guard.admit(request)  # its key may have been revoked, or have expired, meanwhile
        self.guard.keep(response, session, secure=request.url.scheme == "https")
        return response

    def tenant_of(self, request: Request) -> str:
        return self.guard.caller_of(self.guard.admit(request)).tenant

    def _context_of(self, request: Request, session: BrowserSession) -> dict[str, Any]:
        return {"token": self.guard.token_of(session), "path": request.url.path, "with_key": self.guard.needs_key}

    def refuse(self, request: Request, error: Exception) -> Response:
        if isinstance(error, LoginNeeded):
            if request.headers.get("hx-request"):  # the whole page goes there, not the part that was asked for
                return Response(status_code=401, headers={"hx-redirect": f"{PATH}/login"})
            here = f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path
            return RedirectResponse(f"{PATH}/login?next={quote(here)}", 303)
        if isinstance(error, HTTPException):
            message = f"there is no page {request.url.path}" if error.status_code == 404 else str(error.detail)
            refusal = RequestRefused(message, status=error.status_code)
        elif isinstance(error, LedgerUnavailable | EnvironmentRefused):
            message = (
                "The database cannot be read at the moment. Replies are served and feedback is taken all the same: it "
                "waits on this machine's disk until the database is back."
            )
            refusal = RequestRefused(message, status=503)
        else:
            refusal = refusal_of(error)
        context = {"status": refusal.status, "sentence": str(refusal), "path": request.url.path, "token": ""}
        return self.renderer.page("error.html", context, refusal.status)

    async def in_thread(self, request: Request, work: Callable[..., _T], *arguments: Any) -> _T:
        self.guard.admit(request)
        return await asyncio.to_thread(work, *arguments)

    async def form(self, request: Request) -> tuple[BrowserSession, Mapping[str, str]]:
        self.guard.admit(request)
        form = await read_form(request)
        session = self.guard.admit(request)  # its key may have been revoked, or have expired, while the form came
        self.guard.check_form(request, session, form)
        return session, form


def add_site(app: FastAPI, site: Site, *pages: Callable[[APIRouter, Site], None]) -> None:
    app.mount(f"{PATH}/static", StaticFiles(directory=FOLDER / "static"))
    router = APIRouter(prefix=PATH, route_class=_route_of(site), include_in_schema=False)
    _add_login(router, site)
    for add_pages in pages:
        add_pages(router, site)

    @router.get("/{path:path}")
    async def nothing(request: Request) -> Response:
        site.guard.admit(request)
        raise RequestRefused(f"there is no page {request.url.path}", status=404, code="not_found")

    # As they are: include_router would build each of them again, which an explorer that starts would wait for.
    app.router.routes += router.routes


async def read_form(request: Request) -> Mapping[str, str]:
    data = await read_bytes(request, max_bytes=_MAX_FORM_BYTES)
    try:
        pairs = parse_qsl(data.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS, errors="strict")
    except ValueError:
        raise RequestRefused("the form cannot be read: it is not URL-encoded UTF-8", code="invalid_form") from None
    return dict(pairs)


def _add_login(router: APIRouter, site: Site) -> None:
    guard = site.guard

    @router.get("/login")
    async def login_page(request: Request) -> Response:
        if not guard.needs_key:
            return RedirectResponse(PATH, 303)
        return _login_page(request.query_params, failed=False)

    @router.post("/login")
    async def log_in(request: Request) -> Response:
        require_same_origin(request)
        form = await read_form(request)
        session = guard.log_in(form.get("key", ""))
        if session is None:
            return _login_page(form, failed=True)
        target = _target(form.get("next", ""))
        if target == PATH and not guard.is_operators(session):
            target = f"{PATH}/exchanges"
        response = RedirectResponse(target, 303)
        guard.keep(response, session, secure=request.url.scheme == "https")
        return response

    @router.post("/logout")
    async def log_out(request: Request) -> Response:
        session, _ = await site.form(request)
        guard.log_out(session)
        response = RedirectResponse(f"{PATH}/login", 303)
        response.delete_cookie(COOKIE, path=PATH, httponly=True, samesite="strict")
        return response

    def _login_page(asked: Mapping[str, str], *, failed: bool) -> Response:
        context = {"failed": failed, "next": _target(asked.get("next", "")), "path": "", "token": ""}
        return site.renderer.page("login.html", context, 401 if failed else 200)


def _target(wanted: str) -> str:
    """Where to go after the login: only to a page of ours."""
    try:
        parts = urlsplit(wanted)
    except ValueError:
        return PATH
    ours = not parts.scheme and not parts.netloc and (wanted == PATH or wanted.startswith((f"{PATH}/", f"{PATH}?")))
    return wanted if ours and "\\" not in wanted and wanted.isprintable() else PATH


def _route_of(site: Site) -> type[APIRoute]:
    """Routes that answer what is refused with a page, not with JSON."""

    class PageRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
            answer = super().get_route_handler()

            async def handler(request: Request) -> Response:
                try:
                    return await answer(request)
                except (TuneloopError, HTTPException) as error:
                    return site.refuse(request, error)

            return handler

    return PageRoute


FOLDER = Path(__file__).parent

#: Nothing but our own files, and no script or style inside a page.
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with none at all, browsers send forms of ours as if from nowhere
    "cache-control": "no-store",
}

# Control characters but tab and newline, what changes the direction of text, what is not seen, and halves of pairs.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
#: Characters that are looked through at once, in which no other thread has a turn.
_AT_ONCE = 64 << 10

#: Log-probabilities from which on a token is likelier, for its colour.
_SHADES = (-0.1, -0.5, -1.2, -2.5, -5.0)


def visible(value: object) -> object:
    """The value as it is shown: of text every hidden character as its name. Applied to whatever a template writes."""
    if value is None:
        return ""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    if len(value) <= _AT_ONCE:
        return _HIDDEN.sub(_name, value)
    return "".join(_HIDDEN.sub(_name, value[begin : begin + _AT_ONCE]) for begin in range(0, len(value), _AT_ONCE))


def _name(found: re.Match[str]) -> str:
    return f"⟨U+{ord(found[0]):04X}⟩"


def plain(text: str) -> str:
    return _HIDDEN.sub("", text)


def figure(value: float | None, digits: int = 3) -> str:
    """A number of at most so many significant digits, those before the point all the same; a dash for none."""
    if value is None:
        return "–"
    shown = f"{value:.{digits}g}"
    return f"{value:,.0f}" if abs(float(shown)) >= min(1000, 10**digits) else shown


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return (
        f"{seconds * 1000:.0f} ms" if seconds < 0.995 else ago(seconds, 0.0) if seconds >= 120 else f"{seconds:.1f} s"
    )


def when(then: float | None) -> Markup:
    """A time, as how long ago that was, with the time itself beside it."""
    if then is None:
        return Markup("–")
    try:
        machine = datetime.fromtimestamp(then, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):  # an imported row may say anything
        return Markup("at {}").format(then)
    shown = f"{ago(steady_clock(), then)} ago"
    return Markup('<time datetime="{}" title="{}">{}</time>').format(machine, moment(then), shown)


def shade(logprob: float) -> int:
    """How unlikely a token was, from 0 to 5."""
    return sum(logprob < each for each in _SHADES)


class Renderer:
    def __init__(self, **site: object) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            finalize=visible,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {
            "duration": duration,
            "figure": figure,
            "plain": plain,
            "shade": shade,
            "when": when,
        }
        self._environment.globals |= {**site, "release": VERSION}

    def page(self, template: str, context: Mapping[str, Any], status: int = 200) -> HTMLResponse:
        return HTMLResponse(self._environment.get_template(template).render(context), status, HEADERS)
