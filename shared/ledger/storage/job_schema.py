"""The tables of files and fine-tuning jobs. What a job learns from are experiences of its policy."""

from sqlalchemy import BigInteger, CheckConstraint, Column, Double, ForeignKey, Index, Integer, String, Table, Text

from tuneloop.shared.experience import JobState
from tuneloop.shared.ledger.storage.database import Utf8Text
from tuneloop.shared.ledger.storage.schema import RowId, metadata, one_of

#: Files of clients; what they hold lies in the job folder under their ids. One that was deleted keeps its row.
files = Table(
    "files",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("filename", Utf8Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("created_by", Utf8Text, nullable=False),
    Column("expires_at", Double, nullable=True),
    Column("deleted_at", Double, nullable=True),
    Index(None, "tenant", "created_at", "id"),
)

#: Files that come in parts; `parts` are the bytes of each part by its id, as JSON, each a file in the job folder. The
#: file is kept for `keeps_s`.
uploads = Table(
    "uploads",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("filename", Utf8Text, nullable=False),
    Column("mime_type", Utf8Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("status", String(16), nullable=False),
    Column("parts", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("created_by", Utf8Text, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("keeps_s", Integer, nullable=True),
    Column("file", String(64), ForeignKey("files.id"), nullable=True),
    CheckConstraint("status IN ('pending', 'completed', 'cancelled', 'expired')", name="status"),
    Index(None, "tenant", "created_at", "id"),
)

#: Fine-tuning jobs: each trains a policy of its own, named by the job's id, from `training_file`. `name` is the model's
#: name when it is done. `hyperparameters` and `grader` are JSON, as they are answered; `rows_taken` counts the rows of
#: the file, over all epochs, that are experiences by now, of `rows_in_all`.
jobs = Table(
    "jobs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("policy", Integer, ForeignKey("policies.id"), nullable=False, unique=True),
    Column("model", Utf8Text, nullable=False),
    Column("name", Utf8Text, nullable=False, unique=True),
    Column("suffix", String(64), nullable=True),
    Column("method", String(16), nullable=False),
    Column("hyperparameters", Text, nullable=False),
    Column("grader", Utf8Text, nullable=True),
    Column("seed", BigInteger, nullable=False),
    Column("metadata", Utf8Text, nullable=False),
    Column("training_file", String(64), ForeignKey("files.id"), nullable=False),
    Column("validation_file", String(64), ForeignKey("files.id"), nullable=True),
    Column("state", String(24), nullable=False),
    Column("rows_in_all", Integer, nullable=False),
    Column("rows_taken", Integer, nullable=False),
    Column("total_steps", Integer, nullable=False),
    Column("trained_tokens", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("created_by", Utf8Text, nullable=False),
    Column("finished_at", Double, nullable=True),
    Column("version", Integer, ForeignKey("versions.version"), nullable=True),
    Column("error", Utf8Text, nullable=True),
    CheckConstraint(one_of("state", JobState), name="state"),
    CheckConstraint("method IN ('supervised', 'dpo', 'reinforcement')", name="method"),
    CheckConstraint("(state = 'succeeded') = (version IS NOT NULL)", name="succeeded_with_a_version"),
    CheckConstraint("(state = 'failed') = (error IS NOT NULL)", name="failed_with_an_error"),
    Index(None, "tenant", "created_at", "id"),
)

#: What happened to a job: append-only. `data` is JSON; of `type` metrics it has `step`, `train_loss` and the like.
job_events = Table(
    "job_events",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("job", String(64), ForeignKey("jobs.id"), nullable=False),
    Column("at", Double, nullable=False),
    Column("level", String(8), nullable=False),
    Column("type", String(16), nullable=False),
    Column("message", Utf8Text, nullable=False),
    Column("data", Text, nullable=True),
    CheckConstraint("level IN ('info', 'warn', 'error')", name="level"),
    CheckConstraint("type IN ('message', 'metrics')", name="type"),
    Index(None, "job", "id"),
)
