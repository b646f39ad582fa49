"""The overview, the exchanges, and one of them."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from tuneloop.explorer.recorder import Recorder
from tuneloop.explorer.ui.overview import LedgerCounts, build_overview, describe_waiting
from tuneloop.explorer.ui.reading.conversation import last_words, read_calls, read_request
from tuneloop.explorer.ui.reading.reply_query import FIELDS, link, parse_cursor, parse_filter, with_stored_names
from tuneloop.explorer.ui.reading.tokens import list_tokens
from tuneloop.explorer.ui.site import Site
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import Outcome, State
from tuneloop.shared.ledger.browsing.reply_pages import PREVIEW
from tuneloop.shared.operations.diagnosis import number
from tuneloop.shared.operations.explain import explain

#: Replies on one page.
PAGE = 50

#: What became of feedback, in sentences.
SENTENCES = {
    Outcome.ACCEPTED: "Stored. It counts towards the reward as the reward rule says.",
    Outcome.DUPLICATE: "This is recorded already: nothing has changed.",
    Outcome.LATE: "Stored, but too late for this reply's training: it was trained on, has expired, or is closed.",
    Outcome.PENDING: "Stored on disk; the database takes it up when it is back.",
    Outcome.NOT_RECORDED: "Not stored: this reply is not recorded.",
    Outcome.FULL: "Not stored: this reply has as much feedback as may be.",
}


def add_overview(router: APIRouter, site: Site, counts: LedgerCounts) -> None:
    @router.get("")
    @router.get("/")
    async def overview(request: Request) -> Response:
        context = await site.in_thread(request, build_overview, site.ledger)
        engines = request.app.state.services.fleet.engines
        return site.show(request, "overview.html", **context, engines=engines)

    @router.get("/waiting")
    async def waiting(request: Request) -> Response:
        site.guard.admit(request)
        return site.show(request, "_waiting.html", waiting=describe_waiting(await counts.get()))


def add_exchanges(router: APIRouter, site: Site) -> None:
    ledger = site.ledger

    @router.get("/exchanges")
    async def exchanges(request: Request) -> Response:
        tenant = site.tenant_of(request)
        query = dict(request.query_params)
        count = query.pop("committed", "")
        context: dict[str, Any] = {"query": {name: query.get(name, "") for name in FIELDS}, "states": list(State)}
        is_count = count.isascii() and count.isdigit() and len(count) < 12
        context["committed"] = f"{number(int(count), 'experience')} committed for training." if is_count else ""
        try:
            wanted, after = parse_filter(query), parse_cursor(query)
        except RequestRefused as error:
            return site.show(request, "exchanges.html", 400, **context, page=None, rows=[], wrong=error, next_page="")

        recorder: Recorder = request.app.state.services.recorder

        def read() -> dict[str, Any]:
            stored = with_stored_names(wanted, recorder.name_as_stored)
            page = ledger.reply_pages.page(tenant, stored, after=after, limit=PAGE)
            rows = [(row, last_words(row.request, PREVIEW)) for row in page.rows]
            return {"page": page, "rows": rows, "next_page": link(query, page.after) if page.after else ""}

        return await site.show_long(request, "exchanges.html", lambda: {**context, "wrong": None, **read()})

    @router.get("/exchanges/{msg_id}")
    async def exchange(request: Request, msg_id: str) -> Response:
        site.guard.admit(request)
        return await show_exchange(request, site, msg_id, outcome=request.query_params.get("outcome", ""))

    @router.get("/exchanges/{msg_id}/tokens/{choice}")
    async def tokens(request: Request, msg_id: str, choice: str) -> Response:
        tenant = site.tenant_of(request)
        number = int(choice) if choice.isascii() and choice.isdigit() and len(choice) < 6 else -1
        view = await site.in_thread(request, ledger.exchange_views.tokens, tenant, msg_id, number)
        if view is None:
            raise _no_exchange(msg_id)
        fleet = request.app.state.services.fleet
        found = await list_tokens(fleet, site.settings.served_model_name, view)
        return site.show(request, "_tokens.html", tokens=found)

    @router.get("/exchanges/{msg_id}/explain")
    async def explain_exchange(request: Request, msg_id: str) -> Response:
        tenant = site.tenant_of(request)
        sees_all = site.guard.is_operators(site.guard.admit(request))
        outbox = request.app.state.services.drain_status
        found = await site.in_thread(
            request, lambda: explain(ledger, site.settings, msg_id, outbox, tenant=tenant, sees_all=sees_all)
        )
        return site.show(request, "_explained.html", explanation=found)


async def show_exchange(
    request: Request, site: Site, msg_id: str, *, status: int = 200, outcome: str = "", wrong: str = ""
) -> Response:
    """The page of one exchange. Raises RequestRefused if there is none."""
    tenant = site.tenant_of(request)

    def read() -> dict[str, Any]:
        view = site.ledger.exchange_views.get(tenant, msg_id)
        if view is None:
            raise _no_exchange(msg_id)
        calls = {reply.id: read_calls(reply.tool_calls) for reply in view.replies}
        conversation = read_request(view.request)
        notice = SENTENCES[Outcome(outcome)] if outcome in set(SENTENCES) else ""
        said = {"notice": notice, "done": outcome == Outcome.ACCEPTED, "wrong": wrong}
        return {"view": view, "conversation": conversation, "calls": calls, **said}

    return await site.show_long(request, "exchange.html", read, status)


def _no_exchange(msg_id: str) -> RequestRefused:
    message = f"there is no exchange {msg_id[:80]}: it was deleted, has expired, or is of another experiment"
    return RequestRefused(message, status=404, code="not_found")
