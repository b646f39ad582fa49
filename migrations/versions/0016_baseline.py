"""Create all tables: the first step of a new database."""

from pathlib import Path

from alembic import op

revision = "0016"
down_revision = None

#: What SQLite calls the types, and the default, that the file names as PostgreSQL does.
_SQLITE = {
    "BIGSERIAL": "INTEGER",
    "SERIAL": "INTEGER",
    "BYTEA": "BLOB",
    "DOUBLE PRECISION": "DOUBLE",
    "DEFAULT false": "DEFAULT 0",
    "/*WITHOUT ROWID*/": "WITHOUT ROWID",
}


def upgrade() -> None:
    """Apply the step."""
    tables = Path(__file__).with_suffix(".sql").read_text()
    connection = op.get_bind()
    if connection.dialect.name == "sqlite":
        for name, ours in _SQLITE.items():
            tables = tables.replace(name, ours)
    for statement in tables.split(";\n"):
        if statement.strip():
            connection.exec_driver_sql(statement)
