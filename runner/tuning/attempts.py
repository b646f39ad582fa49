"""Runs the workflow and the judge: attempts, failures, and delivery of rewards to the services."""

import asyncio
import hashlib
import inspect
import logging
import math
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import islice
from numbers import Real
from typing import Any

from tuneloop.runner.collection.run_records import in_daemon_thread
from tuneloop.runner.models.run import Run
from tuneloop.runner.tuning.config import CONCURRENCY, RUN_TIMEOUT_S, Call, JudgeOutput, WorkflowOutput
from tuneloop.runner.tuning.experiment import Journal, RunResult, acknowledged_line, name_of, result_line
from tuneloop.runner.tuning.services import ServiceClient


class FailureKind(StrEnum):
    WORKFLOW_RAISED = "workflow raised"
    WORKFLOW_HUNG = "workflow hung"
    NO_REWARD = "no reward"
    BAD_REWARD = "reward is not a number"
    NO_CALL = "called no model"
    OTHER_MODEL = "called another model"
    JUDGE_RAISED = "judge raised"
    JUDGE_HUNG = "judge hung"
    SERVICE_AWAY = "service away"


class RunFailed(Exception):
    """A failed run. `again`: a retry may succeed."""

    def __init__(self, kind: FailureKind, sentence: str, *, again: bool = False) -> None:
        super().__init__(sentence)
        self.kind, self.again = kind, again


_OUR_REWARDS = (
    ". Trinity's rewards start Ray; ours do the same without, from tuneloop.runner.rewards.components: numeric() is"
    " MathRewardFn and MathBoxedRewardFn for numbers, exact_match() for texts, and a composite is math_reward():"
    " JudgeOutput(reward=numeric()(Reply(text=response, expected=truth)))"
)


def sentence_of(error: BaseException) -> str:
    """The error's type and message, even if `__str__` raises."""
    try:
        trinitys = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "trinity"
        return f"{type(error).__name__}: {error}{_OUR_REWARDS if trinitys else ''}"
    except Exception:  # noqa: BLE001 - users' classes raise anything
        return f"{type(error).__name__}, whose message raised an error"


class FailureLog:
    """Counts failures by kind and reports the first of each kind in full."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.counts: Counter[str] = Counter()
        self._held: set[tuple[str, str]] = set()

    def add(self, error: RunFailed, *, where: str) -> None:
        self.counts[error.kind.value] += 1
        if self.counts[error.kind.value] > 1:
            return
        cause = error.__cause__
        trace = "".join(traceback.format_exception(cause)) if cause is not None else ""
        self._say(f"{error.kind.value}, {where}: {error} (shown once; further ones are counted)\n{trace}".rstrip())

    def note_held(self, what: str, function: Callable[..., Any], seconds: float) -> None:
        """Report once per function that it blocked the event loop; `what` is "workflow" or "judge"."""
        name = getattr(function, "__qualname__", type(function).__qualname__)
        if (what, name) not in self._held:
            self._held.add((what, name))
            self._say(
                f"{what} {name} blocked the event loop and all other runs for {seconds:.1f} s: await slow calls"
                " (asyncio.sleep, an async client), or write it with `def`, which runs in a thread (shown once)"
            )


_GRACE_S = 5.0  # seconds that a cancelled function has for its `finally`
_HELD_S = 1.0  # a function that blocks the event loop for so many seconds is reported
_SLICE_S = 0.25  # step of a timeout's countdown, in seconds: time in which another task blocked the loop does not count


async def call_within(
    timeout_s: float,
    function: Callable[..., Any],
    arguments: dict[str, Any],
    note_held: Callable[[float], object] = lambda seconds: None,
) -> Any:
    """Await the function. On a timeout, cancel it (a thread runs on) and raise TimeoutError."""
    working = asyncio.ensure_future(_call(function, arguments, note_held))
    left = timeout_s
    try:
        while left > 0 and not working.done():
            await asyncio.wait({working}, timeout=min(left, _SLICE_S))
            left -= _SLICE_S
        if not working.done():
            raise TimeoutError(f"not done after {timeout_s:g} s")
        if working.cancelled():  # by itself: CancelledError would end the whole call
            raise RuntimeError("it cancelled itself: it raised CancelledError")
        return working.result()
    finally:
        if not working.done():
            working.cancel()
            await asyncio.wait({working}, timeout=_GRACE_S)
            if not working.done():
                # It suppresses its cancellation: without this, closing the event loop would wait for it without end.
                asyncio._unregister_task(working)


class _Watched:
    """Awaits a coroutine and reports each step that blocks the event loop."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], note_held: Callable[[float], object]) -> None:
        self._coroutine, self._note_held = coroutine, note_held

    def __await__(self) -> Generator[Any, Any, Any]:
        value: Any = None
        error: BaseException | None = None
        while True:
            began = time.monotonic()
            try:
                yielded = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
            except StopIteration as end:
                return end.value
            finally:
                if (seconds := time.monotonic() - began) >= _HELD_S:
                    self._note_held(seconds)
            try:
                value, error = (yield yielded), None
            except BaseException as thrown:  # noqa: BLE001 - goes into the coroutine, cancellation too
                value, error = None, thrown


async def _call(function: Callable[..., Any], arguments: dict[str, Any], note_held: Callable[[float], object]) -> Any:
    try:
        called = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__ is async
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called):
            returned = function(**arguments)
        else:
            returned = await in_daemon_thread(lambda: function(**arguments))
        if inspect.iscoroutine(returned):
            return await _Watched(returned, note_held)
        return await returned if inspect.isawaitable(returned) else returned
    except (Exception, asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit would end the event loop with all other runs
        raise RuntimeError(f"it ended with {error!r}") from error


_log = logging.getLogger("tuneloop.tune")

MAX_REWARD = 1e6  # the largest magnitude of a reward that a service accepts

#: Failures that an unavailable service may have caused.
_MAYBE_AWAY = {FailureKind.WORKFLOW_RAISED, FailureKind.WORKFLOW_HUNG, FailureKind.SERVICE_AWAY}

_NO_SUCH_MODEL = re.compile(r"model \S+ does not exist")

_AWAY_PAUSE_S = 1.0  # seconds before a retry after an outage of a service


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One run to make: the `member`-th of the task at `position`."""

    step: int
    position: int
    member: int
    task: Mapping[str, Any]
    task_id: str
    train: bool = True


class Attempts:
    """Makes runs with clients of `model_for(name, run)`; `services` train, the main model first; `others` pass on."""

    def __init__(
        self,
        call: Call,
        services: Mapping[str, ServiceClient],
        model_for: Callable[[str, Run], Any],
        others: Mapping[str, Any],
        *,
        failures: FailureLog,
        life: int,
    ) -> None:
        self._services, self._model_for, self._others = services, model_for, others
        self._workflow, self._judge, self._retries = call.workflow_func, call.judge_func, call.retries
        self._timeout_s = call.run_timeout or RUN_TIMEOUT_S
        self._failures, self._life = failures, life
        self._working, self._judging = (asyncio.Semaphore(call.concurrency or CONCURRENCY) for _ in range(2))

    async def run(self, member: Member) -> RunResult:
        """Run a task until it has a reward or its retries are spent. Raises ServiceAway."""
        attempt = spent = 0
        while True:
            # A new id for each attempt: the ledger has the calls of earlier attempts.
            first = attempt == 0 and self._life == 1
            run_id = str(member.member) if first else f"{member.member}.{self._life}.{attempt}"
            try:
                rewards, metrics, tokens = await self._attempt(member, run_id)
                return _result(member, run_id, rewards=rewards, metrics=metrics, tokens=tokens)
            except RunFailed as error:
                attempt += 1
                if error.kind in _MAYBE_AWAY and await self._was_away():
                    continue
                spent += 1
                if error.again and spent <= self._retries:
                    continue
                self._failures.add(error, where=f"task {member.position}, run {run_id}")
                return _result(member, run_id, failure=error.kind.value)

    async def _attempt(self, member: Member, run_id: str) -> tuple[dict[str, float], dict[str, float], int]:
        runs = {
            name: Run(
                service=service.url,
                api_key=service.api_key,
                task_id=service.task_id(member.task_id),
                run_id=run_id,
                train=member.train,
            )
            for name, service in self._services.items()
        }
        names = list(runs)
        async with self._working:  # released before the judge runs, so that engines stay busy
            models = {name: self._model_for(name, run) for name, run in runs.items()}
            auxiliary = {**(models if len(models) > 1 else {}), **self._others}
            offered: dict[str, Any] = {"task": dict(member.task), "auxiliary_models": auxiliary, "logger": _log}
            offered |= {"run": runs[names[0]], "runs": runs}
            output = await self._call_workflow(offered | {"model": models[names[0]]})
        reward, metrics = output.reward, dict(output.metrics or {})
        if self._judge is not None:
            async with self._judging:
                verdict = await self._call_judge(offered | {"response": output.response})
            reward, metrics = verdict.reward, metrics | dict(verdict.metrics or {})
        # Raises RunFailed unless each reward is a number for a trained model.
        if reward is None:
            raise RunFailed(FailureKind.NO_REWARD, "there is no judge, and the workflow returned no reward")
        by_name = dict(reward) if isinstance(reward, Mapping) else dict.fromkeys(names, reward)
        if unknown := by_name.keys() - set(names):
            raise RunFailed(FailureKind.NO_REWARD, f"{sorted(unknown)} is rewarded; the trained models are {names}")
        if not by_name:
            raise RunFailed(FailureKind.NO_REWARD, "the reward is an empty mapping")
        rewards = {}
        for name, value in by_name.items():
            try:
                rewards[name] = float(value)
            except (TypeError, ValueError):
                raise RunFailed(FailureKind.BAD_REWARD, f"the reward is {value!r}") from None
            if not abs(rewards[name]) <= MAX_REWARD:
                sentence = f"the reward is {rewards[name]}, not within ±{MAX_REWARD:g}"
                raise RunFailed(FailureKind.BAD_REWARD, sentence)
        found = {}  # metrics that are not numbers within range are dropped
        for name, value in metrics.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                continue
            if math.isfinite(number) and abs(number) <= MAX_REWARD:
                found[(str(name)).encode(errors="replace").decode().replace("\0", "?")] = number
        return rewards, found, await self._completion_tokens(runs)

    async def _completion_tokens(self, runs: Mapping[str, Run]) -> int:
        """Tokens of all replies. Raises RunFailed if no client called a trained model."""
        if any(run.calls for run in runs.values()):
            return sum(run.calls.completion_tokens for run in runs.values())
        stored = await asyncio.gather(
            *(self._services[name].calls(run.task_id, run.run_id) for name, run in runs.items())
        )
        if not any(each.calls for each in stored):
            sentence = "no request went to run.base_url: use `model`, or a client with base_url=run.base_url"
            raise RunFailed(FailureKind.NO_CALL, sentence)
        return sum(each.completion_tokens for each in stored)

    async def _call_workflow(self, offered: Mapping[str, Any]) -> WorkflowOutput:
        try:
            held = partial(self._failures.note_held, "workflow", self._workflow)
            output = await call_within(self._timeout_s, self._workflow, matching(self._workflow, offered), held)
        except TimeoutError as error:
            raise RunFailed(FailureKind.WORKFLOW_HUNG, str(error), again=True) from error
        except Exception as error:
            text, code, status = sentence_of(error)[:2000], getattr(error, "code", ""), getattr(error, "status_code", 0)
            is_other = code == "model_not_found" or "model_not_found" in text
            is_other |= status == 404 and _NO_SUCH_MODEL.search(text) is not None  # the engine's message
            kind = FailureKind.OTHER_MODEL if is_other else FailureKind.WORKFLOW_RAISED
            again = kind is FailureKind.WORKFLOW_RAISED
            raise RunFailed(kind, sentence_of(error), again=again) from error
        _require_answers(offered["runs"])
        if isinstance(output, WorkflowOutput):
            return output
        if isinstance(output, Real):  # numpy's numbers too
            return WorkflowOutput(reward=float(output))
        sentence = f"the workflow returned {type(output).__name__}, not WorkflowOutput(reward=…, response=…)"
        raise RunFailed(FailureKind.NO_REWARD, sentence)

    async def _call_judge(self, offered: Mapping[str, Any]) -> JudgeOutput:
        assert self._judge is not None
        spent, held = 0, partial(self._failures.note_held, "judge", self._judge)
        while True:
            try:
                verdict = await call_within(self._timeout_s, self._judge, matching(self._judge, offered), held)
                break
            except Exception as error:
                if await self._was_away():
                    continue
                spent += 1
                if spent > self._retries:
                    kind = FailureKind.JUDGE_HUNG if isinstance(error, TimeoutError) else FailureKind.JUDGE_RAISED
                    raise RunFailed(kind, sentence_of(error)) from error
        _require_answers(offered["runs"])
        if isinstance(verdict, Real):
            return JudgeOutput(reward=float(verdict))
        if not isinstance(verdict, JudgeOutput):
            sentence = f"the judge returned {type(verdict).__name__}, not JudgeOutput(reward=…)"
            raise RunFailed(FailureKind.NO_REWARD, sentence)
        return verdict

    async def _was_away(self) -> bool:
        """Whether a service was unavailable; if so, wait until all are ready. Raises ServiceAway."""
        clients = self._services.values()
        ready = await asyncio.gather(*(client.is_ready() for client in clients))
        if all(ready):
            return False
        self._failures.counts[FailureKind.SERVICE_AWAY.value] += 1
        await asyncio.sleep(_AWAY_PAUSE_S)
        for client in clients:
            await client.until_ready()
        return True


def matching(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The offered arguments that the function accepts."""
    taken = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in taken}


def _require_answers(runs: Mapping[str, Run]) -> None:
    """Raise RunFailed if a service failed to answer a call of the run, even if the workflow caught the error."""
    for run in runs.values():
        if sentence := run.calls.outage:
            raise RunFailed(FailureKind.SERVICE_AWAY, sentence, again=True)


def _result(member: Member, run_id: str, **how: Any) -> RunResult:
    return RunResult(
        step=member.step, position=member.position, member=member.member, task_id=member.task_id, run_id=run_id, **how
    )


METRIC_PREFIX = "metrics/"  # prefix of a metric's name, so that no metric counts as the reward

_MAX_NAME = 256
_MOST_AT_ONCE = 256

#: A service accepts 100 events of a run per call, and keeps 250 per source; the rest is room for other feedback.
_MOST_OF_A_RUN, _MOST_METRICS = 100, 200

#: Seconds in which results are collected into one call. Finished runs do not wait for it.
_GATHER_S = 0.02

_MOST_OF_A_CALL = 5000  # entries per call, well below the largest body that a service accepts
_FULL = "full"  # the service's outcome for feedback above its limit per run


class RewardOutbox:
    """Writes results to the journal and their rewards to the services before `send` returns."""

    def __init__(self, journal: Journal, services: Mapping[str, ServiceClient], say: Callable[[str], None]) -> None:
        self._journal, self._services, self._say = journal, services, say
        self._reported_cut = False
        self._waiting: list[tuple[RunResult, asyncio.Future[None]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def send(self, result: RunResult) -> None:
        """Deliver a result; results that arrive during a delivery form the next batch."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((result, future))
        if self._sending is None:
            self._sending = asyncio.create_task(self._drain())
        await future

    async def send_again(self, results: Sequence[RunResult]) -> None:
        """Deliver the rewards of an earlier process; the services ignore repeated keys."""
        for start in range(0, len(results), _MOST_AT_ONCE):
            await self._give(results[start : start + _MOST_AT_ONCE])

    async def _drain(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(_GATHER_S)
                batch, self._waiting = self._waiting[:_MOST_AT_ONCE], self._waiting[_MOST_AT_ONCE:]
                results, failure = [result for result, _ in batch], None
                try:
                    await self._journal.append(*map(result_line, results))
                    await self._give([result for result in results if result.rewards])
                except BaseException as error:
                    failure = error
                    if not isinstance(error, Exception):
                        raise
                finally:
                    for future in [each for _, each in batch if not each.done()]:
                        if failure is None:
                            future.set_result(None)
                        else:
                            future.set_exception(failure)
        finally:
            self._sending = None

    async def _give(self, results: Sequence[RunResult]) -> None:
        """Send rewards before metrics: a service with a full run must drop metrics, not rewards."""
        if not results:
            return
        await asyncio.gather(*(self._give_to(name, results) for name in self._services))
        await self._journal.append(acknowledged_line(results))

    async def _give_to(self, name: str, results: Sequence[RunResult]) -> None:
        service = self._services[name]
        rewarded = [result for result in results if name in result.rewards]
        rewards = [_about(result, service) | {"reward": result.rewards[name]} for result in rewarded]
        outcomes = await service.feedback(rewards) if rewards else {}
        if full := [run for run, outcome in outcomes.items() if outcome == _FULL]:
            self._say(
                f"the reward of {len(full)} runs was refused, the first is {full[0]}: the service keeps no more "
                "feedback on them"
            )
        for first in range(0, _MOST_METRICS, _MOST_OF_A_RUN):
            metrics = [
                _about(result, service) | {"metric": f"{METRIC_PREFIX}{name}"[:_MAX_NAME], "value": value}
                for result in rewarded
                for name, value in islice(result.metrics.items(), first, first + _MOST_OF_A_RUN)
            ]
            for start in range(0, len(metrics), _MOST_OF_A_CALL):
                await service.feedback(metrics[start : start + _MOST_OF_A_CALL])
        most = max((len(result.metrics) for result in rewarded), default=0)
        if most > _MOST_METRICS and not self._reported_cut:
            self._reported_cut = True
            self._say(f"a run has {most} metrics: the service gets the first {_MOST_METRICS} of each run (shown once)")


def _about(result: RunResult, service: ServiceClient) -> dict[str, Any]:
    name = service.task_id(name_of(result))
    key = name if len(name) <= _MAX_NAME else hashlib.sha256(name.encode()).hexdigest()
    return {"task_id": service.task_id(result.task_id), "run_id": result.run_id, "idempotency_key": key}
