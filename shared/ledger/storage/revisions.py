"""This file reads which schema a database has, without changing or creating anything."""

from pathlib import Path

from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import DBAPIError

from tuneloop import migrations
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.ledger.storage.database import connect, first_line
from tuneloop.shared.settings.database_url import parse_url, without_password


def _revisions() -> list[str]:
    """The revisions of this release, by the names of their files: Alembic takes long to import."""
    files = Path(*migrations.__path__).joinpath("versions").glob("[0-9]*.py")
    return sorted(each.name.partition("_")[0] for each in files)


def newest() -> str:
    return _revisions()[-1]


def is_known(revision: str) -> bool:
    return revision in _revisions()


def of(connection: Connection) -> str | None:
    """The revision of a database, None if it is of no release."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return found


def current(url: str, *, schema: str) -> str | None:
    """The revision of the database, None if it is empty or not there yet."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").is_file():
        return None
    engine = connect(url, schema=schema)
    try:
        with engine.connect() as connection:
            return of(connection)
    except DBAPIError as error:
        raise EnvironmentRefused(
            f"cannot use the database {without_password(url)}: {first_line(error)}; start it, or correct the URL"
        ) from None
    finally:
        engine.dispose()
