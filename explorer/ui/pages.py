"""The overview, the exchanges, and one of them."""

import asyncio
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import urlencode

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from tuneloop.explorer.engines.fleet import Fleet
from tuneloop.explorer.http.bodies import number_in_form
from tuneloop.explorer.recorder import Recorder
from tuneloop.explorer.routes.admin import find_policy, parse_decision, parse_version
from tuneloop.explorer.routes.passthrough import ask_engine
from tuneloop.explorer.ui.conversation import last_words, read_calls, read_request
from tuneloop.explorer.ui.overview import (
    LedgerCounts,
    build_overview,
    chart_of,
    compare_versions_by_reward,
    describe_waiting,
    reward_points,
)
from tuneloop.explorer.ui.sessions import PATH
from tuneloop.explorer.ui.site import Site
from tuneloop.shared.errors import EngineError, RequestRefused, VersionRefused
from tuneloop.shared.experience import MAX_NAME, Outcome, State, VersionState
from tuneloop.shared.ledger.browsing.exchange_view import TokenView
from tuneloop.shared.ledger.browsing.reply_pages import PREVIEW, ReplyCursor, ReplyFilter
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import Policy
from tuneloop.shared.operations import version_decisions
from tuneloop.shared.operations.diagnosis import number
from tuneloop.shared.operations.explain import explain
from tuneloop.shared.operations.job_requests import list_jobs
from tuneloop.shared.operations.policy_report import list_policies
from tuneloop.shared.operations.version_decisions import DecisionRequest, DecisionResult

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
    Outcome.PENDING: "Stored on disk; the database gets it when it is back.",
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
    """A token: how it is written, or its id in brackets where the text is unknown. `logprob`: None if not captured."""

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


#: Versions in the list, events, and prompts side by side.
LISTED, EVENTS, PROMPTS = 60, 30, 8

#: The author of decisions that are made here.
AUTHOR = "page"

_Decision = Callable[[Ledger, int, DecisionRequest], DecisionResult]

_DECISIONS: Mapping[str, _Decision] = {
    "promote": version_decisions.promote,
    "rollback": version_decisions.roll_back,
    "reject": version_decisions.reject,
    "pin": version_decisions.pin,
    "unpin": version_decisions.unpin,
}

#: What may be decided of a version in each state.
_OFFERED: Mapping[VersionState, tuple[str, ...]] = {
    VersionState.CANDIDATE: ("promote", "pin", "reject"),
    VersionState.CANARY: ("promote", "rollback"),
    VersionState.CHAMPION: ("pin", "rollback"),
    VersionState.RETIRED: ("promote", "pin", "reject"),
    VersionState.REJECTED: (),
    VersionState.ROLLED_BACK: (),
}

#: What is done, once it is.
_DONE = {
    "promote": "is the champion now",
    "rollback": "was rolled back",
    "reject": "was rejected",
    "pin": "is pinned",
    "unpin": "is not pinned any more",
}


def add_versions(router: APIRouter, site: Site) -> None:
    @router.get("/versions")
    async def versions(request: Request) -> Response:
        policy = await site.in_thread(request, _policy_of, site, request)
        return site.show(request, "versions.html", **await site.in_thread(request, _list, site.ledger, policy))

    @router.get("/policies")
    async def policies(request: Request) -> Response:
        tenant = _tenant_of(site, request)
        rows, jobs = await site.in_thread(
            request, lambda: (list_policies(site.ledger, tenant), list_jobs(site.ledger, tenant))
        )
        return site.show(request, "policies.html", rows=rows, jobs=jobs)

    @router.get("/versions/compare")
    async def compare(request: Request) -> Response:
        tenant = site.tenant_of(request)
        sides = [request.query_params.get(side, "") for side in ("a", "b")]
        return await site.show_long(request, "compare.html", lambda: _compare(site.ledger, tenant, *sides))

    @router.get("/versions/{version}")
    async def version(request: Request, version: str) -> Response:
        done = request.query_params.get("done", "")
        context = await site.in_thread(request, _describe, site.ledger, version)
        return site.show(request, "version.html", **context, done=_DONE.get(done, ""), wrong="")

    @router.post("/versions/{version}/{action}")
    async def decide(request: Request, version: str, action: str) -> Response:
        _, form = await site.form(request)
        if action not in _DECISIONS:
            raise RequestRefused(f"{action[:20]} is not a decision about a version", status=404, code="not_found")
        try:
            expect = form.get("expect", "")
            seen = int(expect) if expect.isascii() and expect.isdigit() else None
            decided = parse_decision({"reason": form.get("reason", ""), "by": AUTHOR, "expect": seen})
            if not decided.reason:
                raise RequestRefused("Say why: the reason stays with the version.", code="missing", param="reason")
            await site.in_thread(
                request, lambda: _DECISIONS[action](site.ledger, parse_version(version, site.ledger), decided)
            )
        except (VersionRefused, RequestRefused) as error:
            status = error.status if isinstance(error, RequestRefused) else 409
            context = await site.in_thread(request, _describe, site.ledger, version)
            return site.show(request, "version.html", status, **context, done="", wrong=str(error))
        return RedirectResponse(f"{PATH}/versions/{version}?done={action}", 303)


def _tenant_of(site: Site, request: Request) -> str | None:
    """Whose policies a request may see; None: all."""
    return None if site.guard.is_operators(site.guard.admit(request)) else site.tenant_of(request)


def _policy_of(site: Site, request: Request) -> Policy:
    tenant, _, name = request.query_params.get("policy", "default").rpartition("/")
    own = _tenant_of(site, request)
    return find_policy(site.ledger, name, own if own is not None else tenant or None)


def _list(ledger: Ledger, policy: Policy) -> dict[str, Any]:
    versions = [each for each in ledger.versions.all() if each.policy == policy.id]
    points = reward_points(ledger, versions)
    listed = versions[::-1][:LISTED]
    scores: dict[int, list[Any]] = {}
    for score in ledger.evaluations.of_versions([each.version for each in listed]):
        if not score.slice:
            scores.setdefault(score.version, []).append(score)
    return {
        "policy": policy,
        "versions": listed,
        "more": len(versions) - len(listed),
        "rewards": {each.version: each for each in points},
        "chart": chart_of(points),
        "points": points,
        "scores": scores,
        "events": ledger.versions.events(last=EVENTS)[::-1],
    }


def _describe(ledger: Ledger, version: str) -> dict[str, Any]:
    number = parse_version(version, ledger)
    found = ledger.versions.get(number)
    assert found is not None
    versions = [each for each in ledger.versions.all() if each.policy == found.policy]
    served = [each.version for each in versions if each.served_at is not None and each.version < number]
    return {
        "version": found,
        "before": served[-1] if served else None,
        "champion": next((each.version for each in versions if each.state is VersionState.CHAMPION), None),
        "offered": ("unpin",) if found.pinned else _OFFERED[found.state],
        "trained_on": ledger.evaluations.trained_on(number),
        "scores": ledger.evaluations.of_versions([number]),
        "events": ledger.versions.events(number)[::-1],
        "points": reward_points(ledger, [found]),
    }


def _compare(ledger: Ledger, tenant: str, a: str, b: str) -> dict[str, Any]:
    known = [each.version for each in ledger.versions.all()][::-1]
    if not a and not b:
        a, b = ([*map(str, known[1:2]), *map(str, known[:1])] * 2)[:2]
    one, other = parse_version(a, ledger), parse_version(b, ledger)
    pairs = ledger.same_prompts.side_by_side(tenant, one, other, limit=PROMPTS) if one != other else []
    scores = ledger.evaluations.of_versions([one, other])
    table: dict[tuple[str, str, str], dict[int, Any]] = {}
    for score in scores:
        table.setdefault((score.metric, score.slice, score.evaluator), {})[score.version] = score
    return {
        "known": known,
        "a": one,
        "b": other,
        "verdict": compare_versions_by_reward(ledger, other, one) if one != other else None,
        "table": table,
        "pairs": [(read_request(pair.request).turns, _view_of(pair.one), _view_of(pair.other)) for pair in pairs],
    }


def _view_of(answer: Any) -> dict[str, Any]:
    return {**answer._asdict(), "calls": read_calls(answer.tool_calls)}
