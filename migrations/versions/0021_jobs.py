"""Keep files, and fine-tuning jobs that learn from them; find what is committed by itself."""

from alembic import op
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    ForeignKeyConstraint,
    Integer,
    PrimaryKeyConstraint,
    String,
    Text,
    UniqueConstraint,
)

revision = "0021"
down_revision = "0020"

_STATES = "'validating_files', 'queued', 'running', 'paused', 'succeeded', 'failed', 'cancelled'"


def upgrade() -> None:
    """Apply the step."""
    _create_files()
    op.create_table(
        "jobs",
        Column("id", String(64), nullable=False),
        Column("tenant", String(64), nullable=False),
        Column("policy", Integer, nullable=False),
        Column("model", Text, nullable=False),
        Column("name", Text, nullable=False),
        Column("suffix", String(64), nullable=True),
        Column("method", String(16), nullable=False),
        Column("hyperparameters", Text, nullable=False),
        Column("grader", Text, nullable=True),
        Column("seed", BigInteger, nullable=False),
        Column("metadata", Text, nullable=False),
        Column("training_file", String(64), nullable=False),
        Column("validation_file", String(64), nullable=True),
        Column("state", String(24), nullable=False),
        Column("rows_in_all", Integer, nullable=False),
        Column("rows_taken", Integer, nullable=False),
        Column("total_steps", Integer, nullable=False),
        Column("trained_tokens", BigInteger, nullable=False),
        Column("created_at", Double, nullable=False),
        Column("created_by", Text, nullable=False),
        Column("finished_at", Double, nullable=True),
        Column("version", Integer, nullable=True),
        Column("error", Text, nullable=True),
        CheckConstraint(f"state IN ({_STATES})", name="ck_jobs_state"),
        CheckConstraint("method IN ('supervised', 'dpo', 'reinforcement')", name="ck_jobs_method"),
        CheckConstraint("(state = 'succeeded') = (version IS NOT NULL)", name="ck_jobs_succeeded_with_a_version"),
        CheckConstraint("(state = 'failed') = (error IS NOT NULL)", name="ck_jobs_failed_with_an_error"),
        ForeignKeyConstraint(["policy"], ["policies.id"], name="fk_jobs_policy"),
        ForeignKeyConstraint(["training_file"], ["files.id"], name="fk_jobs_training_file"),
        ForeignKeyConstraint(["validation_file"], ["files.id"], name="fk_jobs_validation_file"),
        ForeignKeyConstraint(["version"], ["versions.version"], name="fk_jobs_version"),
        PrimaryKeyConstraint("id", name="pk_jobs"),
        UniqueConstraint("policy", name="uq_jobs_policy"),
        UniqueConstraint("name", name="uq_jobs_name"),
    )
    op.create_table(
        "job_events",
        Column("id", BigInteger().with_variant(Integer(), "sqlite"), nullable=False),
        Column("job", String(64), nullable=False),
        Column("at", Double, nullable=False),
        Column("level", String(8), nullable=False),
        Column("type", String(16), nullable=False),
        Column("message", Text, nullable=False),
        Column("data", Text, nullable=True),
        CheckConstraint("level IN ('info', 'warn', 'error')", name="ck_job_events_level"),
        CheckConstraint("type IN ('message', 'metrics')", name="ck_job_events_type"),
        ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_job_events_job"),
        PrimaryKeyConstraint("id", name="pk_job_events"),
    )
    for table in ("files", "uploads", "jobs"):
        op.create_index(f"ix_{table}_tenant_created_at_id", table, ["tenant", "created_at", "id"])
    op.create_index("ix_job_events_job_id", "job_events", ["job", "id"])
    op.execute("CREATE INDEX ix_experiences_rewarded ON experiences (policy, rewarded_at, id) WHERE state = 'rewarded'")


def _create_files() -> None:
    op.create_table(
        "files",
        Column("id", String(64), nullable=False),
        Column("tenant", String(64), nullable=False),
        Column("purpose", String(32), nullable=False),
        Column("filename", Text, nullable=False),
        Column("bytes", BigInteger, nullable=False),
        Column("sha256", String(64), nullable=False),
        Column("created_at", Double, nullable=False),
        Column("created_by", Text, nullable=False),
        Column("expires_at", Double, nullable=True),
        Column("deleted_at", Double, nullable=True),
        PrimaryKeyConstraint("id", name="pk_files"),
    )
    op.create_table(
        "uploads",
        Column("id", String(64), nullable=False),
        Column("tenant", String(64), nullable=False),
        Column("purpose", String(32), nullable=False),
        Column("filename", Text, nullable=False),
        Column("mime_type", Text, nullable=False),
        Column("bytes", BigInteger, nullable=False),
        Column("status", String(16), nullable=False),
        Column("parts", Text, nullable=False),
        Column("created_at", Double, nullable=False),
        Column("created_by", Text, nullable=False),
        Column("expires_at", Double, nullable=False),
        Column("keeps_s", Integer, nullable=True),
        Column("file", String(64), nullable=True),
        CheckConstraint("status IN ('pending', 'completed', 'cancelled', 'expired')", name="ck_uploads_status"),
        ForeignKeyConstraint(["file"], ["files.id"], name="fk_uploads_file"),
        PrimaryKeyConstraint("id", name="pk_uploads"),
    )
