"""One run of a task: the workflow, then the judge; tried again where that may help, each time under a new run_id."""

import asyncio
import inspect
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from tuneloop.runner.models.run import Run
from tuneloop.runner.tuning.config import JudgeOutput, JudgeType, WorkflowOutput, WorkflowType
from tuneloop.runner.tuning.journal import RunResult
from tuneloop.runner.tuning.rollouts.calls import call_within
from tuneloop.runner.tuning.rollouts.failures import FailureKind, FailureLog, RunFailed, sentence_of
from tuneloop.runner.tuning.services.service_client import ServiceClient

_log = logging.getLogger("tuneloop.tune")

#: The largest reward that a service takes, either way.
MAX_REWARD = 1e6

#: What fails so may have failed because a service was away.
_MAYBE_AWAY = {FailureKind.WORKFLOW_RAISED, FailureKind.WORKFLOW_HUNG, FailureKind.SERVICE_AWAY}

_NO_SUCH_MODEL = re.compile(r"model \S+ does not exist")

#: Seconds between two looks whether a service is back that a run found away.
_AWAY_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A run that is to be made: the `member`-th of the task at `position`."""

    step: int
    position: int
    member: int
    task: Mapping[str, Any]
    task_id: str
    train: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What makes a run's calls its own: `model_for(name, run)` is what the workflow gets for the model `name`.

    `trained` are the services by the names of their models, the main one first; `others` are passed on as they are.
    """

    trained: Mapping[str, ServiceClient]
    model_for: Callable[[str, Run], Any]
    others: Mapping[str, Any] = field(default_factory=dict)

    def runs(self, member: Member, run_id: str) -> dict[str, Run]:
        """The run at each service."""
        return {
            name: Run(
                service=client.url, task_id=member.task_id, run_id=run_id, train=member.train, api_key=client.api_key
            )
            for name, client in self.trained.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`timeout_s` for a workflow or a judge; `retries` after a failure that another attempt may cure.

    At most `concurrency` workflows are under way, and as many judges.
    """

    timeout_s: float = 600.0
    retries: int = 1
    concurrency: int = 64


class Attempts:
    """Makes runs."""

    def __init__(
        self,
        binding: Binding,
        workflow: WorkflowType,
        judge: JudgeType | None,
        *,
        limits: Limits,
        failures: FailureLog,
        life: int,
    ) -> None:
        self._binding, self._workflow, self._judge = binding, workflow, judge
        self._limits, self._failures, self._life = limits, failures, life
        self._working, self._judging = (asyncio.Semaphore(limits.concurrency) for _ in range(2))
        self._workflow_takes = parameters_of(workflow)
        self._judge_takes = frozenset() if judge is None else parameters_of(judge)

    async def run(self, member: Member) -> RunResult:
        """Run a task until it is rewarded or has failed for good. Raises ServiceAway."""
        attempt = spent = 0
        while True:
            run_id = self._run_id(member, attempt)
            try:
                rewards, metrics, tokens = await self._attempt(member, run_id)
                return _result(member, run_id, rewards=rewards, metrics=metrics, tokens=tokens)
            except RunFailed as error:
                attempt += 1
                if error.kind in _MAYBE_AWAY and await self._was_away():
                    continue
                spent += 1
                if error.again and spent <= self._limits.retries:
                    continue
                self._failures.add(error, where=f"task {member.position}, run {run_id}")
                return _result(member, run_id, failure=error.kind.value)

    def _run_id(self, member: Member, attempt: int) -> str:
        """Never that of an earlier attempt: its calls are in the ledger, and must not be mixed with these."""
        first = attempt == 0 and self._life == 1
        return str(member.member) if first else f"{member.member}.{self._life}.{attempt}"

    async def _attempt(self, member: Member, run_id: str) -> tuple[dict[str, float], dict[str, float], int]:
        runs = self._binding.runs(member, run_id)
        names = list(runs)
        async with self._working:  # and no longer: what a judge thinks about must not keep the engine waiting
            models = {name: self._binding.model_for(name, run) for name, run in runs.items()}
            auxiliary = {**(models if len(models) > 1 else {}), **self._binding.others}
            offered: dict[str, Any] = {"task": dict(member.task), "auxiliary_models": auxiliary, "logger": _log}
            offered |= {"run": runs[names[0]], "runs": runs}
            output = await self._call_workflow(offered | {"model": models[names[0]]})
        reward, metrics = output.reward, dict(output.metrics or {})
        if self._judge is not None:
            async with self._judging:
                verdict = await self._call_judge(offered | {"response": output.response})
            reward, metrics = verdict.reward, metrics | dict(verdict.metrics or {})
        rewards = _rewards(reward, names)
        return rewards, _finite(metrics), await self._completion_tokens(runs)

    async def _completion_tokens(self, runs: Mapping[str, Run]) -> int:
        """Tokens of all replies; raises RunFailed if no model that is trained was called, by whatever client."""
        if any(run.calls for run in runs.values()):
            return sum(run.calls.completion_tokens for run in runs.values())
        services = self._binding.trained
        stored = await asyncio.gather(*(services[name].calls(run.task_id, run.run_id) for name, run in runs.items()))
        if not any(each.calls for each in stored):
            sentence = "no reply was asked for below run.base_url: use `model`, or a client with base_url=run.base_url"
            raise RunFailed(FailureKind.NO_CALL, sentence)
        return sum(each.completion_tokens for each in stored)

    async def _call_workflow(self, offered: Mapping[str, Any]) -> WorkflowOutput:
        try:
            output = await call_within(self._limits.timeout_s, self._workflow, matching(self._workflow_takes, offered))
        except TimeoutError as error:
            raise RunFailed(FailureKind.WORKFLOW_HUNG, str(error), again=True) from error
        except Exception as error:
            kind = FailureKind.OTHER_MODEL if _is_other_model(error) else FailureKind.WORKFLOW_RAISED
            again = kind is FailureKind.WORKFLOW_RAISED
            raise RunFailed(kind, sentence_of(error), again=again) from error
        _require_answers(offered["runs"])
        if isinstance(output, WorkflowOutput):
            return output
        if isinstance(output, Real):  # also one of numpy's
            return WorkflowOutput(reward=float(output))
        sentence = f"the workflow returned {type(output).__name__}, not WorkflowOutput(reward=…, response=…)"
        raise RunFailed(FailureKind.NO_REWARD, sentence)

    async def _call_judge(self, offered: Mapping[str, Any]) -> JudgeOutput:
        assert self._judge is not None
        spent = 0
        while True:
            try:
                verdict = await call_within(self._limits.timeout_s, self._judge, matching(self._judge_takes, offered))
                break
            except Exception as error:
                if await self._was_away():
                    continue
                spent += 1
                if spent > self._limits.retries:
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
        """Whether something failed because a service was away; if so, it is back now. Raises ServiceAway."""
        clients = self._binding.trained.values()
        ready = await asyncio.gather(*(client.is_ready() for client in clients))
        if all(ready):
            return False
        self._failures.counts[FailureKind.SERVICE_AWAY.value] += 1
        await asyncio.sleep(_AWAY_PAUSE_S)
        for client in clients:
            await client.until_ready()
        return True


def parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)


def matching(names: frozenset[str], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Of what is offered, that which a function with these parameters takes."""
    return {name: value for name, value in offered.items() if name in names}


def _require_answers(runs: Mapping[str, Run]) -> None:
    """Raise RunFailed where a service failed to answer a run, whatever was made of that."""
    for run in runs.values():
        if sentence := run.calls.outage:
            raise RunFailed(FailureKind.SERVICE_AWAY, sentence, again=True)


def _rewards(reward: object, names: list[str]) -> dict[str, float]:
    """The reward of each trained model. Raises RunFailed."""
    if reward is None:
        raise RunFailed(FailureKind.NO_REWARD, "there is no judge, and the workflow returned no reward")
    by_name = dict(reward) if isinstance(reward, Mapping) else dict.fromkeys(names, reward)
    if unknown := by_name.keys() - set(names):
        raise RunFailed(FailureKind.NO_REWARD, f"{sorted(unknown)} is rewarded; the trained models are {names}")
    if not by_name:
        raise RunFailed(FailureKind.NO_REWARD, "the reward is an empty mapping")
    return {name: _number(value) for name, value in by_name.items()}


def _number(value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise RunFailed(FailureKind.BAD_REWARD, f"the reward is {value!r}") from None
    if not abs(number) <= MAX_REWARD:
        raise RunFailed(FailureKind.BAD_REWARD, f"the reward is {number}, not within ±{MAX_REWARD:g}")
    return number


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers a service takes."""
    found = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        if math.isfinite(number) and abs(number) <= MAX_REWARD:
            found[_storable(str(name))] = number
    return found


def _storable(name: str) -> str:
    """The name without what neither a file nor a service takes: lone surrogates and NUL."""
    return name.encode(errors="replace").decode().replace("\0", "?")


def _is_other_model(error: BaseException) -> bool:
    text = sentence_of(error)[:2000]
    if getattr(error, "code", None) == "model_not_found" or "model_not_found" in text:
        return True
    return getattr(error, "status_code", None) == 404 and _NO_SUCH_MODEL.search(text) is not None  # an engine's words


def _result(member: Member, run_id: str, **how: Any) -> RunResult:
    return RunResult(
        step=member.step,
        position=member.position,
        member=member.member,
        task_id=member.task_id,
        run_id=run_id,
        **how,
    )
