"""Lets requests in by their heads, before a body is read: which key, what it may do, whether it has had enough.

All it asks is in memory, since it is asked for every request: the control process keeps the table fresh, and a key that
is not in it is refused, whether the database answers or not.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from prometheus_client import Counter

from tuneloop.explorer.access import feedback_tokens, key_prefix
from tuneloop.explorer.access.feedback_tokens import FeedbackTokens
from tuneloop.explorer.access.loopback import HostRules, is_proxied
from tuneloop.explorer.access.rate_limits import KeyMeter, KeyUsage, PromptRefusals
from tuneloop.explorer.access.route_scopes import OPEN, is_about_all_tenants, is_probe, required_scopes
from tuneloop.explorer.http import run_prefix
from tuneloop.explorer.http.caller import Caller, operator_only
from tuneloop.explorer.http.cors import ROUTE, CrossOrigin
from tuneloop.shared import steady_time
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import AccessKey, KeyLimits, KeyTable, digest_of
from tuneloop.shared.settings.serving import is_loopback
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.types import reveal

_HEADERS = frozenset({b"authorization", b"x-api-key", b"host", b"origin"})
_BEARER = b"bearer "

#: Where the routes of administrators are. Without keys they ask for `explorer.admin_key`, or are not there.
_ADMIN = "/admin"

#: What is beyond a key's limits.
_LIMITED = 429

_STRANGER = Caller()


class _Holder:
    """A key that is in force, and what its holder has taken."""

    __slots__ = ("caller", "expires_at", "key_id", "meter")

    def __init__(self, key: AccessKey, meter: KeyMeter) -> None:
        self.key_id = key.key_id
        self.meter = meter
        self.expires_at = float("inf") if key.expires_at is None else key.expires_at
        scopes = frozenset(key.scopes)
        self.caller = Caller(name=key.name, tenant=key.tenant, scopes=scopes, meter=meter, key_id=key.key_id)


class Gatekeeper:
    """Decides who comes in."""

    def __init__(self, settings: Settings, tokens: FeedbackTokens) -> None:
        explorer = settings.explorer
        self._refused: Counter | None = None
        self._tokens = tokens
        self._prompt_refusals = PromptRefusals()
        self._cross_origin = CrossOrigin(explorer.cors_allow_origins)
        self._holders: dict[bytes, _Holder] = {}
        self._insecure, self._on_loopback = explorer.insecure, is_loopback(explorer.listen_address)
        self._hosts = None if self._insecure else HostRules(explorer.allowed_hosts)
        admin_key = reveal(explorer.admin_key)
        self._admin_digest = None if admin_key is None else digest_of(admin_key)
        self._local = Caller(scopes=frozenset(set(Scope) - {Scope.ADMIN}), meter=KeyMeter(KeyLimits()))
        admin_key_id = "" if self._admin_digest is None else tokens.admin_key_id(self._admin_digest)
        self._operator = Caller(name="admin_key", scopes=frozenset({Scope.ADMIN}), key_id=admin_key_id)
        self.apply(KeyTable())

    def apply(self, table: KeyTable) -> None:
        """Go by these keys from now on. What was taken of a key stays taken."""
        known = {holder.key_id: holder for holder in self._holders.values()}
        self._holders = {key.digest: self._holder_of(key, known.get(key.key_id)) for key in table.keys}
        self._open = self._insecure or (self._on_loopback and not table.in_force)

    def count_in(self, refused: Counter) -> None:
        """Count refusals there from now on, by their codes."""
        self._refused = refused

    def _holder_of(self, key: AccessKey, before: _Holder | None) -> _Holder:
        return _Holder(key, KeyMeter(key.limits) if before is None else before.meter)

    def admit(self, scope: MutableMapping[str, Any]) -> Caller:
        """The caller of an ASGI scope, whose path prefixes are taken off. Raises RequestRefused."""
        if scope["path"].startswith(key_prefix.PREFIX):
            key_prefix.strip_prefix(scope)
        run_prefix.strip_prefix(scope)
        try:
            _check_path(scope["path"])
            return self._admit(scope)
        except RequestRefused as error:
            if error.status != _LIMITED:  # a key's meter counts its own
                self._prompt_refusals.take(error)
            if self._refused is not None:
                self._refused.labels(error.code).inc()
            raise

    def _admit(self, scope: Mapping[str, Any]) -> Caller:
        method, path = scope["method"], scope["path"]
        required = required_scopes(method, path)
        proxied = self._open and self._hosts is not None and not is_probe(path) and is_proxied(scope["headers"])
        if required is OPEN or self._cross_origin.is_preflight(scope):
            if proxied and not self.needs_admin_key:  # else the page asks for that key itself
                raise _from_proxy()
            return _STRANGER
        headers = _headers_of(scope)
        if self._open and self._hosts is not None:
            origin = None if self._cross_origin.allows(scope) else headers.get(b"origin")
            self._hosts.check(method, headers.get(b"host"), origin)
        candidates = list(_candidates(scope, headers))
        for secret in candidates:
            if secret.startswith(feedback_tokens.PREFIX):
                return self._bearer_of(secret, path, proxied=proxied)
            digest = digest_of(secret)
            if (holder := self._holders.get(digest)) is not None:
                return _check(holder, required, path)
            if digest == self._admin_digest:
                return self._operator
        return self._without_key(path, _unknown if candidates else _missing, proxied=proxied)

    def _without_key(self, path: str, refusal: Callable[[], RequestRefused], *, proxied: bool) -> Caller:
        """Who shows no key that is in force; `refusal` is for where one is needed. Raises RequestRefused."""
        if not self._open:
            raise refusal()
        if proxied:
            raise _from_proxy()
        if not path.startswith(_ADMIN):
            return self._local
        if self._admin_digest is None:
            raise RequestRefused(f"no route {path}", status=404, code="not_found")
        raise _no_entry("send explorer.admin_key as `Authorization: Bearer <key>`", "unauthorized")

    def _bearer_of(self, token: str, path: str, *, proxied: bool) -> Caller:
        """Who brings a token for feedback. Raises RequestRefused."""
        claims = self._tokens.read(token)
        if claims is None:
            raise _no_entry("this token is not one of ours", "token_unknown")
        if steady_time.now() >= claims.expires_at:
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
            maker = self._without_key(path, _made_without_key, proxied=proxied)
        return replace(maker, scopes=frozenset({Scope.FEEDBACK}), binding=claims.binding)

    @property
    def needs_admin_key(self) -> bool:
        """Whether an administrator must show a key; else being at this machine is enough."""
        return self._admin_digest is not None or self._insecure or not self._open

    def administrators(self) -> Mapping[bytes, Caller]:
        """The holders of the keys with the scope `admin` that are in force now, by the keys' digests."""
        now = steady_time.now()
        found = {
            digest: holder.caller
            for digest, holder in self._holders.items()
            if Scope.ADMIN in holder.caller.scopes and now < holder.expires_at
        }
        return found if self._admin_digest is None else {**found, self._admin_digest: self._operator}

    def usage(self) -> dict[str, KeyUsage]:
        """What each key that has been used here has taken, by its id."""
        return {holder.key_id: holder.meter.usage for holder in self._holders.values() if holder.meter.usage.requests}

    def subtract_others(self, usage: Mapping[str, KeyUsage]) -> None:
        """Subtract what the keys have taken of other workers."""
        for holder in self._holders.values():
            if (others := usage.get(holder.key_id)) is not None:
                holder.meter.subtract_others(others)


def _check_path(path: str) -> None:
    """Raise RequestRefused for a path that a route would match, and the rules about who may use it would not.

    The patterns of Starlette's routes end with `$`, which a line feed may follow.
    """
    if not path.isprintable():
        raise RequestRefused("no route has such a path", status=404, code="not_found")


def _headers_of(scope: Mapping[str, Any]) -> Mapping[bytes, bytes]:
    """The headers that decide who comes in. Raises RequestRefused where one says two things.

    A proxy before us may have checked, or added, the one that would not count here.
    """
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in _HEADERS and found.setdefault(name, value) != value:
            raise RequestRefused(f"the header {name.decode()} is there twice", code="ambiguous_header")
    return found


def _candidates(scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> Iterator[str]:
    """The keys that a request brings: a client may send a placeholder in the header that it always sends."""
    if (key := key_prefix.key_in(scope)) is not None:
        yield key
        return
    bearer = headers.get(b"authorization", b"")
    if bearer[: len(_BEARER)].lower() == _BEARER:
        yield bearer[len(_BEARER) :].strip().decode("latin-1")
    if (value := headers.get(b"x-api-key")) is not None:
        yield value.decode("latin-1")


def _check(holder: _Holder, required: frozenset[Scope], path: str) -> Caller:
    """The holder of a key, if it may do one of these now. Raises RequestRefused."""
    caller = holder.caller
    if steady_time.now() >= holder.expires_at:
        raise _no_entry("this key has expired", "key_expired")
    if Scope.ADMIN in caller.scopes:
        if is_about_all_tenants(path) and not caller.sees_all and caller.scopes.isdisjoint(required - {Scope.ADMIN}):
            raise operator_only()
    elif caller.scopes.isdisjoint(required):
        wanted = " or ".join(sorted(required))
        raise RequestRefused(f"this needs a key with the scope {wanted}", status=403, code="scope_missing")
    holder.meter.admit(brings_feedback=path.endswith(ROUTE))
    return caller


def _missing() -> RequestRefused:
    return _no_entry(
        "send a key as `Authorization: Bearer <key>`, as `x-api-key`, or in the path: /key/<key>/v1/…", "key_missing"
    )


def _made_without_key() -> RequestRefused:
    return _no_entry("keys are needed now: this token was made without one", "token_unknown")


def _from_proxy() -> RequestRefused:
    return RequestRefused(
        "without keys, nothing that a proxy forwards is answered, for it may come from anywhere: make a key "
        "(tuneloop keys create -c tuneloop.yaml --name web), and send it with each request",
        status=403,
        code="proxied_without_keys",
    )


def _unknown() -> RequestRefused:
    return _no_entry("this key is unknown or was revoked", "key_unknown")


def _no_entry(message: str, code: str) -> RequestRefused:
    return RequestRefused(message, status=401, code=code)
