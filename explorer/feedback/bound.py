"""Feedback that is bound to one reply: makes the tokens for it, and holds their bearers to them."""

from collections.abc import Sequence

from fastapi import Request

from tuneloop.explorer.access.feedback_tokens import (
    MAX_EVENTS,
    MAX_LIFE_S,
    FeedbackBinding,
    FeedbackTokens,
    TokenClaims,
)
from tuneloop.explorer.auth import caller_of
from tuneloop.explorer.capture.transcript import ReplyIdSigner
from tuneloop.explorer.feedback.request import Entry
from tuneloop.explorer.http.bodies import finite_number, optional_name, read_object
from tuneloop.shared import steady_time
from tuneloop.shared.errors import RequestRefused

_MAX_BODY_BYTES = 4096

_LIFE_S, _EVENTS = 600.0, 10.0


class TokenRoute:
    """The route that makes tokens."""

    def __init__(self, signer: ReplyIdSigner, tokens: FeedbackTokens) -> None:
        self._signer = signer
        self._tokens = tokens

    async def create(self, request: Request) -> dict[str, object]:
        """A token with which a browser gives feedback on one reply."""
        caller, body = caller_of(request.scope), await read_object(request, max_bytes=_MAX_BODY_BYTES)
        msg_id = optional_name(body, "msg_id") or ""
        if self._signer.parse(msg_id, caller.tenant) is None:
            message = "msg_id is no id of our replies"
            raise RequestRefused(message, status=404, code="unknown_msg_id", param="msg_id")
        most = _within(body, "max_events", _EVENTS, MAX_EVENTS)
        if not most.is_integer():  # half an event would allow none
            raise RequestRefused("max_events must be a whole number", code="invalid_value", param="max_events")
        expires_at = steady_time.now() + _within(body, "expires_in", _LIFE_S, MAX_LIFE_S)
        claims = TokenClaims(
            key_id=caller.key_id,
            tenant=caller.tenant,
            msg_id=msg_id,
            source=optional_name(body, "source") or "",
            expires_at=expires_at,
            max_events=int(most),
        )
        return {"token": self._tokens.sign(claims), "expires_at": expires_at}


def bind(entries: Sequence[Entry], binding: FeedbackBinding) -> list[Entry]:
    """Entries as the bearer of a token may write them. Raises RequestRefused if one is about anything else."""
    for entry in entries:
        about = {each.partition(":")[0] for each in entry.msg_ids or ("",)}
        named = (entry.preferred_over, entry.task_id, entry.run_id)
        if about != {binding.msg_id.partition(":")[0]} or any(each is not None for each in named):
            message = "this token is for feedback on one reply, and on nothing else"
            raise RequestRefused(message, status=403, code="token_of_another_reply")
        if entry.source not in {None, binding.source}:
            raise RequestRefused("this token fixes whose feedback it is", status=403, code="token_of_another_source")
    return [entry._replace(source=binding.source) for entry in entries]


def _within(body: dict[str, object], param: str, default: float, most: float) -> float:
    """A number above 0 and at most `most`. Raises RequestRefused."""
    value = default if body.get(param) is None else finite_number(body[param], param, bound=most)
    if not 0 < value <= most:
        raise RequestRefused(f"{param} must lie between 0 and {most:g}", code="out_of_range", param=param)
    return value
