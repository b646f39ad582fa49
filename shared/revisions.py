"""This file tells which schema a database has, without changing or creating anything."""

from pathlib import Path

from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DBAPIError

from shared.database import connect, parse_url
from shared.errors import EnvironmentRefused


def newest() -> str | None:
    """The revision that this release of tuneloop works with."""
    config = Config()
    config.set_main_option("script_location", "migrations:")
    return ScriptDirectory.from_config(config).get_current_head()


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
        reason = (str(error.orig).strip().splitlines() or [type(error.orig).__name__])[0]
        raise EnvironmentRefused(
            f"cannot use the database {shown(url)}: {reason}; start it, or correct the URL"
        ) from None
    finally:
        engine.dispose()


def shown(url: str) -> str:
    """The URL without its passwords."""
    return parse_url(url).difference_update_query(["password", "sslpassword"]).render_as_string()
