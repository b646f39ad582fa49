"""Who may use the page: by a signed cookie, holders of an admin key, or without keys people at this machine."""

import base64
import fcntl
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.responses import Response

from tuneloop.explorer.auth import Caller, Gatekeeper, is_from_here, operator_only
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import steady_clock
from tuneloop.shared.ledger.keys import digest_of

COOKIE = "tuneloop_ui"
PATH = "/ui"

#: The field of a form that proves that our own page sent it.
TOKEN_FIELD = "token"

#: How long a session lasts.
SESSION_S = 12 * 3600

#: Sessions that were ended and have not expired: as many are remembered, the newest.
_MAX_ENDED = 10_000

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_ENDED_LINES = re.compile(rb"[\w-]+ (\d{1,12})\n").finditer
_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[^:\[\]/@]+))(?::\d{1,5})?").fullmatch


#: What a tenant's own administrator sees: the tenant's exchanges, and what raters are asked about them.
_OF_TENANT = re.compile(rf"{PATH}/(?:exchanges(?:/.*)?|preferences|logout)").fullmatch


class LoginNeeded(RequestRefused):
    """There are keys, and the request comes without a session of one with the scope `admin`."""

    def __init__(self) -> None:
        super().__init__("log in with an admin key first", status=401, code="login_needed")


class BrowserSession(NamedTuple):
    """One browser's session; `key_mark` names the key that it was begun with, empty for people at this machine."""

    nonce: str
    expires_at: int
    key_mark: str


class EndedSessions:
    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, session: BrowserSession) -> None:
        """End a session: its cookie may have been copied. Raises OSError."""
        with os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            now = steady_clock()
            lines = [line for line in _ENDED_LINES(file.readall() or b"") if int(line[1]) > now][1 - _MAX_ENDED :]
            kept = b"".join(line[0] for line in lines) + _line_of(session)
            file.seek(0)
            file.write(kept)
            file.truncate()

    def __contains__(self, session: BrowserSession) -> bool:
        try:
            return _line_of(session) in self._path.read_bytes()
        except FileNotFoundError:
            return False
        except OSError:
            return True  # unknown, so access is refused


class SessionGuard:
    def __init__(self, gate: Gatekeeper, secret: bytes, ended: EndedSessions) -> None:
        self._gate = gate
        self._ended = ended
        self._key = hashlib.blake2b(secret, person=b"tuneloop-ui", digest_size=32).digest()

    @property
    def needs_key(self) -> bool:
        return self._gate.needs_admin_key

    def admit(self, request: Request) -> BrowserSession:
        """The session of a request; one that is new is not on its browser yet. Raises RequestRefused."""
        session = self._read(request.cookies.get(COOKIE, ""))
        if self.needs_key:
            if session is None or session.key_mark not in self._administrators() or session in self._ended:
                raise LoginNeeded
            if not (self.is_operators(session) or _OF_TENANT(request.url.path)):
                raise operator_only()
            return session
        client = request.client.host if request.client else ""
        matched = _HOST(request.headers.get("host", ""))
        # Any site may give its own name the address 127.0.0.1.
        name = (matched["v6"] or matched["name"]).lower() if matched else ""
        if name not in _LOCAL_NAMES or not is_from_here(client, request.headers.raw):
            message = (
                "without keys this page is only for this machine itself, at http://localhost:<port>/ui: to reach it "
                "from elsewhere, make a key with the scope admin (tuneloop keys create), or set explorer.admin_key"
            )
            raise RequestRefused(message, status=403, code="not_local")
        return session or self._begin("")

    def log_in(self, admin_key: str) -> BrowserSession | None:
        """A new session for a key that has the scope `admin` now; None for any other."""
        digest = digest_of(admin_key)
        return self._begin(self._mark(digest)) if digest in self._gate.administrators() else None

    def log_out(self, session: BrowserSession) -> None:
        try:
            self._ended.add(session)
        except OSError:
            message = "the disk refuses to note that the session is over: it is not, try again"
            raise RequestRefused(message, status=503, code="session_not_ended") from None

    def is_operators(self, session: BrowserSession) -> bool:
        """Whether a session is for all that there is: not only for a tenant's own."""
        return self.caller_of(session).sees_all

    def caller_of(self, session: BrowserSession) -> Caller:
        """Who a session is: the holder of its key, whose tenant's exchanges it shows. Raises LoginNeeded."""
        found = self._administrators().get(session.key_mark)
        if found is not None:
            return found
        if self.needs_key:  # its key was in force a moment ago
            raise LoginNeeded
        return Caller()

    def _administrators(self) -> Mapping[str, Caller]:
        return {self._mark(digest): caller for digest, caller in self._gate.administrators().items()}

    def _begin(self, key_mark: str) -> BrowserSession:
        return BrowserSession(secrets.token_urlsafe(18), int(steady_clock()) + SESSION_S, key_mark)

    def _mark(self, digest: bytes) -> str:
        return self._sign("key", digest.hex())[:22]

    def token_of(self, session: BrowserSession) -> str:
        return self._sign("form", *map(str, session))

    def check_form(self, request: Request, session: BrowserSession, form: Mapping[str, str]) -> None:
        require_same_origin(request)
        if not hmac.compare_digest(form.get(TOKEN_FIELD, "").encode(), self.token_of(session).encode()):
            message = "the form is not of this session, or too old: reload the page and send it again"
            raise RequestRefused(message, status=403, code="wrong_token")

    def keep(self, response: Response, session: BrowserSession, *, secure: bool) -> None:
        value = f"{'.'.join(map(str, session))}.{self._sign('session', *map(str, session))}"
        response.set_cookie(
            COOKIE, value, max_age=SESSION_S, path=PATH, httponly=True, samesite="strict", secure=secure
        )

    def _read(self, cookie: str) -> BrowserSession | None:
        parts = cookie.split(".")
        if len(parts) != 4 or not (parts[1].isascii() and parts[1].isdigit() and len(parts[1]) < 12):
            return None
        session = BrowserSession(parts[0], int(parts[1]), parts[2])
        if not hmac.compare_digest(parts[3].encode(), self._sign("session", *map(str, session)).encode()):
            return None
        return session if session.expires_at > steady_clock() else None

    def _sign(self, *words: str) -> str:
        mac = hmac.digest(self._key, "\n".join(words).encode(), "sha256")
        return base64.urlsafe_b64encode(mac).decode().rstrip("=")


def _line_of(session: BrowserSession) -> bytes:
    return b"%b %d\n" % (session.nonce.encode(), session.expires_at)


def require_same_origin(request: Request) -> None:
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "same-origin")
    try:
        same = origin is None or urlsplit(origin).netloc == request.headers.get("host")
    except ValueError:
        same = False
    if not same or site not in {"same-origin", "none"}:
        raise RequestRefused(
            "the request came from another site's page: nothing was done", status=403, code="other_origin"
        )
