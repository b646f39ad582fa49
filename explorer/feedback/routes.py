"""Takes feedback and commits, on Trinity's wire. Tokens bind the feedback of a browser to one reply."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar, Unpack

import orjson
import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tuneloop.explorer.auth import TRINITY, Caller, caller_of
from tuneloop.explorer.channel import ControlClient
from tuneloop.explorer.feedback.events import Entry, EventFactory, FeedbackEvent, parse_entries
from tuneloop.explorer.http.bodies import (
    as_utf8,
    finite_number,
    id_of,
    optional_id,
    optional_name,
    optional_time,
    parse_body,
    read_bytes,
    read_object,
    wrong_type,
)
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.recorder import Recorder
from tuneloop.explorer.tokens import (
    MAX_EVENTS,
    MAX_LIFE_S,
    FeedbackClaims,
    TokenSigner,
)
from tuneloop.explorer.traces import Traces
from tuneloop.explorer.transcript import ReplyIdSigner
from tuneloop.shared.errors import LedgerUnavailable, RequestRefused
from tuneloop.shared.experience import Feedback, Kind, Outcome, steady_clock
from tuneloop.shared.job_marks import touch_committed
from tuneloop.shared.ledger.recording.feedback import RATINGS, FeedbackResults, Statement
from tuneloop.shared.ledger.recording.recording import CommitLimits, Recording
from tuneloop.shared.ledger.recording.reward_rule import is_clipped
from tuneloop.shared.settings.settings import Settings

#: Bytes of the largest body: room for MAX_IDS ids, and for some words.
MAX_BODY_BYTES = 8 << 20

#: Of several outcomes about one id, the first of these is reported: what the client should know soonest.
WEAKEST_FIRST = (
    *(Outcome.UNKNOWN, Outcome.NOT_RECORDED, Outcome.FULL, Outcome.LATE, Outcome.PENDING),
    *(Outcome.ACCEPTED, Outcome.DUPLICATE),
)

_Result = TypeVar("_Result")

#: Replies of each run that an answer names as rewarded by feedback on it.
_MOST_OF_RUNS = 100

#: A call that names more is worked on in a thread. This many take some milliseconds.
_FEW = 100


async def read_body(request: Request, *, may_be_empty: bool = False) -> dict[str, object]:
    data = as_utf8(await read_bytes(request, max_bytes=MAX_BODY_BYTES))
    if may_be_empty and not data:
        return {}
    return await parse_body(data)


def add_routes(app: FastAPI) -> None:
    @app.post("/feedback")
    @app.post(f"{TRINITY}/feedback")
    async def feedback(request: Request) -> Response:
        # Not JSONResponse: a hundred thousand outcomes would take it a second, during which streams stand still.
        outcomes = await request.app.state.services.feedback.feedback(request)
        return Response(orjson.dumps(outcomes), media_type="application/json")

    @app.post("/v1/feedback_tokens")
    async def feedback_token(request: Request) -> Response:
        token = await request.app.state.services.feedback_tokens.create(request)
        return JSONResponse(token, headers={"cache-control": "no-store"})

    @app.post("/commit")
    @app.post(f"{TRINITY}/commit")
    async def commit(request: Request) -> Response:
        return JSONResponse(await request.app.state.services.commit.commit(request))


class FeedbackRoutes:
    def __init__(
        self,
        *,
        signer: ReplyIdSigner,
        recorder: Recorder,
        control_client: ControlClient,
        metrics: Metrics,
        settings: Settings,
        traces: Traces | None = None,
    ) -> None:
        self.signer, self._traces = signer, traces
        self.recorder = recorder
        self.control_client = control_client
        self._metrics = metrics
        self._rule = settings.reward
        self._judge_source = settings.judge.own_source

    async def feedback(self, request: Request) -> dict[str, object]:
        caller = caller_of(request.scope)
        body = await read_body(request)
        key, traceparent = request.headers.get("idempotency-key"), request.headers.get("traceparent")
        return await self.take(caller, body, key, traceparent)

    async def take(
        self, caller: Caller, body: dict[str, object], key: str | None = None, traceparent: str | None = None
    ) -> dict[str, object]:
        started = time.time_ns()
        # How many ids a body may name, whatever else is wrong with it.
        entries = body.get("feedback")
        named = 0
        for entry in entries if isinstance(entries, list) else [body]:
            ids = entry.get("msg_ids") if isinstance(entry, dict) else None
            named += len(ids) if isinstance(ids, list) else 1

        def parse() -> tuple[list[FeedbackEvent], list[Feedback]]:
            as_stored = self.recorder.name_as_stored
            factory = EventFactory(self.signer, caller, as_stored=as_stored, judge=self._judge_source)
            entries = parse_entries(body, key)
            parsed = factory.events_of(bind(entries, caller.feedback) if caller.feedback else entries)
            return parsed, list(_first_of_each(parsed).values())

        parsed, events = await self._aside(named, parse)
        if (bound := caller.feedback) is not None and not await self.control_client.take_of_token(bound, len(events)):
            message = f"this token allows {bound.max_events} events, or too many tokens of its key are in use"
            raise RequestRefused(message, status=403, code="token_used_up")
        caller.meter.take_feedback(len(events))
        found = await self.recorder.take(events) if events else FeedbackResults()
        if self._traces is not None and events:
            self._traces.send_feedback(traceparent, started, events, found.outcomes)
        answer = await self._aside(len(parsed), partial(self._answer, parsed, found))
        if not any(each.event or each.outcome is Outcome.NOT_RECORDED for each in parsed):
            raise RequestRefused(
                "none of them is an id of our replies; nothing was stored",
                status=404,
                code="unknown_msg_id",
                param="msg_ids",
                extra=answer,
            )
        return {"status": "success", **answer}

    async def _aside(self, named: int, work: Callable[[], _Result]) -> _Result:
        """The result of some work about so many ids: a hundred thousand take seconds, others are answered meanwhile."""
        if named <= _FEW and not self.recorder.slow:
            return work()
        return await asyncio.to_thread(work)

    def _answer(self, parsed: Sequence[FeedbackEvent], found: FeedbackResults) -> dict[str, object]:
        stored = _first_of_each(parsed)
        results = [
            each.outcome
            if (event := each.event) is None
            else found.outcomes[event.event_id]
            if event == stored[event.event_id]
            else Outcome.DUPLICATE
            for each in parsed
        ]
        pairs = Counter((each.kind.value, outcome.value) for each, outcome in zip(parsed, results, strict=True))
        for (kind, outcome), count in pairs.items():
            self._metrics.feedback.labels(kind, outcome).inc(count)
        answer, named = _answer(parsed, results), [(each.about, each.event) for each in parsed if each.event]
        rated = {event.metric for _, event in named if event.kind in RATINGS}
        if unweighted := sorted(rated - self._rule.weights.keys()):
            answer["not_counted"] = unweighted
        numbers = [event for _, event in named if event.kind is Kind.NUMBER]
        if any(is_clipped(self._rule, event.metric, event.value or 0.0) for event in numbers):
            answer["clipped"] = True
        if choices := {about: found.apart[event.event_id] for about, event in named if event.event_id in found.apart}:
            answer["choices"] = choices
        if replaced := _by_metric(named, found.replaced):
            answer["replaced"] = replaced
        reasons: dict[str, str] = {}
        for about, event in named if found.not_trained else ():
            why = found.not_trained.get(event.msg_id or "", {})
            # That of a choice of the reply, if the event names none.
            reason = next(iter(why.values()), None) if event.choice is None else why.get(event.choice)
            if reason is not None:
                reasons[about] = reason
        if reasons:
            answer["not_trained"] = reasons
        if replies := dict(_replies_of_runs(parsed, found.of_runs)):
            answer["replies"] = replies
        if unfinished := {about for about, event in named if event.event_id in found.unfinished}:
            answer["unfinished_runs"] = sorted(unfinished)
            self._metrics.unfinished_runs.inc(len(unfinished))
        return answer


def _by_metric(
    named: Sequence[tuple[str, Feedback]], replaced: Mapping[str, Statement]
) -> dict[str, dict[str, Statement]]:
    found: dict[str, dict[str, Statement]] = {}
    for about, event in named if replaced else ():
        if event.event_id in replaced:
            found.setdefault(about, {})[event.metric] = replaced[event.event_id]
    return found


def _replies_of_runs(
    parsed: Sequence[FeedbackEvent], of_runs: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """How many replies of each run take what was said of it, and the first of them."""
    found: dict[str, dict[str, None]] = {}
    for each in parsed if of_runs else ():
        if each.event is not None and each.event.event_id in of_runs:
            found.setdefault(each.about, {}).update(dict.fromkeys(of_runs[each.event.event_id]))
    for about, msg_ids in found.items():
        yield about, {"count": len(msg_ids), "msg_ids": list(msg_ids)[:_MOST_OF_RUNS]}


def _first_of_each(parsed: Sequence[FeedbackEvent]) -> dict[str, Feedback]:
    first: dict[str, Feedback] = {}
    for each in parsed:
        if each.event is not None:
            first.setdefault(each.event.event_id, each.event)
    return first


def _answer(parsed: Sequence[FeedbackEvent], results: Sequence[Outcome]) -> dict[str, object]:
    outcomes: dict[str, Outcome] = {}
    for each, outcome in zip(parsed, results, strict=True):
        outcomes[each.about] = min(outcome, outcomes.get(each.about, outcome), key=WEAKEST_FIRST.index)
    counts = Counter(outcomes.values())
    return {
        "accepted": counts[Outcome.ACCEPTED],
        "outcomes": outcomes,
        "counts": {outcome.value: counts[outcome] for outcome in Outcome},
    }


log = structlog.get_logger()

#: Tasks in one commit.
MAX_TASKS = 10_000

#: How long a commit waits for what was acknowledged before it: the clients of Trinity stop waiting after ten seconds.
_COMMIT_PATIENCE_S = 8.0


class CommitRoute:
    def __init__(
        self, *, recorder: Recorder, control_client: ControlClient, recording: Recording, job_dir: Path
    ) -> None:
        self._recorder, self._control_client, self._recording = recorder, control_client, recording
        self._job_dir = job_dir

    async def commit(self, request: Request) -> dict[str, object]:
        body = await read_body(request, may_be_empty=True)
        as_stored, task_ids = self._recorder.name_as_stored, body.get("task_ids")
        task_id, run_id = (optional_id(body, name) for name in ("task_id", "run_id"))
        if not isinstance(task_ids, list | None):
            raise wrong_type("task_ids", "a list of strings or integers")
        if task_ids and len(task_ids) > MAX_TASKS:
            message = f"task_ids has {len(task_ids)} ids, {MAX_TASKS} are allowed in one call"
            raise RequestRefused(message, status=413, code="too_many_ids", param="task_ids")
        limits: CommitLimits = {
            "task_id": task_id and as_stored(task_id),
            "run_id": run_id and as_stored(run_id),
            "task_ids": task_ids and [as_stored(id_of(each, "task_ids")) for each in task_ids],
            "until": optional_time(body, "time_threshold"),
        }
        return {"status": "success", "committed": await self.release(caller_of(request.scope).tenant, **limits)}

    async def release(self, tenant: str, **limits: Unpack[CommitLimits]) -> int:
        """Release what of a tenant's has been rewarded until now; how much that is. Raises LedgerUnavailable."""
        try:
            if not await self._control_client.wait_until_taken(_COMMIT_PATIENCE_S):
                raise LedgerUnavailable(
                    "the database is away, or still behind; what was acknowledged is safe on disk: commit again later"
                )
            committed = await asyncio.to_thread(lambda: self._recording.commit(tenant, **limits))
        except LedgerUnavailable as error:
            log.warning("commit_put_off", reason=str(error))
            raise
        if committed:
            with suppress(OSError):  # Then the trainer looks after its interval.
                touch_committed(self._job_dir)
        return committed


_MAX_TOKEN_BYTES = 4096

_LIFE_S, _EVENTS = 600.0, 10.0


class TokenRoute:
    def __init__(self, signer: ReplyIdSigner, tokens: TokenSigner) -> None:
        self._signer = signer
        self._tokens = tokens

    async def create(self, request: Request) -> dict[str, object]:
        caller, body = caller_of(request.scope), await read_object(request, max_bytes=_MAX_TOKEN_BYTES)
        msg_id = optional_name(body, "msg_id") or ""
        if self._signer.parse(msg_id, caller.tenant) is None:
            message = "msg_id is no id of our replies"
            raise RequestRefused(message, status=404, code="unknown_msg_id", param="msg_id")
        most = _within_limit(body, "max_events", _EVENTS, MAX_EVENTS)
        if not most.is_integer():  # half an event would allow none
            raise RequestRefused("max_events must be a whole number", code="invalid_value", param="max_events")
        expires_at = steady_clock() + _within_limit(body, "expires_in", _LIFE_S, MAX_LIFE_S)
        claims = FeedbackClaims(
            key_id=caller.key_id,
            tenant=caller.tenant,
            msg_id=msg_id,
            # A browser is never its key's owner.
            source=optional_name(body, "source") or f"browser/{msg_id.partition(':')[0]}",
            expires_at=expires_at,
            max_events=int(most),
        )
        return {"token": self._tokens.sign(claims), "expires_at": expires_at}


def bind(entries: Sequence[Entry], claims: FeedbackClaims) -> list[Entry]:
    for entry in entries:
        about = {each.partition(":")[0] for each in entry.msg_ids or ("",)}
        named = (entry.preferred_over, entry.task_id, entry.run_id)
        if about != {claims.msg_id.partition(":")[0]} or any(each is not None for each in named):
            message = "this token is for feedback on one reply, and on nothing else"
            raise RequestRefused(message, status=403, code="token_of_another_reply")
        if entry.source not in {None, claims.source}:
            raise RequestRefused("this token fixes whose feedback it is", status=403, code="token_of_another_source")
    return [entry._replace(source=claims.source) for entry in entries]


def _within_limit(body: dict[str, object], param: str, default: float, most: float) -> float:
    """A number above 0 and at most `most`. Raises RequestRefused."""
    value = default if body.get(param) is None else finite_number(body[param], param, bound=most)
    if not 0 < value <= most:
        raise RequestRefused(f"{param} must lie between 0 and {most:g}", code="out_of_range", param=param)
    return value
