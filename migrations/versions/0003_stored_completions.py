"""Let stored completions be listed, found by their model and metadata, changed and deleted."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
import zstandard
from alembic import op

revision = "0003"
down_revision = "0002"

_FRAME = b"\x28\xb5\x2f\xfd"
_PAGE = 500
_CHAT = "endpoint = '/v1/chat/completions'"


def upgrade() -> None:
    """Apply the step."""
    # First, because on PostgreSQL it keeps others from writing exchanges that would get no tags.
    some = sa.text(_CHAT)
    columns = ["tenant", "received_at", "msg_id"]
    op.create_index("ix_exchanges_chat", "exchanges", columns, sqlite_where=some, postgresql_where=some)
    _tags()
    _changed_metadata()
    _deletions()
    _tag_what_is_there()


def downgrade() -> None:
    """Take the step back. Changes of metadata are lost, and which completions were deleted."""
    for table in ("tags", "changed_metadata", "deletions"):
        op.drop_table(table)
    op.drop_index("ix_exchanges_chat", "exchanges")


def _tags() -> None:
    op.create_table(
        "tags",
        sa.Column("tag", sa.LargeBinary, nullable=False),
        sa.Column("received_at", sa.Double, nullable=False),
        sa.Column("msg_id", sa.String(96), nullable=False),
        sa.PrimaryKeyConstraint("tag", "received_at", "msg_id", name=op.f("pk_tags")),
        sa.ForeignKeyConstraint(["msg_id"], ["exchanges.msg_id"], name=op.f("fk_tags_msg_id"), ondelete="CASCADE"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_tags_msg_id", "tags", ["msg_id"])


def _changed_metadata() -> None:
    op.create_table(
        "changed_metadata",
        sa.Column("msg_id", sa.String(96), nullable=False),
        sa.Column("metadata", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("msg_id", name=op.f("pk_changed_metadata")),
        sa.ForeignKeyConstraint(
            ["msg_id"], ["exchanges.msg_id"], name=op.f("fk_changed_metadata_msg_id"), ondelete="CASCADE"
        ),
    )


def _deletions() -> None:
    op.create_table(
        "deletions",
        sa.Column("msg_id", sa.String(96), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("received_at", sa.Double, nullable=False),
        sa.Column("deleted_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("msg_id", name=op.f("pk_deletions")),
    )


def _tag_what_is_there() -> None:
    page = sa.text(
        f"SELECT msg_id, tenant, received_at, request FROM exchanges WHERE {_CHAT} AND msg_id > :last "
        f"ORDER BY msg_id LIMIT {_PAGE}"
    )
    tagged = sa.text("INSERT INTO tags (tag, received_at, msg_id) VALUES (:tag, :received_at, :msg_id)")
    last = ""
    while rows := op.get_bind().execute(page, {"last": last}).all():
        found = [
            {"tag": tag, "received_at": row.received_at, "msg_id": row.msg_id} for row in rows for tag in _tags_of(row)
        ]
        if found:
            op.get_bind().execute(tagged, found)
        last = rows[-1].msg_id


def _tags_of(row: Any) -> set[bytes]:
    stored = bytes(row.request)
    try:
        request = json.loads(zstandard.decompress(stored) if stored.startswith(_FRAME) else stored)
    except (ValueError, zstandard.ZstdError):
        return set()
    return {_digest(row.tenant, *words) for words in _words(request)} if isinstance(request, dict) else set()


def _words(request: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    if isinstance(model := request.get("model"), str):
        yield "model", model
    pairs = request.get("metadata")
    shown = (
        {key: _metadata_as_text(value) for key, value in pairs.items() if value is not None}
        if isinstance(pairs, dict)
        else {}
    )
    for key, value in list(shown.items())[:16]:
        if len(key) <= 64 and len(value) <= 512:
            yield "metadata", key, value


def _metadata_as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _digest(*words: str) -> bytes:
    return hashlib.blake2b(json.dumps(words).encode(), digest_size=16).digest()
