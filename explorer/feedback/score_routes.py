"""Takes Langfuse's scores, as feedback: of a reply's id, of a name that requests carried, or of `task_id/run_id`."""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tuneloop.explorer.auth import Caller, caller_of
from tuneloop.explorer.feedback.routes import MAX_BODY_BYTES, FeedbackRoutes
from tuneloop.explorer.http.bodies import as_utf8, optional_name, optional_text, parse_body, read_bytes, wrong_type
from tuneloop.shared.errors import LedgerUnavailable, RequestRefused
from tuneloop.shared.experience import Kind, Outcome, trace_keys
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings

SCORES = "/api/public/scores"

#: Scores in one call, and replies of one trace.
MAX_SCORES, MAX_REPLIES = 1000, 1000

#: How long a score waits for what was acknowledged before it.
_PATIENCE_S = 8.0
_KEPT = {Outcome.ACCEPTED, Outcome.DUPLICATE, Outcome.LATE, Outcome.PENDING}


def add_routes(app: FastAPI) -> None:
    def routes(request: Request) -> "ScoreRoutes":
        found: ScoreRoutes = request.app.state.services.scores
        return found

    @app.post(SCORES)
    async def create(request: Request) -> Response:
        return await routes(request).create(request)

    @app.post("/api/public/ingestion")
    async def ingest(request: Request) -> Response:
        return await routes(request).ingest(request)

    @app.delete(f"{SCORES}/{{score_id:path}}")
    async def delete(request: Request, score_id: str) -> Response:
        await routes(request).delete(caller_of(request.scope), score_id)
        return Response(status_code=204)


class ScoreRoutes:
    def __init__(self, feedback: FeedbackRoutes, ledger: Ledger, settings: Settings) -> None:
        self._feedback, self._ledger = feedback, ledger
        self._metrics = settings.feedback.score_metrics

    async def create(self, request: Request) -> Response:
        caller, data = caller_of(request.scope), as_utf8(await read_bytes(request, max_bytes=MAX_BODY_BYTES))
        if not data.lstrip().startswith(b"["):
            return JSONResponse(await self._store(caller, await parse_body(data)))
        results = await self._store_all(caller, (await parse_body(b'{"scores":%b}' % data))["scores"])
        if errors := [{"message": str(each)} for each in results if isinstance(each, RequestRefused)]:
            told = {"accepted": len(results) - len(errors), "rejected": len(errors), "errors": errors}
            return JSONResponse(told, 207)
        return JSONResponse({"message": "Accepted"}, 202)

    async def ingest(self, request: Request) -> Response:
        data = as_utf8(await read_bytes(request, max_bytes=MAX_BODY_BYTES))
        events = (await parse_body(data)).get("batch")
        if not isinstance(events, list) or not all(isinstance(each, dict) for each in events):
            raise wrong_type("batch", "a list of objects")
        results = await self._store_all(caller_of(request.scope), [_score_of(each) for each in events])
        told: dict[str, list[dict[str, object]]] = {"successes": [], "errors": []}
        for event, result in zip(events, results, strict=True):
            name = {"id": str(event.get("id") or "")}
            if isinstance(result, RequestRefused):
                told["errors"].append({**name, "status": result.status, "message": str(result)})
            else:
                told["successes"].append({**name, "status": 201})
        return JSONResponse(told, 207)

    async def delete(self, caller: Caller, score_id: str) -> None:
        source = _source_of({"id": score_id})
        await self._wait_until_taken()
        as_stored = self._feedback.recorder.name_as_stored(caller.rater(source) or "")
        events = await asyncio.to_thread(lambda: self._ledger.recording.last_events_of(caller.tenant, as_stored))
        entries = []
        for each in events:
            choice = "" if each.choice is None else f":{each.choice}"
            of_run = {"task_id": each.task_id, "run_id": each.run_id}
            about = {"msg_ids": [f"{each.msg_id}{choice}"]} if each.msg_id else of_run
            if each.kind != Kind.RETRACTION:
                entries.append({**about, "metric": each.metric, "source": source, "retract": True})
        if not entries:
            raise RequestRefused(f"there is no score {score_id}", status=404, code="not_found")
        await self._feedback.take(caller, {"feedback": entries})

    async def _wait_until_taken(self) -> None:
        """Wait until the database has what was acknowledged before. Raises LedgerUnavailable."""
        if not await self._feedback.control_client.wait_until_taken(_PATIENCE_S):
            raise LedgerUnavailable("the database is away, or still behind: send the same again later")

    async def _store_all(self, caller: Caller, scores: Sequence[Any]) -> list[object]:
        if len(scores) > MAX_SCORES:
            message = f"a call may bring {MAX_SCORES} scores, and this one brings {len(scores)}"
            raise RequestRefused(message, status=413, code="too_many_scores")
        results = await asyncio.gather(*(self._store(caller, each) for each in scores), return_exceptions=True)
        for each in results:
            if isinstance(each, BaseException) and not isinstance(each, RequestRefused):
                raise each
        return list(results)

    async def _store(self, caller: Caller, score: Any) -> dict[str, object]:
        if isinstance(score, RequestRefused):
            raise score
        if not isinstance(score, dict):
            raise wrong_type("score", "an object")
        score = {"id": uuid.uuid4().hex} | {name: value for name, value in score.items() if value is not None}
        words, about = _words_of(score, self._metrics), await self._about(caller, score)
        answer = await self._feedback.take(caller, {**about, **words, "source": _source_of(score)})
        outcomes: Any = answer["outcomes"]
        if _KEPT.isdisjoint(outcomes.values()):
            raise RequestRefused(f"nothing was stored: {', '.join(sorted({*outcomes.values()}))}", code="not_stored")
        return {"id": score["id"], **answer}

    async def _about(self, caller: Caller, score: dict[str, Any]) -> dict[str, object]:
        named = [each for name in ("observationId", "traceId") if (each := optional_name(score, name))]
        for each in named:
            if self._feedback.signer.parse(each, caller.tenant) is not None:
                return {"msg_ids": [each]}
        if not (trace := optional_name(score, "traceId")):
            message = "a score needs traceId: the id of a reply, or a name that its request carried"
            raise RequestRefused(message, code="missing", param="traceId")
        await self._wait_until_taken()
        keys, stored = [*trace_keys(trace), trace.lower()], self._ledger.stored
        if found := await asyncio.to_thread(lambda: stored.replies_of_trace(caller.tenant, keys, most=MAX_REPLIES)):
            return {"msg_ids": found}
        task_id, _, run_id = trace.partition("/")
        if task_id and run_id:
            return {"task_id": task_id, "run_id": run_id}
        message = (
            f"{trace} is neither the id of a reply of ours nor what a request had as x-request-id, traceparent,"
            " metadata.trace_id, task_id or run_id; nothing was stored"
        )
        raise RequestRefused(message, status=404, code="unknown_trace", param="traceId")


def _score_of(event: Mapping[str, Any]) -> Any:
    if (kind := event.get("type")) == "score-create":
        return event.get("body")
    message = f"{str(kind)[:100]} was not kept: only scores are kept here"
    return RequestRefused(message, code="unsupported_event", param="type")


def _source_of(score: dict[str, Any]) -> str:
    return f"score:{optional_name(score, 'id')}"


def _words_of(score: dict[str, Any], metrics: Mapping[str, str]) -> dict[str, object]:
    """What a score says, in the words of feedback. Raises RequestRefused where value and type do not fit."""
    if not (name := optional_name(score, "name")):
        raise RequestRefused("a score needs a name", code="missing", param="name")
    value, comment = score.get("value"), optional_text(score, "comment")
    kind = score.get("dataType", {bool: "BOOLEAN", int: "NUMERIC", float: "NUMERIC"}.get(type(value), "CATEGORICAL"))
    more = {"comment": comment, "time": score.get("timestamp")}
    named = {"metric": metrics.get(name, name), **more}
    match kind, value:
        case "NUMERIC", int() | float():
            return {**named, "value": float(value)}
        case "BOOLEAN", 0 | 1:
            return {**named, "value": bool(value)}
        case "CATEGORICAL", str() if value:
            return {**named, "value": value}
        case "CORRECTION", str() if value:
            return {**more, "demonstration": value}
        case "TEXT", str() if value:
            return {**more, "comment": "\n".join(filter(None, (value, comment)))}
    message = f"value {str(value)[:100]} does not fit dataType {str(kind)[:100]}"
    raise RequestRefused(message, code="invalid_value", param="value")
