"""The tables of the keys that clients are let in by, and of what happened to them: of a key they have its SHA-256."""

from sqlalchemy import (
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
)

from tuneloop.shared.experience import KeyAction
from tuneloop.shared.ledger.storage.schema_types import RowId, Words, metadata, one_of

#: `scopes` are separated by commas. A limit that is NULL does not exist.
keys = Table(
    "keys",
    metadata,
    Column("key_id", String(32), primary_key=True),
    Column("digest", LargeBinary, nullable=False, unique=True),
    Column("name", String(64), nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("scopes", Text, nullable=False),
    Column("requests_per_minute", Integer, nullable=True),
    Column("tokens_per_minute", Integer, nullable=True),
    Column("feedback_per_minute", Integer, nullable=True),
    Column("max_concurrent", Integer, nullable=True),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=True),
    Column("revoked_at", Double, nullable=True),
    CheckConstraint("length(name) BETWEEN 1 AND 64 AND length(tenant) BETWEEN 1 AND 64", name="names"),
    CheckConstraint("length(scopes) > 0", name="scopes"),
    CheckConstraint(
        "requests_per_minute > 0 AND tokens_per_minute > 0 AND feedback_per_minute > 0 AND max_concurrent > 0",
        name="limits",
    ),
)

#: The audit log: who made and who revoked a key, and when. Append-only.
key_events = Table(
    "key_events",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("key_id", String(32), ForeignKey("keys.key_id"), nullable=False),
    Column("at", Double, nullable=False),
    Column("action", String(16), nullable=False),
    Column("actor", Words, nullable=False),
    CheckConstraint(one_of("action", KeyAction), name="action"),
    Index(None, "key_id", "id"),
)
