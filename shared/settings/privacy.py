"""The settings of what is replaced before anything is written: `privacy` in the YAML."""

from collections.abc import Iterator
from typing import Annotated, Literal

import regex
from pydantic import AfterValidator, Field

from tuneloop.shared.settings.types import Section

#: What is found by itself; `shared/privacy/patterns.py` says how.
BuiltIn = Literal["private_key", "jwt", "api_key", "email", "iban", "credit_card", "us_ssn", "ip_address", "phone"]

_LONGEST_PATTERN = 1000


def _named_patterns(value: dict[str, str]) -> dict[str, str]:
    for name, pattern in value.items():
        if not regex.fullmatch("[a-z][a-z0-9_]{0,63}", name):
            raise ValueError(f"the name {name!r} must be 1 to 64 of a-z 0-9 _, and begin with a letter")
        if len(pattern) > _LONGEST_PATTERN:
            raise ValueError(f"{name} is longer than {_LONGEST_PATTERN} characters")
        try:
            found = regex.compile(pattern).fullmatch("")
        except regex.error as error:
            raise ValueError(f"{name} is no regular expression: {error}") from None
        if found:
            raise ValueError(f"{name} matches nothing at all, which stands everywhere")
    return value


Patterns = Annotated[dict[str, str], AfterValidator(_named_patterns)]


class PrivacySettings(Section):
    """What is replaced in requests, replies and feedback before they are written anywhere."""

    redact: tuple[BuiltIn, ...] = ("private_key", "jwt", "api_key")
    patterns: Patterns = Field(default_factory=dict)
    presidio: tuple[str, ...] = ()
    presidio_language: str = "en"

    def contradictions(self) -> Iterator[str]:
        """What does not fit together."""
        for name in sorted(self.patterns.keys() & set(self.redact)):
            yield f"privacy.patterns: {name} is the name of a kind in privacy.redact; give the pattern another one"
