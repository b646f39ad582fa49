"""Lets requests in by their heads: which key, what it may do, whether it has had enough. All it asks is in memory."""

import base64
import binascii
import ipaddress
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import orjson
from prometheus_client import Counter

from tuneloop.explorer.http.bodies import id_of
from tuneloop.explorer.http.errors import from_proxy, hint
from tuneloop.explorer.http.errors import operator_only as operator_only
from tuneloop.explorer.limits import KeyMeter, KeyUsage
from tuneloop.explorer.tokens import FeedbackClaims, JobClaims, TokenSigner
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import DEFAULT_TENANT, KEY_SOURCE, Scope, steady_clock
from tuneloop.shared.ledger.keys import AccessKey, KeyLimits, KeyTable, digest_of
from tuneloop.shared.settings.serving import is_loopback
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.types import reveal

#: Where a scope has its caller.
SCOPE_KEY = "tuneloop.caller"

_UNMETERED = KeyMeter(KeyLimits())


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A key's holder, or a caller without one: then `name` is empty. `policy` answers where a request names none."""

    name: str = ""
    tenant: str = DEFAULT_TENANT
    scopes: frozenset[Scope] = frozenset()
    meter: KeyMeter = _UNMETERED
    key_id: str = ""
    feedback: FeedbackClaims | None = None
    policy: int | None = None

    @property
    def identity(self) -> str:
        """Who shares places with others: a tenant's key, or all who have none."""
        return f"{self.tenant}/{self.name}" if self.name else ""

    def rater(self, source: str | None) -> str | None:
        """The name in which the caller gives feedback as `source`: no caller writes in the name of another's raters.

        Without a source, who may ask the model is the application; who may only give feedback is a rater.

        >>> web = Caller(name="web", scopes=frozenset({Scope.INFERENCE, Scope.FEEDBACK}))
        >>> web.rater("ann"), web.rater(None), Caller().rater("ann")
        ('key:web/ann', 'key:web', 'ann')
        >>> Caller(name="desk", scopes=frozenset({Scope.FEEDBACK})).rater(None)
        'key:desk/desk'
        """
        if not self.name:
            return source
        if not source and not self.scopes.isdisjoint({Scope.INFERENCE, Scope.ADMIN}):
            return f"{KEY_SOURCE}{self.name}"
        return f"{KEY_SOURCE}{self.name}/{source or self.name}"

    @property
    def sees_all(self) -> bool:
        """Whether all tenants are the caller's business: an operator's, or that of who has no key."""
        return not self.name or (Scope.ADMIN in self.scopes and self.tenant == DEFAULT_TENANT)


def caller_of(scope: MutableMapping[str, Any]) -> Caller:
    found: Caller = scope[SCOPE_KEY]
    return found


Scopes = frozenset[Scope]

#: Anybody may ask this, without a key too.
OPEN: Scopes = frozenset()

_INFERENCE, _FEEDBACK = frozenset({Scope.INFERENCE}), frozenset({Scope.FEEDBACK})
_READ, _COMMIT = frozenset({Scope.READ}), frozenset({Scope.COMMIT})
_METRICS, _ADMIN = frozenset({Scope.METRICS}), frozenset({Scope.ADMIN})
_OF_JOBS = frozenset({Scope.INFERENCE, Scope.FEEDBACK, Scope.READ, Scope.COMMIT})

#: Any one of the scopes will do. Trinity's prefix is taken off before.
_ROUTES: dict[tuple[str, str], Scopes] = {
    ("POST", "/v1/chat/completions"): _INFERENCE,
    ("POST", "/v1/completions"): _INFERENCE,
    ("POST", "/v1/responses"): _INFERENCE,
    ("POST", "/v1/messages"): _INFERENCE,
    ("POST", "/v1/messages/count_tokens"): _INFERENCE,
    ("POST", "/tokenize"): _INFERENCE,
    ("POST", "/detokenize"): _INFERENCE,
    ("GET", "/tokenizer_info"): _INFERENCE,
    ("GET", "/version"): _INFERENCE,
    ("GET", "/v1/models"): _INFERENCE | _READ,
    ("GET", "/v1/chat/completions"): _READ,
    ("GET", "/v1/fine_tuning/jobs"): _READ,
    ("POST", "/v1/fine_tuning/jobs"): _COMMIT,
    ("POST", "/feedback"): _FEEDBACK,
    ("POST", "/api/public/scores"): _FEEDBACK,
    ("POST", "/api/public/ingestion"): _FEEDBACK,
    ("POST", "/v1/feedback_tokens"): _FEEDBACK,
    ("POST", "/commit"): _COMMIT,
    ("GET", "/training"): _READ | _COMMIT,
    ("GET", "/training/calls"): _READ | _COMMIT,
    ("GET", "/metrics"): _METRICS,
    ("GET", "/"): OPEN,
    ("GET", "/docs"): OPEN,
    ("GET", "/openapi.json"): OPEN,
    ("GET", "/health"): OPEN,
    ("GET", "/health/live"): OPEN,
    ("GET", "/api/hello"): OPEN,
    ("GET", "/health/ready"): OPEN,
    ("GET", "/ping"): OPEN,
    ("POST", "/ping"): OPEN,
}

_PROBES = frozenset({"/health", "/health/live", "/health/ready", "/ping", "/api/hello"})

#: The page decides by its sessions who may see it: a browser sends no key.
PAGE = "/ui"

#: The same for all routes that begin so; the first counts.
_BELOW: tuple[tuple[str, str, Scopes], ...] = (
    ("GET", "/v1/chat/completions/", _READ),
    ("POST", "/v1/chat/completions/", _COMMIT),
    ("DELETE", "/v1/chat/completions/", _COMMIT),
    ("DELETE", "/api/public/scores/", _FEEDBACK),
    ("GET", "/v1/responses/", _INFERENCE | _READ),
    ("GET", "/v1/models/", _INFERENCE | _READ),
    ("GET", "/v1/files", _READ),
    ("POST", "/v1/files", _COMMIT),
    ("DELETE", "/v1/files/", _COMMIT),
    ("POST", "/v1/uploads", _COMMIT),
    ("POST", "/v1/fine_tuning/alpha/graders/", _COMMIT),
    ("DELETE", "/v1/models/", _COMMIT),
    ("GET", "/v1/fine_tuning/jobs/", _READ),
    ("POST", "/v1/fine_tuning/jobs/", _COMMIT),
)

#: Below this path are the routes of Trinity's own client, which accepts any type and reads its metrics as JSON.
TRINITY = "/trinity"

#: What is about all tenants. The administrator of one other than the operator's has no say there.
_OF_ALL_TENANTS = ("/admin/versions", "/metrics")


def _own_path(path: str) -> str:
    return path.removeprefix(TRINITY) if path.startswith(f"{TRINITY}/") else path


def is_about_all_tenants(path: str) -> bool:
    path = _own_path(path)
    return any(path == each or path.startswith(f"{each}/") for each in _OF_ALL_TENANTS)


def is_probe(path: str) -> bool:
    return path.removeprefix(TRINITY) in _PROBES


def required_scopes(method: str, path: str) -> Scopes:
    path, method = _own_path(path), "GET" if method == "HEAD" else method
    found = _ROUTES.get((method, path))
    if found is not None:
        return found
    if path == PAGE or path.startswith(f"{PAGE}/"):
        return OPEN
    return next((scopes for verb, begin, scopes in _BELOW if verb == method and path.startswith(begin)), _ADMIN)


_HEADERS = frozenset({b"authorization", b"x-api-key", b"host", b"origin"})
_BEARER, _BASIC = b"bearer ", b"basic "

#: Where the routes of administrators are. Without keys they ask for `explorer.admin_key`, or are not there.
_ADMIN_PATH = "/admin"

_KEY_PREFIX, _RUN_PREFIX = "/key/", "/run/"

#: Where a scope has the key and the token of a run that came in its path.
_KEY, _RUN_TOKEN = "tuneloop.key", "tuneloop.run_token"

#: Not all routes: a proxy that allows clients only /run/ means requests to the model.
_ROUTES_BELOW = ("/v1/", "/tokenize", "/detokenize")

#: What is said to who brings no key that is in force.
_WITHOUT_KEY = {
    "key_missing": "send a key as `Authorization: Bearer <key>`, as `x-api-key`, or in the path: /key/<key>/v1/…",
    "key_unknown": "this key is unknown or was revoked",
    "token_unknown": "keys are needed now: this token was made without one",
}

_STRANGER = Caller()


class _Holder:
    __slots__ = ("caller", "expires_at", "key_id", "meter")

    def __init__(self, key: AccessKey, before: "_Holder | None") -> None:
        self.key_id = key.key_id
        self.meter: KeyMeter = KeyMeter(key.limits) if before is None else before.meter
        self.expires_at = float("inf") if key.expires_at is None else key.expires_at
        scopes = frozenset(key.scopes)
        self.caller = Caller(
            name=key.name,
            tenant=key.tenant,
            scopes=scopes,
            meter=self.meter,
            key_id=key.key_id,
            policy=key.policy,
        )


class Gatekeeper:
    def __init__(self, settings: Settings, tokens: TokenSigner) -> None:
        explorer = settings.explorer
        self._refused: Counter | None = None
        self._tokens = tokens
        self.cross_origin = CrossOrigin(explorer.cors_allow_origins, inference=explorer.cors_inference_origins)
        self._holders: dict[bytes, _Holder] = {}
        self._insecure, self._on_loopback = explorer.insecure, is_loopback(explorer.listen_address)
        self._hosts = None if self._insecure else HostRules(explorer.allowed_hosts)
        admin_key = reveal(explorer.admin_key)
        self._admin_digest = None if admin_key is None else digest_of(admin_key)
        self._local = Caller(scopes=frozenset(set(Scope) - {Scope.ADMIN}))
        admin_key_id = "" if self._admin_digest is None else tokens.admin_key_id(self._admin_digest)
        self._operator = Caller(name="admin_key", scopes=frozenset({Scope.ADMIN}), key_id=admin_key_id)
        self.apply(KeyTable())

    def apply(self, table: KeyTable) -> None:
        """Go by these keys from now on. What was taken of a key stays taken."""
        known = {holder.key_id: holder for holder in self._holders.values()}
        self._holders = {key.digest: _Holder(key, known.get(key.key_id)) for key in table.keys}
        self._open = self._insecure or (self._on_loopback and not table.in_force)

    def count_in(self, refused: Counter) -> None:
        self._refused = refused

    def admit(self, scope: MutableMapping[str, Any]) -> Caller:
        """The caller of an ASGI scope, whose path prefixes are taken off. Raises RequestRefused."""
        if scope["path"].startswith(_KEY_PREFIX):
            key, slash, rest = scope["path"].removeprefix(_KEY_PREFIX).partition("/")
            if slash:
                scope["path"], scope[_KEY] = slash + rest, key
                scope["raw_path"] = b""  # it has the key, too, and nothing reads it
        if scope["path"].startswith(_RUN_PREFIX):
            token, slash, rest = scope["path"].removeprefix(_RUN_PREFIX).partition("/")
            if (slash + rest).startswith(_ROUTES_BELOW):
                scope["path"], scope[_RUN_TOKEN] = slash + rest, token
        try:
            if not scope["path"].isprintable():
                # A route would match it, the rules about who may use it would not: patterns of Starlette's routes end
                # with `$`, which a line feed may follow.
                raise RequestRefused("no route has such a path", status=404, code="not_found")
            return self._admit(scope)
        except RequestRefused as error:
            if self._refused is not None:
                self._refused.labels(error.code).inc()
            raise

    def _admit(self, scope: Mapping[str, Any]) -> Caller:
        method, path = scope["method"], scope["path"]
        required = required_scopes(method, path)
        proxied = self._open and self._hosts is not None and not is_probe(path) and is_proxied(scope["headers"])
        if required is OPEN or self.cross_origin.is_preflight(scope):
            if proxied and not self.needs_admin_key:  # else the page asks for that key itself
                raise from_proxy()
            return _STRANGER
        # The headers that decide who comes in. Raises RequestRefused where one says two things. A proxy before us
        # may have checked, or added, the one that would not count here.
        found: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in _HEADERS and found.setdefault(name, value) != value:
                raise RequestRefused(f"the header {name.decode()} is there twice", code="ambiguous_header")
        headers = found
        if self._open and self._hosts is not None:
            origin = None if self.cross_origin.allows(scope) else headers.get(b"origin")
            self._hosts.check(method, headers.get(b"host"), origin)
        candidates = list(_candidates(scope, headers))
        for secret in candidates:
            if secret.startswith(FeedbackClaims.prefix):
                return self._bearer_of(secret, path, proxied=proxied)
            if secret.startswith(JobClaims.prefix):
                return self._job_of(secret, required)
            digest = digest_of(secret)
            if (holder := self._holders.get(digest)) is not None:
                return _check(holder, required, path, hint(scope) if required is _ADMIN else "")
            if digest == self._admin_digest:
                return self._operator
        return self._without_key(path, "key_unknown" if candidates else "key_missing", proxied=proxied)

    def _without_key(self, path: str, code: str, *, proxied: bool) -> Caller:
        """Who shows no key that is in force; `code` is that of the refusal where one is needed."""
        if not self._open:
            raise _no_entry(_WITHOUT_KEY[code], code)
        if proxied:
            raise from_proxy()
        if not path.startswith(_ADMIN_PATH):
            return self._local
        if self._admin_digest is None:
            raise RequestRefused(f"no route {path}", status=404, code="not_found")
        raise _no_entry("send explorer.admin_key as `Authorization: Bearer <key>`", "unauthorized")

    def _bearer_of(self, token: str, path: str, *, proxied: bool) -> Caller:
        """Who brings a token for feedback. Raises RequestRefused."""
        claims = self._tokens.read(token, FeedbackClaims)
        if claims is None:
            raise _no_entry("this token is invalid", "token_unknown")
        if steady_clock() >= claims.expires_at:
            raise _no_entry("this token has expired", "token_expired")
        if path != ROUTE:
            raise RequestRefused("a token is for POST /feedback alone", status=403, code="scope_missing")
        if claims.key_id and claims.key_id == self._operator.key_id:
            maker = self._operator
        elif claims.key_id:
            holder = next((each for each in self._holders.values() if each.key_id == claims.key_id), None)
            if holder is None:
                raise _no_entry("the key that made this token was revoked", "token_unknown")
            maker = _check(holder, frozenset({Scope.FEEDBACK}), path)
        else:
            maker = self._without_key(path, "token_unknown", proxied=proxied)
        return replace(maker, scopes=frozenset({Scope.FEEDBACK}), feedback=claims)

    def _job_of(self, token: str, required: frozenset[Scope]) -> Caller:
        """The fine-tuning job that asks its own service. Raises RequestRefused."""
        claims = self._tokens.read(token, JobClaims)
        if claims is None or steady_clock() >= claims.expires_at:
            raise _no_entry("this token is invalid or has expired", "token_unknown")
        if _OF_JOBS.isdisjoint(required):
            raise RequestRefused("a job asks for replies, and rates them", status=403, code="scope_missing")
        return Caller(name=claims.job, tenant=claims.tenant, scopes=_OF_JOBS, policy=claims.policy or None)

    @property
    def needs_admin_key(self) -> bool:
        """Whether an administrator must show a key; else being at this machine is enough."""
        return self._admin_digest is not None or self._insecure or not self._open

    def administrators(self) -> Mapping[bytes, Caller]:
        now = steady_clock()
        found = {
            digest: holder.caller
            for digest, holder in self._holders.items()
            if Scope.ADMIN in holder.caller.scopes and now < holder.expires_at
        }
        return found if self._admin_digest is None else {**found, self._admin_digest: self._operator}

    def usage(self) -> dict[str, KeyUsage]:
        return {holder.key_id: holder.meter.usage for holder in self._holders.values() if holder.meter.usage.requests}

    def subtract_others(self, usage: Mapping[str, KeyUsage]) -> None:
        for holder in self._holders.values():
            if (others := usage.get(holder.key_id)) is not None:
                holder.meter.subtract_others(others)


def _candidates(scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> Iterator[str]:
    if (key := scope.get(_KEY)) is not None:
        yield key
        return
    bearer = headers.get(b"authorization", b"")
    if bearer[: len(_BEARER)].lower() == _BEARER:
        yield bearer[len(_BEARER) :].strip().decode("latin-1")
    if (value := headers.get(b"x-api-key")) is not None:
        yield value.decode("latin-1")
    if bearer[: len(_BASIC)].lower() == _BASIC:  # Langfuse's clients: a public and a secret key.
        with suppress(ValueError):
            yield from reversed(base64.b64decode(bearer[len(_BASIC) :]).decode("latin-1").split(":", 1))


def _check(holder: _Holder, required: frozenset[Scope], path: str, meant: str = "") -> Caller:
    """The holder of a key, if it may do one of these now. Raises RequestRefused."""
    caller = holder.caller
    if steady_clock() >= holder.expires_at:
        raise _no_entry("this key has expired", "key_expired")
    if Scope.ADMIN in caller.scopes:
        if is_about_all_tenants(path) and not caller.sees_all and caller.scopes.isdisjoint(required - {Scope.ADMIN}):
            raise operator_only()
    elif caller.scopes.isdisjoint(required):
        if meant:
            raise RequestRefused(f"no route {path}; {meant}", status=404, code="not_found")
        wanted = " or ".join(sorted(required))
        raise RequestRefused(f"this needs a key with the scope {wanted}", status=403, code="scope_missing")
    holder.meter.admit(brings_feedback=path.endswith(_BRINGS_FEEDBACK))
    return caller


def _no_entry(message: str, code: str) -> RequestRefused:
    return RequestRefused(message, status=401, code=code)


#: The route for which a page of another origin needs no key of its own: it may bring a token for one reply.
ROUTE = "/feedback"
_BRINGS_FEEDBACK = (ROUTE, "/api/public/scores", "/api/public/ingestion")

_INFERENCE_PATHS = frozenset(path for (_, path), scopes in _ROUTES.items() if scopes >= _INFERENCE)


class CrossOrigin:
    def __init__(self, origins: Collection[str] = (), *, inference: Collection[str] = ()) -> None:
        of_feedback, of_inference = (frozenset(each.encode() for each in some) for some in (origins, inference))
        self._origins = {ROUTE: of_feedback} | dict.fromkeys(_INFERENCE_PATHS if of_inference else (), of_inference)

    def allows(self, scope: Mapping[str, Any]) -> bool:
        origins, origin = self._origins.get(scope["path"], frozenset()), _origin_of(scope)
        return bool(origin) and (origin in origins or b"*" in origins)

    def is_preflight(self, scope: Mapping[str, Any]) -> bool:
        """Whether a browser asks first, on behalf of a page that may."""
        return scope["method"] == "OPTIONS" and self.allows(scope)

    def headers(self, scope: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
        if not self._origins.get(scope["path"]):
            return []
        if not self.allows(scope):
            return [(b"vary", b"origin")]
        found = [(b"access-control-allow-origin", _origin_of(scope)), (b"vary", b"origin")]
        if scope["method"] != "OPTIONS":
            return [*found, (b"access-control-expose-headers", b"x-request-id, x-tuneloop-version, x-tuneloop-policy")]
        # OpenAI's client sends headers of its own, more with each release.
        asked = next((value for name, value in scope["headers"] if name == b"access-control-request-headers"), b"")
        return [
            *found,
            (b"access-control-allow-methods", b"POST" if scope["path"] == ROUTE else b"GET, POST"),
            (b"access-control-allow-headers", asked),
            (b"access-control-max-age", b"600"),
        ]


def _origin_of(scope: Mapping[str, Any]) -> bytes:
    return next((value for name, value in scope["headers"] if name == b"origin"), b"")


_HEARD = 512

_ORIGIN = re.compile(rb"[a-z][a-z0-9+.-]*://([^/@?#]+)", re.IGNORECASE).fullmatch
_BRACKETED = re.compile(r"\[([^\]]*)\](?::\d*)?").fullmatch

_OF_PROXIES = re.compile(rb"forwarded|via|x-real-ip|x-forwarded-.*").fullmatch

#: What changes nothing: a browser may send it, and shows its page nothing of the answer.
_HARMLESS = frozenset({"GET", "HEAD"})


class HostRules:
    """The names under which this machine may be asked."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(each.lower() for each in allowed)
        self._is_ours = lru_cache(_HEARD)(self._is_ours_uncached)

    def check(self, method: str, host: bytes | None, origin: bytes | None) -> None:
        """Raise RequestRefused for a request that a browser was led to send. No browser leaves out `Host`."""
        if host is not None and not self._is_ours(host):
            raise RequestRefused(
                "without keys, this host name is not answered for: name this machine localhost, list the name in "
                "explorer.allowed_hosts, or make a key (tuneloop keys create)",
                status=403,
                code="host_not_allowed",
            )
        if origin is None or method in _HARMLESS:
            return
        if (found := _ORIGIN(origin)) is None or not self._is_ours(found[1]):
            raise RequestRefused(
                "without keys, pages of other sites may send nothing here",
                status=403,
                code="origin_not_allowed",
            )

    def _is_ours_uncached(self, host: bytes) -> bool:
        name = host.decode("latin-1").lower()
        if (found := _BRACKETED(name)) is not None:
            name = found[1]
        else:
            try:
                name = str(ipaddress.IPv6Address(name))
            except ValueError:
                name = name.partition(":")[0].removesuffix(".")
        return name in self._allowed or is_loopback(name)


def is_proxied(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a proxy has forwarded the request: only a proxy sends such headers."""
    return any(_OF_PROXIES(name) for name, _ in headers)


def is_from_here(client: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request was sent on this machine, and not for another machine."""
    try:
        found = ipaddress.ip_address(client)
    except ValueError:
        return False
    here = (getattr(found, "ipv4_mapped", None) or found).is_loopback
    return here and not is_proxied(headers)


_FIELDS = frozenset({"task_id", "run_id", "train"})


class RunBinding(NamedTuple):
    """The labels that a path gives its request; `train` is None where it leaves that to the body."""

    task_id: str
    run_id: str
    train: bool | None


def binding_of(scope: MutableMapping[str, Any]) -> RunBinding | None:
    """The run that a request is bound to, if it is to one. Raises RequestRefused for a broken token."""
    token = scope.get(_RUN_TOKEN)
    if token is None:
        return None
    try:
        padded = token.rstrip("=") + "=" * (-len(token.rstrip("=")) % 4)
        labels = orjson.loads(base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True))
    except (UnicodeError, binascii.Error, orjson.JSONDecodeError):
        raise _broken("its token must be URL-safe base64 of a JSON object") from None
    if not isinstance(labels, dict):
        raise _broken("its token must be URL-safe base64 of a JSON object")
    if unknown := sorted(labels.keys() - _FIELDS):
        raise _broken(f"unknown field {unknown[0]!r} in its token; there are task_id, run_id and train")
    for name in ("task_id", "run_id"):
        if labels.get(name) is None:
            raise _broken(f"{name} is missing from its token")
    train = labels.get("train")
    if not isinstance(train, bool | None):
        raise _broken("train in its token must be a boolean")
    return RunBinding(_name_in(labels, "task_id"), _name_in(labels, "run_id"), train)


def _name_in(labels: dict[str, Any], name: str) -> str:
    try:
        return id_of(labels[name], name)
    except RequestRefused as error:
        raise _broken(f"in its token {error}") from None


def _broken(what: str) -> RequestRefused:
    return RequestRefused(f"the path {_RUN_PREFIX}<token>/ names no run: {what}", code="invalid_run_token")
