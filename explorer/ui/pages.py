"""The overview, the exchanges, and one of them."""

import asyncio
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import urlencode

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from tuneloop.explorer.engines.fleet import Fleet
from tuneloop.explorer.http.bodies import number_in_form
from tuneloop.explorer.recorder import Recorder
from tuneloop.explorer.routes.passthrough import ask_engine
from tuneloop.explorer.ui.conversation import last_words, read_calls, read_request
from tuneloop.explorer.ui.overview import LedgerCounts, build_overview, describe_waiting
from tuneloop.explorer.ui.site import Site
from tuneloop.shared.errors import EngineError, RequestRefused
from tuneloop.shared.experience import MAX_NAME, Outcome, State
from tuneloop.shared.ledger.browsing.exchange_view import TokenView
from tuneloop.shared.ledger.browsing.reply_pages import PREVIEW, ReplyCursor, ReplyFilter
from tuneloop.shared.operations.diagnosis import number
from tuneloop.shared.operations.explain import explain

#: Replies on one page.
PAGE = 50

#: The fields of the form, by their names in the query.
FIELDS = ("text", "state", "version", "reward_from", "reward_to", "task", "run", "user", "since", "until")

_NAMES = {"task": "task_id", "run": "run_id"}
_MAX_TEXT = 200
_DIGITS = 9

#: Tokens of one reply that are shown.
MAX_TOKENS = 4_000

_PATIENCE_S = 3.0

#: How tokenizers write a space and a line's end inside of tokens.
_WRITTEN = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t"})

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


def parse_filter(query: Mapping[str, str]) -> ReplyFilter:
    given = {name: value.strip() for name, value in query.items() if name in FIELDS and value.strip()}
    if unknown := sorted(query.keys() - {*FIELDS, "after"}):
        raise _refusal(unknown[0], f"there is no filter {unknown[0][:40]!r}; there are {', '.join(FIELDS)}")
    parsed: dict[str, Any] = {
        _NAMES.get(name, name): _PARSERS.get(name, _words)(name, value) for name, value in given.items()
    }
    wanted = ReplyFilter()._replace(**parsed)
    for low, high in (("reward_from", "reward_to"), ("since", "until")):
        first, last = getattr(wanted, low), getattr(wanted, high)
        if first is not None and last is not None and first > last:
            raise _refusal(low, f"{low} is larger than {high}: nothing can lie between them")
    return wanted


def with_stored_names(wanted: ReplyFilter, as_stored: Callable[[str], str]) -> ReplyFilter:
    task_id, run_id, user = (name and as_stored(name) for name in (wanted.task_id, wanted.run_id, wanted.user))
    return wanted._replace(task_id=task_id, run_id=run_id, user=user)


def parse_cursor(query: Mapping[str, str]) -> ReplyCursor | None:
    after = query.get("after", "")
    if not after:
        return None
    time, _, number = after.partition("_")
    try:
        cursor = ReplyCursor(float(time), int(number))
    except ValueError:
        cursor = ReplyCursor(math.nan, 0)
    if not (math.isfinite(cursor.sampled_at) and 0 <= cursor.id < 2**63):
        raise _refusal("after", "after is not a position in this list: begin at its top")
    return cursor


def link(query: Mapping[str, str], after: ReplyCursor | None = None) -> str:
    kept = {name: query[name] for name in FIELDS if query.get(name, "").strip()}
    if after is not None:
        kept["after"] = f"{after.sampled_at!r}_{after.id}"
    return urlencode(kept)


def _refusal(field: str, message: str) -> RequestRefused:
    return RequestRefused(message, code="invalid_value", param=field)


def _words(field: str, value: str) -> str:
    most = _MAX_TEXT if field == "text" else MAX_NAME
    if len(value) > most:
        raise _refusal(field, f"{field} is longer than {most} characters")
    return value


def _state(field: str, value: str) -> State:
    try:
        return State(value)
    except ValueError:
        raise _refusal(field, f"there is no state {value[:40]!r}; there are {', '.join(State)}") from None


def _version(field: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= _DIGITS):
        raise _refusal(field, f"version must be a number, not {value[:40]!r}")
    return int(value)


def _number(field: str, value: str) -> float:
    number = number_in_form(value)
    if number is None or not math.isfinite(number):
        raise _refusal(field, f"{field} must be a number, not {value[:40]!r}")
    return number


def _time(field: str, value: str) -> float:
    try:
        time = datetime.fromisoformat(value)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        message = f"{field} must be a time in UTC such as 2026-11-23T18:30, not {value[:40]!r}"
        raise _refusal(field, message) from None


_PARSERS = {
    "state": _state,
    "version": _version,
    "reward_from": _number,
    "reward_to": _number,
    "since": _time,
    "until": _time,
}


class Token(NamedTuple):
    """A token: how it is written, or its id in brackets where nobody could tell. `logprob`: None if not captured."""

    text: str
    id: int
    logprob: float | None


class TokenList(NamedTuple):
    """The tokens of a reply, and their log-probabilities added up, if captured; `named`: they are shown as text."""

    tokens: list[Token]
    total: int
    logprob: float | None
    prompt_tokens: int
    named: bool


async def list_tokens(fleet: Fleet, model: str, view: TokenView) -> TokenList:
    names = await _names(fleet, model, view)
    tokens = [
        Token(names[place] if place < len(names) else f"[{number}]", number, logprob)
        for place, (number, logprob) in enumerate(zip(view.completion_ids, view.logprobs, strict=True))
    ]
    captured = [each for each in view.logprobs if each is not None]
    total = sum(captured) if len(captured) == len(tokens) else None
    return TokenList(tokens[:MAX_TOKENS], len(tokens), total, view.prompt_tokens, bool(names))


async def _names(fleet: Fleet, model: str, view: TokenView) -> list[str]:
    """How the first tokens are written: those that the engine makes of the reply's text, if they are the same."""
    question = {"model": model, "prompt": view.text, "add_special_tokens": False, "return_token_strs": True}
    try:
        async with asyncio.timeout(_PATIENCE_S):
            answer = await ask_engine(fleet, "POST", "/tokenize", orjson.dumps(question))
    except (EngineError, RequestRefused, TimeoutError):
        return []
    try:
        body: Any = orjson.loads(bytes(answer.body))
        ids, names = body["tokens"], body["token_strs"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return []
    if not isinstance(names, list) or ids != view.completion_ids[: len(ids)] or len(names) != len(ids):
        return []
    return [str(name).translate(_WRITTEN) for name in names]
