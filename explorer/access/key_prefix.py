"""The prefix that carries a key for clients that can set nothing but a URL: /key/<key>/v1/… is /v1/… with that key.

It may stand before the prefix of a run: /key/<key>/run/<token>/v1/….
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

PREFIX = "/key/"

#: Where a scope has the key.
_SCOPE_KEY = "tuneloop.key"


def strip_prefix(scope: MutableMapping[str, Any]) -> None:
    """Move the key of a scope whose path begins with PREFIX aside, and make the path the one below it."""
    key, slash, rest = scope["path"].removeprefix(PREFIX).partition("/")
    if slash:
        scope["path"], scope[_SCOPE_KEY] = slash + rest, key
        scope["raw_path"] = b""  # it has the key, too, and nobody reads it


def key_in(scope: Mapping[str, Any]) -> str | None:
    """The key that came in the path, if one did."""
    key: str | None = scope.get(_SCOPE_KEY)
    return key
