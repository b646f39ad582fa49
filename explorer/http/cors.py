"""Which pages of other sites may read an answer: those of `explorer.cors_allow_origins`, on the route for feedback."""

from collections.abc import Collection, Mapping
from typing import Any

#: A browser has no use for any other route: what it may bring is a token for feedback on one reply.
ROUTE = "/feedback"

_PREFLIGHT = (
    (b"access-control-allow-methods", b"POST"),
    (b"access-control-allow-headers", b"authorization, content-type, idempotency-key, x-api-key"),
    (b"access-control-max-age", b"600"),
)


class CrossOrigin:
    """The rule, by the origins that may."""

    def __init__(self, origins: Collection[str] = ()) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def allows(self, scope: Mapping[str, Any]) -> bool:
        """Whether it is a request of a page that may send it."""
        return bool(self._origins) and scope["path"] == ROUTE and _origin_of(scope) in self._origins

    def is_preflight(self, scope: Mapping[str, Any]) -> bool:
        """Whether a browser asks first, on behalf of a page that may."""
        return scope["method"] == "OPTIONS" and self.allows(scope)

    def headers(self, scope: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
        """What the answer says to the browser."""
        if not self._origins or scope["path"] != ROUTE:
            return []
        if not self.allows(scope):
            return [(b"vary", b"origin")]
        found = [(b"access-control-allow-origin", _origin_of(scope)), (b"vary", b"origin")]
        return [*found, *_PREFLIGHT] if scope["method"] == "OPTIONS" else found


def _origin_of(scope: Mapping[str, Any]) -> bytes:
    return next((value for name, value in scope["headers"] if name == b"origin"), b"")
