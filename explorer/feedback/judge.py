"""Lets a judge score what is recorded: its verdicts are feedback events like any other, and go the same way to disk.

Runs in the control process, away from the requests. Replies are looked at in the order of their ids, and again from the
first that is not too old, every SWEEP_S: for some database hands out ids in another order than it shows the rows. Which
are judged already the ledger knows, by ids of events that are the same each time: a restart judges none twice.
"""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import orjson
import structlog

from tuneloop.explorer.auth import Caller
from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.dialects import messages, responses_request
from tuneloop.explorer.dialects.dialect import MESSAGES, RESPONSES, TEXT, Json, ReadConversation, choice_count
from tuneloop.explorer.engines.fleet import in_share
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.recorder import FILE_S
from tuneloop.runner.errors import JudgeAway, JudgeError, JudgeFailed
from tuneloop.runner.judging.judge import Judge, Verdict
from tuneloop.runner.judging.rubric import Rubric
from tuneloop.runner.outbox import Outbox
from tuneloop.runner.rewards.reply import Message, Reply, calls_of
from tuneloop.shared.errors import EnvironmentRefused, LedgerUnavailable, RequestRefused
from tuneloop.shared.experience import Feedback, Kind, State, encode, stamp, steady_clock
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.recording.judging import JUDGEABLE, JudgedExchange, ReplyState
from tuneloop.shared.settings.feedback import JudgeSettings as JudgeSettings
from tuneloop.shared.settings.types import reveal

log = structlog.get_logger()

#: The metric of a verdict's total; a criterion's own is METRIC/<criterion>.
METRIC = "judge"

#: How often everything that is not too old is looked at again.
SWEEP_S = 3600.0

#: By how much the clock of another explorer may be ahead: what is later still would hold up all that follows.
_SKEW_S = 60.0

_PAGE = 500
_CATCH_UP_S = 10.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 300.0
_MAX_COMMENT = 4000


class UnjudgedReply(NamedTuple):
    reply: ReplyState
    event_id: str


class JudgeLoop:
    """Looks for replies to judge, has them judged, and brings the verdicts to disk."""

    def __init__(
        self,
        settings: JudgeSettings,
        ledger: Ledger,
        outbox: Outbox,
        *,
        metrics: Metrics,
        conversation: ReadConversation,
        wait_until_taken: Callable[[float], Awaitable[bool]],
    ) -> None:
        self._settings = settings
        self._judge = judge_of(settings)
        self._ledger = ledger
        self._outbox = outbox
        self._metrics = metrics
        self._conversation = conversation
        self._caught_up = wait_until_taken
        self._last = 0
        self._sweep_at = 0.0
        self._failed: set[int] = set()
        self._done: set[int] = set()
        self._pause_s = _SHORTEST_PAUSE_S
        self._away = False
        self._asked_at: float | None = None  # since when it has given no verdict

    def silent_s(self) -> float:
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    async def run(self, interval_s: float) -> None:
        """Judge replies every `interval_s` seconds, and at once again while there are more."""
        try:
            await every(interval_s, self.look, task="judge", metrics=self._metrics)
        finally:
            await self._judge.close_async()

    async def look(self) -> float | None:
        """Judge some replies; how many seconds to wait then, None if there is nothing more to judge now."""
        await asyncio.to_thread(self._outbox.begin_new_file, after_s=FILE_S)
        if not await self._swept():
            return _SHORTEST_PAUSE_S
        found, last = await asyncio.to_thread(self._next)
        exchanges = await asyncio.to_thread(self._ledger.judging.exchanges_of, [each.reply.id for each in found])
        outcomes = await asyncio.gather(*(self._judge_reply(each, exchanges.get(each.reply.id)) for each in found))
        waits = [outcome for outcome in outcomes if outcome is not None]
        if waits:
            pause, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
            return max(pause, *waits)  # those are found again
        self._away, self._pause_s, self._asked_at = False, _SHORTEST_PAUSE_S, None
        more, self._last = last > self._last, last
        return _NOW if more else None

    async def _swept(self) -> bool:
        """Go back to the first reply that is not too old if it is time; False if that cannot be yet."""
        now = time.monotonic()
        if now < self._sweep_at:
            return True
        if not await self._caught_up(_CATCH_UP_S):
            return False  # or verdicts on their way would be asked for again
        since = steady_clock() - self._settings.max_age
        first = await asyncio.to_thread(self._ledger.judging.first_sampled_since, since)
        self._last = first - 1
        self._failed = {each for each in self._failed if each >= first}
        self._done.clear()  # the ledger has them by now
        self._sweep_at = now + SWEEP_S
        return True

    def _next(self) -> tuple[Sequence[UnjudgedReply], int]:
        now, last, found = steady_clock(), self._last, []
        most = 1 if self._away else 4 * self._settings.concurrency
        for reply in self._ledger.judging.replies_after(last, limit=_PAGE):
            settings = self._settings
            states = JUDGEABLE if settings.which == "all" else (State.RECORDED,)
            wanted = (
                reply.correction == 0
                and reply.state in states
                and reply.id not in self._failed
                and reply.id not in self._done
                and now - settings.max_age <= reply.sampled_at <= now + _SKEW_S
                and in_share(b"judged", reply.msg_id, settings.share)
            )
            if wanted and reply.sampled_at + self._settings.after > now:
                break
            last = reply.id
            if wanted:
                found.append(UnjudgedReply(reply, event_id(self._settings.source, reply, METRIC)))
        there = self._ledger.judging.existing_events([each.event_id for each in found])
        left = [each for each in found if each.event_id not in there]
        return left[:most], left[most].reply.id - 1 if len(left) > most else last

    async def _judge_reply(self, candidate: UnjudgedReply, exchange: JudgedExchange | None) -> float | None:
        """Judge one; None if that is done, else the least number of seconds until the judge is asked again."""
        if exchange is None:
            return None  # deleted meanwhile
        started = time.monotonic()
        try:
            reading = await reading_of(exchange, candidate.reply.tenant, self._conversation)
            self._asked_at = started if self._asked_at is None else self._asked_at
            verdict = await self._judge.score_async(reading)
            self._asked_at = None
            payloads = [encode(each) for each in events_of(self._settings.source, candidate, verdict)]
            await asyncio.to_thread(self._outbox.append, payloads)
        except (JudgeFailed, RequestRefused) as error:
            self._failed.add(candidate.reply.id)
            self._count("failed", candidate, error)
            return None
        except JudgeAway as error:
            self._away = True
            self._count("away", candidate, error)
            return min(error.retry_after_s or 0.0, SWEEP_S)
        except (OSError, LedgerUnavailable) as error:
            self._count("not_kept", candidate, error)
            return 0.0
        self._done.add(candidate.reply.id)
        self._metrics.judged.labels("judged").inc()
        self._metrics.judge_seconds.observe(time.monotonic() - started)
        self._metrics.judge_tokens.labels("prompt").inc(verdict.prompt_tokens)
        self._metrics.judge_tokens.labels("completion").inc(verdict.completion_tokens)
        return None

    def _count(self, outcome: str, candidate: UnjudgedReply, error: Exception) -> None:
        self._metrics.judged.labels(outcome).inc()
        # Not all that an error says: it may quote what a user wrote.
        reason = error.reason if isinstance(error, JudgeError) else type(error).__name__
        log.warning(f"judge_{outcome}", msg_id=candidate.reply.msg_id, reason=reason)


#: Seconds after which there is more to do: at once, but others come first.
_NOW = 0.001


def judge_of(settings: JudgeSettings) -> Judge:
    """The judge that the settings name. Raises EnvironmentRefused if its rubric cannot be read, or its key sent."""
    rubric = Rubric(criteria=settings.criteria, weights=settings.weights, scale=settings.scale)
    if settings.rubric is not None:
        try:
            rubric = Rubric.load(settings.rubric)
        except (OSError, ValueError) as error:
            raise EnvironmentRefused(f"judge.rubric: {error}; write it with runner.Rubric.save") from None
    try:
        return Judge(
            base_url=settings.url or "",
            model=settings.model or "",
            api_key=reveal(settings.key),
            criteria=rubric.criteria,
            weights=rubric.weights,
            scale=rubric.scale,
            samples=settings.samples,
            temperature=settings.temperature,
            timeout=settings.timeout,
            retries=settings.retries,
            concurrency=settings.concurrency,
        )
    except ValueError as error:  # such as a key that no header can hold
        raise EnvironmentRefused(f"judge: {error}") from None


def event_id(source: str, reply: ReplyState, metric: str) -> str:
    name = "\0".join(("judge", source, reply.tenant, reply.msg_id, str(reply.choice), metric))
    return hashlib.sha256(name.encode()).hexdigest()


def events_of(source: str, candidate: UnjudgedReply, verdict: Verdict) -> list[Feedback]:
    """The verdict as feedback: its total and each criterion, from 0 to 1, and its reason as a comment."""
    reply, now = candidate.reply, steady_clock()
    common = {
        "call_id": uuid.uuid4().hex,
        "tenant": reply.tenant,
        "msg_id": reply.msg_id,
        "choice": reply.choice,
        "received_at": now,
        "source": source,
        "stamp": stamp(),
    }
    values = {METRIC: verdict.normalised} | {f"{METRIC}/{name}": share for name, share in verdict.shares.items()}
    events = [
        Feedback(event_id=event_id(source, reply, metric), metric=metric, value=value, **common)  # type: ignore[arg-type]
        for metric, value in values.items()
    ]
    if verdict.reason:
        words = {"kind": Kind.COMMENT, "metric": "comment", "text": verdict.reason[:_MAX_COMMENT]}
        events.append(Feedback(event_id=event_id(source, reply, "comment"), **words, **common))  # type: ignore[arg-type]
    return events


async def reading_of(exchange: JudgedExchange, tenant: str, conversation: ReadConversation) -> Reply:
    """A tenant's reply. Raises RequestRefused if what it answers cannot be read, or is gone."""
    try:
        body = orjson.loads(exchange.request)
        if exchange.endpoint == TEXT:
            prompt = body["prompt"]
            if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
                prompt = prompt[exchange.choice // choice_count(body)]  # each has `n` choices
            if not isinstance(prompt, str):
                raise RequestRefused("the prompt is token ids, which only the model can read")
            chat: Json = {"messages": [{"role": "prompt", "content": prompt}]}
        elif exchange.endpoint == MESSAGES:
            chat = messages.to_chat(body)
        elif exchange.endpoint == RESPONSES:
            continued = body.get("previous_response_id")
            previous = await conversation(continued, Caller(tenant=tenant)) if isinstance(continued, str) else ()
            chat = responses_request.to_chat(body, previous)
        else:
            chat = body
        before: list[Message] = chat["messages"]
        if not isinstance(before, list) or not all(isinstance(each, dict) for each in before):
            raise RequestRefused("the request has no messages")
        calls = calls_of({"tool_calls": orjson.loads(exchange.tool_calls or b"[]")})
        tools = [str(each.get("function", each).get("name", "")) for each in body.get("tools") or ()]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RequestRefused(f"the request cannot be read: {type(error).__name__}") from None
    return Reply(
        text=exchange.text,
        messages=tuple(before),
        tool_calls=tuple(calls),
        tools=tuple(tools),
    )
