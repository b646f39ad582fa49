"""This file reads which schema a database has, without changing or creating anything."""

from pathlib import Path

from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DBAPIError

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.ledger.storage.database import connect, first_line, migrations
from tuneloop.shared.settings.database_url import parse_url, without_password


def newest() -> str | None:
    """The revision that this release of tuneloop works with."""
    return ScriptDirectory.from_config(migrations()).get_current_head()


def is_known(revision: str) -> bool:
    """Whether this release can bring a database of that revision to the newest."""
    return revision in {each.revision for each in ScriptDirectory.from_config(migrations()).walk_revisions()}


def current(url: str, *, schema: str) -> str | None:
    """The revision of the database, None if it is empty or not there yet."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").is_file():
        return None
    engine = connect(url, schema=schema)
    try:
        with engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    except DBAPIError as error:
        raise EnvironmentRefused(
            f"cannot use the database {without_password(url)}: {first_line(error)}; start it, or correct the URL"
        ) from None
    finally:
        engine.dispose()
