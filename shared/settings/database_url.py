"""The URL of a database: parsed, and shown without its password."""

from typing import Annotated

from pydantic import AfterValidator, PlainSerializer, SecretStr, SerializationInfo
from sqlalchemy import make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError

from tuneloop.shared.errors import SettingsError
from tuneloop.shared.settings.types import WITH_SECRETS

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


def without_password(url: str) -> str:
    return parse_url(url).difference_update_query(["password", "sslpassword"]).render_as_string()


def _a_database(url: SecretStr) -> SecretStr:
    try:
        parse_url(url.get_secret_value())
    except SettingsError as error:
        raise ValueError(str(error).removeprefix(f"{SETTING}: ")) from None
    return url


def _mask(url: SecretStr, info: SerializationInfo) -> str:
    written = url.get_secret_value()
    return written if info.context == WITH_SECRETS else without_password(written)


DatabaseUrl = Annotated[SecretStr, AfterValidator(_a_database), PlainSerializer(_mask, when_used="json")]
