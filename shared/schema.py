"""The tables, with the rules that must hold written into them.

Times are seconds since 1970, UTC. A rule here is a rule for every program that touches the database, ours or not.
"""

import re

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)

from shared.experience import State, VersionState

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite numbers rows by itself only in a column declared INTEGER.
RowId = BigInteger().with_variant(Integer(), "sqlite")


_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


class Words(TypeDecorator[str]):
    """Text of any origin: what UTF-8 or PostgreSQL cannot hold (NUL, half a surrogate pair) is stored as U+FFFD."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """The text as it can be stored and compared."""
        return None if value is None else _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", value)


def _one_of(column: str, values: type[State] | type[VersionState]) -> str:
    return f"{column} IN ({', '.join(repr(value.value) for value in values)})"


#: Whose database this is: one row, so that two experiments never mix their ledgers.
experiment = Table(
    "experiment",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("project", String(255), nullable=False),
    Column("name", String(255), nullable=False),
    CheckConstraint("id = 1", name="only_one"),
)

#: The trainers' fencing tokens: the highest epoch owns all leases.
epochs = Table(
    "epochs",
    metadata,
    Column("epoch", Integer, primary_key=True, autoincrement=False),
    Column("trainer", String(255), nullable=False),
    Column("started_at", Double, nullable=False),
    CheckConstraint("epoch >= 1", name="from_one"),
)

#: Every set of weights that exists; 0 is the base model.
versions = Table(
    "versions",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("state", String(16), nullable=False),
    Column("step", Integer, nullable=False),
    Column("epoch", Integer, ForeignKey("epochs.epoch"), nullable=True),
    Column("path", Text, nullable=False),
    Column("manifest_sha256", String(64), nullable=True),
    Column("consumed", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("served_at", Double, nullable=True),
    Column("reason", Words, nullable=True),
    CheckConstraint(_one_of("state", VersionState), name="state"),
    CheckConstraint("version >= 0 AND step >= 0 AND consumed >= 0", name="not_negative"),
    CheckConstraint("(version = 0) = (epoch IS NULL)", name="trained_under_an_epoch"),
    CheckConstraint("(version = 0) = (manifest_sha256 IS NULL)", name="manifest"),
    CheckConstraint("(state = 'rejected') = (reason IS NOT NULL)", name="rejected_with_reason"),
    CheckConstraint("state <> 'champion' OR served_at IS NOT NULL", name="champion_was_served"),
)
Index(
    "ix_versions_one_champion",
    versions.c.state,
    unique=True,
    sqlite_where=text("state = 'champion'"),
    postgresql_where=text("state = 'champion'"),
)

exchanges = Table(
    "exchanges",
    metadata,
    Column("msg_id", String(96), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("task_id", Words, nullable=True),
    Column("run_id", Words, nullable=True),
    Column("request", LargeBinary, nullable=False),
    Column("received_at", Double, nullable=False),
    Column("latency_s", Double, nullable=False),
)

experiences = Table(
    "experiences",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("msg_id", String(96), ForeignKey("exchanges.msg_id"), nullable=False),
    Column("choice", SmallInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Words, nullable=True),
    Column("reward", Double, nullable=True),
    Column("version_min", Integer, nullable=False),
    Column("version_max", Integer, nullable=False),
    Column("temperature", Double, nullable=False),
    Column("finish_reason", String(32), nullable=True),
    Column("text", Words, nullable=False),
    Column("completion_tokens", Integer, nullable=False),
    Column("blob", LargeBinary, nullable=False),
    Column("recorded_at", Double, nullable=False),
    Column("rewarded_at", Double, nullable=True),
    Column("committed_at", Double, nullable=True),
    Column("lease_epoch", Integer, ForeignKey("epochs.epoch"), nullable=True),
    Column("lease_until", Double, nullable=True),
    Column("trained_version", Integer, ForeignKey("versions.version"), nullable=True),
    UniqueConstraint("msg_id", "choice"),
    CheckConstraint(_one_of("state", State), name="state"),
    CheckConstraint("(state IN ('expired', 'dropped')) = (reason IS NOT NULL)", name="aside_with_reason"),
    CheckConstraint(
        "state NOT IN ('rewarded', 'committed', 'leased', 'trained') OR reward IS NOT NULL", name="rewarded_first"
    ),
    # NaN is larger than every number on PostgreSQL and NULL on SQLite, so the bounds keep it out of both.
    CheckConstraint("reward IS NULL OR (reward > -1e300 AND reward < 1e300)", name="reward_is_finite"),
    CheckConstraint("(reward IS NULL) = (rewarded_at IS NULL)", name="rewarded_at"),
    CheckConstraint(
        "state NOT IN ('committed', 'leased', 'trained') OR committed_at IS NOT NULL", name="committed_first"
    ),
    CheckConstraint("(state = 'leased') = (lease_epoch IS NOT NULL)", name="leased_under_an_epoch"),
    CheckConstraint("(state = 'leased') = (lease_until IS NOT NULL)", name="leased_until"),
    CheckConstraint("(state = 'trained') = (trained_version IS NOT NULL)", name="trained_in_a_version"),
    CheckConstraint("version_min <= version_max AND choice >= 0 AND completion_tokens >= 0", name="ranges"),
    CheckConstraint("state <> 'recorded' OR reward IS NULL", name="recorded_without_reward"),
    CheckConstraint("state NOT IN ('recorded', 'rewarded') OR committed_at IS NULL", name="committed_once_committed"),
    Index(None, "state", "id"),
    Index(None, "state", "version_min"),
    Index(None, "version_min", "reward"),
    Index(None, "trained_version"),
)

#: Append-only. Has no foreign key to exchanges, because feedback may come before the row of its reply.
feedback = Table(
    "feedback",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("event_id", String(64), nullable=False, unique=True),
    Column("msg_id", String(96), nullable=False),
    Column("choice", SmallInteger, nullable=True),
    Column("tenant", String(64), nullable=False),
    Column("reward", Double, nullable=False),
    Column("task_id", Words, nullable=True),
    Column("run_id", Words, nullable=True),
    Column("received_at", Double, nullable=False),
    CheckConstraint("reward > -1e300 AND reward < 1e300", name="reward_is_finite"),
    Index(None, "msg_id", "received_at"),
)
