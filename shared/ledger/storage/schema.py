"""Defines the tables with their constraints, which bind every program. Times are seconds since 1970, UTC."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
    event,
    false,
    func,
    text,
)

from tuneloop.shared.experience import (
    AlarmState,
    Evaluator,
    KeyAction,
    Kind,
    Outcome,
    PolicyState,
    RaterState,
    State,
    VersionAction,
    VersionState,
)
from tuneloop.shared.ledger.storage.counters import keep_counts
from tuneloop.shared.ledger.storage.database import Utf8Text

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


#: Experiences that correct another one, as an index has them.
CORRECTS = "correction > 0"

#: Experiences that were edited and not rated, as an index has them.
EDITED = "reward IS NULL AND edit_similarity IS NOT NULL"

#: Ratings of replies, as an index has them.
RATED = "kind IN ('number', 'boolean', 'label') AND msg_id IS NOT NULL"


def one_of(column: str, values: Iterable[StrEnum]) -> str:
    return f"{column} IN ({', '.join(repr(value.value) for value in values)})"


def partial(name: str, *columns: ColumnElement[Any], where: str, unique: bool = False) -> None:
    """An index of some of the rows only. A query uses it only if it says the same, and not by a parameter."""
    Index(name, *columns, unique=unique, sqlite_where=text(where), postgresql_where=text(where))


#: Say the same as the partial indexes of what the trainer may take, and of what may be committed.
COMMITTED, REWARDED = f"state = '{State.COMMITTED}'", f"state = '{State.REWARDED}'"

#: Says the same as the partial index of the exchanges that are listed as stored completions.
CHAT = "endpoint = '/v1/chat/completions'"


#: Whose database this is: one row, so that two experiments never mix their ledgers.
experiment = Table(
    "experiment",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("project", String(255), nullable=False),
    Column("name", String(255), nullable=False),
    Column("folder", String(32), nullable=True),
    CheckConstraint("id = 1", name="only_one"),
)

#: The explorers, under the names that their exchanges have. `version` is what one served when it was seen last. Who has
#: the highest `lead_epoch` decides about rollouts until a time.
explorers = Table(
    "explorers",
    metadata,
    Column("name", Text, primary_key=True),
    Column("address", Text, nullable=False),
    Column("release", Text, nullable=False),
    Column("version", Integer, nullable=True),
    Column("seen_at", Double, nullable=False),
    Column("lead_epoch", Integer, nullable=True),
    Column("leads_until", Double, nullable=True),
)

#: What explorers count together: of a trial, and of a browser's token until it expires.
shared_counts = Table(
    "shared_counts",
    metadata,
    Column("scope", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("amount", Double, nullable=False),
    Column("until", Double, nullable=False),
    Index(None, "until"),
)

#: The trainers' fencing tokens: the highest epoch owns all leases.
epochs = Table(
    "epochs",
    metadata,
    Column("epoch", Integer, primary_key=True, autoincrement=False),
    Column("trainer", String(255), nullable=False),
    Column("started_at", Double, nullable=False),
    Column("seen_at", Double, nullable=False),
    Column("ended_at", Double, nullable=True),
    CheckConstraint("epoch >= 1", name="from_one"),
)

#: The trainer of the epoch in which a ledger was put back, and who says so of its versions.
RESTORE = "tuneloop restore"

#: What is trained apart from others, on the same base model; 0 is the default policy. `tenant` is empty where every key
#: may use it. `parent` is the version that it began with, `settings` the options that it has otherwise, as JSON.
policies = Table(
    "policies",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("name", String(64), nullable=False),
    Column("parent", Integer, nullable=False),
    Column("settings", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("created_by", Utf8Text, nullable=False),
    CheckConstraint(one_of("state", PolicyState), name="state"),
    CheckConstraint("length(name) BETWEEN 1 AND 64", name="name"),
)
partial("ix_policies_one_name", policies.c.tenant, policies.c.name, where="state <> 'deleted'", unique=True)

#: Every set of weights that exists; 0 is the base model. One that no trainer made, or that consumed nothing, has the
#: weights of another: a policy begins with those of its parent.
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
    Column("purged", Integer, nullable=False, server_default="0"),
    Column("created_at", Double, nullable=False),
    Column("served_at", Double, nullable=True),
    Column("reason", Utf8Text, nullable=True),
    Column("pinned", Boolean, nullable=False, server_default=false()),
    Column("policy", Integer, nullable=False, server_default="0"),
    CheckConstraint(one_of("state", VersionState), name="state"),
    CheckConstraint("version >= 0 AND step >= 0 AND consumed >= 0", name="not_negative"),
    CheckConstraint("purged >= 0 AND purged <= consumed", name="purged_of_the_consumed"),
    CheckConstraint("epoch IS NOT NULL OR (step = 0 AND consumed = 0)", name="trained_under_an_epoch"),
    CheckConstraint("(epoch IS NULL) = (manifest_sha256 IS NULL)", name="manifest"),
    CheckConstraint("(state IN ('rejected', 'rolled_back')) = (reason IS NOT NULL)", name="rejected_with_reason"),
    CheckConstraint("state <> 'champion' OR served_at IS NOT NULL", name="champion_was_served"),
)
for _state in (VersionState.CHAMPION, VersionState.CANARY):
    _columns = (versions.c.policy, versions.c.state)
    partial(f"ix_versions_one_{_state}", *_columns, where=f"state = '{_state}'", unique=True)
partial("ix_versions_one_pinned", versions.c.policy, versions.c.pinned, where="pinned", unique=True)

#: What happened to each version, its actor and reason; `details` is JSON: the figures that decided it.
version_events = Table(
    "version_events",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("version", Integer, ForeignKey("versions.version"), nullable=False),
    Column("at", Double, nullable=False),
    Column("action", String(16), nullable=False),
    Column("actor", Utf8Text, nullable=False),
    Column("reason", Utf8Text, nullable=True),
    Column("details", Utf8Text, nullable=True),
    CheckConstraint(one_of("action", VersionAction), name="action"),
    Index(None, "version", "id"),
)

#: How each version did on tasks that it was not trained on: `slice` is empty for all of them.
evaluations = Table(
    "evaluations",
    metadata,
    Column("version", Integer, ForeignKey("versions.version"), nullable=False),
    Column("evaluator", String(16), nullable=False),
    Column("metric", String(64), nullable=False),
    Column("slice", String(64), nullable=False),
    Column("value", Double, nullable=False),
    Column("deviation", Double, nullable=False),
    Column("samples", Integer, nullable=False),
    Column("evaluated_at", Double, nullable=False),
    PrimaryKeyConstraint("version", "evaluator", "metric", "slice"),
    CheckConstraint(one_of("evaluator", Evaluator), name="evaluator"),
    CheckConstraint("samples >= 1 AND deviation >= 0", name="samples"),
    CheckConstraint("value > -1e300 AND value < 1e300", name="value_is_finite"),
)

#: When an engine was found with other weights than it should have had. What it sampled from `since` to `until` is not
#: trained on, however late it comes in.
mismatches = Table(
    "mismatches",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("engine", SmallInteger, nullable=False),
    Column("since", Double, nullable=False),
    Column("until", Double, nullable=False),
    Column("explorer", Text, nullable=True),
    Column("version", Integer, nullable=True),
    UniqueConstraint("engine", "since", "until"),
    CheckConstraint("since <= until", name="range"),
)

#: Every rule by which feedback has become a reward: its definition is JSON, written once.
reward_rules = Table(
    "reward_rules",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("definition", Text, nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
)

#: `key` is the name of the key that brought it, `explorer` that of the one whose engine of this number answered.
exchanges = Table(
    "exchanges",
    metadata,
    Column("msg_id", String(96), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("user_id", Utf8Text, nullable=True),
    Column("request", LargeBinary, nullable=False),
    Column("received_at", Double, nullable=False),
    Column("latency_s", Double, nullable=False),
    Column("engine", SmallInteger, nullable=True),
    Column("key", String(64), nullable=True),
    Column("explorer", Text, nullable=True),
)
partial("ix_exchanges_user_id", exchanges.c.tenant, exchanges.c.user_id, where="user_id IS NOT NULL")
partial("ix_exchanges_chat", exchanges.c.tenant, exchanges.c.received_at, exchanges.c.msg_id, where=CHAT)

#: What a stored completion is found by: digests of its model and of each pair of its metadata. Names of any length
#: would not fit into an index.
tags = Table(
    "tags",
    metadata,
    Column("tag", LargeBinary, nullable=False),
    Column("received_at", Double, nullable=False),
    Column("msg_id", String(96), ForeignKey("exchanges.msg_id", ondelete="CASCADE"), nullable=False),
    PrimaryKeyConstraint("tag", "received_at", "msg_id"),
    Index(None, "msg_id"),
    sqlite_with_rowid=False,
)

#: The metadata, as JSON, of the completions whose metadata was changed. That of the others is in their request.
changed_metadata = Table(
    "changed_metadata",
    metadata,
    Column("msg_id", String(96), ForeignKey("exchanges.msg_id", ondelete="CASCADE"), primary_key=True),
    Column("metadata", Text, nullable=False),
)

#: Exchanges that were deleted, alone or with their person. What of them comes in later is not taken; `received_at` is
#: where they stood in the list.
deletions = Table(
    "deletions",
    metadata,
    Column("msg_id", String(96), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("received_at", Double, nullable=False),
    Column("deleted_at", Double, nullable=False),
)

#: `correction` 0 is the reply as it was sampled; higher ones are the same reply once more, with the reward of feedback
#: that came when the one before had been trained on. `group_id` is the smallest id of a group that is complete.
#: `unsampled` says why the log-probabilities are not those of a sample of the policy, NULL where they are. Where there
#: is a `grammar`, they are those of the policy among the tokens that it allowed. `edit_similarity`: how alike the reply
#: and the edited answer that stands are, from 0 to 1; without a `reward`, what the reply counts as among versions.
experiences = Table(
    "experiences",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("msg_id", String(96), ForeignKey("exchanges.msg_id"), nullable=False),
    Column("choice", SmallInteger, nullable=False),
    Column("correction", SmallInteger, nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("task_id", Utf8Text, nullable=True),
    Column("run_id", Utf8Text, nullable=True),
    Column("priority", Double, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Utf8Text, nullable=True),
    Column("reward", Double, nullable=True),
    Column("reward_rule", Integer, ForeignKey("reward_rules.id"), nullable=True),
    Column("version_min", Integer, nullable=False),
    Column("version_max", Integer, nullable=False),
    Column("temperature", Double, nullable=False),
    Column("finish_reason", String(32), nullable=True),
    Column("text", Utf8Text, nullable=False),
    Column("tool_calls", LargeBinary, nullable=True),
    Column("completion_tokens", Integer, nullable=False),
    Column("blob", LargeBinary, nullable=False),
    Column("sampled_at", Double, nullable=False),
    Column("rewarded_at", Double, nullable=True),
    Column("committed_at", Double, nullable=True),
    Column("group_id", BigInteger, nullable=True),
    Column("lease_epoch", Integer, ForeignKey("epochs.epoch"), nullable=True),
    Column("lease_until", Double, nullable=True),
    Column("trained_version", Integer, ForeignKey("versions.version"), nullable=True),
    Column("unsampled", Utf8Text, nullable=True),
    Column("grammar", LargeBinary, nullable=True),
    Column("edit_similarity", Double, nullable=True),
    Column("policy", Integer, nullable=False, server_default="0"),
    UniqueConstraint("msg_id", "choice", "correction"),
    CheckConstraint(one_of("state", State), name="state"),
    CheckConstraint("(state IN ('expired', 'dropped')) = (reason IS NOT NULL)", name="aside_with_reason"),
    CheckConstraint(
        "state NOT IN ('rewarded', 'committed', 'leased', 'trained') OR rewarded_at IS NOT NULL", name="rewarded_first"
    ),
    # NaN is larger than every number on PostgreSQL and NULL on SQLite, so the bounds keep it out of both.
    CheckConstraint("reward IS NULL OR (reward > -1e300 AND reward < 1e300)", name="reward_is_finite"),
    CheckConstraint("edit_similarity IS NULL OR edit_similarity BETWEEN 0 AND 1", name="edit_similarity"),
    CheckConstraint("(reward IS NULL AND edit_similarity IS NULL) = (rewarded_at IS NULL)", name="rewarded_at"),
    CheckConstraint("(rewarded_at IS NULL) = (reward_rule IS NULL)", name="reward_by_a_rule"),
    CheckConstraint(
        "state NOT IN ('committed', 'leased', 'trained') OR committed_at IS NOT NULL", name="committed_first"
    ),
    CheckConstraint("(state = 'leased') = (lease_epoch IS NOT NULL)", name="leased_under_an_epoch"),
    CheckConstraint("(state = 'leased') = (lease_until IS NOT NULL)", name="leased_until"),
    CheckConstraint("(state = 'trained') = (trained_version IS NOT NULL)", name="trained_in_a_version"),
    CheckConstraint("version_min <= version_max AND choice >= 0 AND completion_tokens >= 0", name="ranges"),
    CheckConstraint("correction >= 0 AND priority > -1e300 AND priority < 1e300", name="correction_and_priority"),
    CheckConstraint("state <> 'recorded' OR rewarded_at IS NULL", name="recorded_without_reward"),
    CheckConstraint("state NOT IN ('recorded', 'rewarded') OR committed_at IS NULL", name="committed_once_committed"),
    CheckConstraint("group_id IS NULL OR committed_at IS NOT NULL", name="grouped_once_committed"),
    Index(None, "sampled_at"),
    Index(None, "state", "sampled_at"),
    Index(None, "version_min", "sampled_at", "reward", "edit_similarity"),
)
#: What a reply counts as among others: its reward, or, where it was edited and not rated, how alike the two are.
worth = func.coalesce(experiences.c.reward, experiences.c.edit_similarity)

partial(
    "ix_experiences_trajectory",
    *(experiences.c[name] for name in ("tenant", "task_id", "run_id")),
    where="task_id IS NOT NULL",
)
partial("ix_experiences_trained_version", experiences.c.trained_version, where="trained_version IS NOT NULL")
partial("ix_experiences_rewarded", *(experiences.c[name] for name in ("policy", "rewarded_at", "id")), where=REWARDED)
partial("ix_experiences_leased", experiences.c.lease_epoch, where="state = 'leased'")
# One for each order in which a batch is taken, so that a claim costs the same whatever waits.
partial("ix_experiences_committed", experiences.c.policy, experiences.c.tenant, experiences.c.id, where=COMMITTED)
partial(
    "ix_experiences_committed_by_priority",
    experiences.c.policy,
    experiences.c.tenant,
    experiences.c.priority.desc(),
    experiences.c.id,
    where=COMMITTED,
)
partial("ix_experiences_committed_by_version", experiences.c.policy, experiences.c.version_min, where=COMMITTED)
partial("ix_experiences_waiting", experiences.c.policy, experiences.c.committed_at, where=COMMITTED)
partial("ix_experiences_committed_by_age", experiences.c.sampled_at, where=COMMITTED)
partial(
    "ix_experiences_grouped",
    *(experiences.c[name] for name in ("policy", "tenant", "group_id", "id")),
    where=f"{COMMITTED} AND group_id IS NOT NULL",
)
partial("ix_experiences_ungrouped", experiences.c.policy, experiences.c.id, where=f"{COMMITTED} AND group_id IS NULL")
partial(
    "ix_experiences_corrections",
    *(experiences.c[name] for name in ("version_min", "reward", "edit_similarity")),
    where=CORRECTS,
)
partial("ix_experiences_edited", experiences.c.state, where=EDITED)
partial("ix_experiences_aside", experiences.c.state, experiences.c.reason, where="reason IS NOT NULL")
partial("ix_experiences_unsampled", experiences.c.state, experiences.c.sampled_at, where="unsampled IS NOT NULL")

#: The counts of `experiences`, which the database keeps itself: the sum over all rows of a key.
experience_counts = Table(
    "experience_counts",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("version", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("corrects", Boolean, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("rewarded", BigInteger, nullable=False),
    Column("reward_sum", Double, nullable=False),
    Index(None, "tenant", "version", "state", "corrects"),
)
event.listen(metadata, "after_create", lambda _metadata, connection, **_: keep_counts(connection))

#: What may have become of feedback that is stored.
_STORED = [outcome for outcome in Outcome if outcome not in (Outcome.FULL, Outcome.NOT_RECORDED)]

#: Append-only, but for `repeated_at`: when its source last said the same again. Has no foreign key to exchanges,
#: because feedback may come before the row of its reply.
feedback = Table(
    "feedback",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("event_id", String(64), nullable=False, unique=True),
    Column("call_id", String(64), nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("msg_id", String(96), nullable=True),
    Column("choice", SmallInteger, nullable=True),
    Column("task_id", Utf8Text, nullable=True),
    Column("run_id", Utf8Text, nullable=True),
    Column("kind", String(16), nullable=False),
    Column("metric", Utf8Text, nullable=False),
    Column("value", Double, nullable=True),
    Column("text", Utf8Text, nullable=True),
    Column("other_msg_id", String(96), nullable=True),
    Column("other_choice", SmallInteger, nullable=True),
    Column("source", Utf8Text, nullable=True),
    Column("received_at", Double, nullable=False),
    Column("occurred_at", Double, nullable=True),
    Column("outcome", String(16), nullable=False),
    Column("key", String(64), nullable=True),
    Column("repeated_at", Double, nullable=True),
    CheckConstraint(one_of("kind", Kind), name="kind"),
    CheckConstraint(one_of("outcome", _STORED), name="outcome"),
    CheckConstraint("value IS NULL OR (value > -1e300 AND value < 1e300)", name="value_is_finite"),
    CheckConstraint("(kind IN ('number', 'boolean')) = (value IS NOT NULL)", name="value_of_a_number"),
    CheckConstraint("(kind IN ('label', 'comment', 'demonstration')) = (text IS NOT NULL)", name="text_of_words"),
    CheckConstraint("(kind = 'preference') = (other_msg_id IS NOT NULL)", name="preferred_to_another"),
    CheckConstraint("msg_id IS NOT NULL OR (task_id IS NOT NULL AND run_id IS NOT NULL)", name="about_something"),
    Index(None, "msg_id", "received_at"),
    Index(None, "tenant", "key", "id"),
)
partial("ix_feedback_other_msg_id", feedback.c.other_msg_id, where="other_msg_id IS NOT NULL")
partial(
    "ix_feedback_trajectory", *(feedback.c[name] for name in ("tenant", "task_id", "run_id")), where="msg_id IS NULL"
)
partial("ix_feedback_pending", feedback.c.id, where="outcome = 'pending'")
partial("ix_feedback_early", feedback.c.tenant, where="outcome = 'pending' AND msg_id IS NOT NULL")
partial("ix_feedback_rated", *(feedback.c[name] for name in ("tenant", "key", "id")), where=RATED)
partial("ix_feedback_source", feedback.c.tenant, feedback.c.source, where="source IS NOT NULL")

#: The highest number of a record that was taken of each file of an outbox, and when a drain last brought some of it.
outbox_files = Table(
    "outbox_files",
    metadata,
    Column("file", Text, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("seen_at", Double, nullable=False),
    Column("removed_at", Double, nullable=True),
)

#: Records that the database refused for what they hold, and damaged bytes of files.
refused_records = Table(
    "refused_records",
    metadata,
    Column("file", Text, nullable=False),
    Column("end_offset", BigInteger, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("reason", Utf8Text, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("refused_at", Double, nullable=False),
    PrimaryKeyConstraint("file", "end_offset"),
)

#: People whose rows were deleted. What was received from them before, and comes in later, is not stored.
erasures = Table(
    "erasures",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("user_id", Utf8Text, nullable=False),
    Column("erased_at", Double, nullable=False),
    UniqueConstraint("tenant", "user_id"),
)

#: The files that rows were exported to, so that a deletion reaches them.
exports = Table(
    "exports",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("path", Text, nullable=False, unique=True),
    Column("format", String(16), nullable=False),
    Column("rows", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
)

#: What a monitor found wrong. An open alarm that `holds` keeps new versions from being served.
alarms = Table(
    "alarms",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("holds", Boolean, nullable=False),
    Column("raised_at", Double, nullable=False),
    Column("cleared_at", Double, nullable=True),
    Column("step", Integer, nullable=True),
    Column("version", Integer, nullable=True),
    Column("value", Double, nullable=True),
    Column("threshold", Double, nullable=True),
    Column("reason", Utf8Text, nullable=False),
    Column("policy", Integer, nullable=False, server_default="0"),
    CheckConstraint(one_of("state", AlarmState), name="state"),
    CheckConstraint("length(name) BETWEEN 1 AND 64", name="name"),
    CheckConstraint("(state = 'cleared') = (cleared_at IS NOT NULL)", name="cleared_at"),
    CheckConstraint("value IS NULL OR (value > -1e300 AND value < 1e300)", name="value_is_finite"),
    CheckConstraint("threshold IS NULL OR (threshold > -1e300 AND threshold < 1e300)", name="threshold_is_finite"),
)
partial("ix_alarms_one_open", alarms.c.policy, alarms.c.name, where="state = 'raised'", unique=True)

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
    Column("policy", Integer, nullable=True),
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
    Column("actor", Utf8Text, nullable=False),
    CheckConstraint(one_of("action", KeyAction), name="action"),
    Index(None, "key_id", "id"),
)

#: Who gave feedback: `name` is its `source`, empty for feedback that names none, or the voter behind several sources.
#: Not `settled`: rewards that the rater had a part in are to be computed again.
raters = Table(
    "raters",
    metadata,
    Column("tenant", String(64), nullable=False),
    Column("name", Utf8Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("settled", Boolean, nullable=False),
    Column("reason", Utf8Text, nullable=True),
    Column("updated_at", Double, nullable=False),
    PrimaryKeyConstraint("tenant", "name"),
    CheckConstraint(one_of("state", RaterState), name="state"),
    CheckConstraint("(state = 'quarantined') = (reason IS NOT NULL)", name="quarantined_with_reason"),
)

#: Decisions about each rater, with actor and reason: append-only.
rater_events = Table(
    "rater_events",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("name", Utf8Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("state", String(16), nullable=False),
    Column("actor", Utf8Text, nullable=False),
    Column("reason", Utf8Text, nullable=False),
    CheckConstraint(one_of("state", RaterState), name="state"),
    Index(None, "tenant", "name"),
)
