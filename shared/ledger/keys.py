"""Stores client keys: their rights, tenant, limits and expiry.

A key is shown once, when it is created. The database has its SHA-256: a slow hash adds nothing for 256 random bits.
"""

import hashlib
import secrets
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, func, insert, select, true, update

from tuneloop.shared.errors import KeyRefused
from tuneloop.shared.experience import DEFAULT_TENANT, KeyAction, Scope, is_tenant_name
from tuneloop.shared.ledger.storage.database import LedgerPart
from tuneloop.shared.ledger.storage.schema import key_events, keys

#: What every key begins with, so that one that leaked is recognised.
PREFIX = "tl-"

_RANDOM_BYTES, _ID_DIGITS = 32, 12

MAX_LIMIT = 2**31 - 1


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much a key allows, a minute and at once; None: as much as there is."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    feedback_per_minute: int | None = None
    max_concurrent: int | None = None


class KeyGrant(msgspec.Struct, frozen=True, kw_only=True):
    """What a key to be made allows, for `expires_in` seconds; requests that name no policy go to `policy`."""

    name: str
    scopes: tuple[Scope, ...] = (Scope.INFERENCE, Scope.FEEDBACK)
    tenant: str = DEFAULT_TENANT
    limits: KeyLimits = KeyLimits()
    expires_in: float | None = None
    policy: int | None = None


class AccessKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret; times are seconds since 1970."""

    key_id: str
    digest: bytes
    name: str
    tenant: str
    scopes: tuple[Scope, ...]
    limits: KeyLimits = KeyLimits()
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None
    policy: int | None = None


class KeyTable(msgspec.Struct, frozen=True):
    """The keys that are not revoked. `in_force`: a key was made at some time, so that none is not enough."""

    keys: tuple[AccessKey, ...] = ()
    in_force: bool = False
    revision: int = 0


class KeyEvent(NamedTuple):
    at: float
    key_id: str
    name: str
    tenant: str
    action: KeyAction
    actor: str


def digest_of(secret: str) -> bytes:
    """What is kept of a key.

    >>> digest_of("tl-x").hex()[:8]
    'f995ed74'
    """
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def check_grant(grant: KeyGrant) -> None:
    for param, text in (("name", grant.name), ("tenant", grant.tenant)):
        if not is_tenant_name(text):
            raise KeyRefused(
                f"{param} must have 1 to 64 letters, digits or any of . _ @ -, and begin with a letter or a digit"
            )
    if not grant.scopes:
        raise KeyRefused(f"scopes must name at least one of {', '.join(Scope)}")
    for param, limit in msgspec.structs.asdict(grant.limits).items():
        if limit is not None and not 1 <= limit <= MAX_LIMIT:
            raise KeyRefused(f"{param} must lie between 1 and {MAX_LIMIT}")
    if grant.expires_in is not None and not 0 < grant.expires_in <= 1e10:
        raise KeyRefused("expires_in must be a number of seconds above 0")


class Keys(LedgerPart):
    def create(self, grant: KeyGrant, *, actor: str) -> tuple[AccessKey, str]:
        """A new key, and its secret, which is never shown again. Raises KeyRefused."""
        check_grant(grant)
        secret = PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
        digest, now = digest_of(secret), self._clock()
        key = AccessKey(
            key_id=f"key_{digest.hex()[:_ID_DIGITS]}",
            digest=digest,
            name=grant.name,
            tenant=grant.tenant,
            scopes=tuple(sorted(set(grant.scopes))),
            limits=grant.limits,
            created_at=now,
            expires_at=None if grant.expires_in is None else now + grant.expires_in,
            policy=grant.policy,
        )
        row = msgspec.structs.asdict(key) | msgspec.structs.asdict(key.limits) | {"scopes": ",".join(key.scopes)}
        del row["limits"]
        with self._write() as connection:
            connection.execute(insert(keys).values(row))
            connection.execute(insert(key_events).values(_event(key.key_id, KeyAction.CREATED, actor, now)))
        return key, secret

    def revoke(self, key_id: str, *, actor: str, tenant: str | None = None) -> bool:
        """End a key, of a tenant if one is named; False if there is none of that id that was not revoked before."""
        now = self._clock()
        with self._write() as connection:
            live = (keys.c.key_id == key_id, keys.c.revoked_at.is_(None), _is_of(tenant))
            if not connection.execute(update(keys).where(*live).values(revoked_at=now)).rowcount:
                return False
            connection.execute(insert(key_events).values(_event(key_id, KeyAction.REVOKED, actor, now)))
        return True

    def all(self, *, tenant: str | None = None) -> list[AccessKey]:
        query = select(keys).where(_is_of(tenant)).order_by(keys.c.created_at, keys.c.key_id)
        return [_key_of(row) for row in self._read(query)]

    def revision(self) -> int:
        """A number that grows with every change."""
        return int(self._read(select(func.coalesce(func.max(key_events.c.id), 0)))[0][0])

    def table(self) -> KeyTable:
        query = select(keys).where(keys.c.revoked_at.is_(None))
        newest = select(func.coalesce(func.max(key_events.c.id), 0))
        [[revision]], rows = self._read_together(newest, query)
        return KeyTable(tuple(map(_key_of, rows)), revision > 0, revision)

    def events(self, *, last: int, tenant: str | None = None) -> list[KeyEvent]:
        named = key_events.join(keys, keys.c.key_id == key_events.c.key_id)
        columns = (key_events.c.at, keys.c.key_id, keys.c.name, keys.c.tenant, key_events.c.action, key_events.c.actor)
        query = select(*columns).select_from(named).where(_is_of(tenant)).order_by(key_events.c.id.desc()).limit(last)
        return [
            KeyEvent(row.at, row.key_id, row.name, row.tenant, KeyAction(row.action), row.actor)
            for row in self._read(query)
        ]


def _is_of(tenant: str | None) -> ColumnElement[bool]:
    return true() if tenant is None else keys.c.tenant == tenant


def _event(key_id: str, action: KeyAction, actor: str, at: float) -> dict[str, Any]:
    return {"key_id": key_id, "action": action, "actor": actor, "at": at}


def _key_of(row: Any) -> AccessKey:
    return AccessKey(
        key_id=row.key_id,
        digest=bytes(row.digest),
        name=row.name,
        tenant=row.tenant,
        scopes=tuple(map(Scope, row.scopes.split(","))),
        limits=KeyLimits(**{name: getattr(row, name) for name in KeyLimits.__struct_fields__}),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        policy=row.policy,
    )
