"""Feedback that people give on the page: a thumb, a number, words, the answer as it should have been, a preference."""

import random
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from tuneloop.explorer.auth import Caller
from tuneloop.explorer.feedback.routes import FeedbackRoutes
from tuneloop.explorer.http.bodies import number_in_form
from tuneloop.explorer.ui.conversation import read_calls, read_request
from tuneloop.explorer.ui.pages import SENTENCES, parse_cursor, show_exchange
from tuneloop.explorer.ui.sessions import PATH
from tuneloop.explorer.ui.site import Site
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import Outcome

#: Who says it, in feedback events.
SOURCE = "page"

_WORTHLESS = "It is kept, and counts for nothing here: the metric preference has no weight in reward.weights."


def add_rating(router: APIRouter, site: Site) -> None:
    @router.post("/exchanges/{msg_id}/feedback")
    async def rate(request: Request, msg_id: str) -> Response:
        session, form = await site.form(request)
        try:
            outcome = await _give(request, site.guard.caller_of(session), parse_rating(msg_id, form))
        except RequestRefused as error:
            if error.status == 404:
                raise
            return await show_exchange(request, site, msg_id, status=error.status, wrong=str(error))
        return RedirectResponse(f"{PATH}/exchanges/{msg_id}?outcome={outcome}", 303)

    @router.post("/commit")
    async def commit(request: Request) -> Response:
        session, _ = await site.form(request)
        committed = await request.app.state.services.commit.release(site.guard.caller_of(session).tenant)
        return RedirectResponse(f"{PATH}/exchanges?committed={committed}", 303)

    weight = site.settings.reward.weights.get("preference")

    @router.get("/preferences")
    async def preferences(request: Request) -> Response:
        tenant = site.tenant_of(request)
        after = parse_cursor({"after": request.query_params.get("after", "")})
        outcome = request.query_params.get("outcome", "")
        notice = SENTENCES[Outcome(outcome)] if outcome in set(SENTENCES) else ""

        def read() -> dict[str, Any]:
            pair = site.ledger.same_prompts.next_pair(tenant, after)
            view: dict[str, Any] = {"turns": [], "answers": [], "skip": "", "after": after, "notice": notice}
            view["worth"] = "It counts towards the reward." if weight else _WORTHLESS
            if pair is None:
                return view
            # In an order that tells nothing; the older one says where to look on.
            answers = random.sample((pair.one, pair.other), 2)
            shown = [{"name": each.name, "text": each.text, "calls": read_calls(each.tool_calls)} for each in answers]
            skip = f"{pair.other.sampled_at!r}_{pair.other.id}"
            return view | {"turns": read_request(pair.request).turns, "answers": shown, "skip": skip}

        return await site.show_long(request, "preferences.html", read)

    @router.post("/preferences")
    async def prefer(request: Request) -> Response:
        session, form = await site.form(request)
        better, worse = form.get("better", ""), form.get("worse", "")
        if not better or not worse:
            raise RequestRefused("name the better of the two answers", code="missing", param="better")
        preference = {"msg_ids": [better], "preferred_over": worse, "source": SOURCE}
        outcome = await _give(request, site.guard.caller_of(session), preference)
        return RedirectResponse(f"{PATH}/preferences?outcome={outcome}", 303)


def parse_rating(msg_id: str, form: Mapping[str, str]) -> dict[str, Any]:
    """The body of /feedback for a form about one choice. Raises RequestRefused."""
    choice, thumb, reward = form.get("choice", ""), form.get("thumb", ""), form.get("reward", "").strip()
    body: dict[str, Any] = {"msg_ids": [f"{msg_id}:{choice}" if choice else msg_id], "source": SOURCE}
    if thumb and reward:
        raise RequestRefused(
            "Give a thumb or a reward, not both: nothing was recorded.", code="invalid_value", param="reward"
        )
    if thumb in {"up", "down"}:
        body["value"] = thumb == "up"
    elif reward:
        if (number := number_in_form(reward)) is None:
            raise RequestRefused("The reward must be a number.", code="invalid_value", param="reward")
        body["reward"] = number
    if comment := form.get("comment", "").strip():
        body["comment"] = comment
    edited = form.get("demonstration", "").replace("\r\n", "\n")
    if edited.strip() and edited != form.get("was", "").replace("\r\n", "\n"):
        body["demonstration"] = edited
    if not body.keys() - {"msg_ids", "source"}:
        raise RequestRefused(
            "There is nothing to record: rate the reply, write a comment, or edit the answer.", code="missing"
        )
    return body


async def _give(request: Request, caller: Caller, body: dict[str, Any]) -> str:
    feedback: FeedbackRoutes = request.app.state.services.feedback
    answer = await feedback.take(caller, body)
    outcomes = answer["outcomes"]
    assert isinstance(outcomes, dict)
    return str(next(iter(outcomes.values())))
