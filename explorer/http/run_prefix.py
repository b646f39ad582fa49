"""The prefix that binds all requests below it to a run: /run/<token>/v1/… is /v1/… with the token's labels.

Any client of any framework takes a base URL, and none of its requests can then be without the labels of its run. The
token is URL-safe base64, padded or not, of a JSON object: {"task_id": "t", "run_id": "0", "train": false}, where
`train` may be missing.
"""

import base64
import binascii
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import orjson

from tuneloop.explorer.http.bodies import id_of
from tuneloop.shared.errors import RequestRefused

PREFIX = "/run/"

#: Where a scope has the token.
_SCOPE_KEY = "tuneloop.run_token"

#: Not all routes: whoever allows clients /run/ and nothing else means requests to the model.
_ROUTES_BELOW = ("/v1/", "/tokenize", "/detokenize")

_FIELDS = frozenset({"task_id", "run_id", "train"})


class RunBinding(NamedTuple):
    """The labels that a path gives its request; `train` is None where it leaves that to the body."""

    task_id: str
    run_id: str
    train: bool | None


def strip_prefix(scope: MutableMapping[str, Any]) -> None:
    """Move the token of a scope whose path begins with PREFIX aside, and make the path that of the route below it.

    Any other path, and one that leads to no route below a run, stays as it is.
    """
    if not scope["path"].startswith(PREFIX):
        return
    token, slash, rest = scope["path"].removeprefix(PREFIX).partition("/")
    path = slash + rest
    if path.startswith(_ROUTES_BELOW):
        scope["path"], scope[_SCOPE_KEY] = path, token


def binding_of(scope: MutableMapping[str, Any]) -> RunBinding | None:
    """The run that a request is bound to, if it is to one. Raises RequestRefused for a broken token."""
    token = scope.get(_SCOPE_KEY)
    return None if token is None else parse_token(token)


def parse_token(token: str) -> RunBinding:
    """The labels in a token. Raises RequestRefused."""
    try:
        padded = token.rstrip("=") + "=" * (-len(token.rstrip("=")) % 4)
        labels = orjson.loads(base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True))
    except (UnicodeError, binascii.Error, orjson.JSONDecodeError):
        raise _broken("its token must be URL-safe base64 of a JSON object") from None
    if not isinstance(labels, dict):
        raise _broken("its token must be URL-safe base64 of a JSON object")
    if unknown := sorted(labels.keys() - _FIELDS):
        raise _broken(f"unknown field {unknown[0]!r} in its token; there are task_id, run_id and train")
    for name in ("task_id", "run_id"):
        if labels.get(name) is None:
            raise _broken(f"{name} is missing from its token")
    train = labels.get("train")
    if not isinstance(train, bool | None):
        raise _broken("train in its token must be a boolean")
    return RunBinding(_name_in(labels, "task_id"), _name_in(labels, "run_id"), train)


def _name_in(labels: dict[str, Any], name: str) -> str:
    try:
        return id_of(labels[name], name)
    except RequestRefused as error:
        raise _broken(f"in its token {error}") from None


def _broken(what: str) -> RequestRefused:
    return RequestRefused(f"the path {PREFIX}<token>/ names no run: {what}", code="invalid_run_token")
