"""The URL of a database: parsed, and shown without its password."""

from sqlalchemy import make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError

from tuneloop.shared.errors import SettingsError

SETTING = "buffer.trainer_input.experience_buffer.path"


def parse_url(url: str) -> URL:
    """The URL with a synchronous driver of ours. Raises SettingsError for what we cannot use."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # a port that is no number
        raise SettingsError(
            f"{SETTING}: not a database URL; write sqlite:////folder/file.db or postgresql://user:password@host/database"
        ) from None
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if not parsed.database or ":memory:" in parsed.database or parsed.database.startswith("file:"):
            raise SettingsError(
                f"{SETTING}: name a file, sqlite:////folder/file.db: several processes share the database"
            )
        return parsed.set(drivername="sqlite")
    if backend in {"postgresql", "postgres"}:
        return parsed.set(drivername="postgresql+psycopg")
    raise SettingsError(f"{SETTING}: {backend} is not supported; use sqlite or postgresql")


def shown(url: str) -> str:
    """The URL without its passwords."""
    return parse_url(url).difference_update_query(["password", "sslpassword"]).render_as_string()
