"""Who sends a request: the tenant, what the caller may do, and the meter that counts what it takes."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tuneloop.explorer.limits import KeyMeter
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import DEFAULT_TENANT, KEY_SOURCE, Scope
from tuneloop.shared.ledger.keys import KeyLimits

#: Where a scope has its caller.
SCOPE_KEY = "tuneloop.caller"


_UNMETERED = KeyMeter(KeyLimits())


class FeedbackBinding(NamedTuple):
    """What the bearer of a token may say: of one reply, in one name, so many events, until a time (since 1970).

    `key_id` is that of its maker, empty where none was needed.
    """

    msg_id: str
    source: str
    expires_at: float
    max_events: int
    nonce: str
    key_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A key's holder, or a caller without one: then `name` is empty."""

    name: str = ""
    tenant: str = DEFAULT_TENANT
    scopes: frozenset[Scope] = frozenset()
    meter: KeyMeter = _UNMETERED
    key_id: str = ""
    binding: FeedbackBinding | None = None

    @property
    def identity(self) -> str:
        """Who shares places with others: a tenant's key, or all who have none.

        >>> Caller(name="web", tenant="acme").identity, Caller().identity
        ('acme/web', '')
        """
        return f"{self.tenant}/{self.name}" if self.name else ""

    def rater(self, source: str | None) -> str | None:
        """The name in which the caller gives feedback as `source`: nobody writes in the name of another's raters.

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
        """Whether all tenants are the caller's business: an operator's, or that of who has no key.

        >>> admin = frozenset({Scope.ADMIN})
        >>> Caller(name="ops", scopes=admin).sees_all, Caller(name="ops", scopes=admin, tenant="acme").sees_all
        (True, False)
        """
        return not self.name or (Scope.ADMIN in self.scopes and self.tenant == DEFAULT_TENANT)


_ABOUT_ALL = "this is about all tenants: it needs explorer.admin_key, or an admin key of the tenant default"


def operator_only(reason: str = _ABOUT_ALL) -> RequestRefused:
    """The refusal of the administrator of one tenant, where all tenants are concerned, or for another reason."""
    return RequestRefused(reason, status=403, code="operator_only")


class EntryGate(Protocol):
    """Decides who comes in, by the head of a request."""

    @property
    def needs_admin_key(self) -> bool:
        """Whether an administrator must show a key; else being at this machine is enough."""

    def admit(self, scope: MutableMapping[str, Any]) -> Caller:
        """The caller of an ASGI scope, whose path prefixes are taken off. Raises RequestRefused."""

    def administrators(self) -> Mapping[bytes, Caller]:
        """The holders of the keys with the scope `admin` that are in force now, by the keys' digests."""


def caller_of(scope: MutableMapping[str, Any]) -> Caller:
    """Who sends a request that a gate has let in."""
    found: Caller = scope[SCOPE_KEY]
    return found
