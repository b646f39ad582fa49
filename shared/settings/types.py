"""The kinds of values that settings have, and the section that all parts of the settings are."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    SerializationInfo,
    model_validator,
)


def _not_a_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


# The bounds come first: only then do they stand in the JSON schema.
_Number = BeforeValidator(_not_a_bool)
Positive = Annotated[int, Field(gt=0), _Number]
NotNegative = Annotated[int, Field(ge=0), _Number]
Port = Annotated[int, Field(ge=0, le=65535), _Number]
#: What the ledger has room for in a small integer.
Small = Annotated[int, Field(gt=0, le=32767), _Number]
Real = Annotated[float, Field(allow_inf_nan=False), _Number]
PositiveReal = Annotated[float, Field(gt=0, allow_inf_nan=False), _Number]
NotNegativeReal = Annotated[float, Field(ge=0, allow_inf_nan=False), _Number]
AtLeastTwo = Annotated[int, Field(ge=2), _Number]
AboveOne = Annotated[float, Field(gt=1, allow_inf_nan=False), _Number]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), _Number]
BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), _Number]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), _Number]
Seconds = PositiveReal


def _one_path_part(value: str) -> str:
    if not value or value in {".", ".."} or "/" in value or "\0" in value:
        raise ValueError("must be one folder name, without '/'")
    return value


def _octal(value: object) -> object:
    """YAML reads 0640 as the number that it is in octal; people mean the digits."""
    return f"{value:04o}" if isinstance(value, int) and not isinstance(value, bool) else value


#: Rights of files, in octal: who may read and write them beside their owner. Who may read may enter the folders.
FileMode = Annotated[Literal["0600", "0640", "0644", "0660", "0664"], BeforeValidator(_octal)]


def umask_of(mode: FileMode) -> int:
    """The umask under which files that are no checkpoint's get these rights, but for those of everybody.

    >>> [f"{umask_of(mode):03o}" for mode in ("0600", "0640", "0644", "0660")]
    ['077', '027', '027', '007']
    """
    group = int(mode, 8) & 0o070
    return 0o077 & ~(group | (0o010 if group else 0))


FolderName = Annotated[str, AfterValidator(_one_path_part)]


def _an_address(value: str) -> str:
    try:
        parts = urlsplit(value)
        absolute = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        absolute = False
    if not absolute:
        raise ValueError("must be an absolute URL, such as http://host:port")
    return value


Address = Annotated[str, AfterValidator(_an_address)]


#: The context of serialization in which secrets are written out: for a process of ours, never for people.
WITH_SECRETS = {"secrets": True}

#: What stands for a secret.
MASK = "***"


def _mask(secret: SecretStr, info: SerializationInfo) -> str:
    return secret.get_secret_value() if info.context == WITH_SECRETS else MASK


def _one_line(secret: SecretStr) -> SecretStr:
    value = secret.get_secret_value()
    if value != value.strip() or any(ord(each) < 32 or ord(each) == 127 for each in value):
        raise ValueError("must be one line, without blanks around it")
    return secret


#: HTTP clients quote a header that they cannot send: hence one line.
Secret = Annotated[SecretStr, AfterValidator(_one_line), PlainSerializer(_mask, when_used="json")]


def reveal(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def _hard_to_guess(secret: SecretStr) -> SecretStr:
    value = secret.get_secret_value()
    if len(value) < 16 or not (value.isascii() and value.isprintable() and " " not in value):
        raise ValueError("must have at least 16 characters of ASCII, and no spaces")
    return secret


HardToGuess = Annotated[Secret, AfterValidator(_hard_to_guess)]


class Section(BaseModel):
    """A part of the settings: frozen, and unknown keys are refused. An empty one has its defaults.

    The text below an option is what docs/settings.md and the JSON schema say of it, in Markdown.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, value: Any) -> Any:
        return {} if value is None else value
