"""Monitors training: after each step, checks the step, the newest replies and feedback, and raises or clears alarms.

The history is in `monitor/drift.json` of the job folder, of other policies in `drift-{policy}.json`, written after each
step, and follows a trainer back to an older version. A failing monitor is skipped with a warning, and never stops
training. Also here: steps that are not finite, which end training; pace; spans.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
import torch

from tuneloop.shared.capacity.pace import VersionPace, note_version
from tuneloop.shared.errors import EnvironmentRefused, LedgerError, NotEvaluated
from tuneloop.shared.evaluation.tasks import tasks_of
from tuneloop.shared.experience import Sample, VersionAction, steady_clock
from tuneloop.shared.held_files import make_below
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.versions.alarms import Alarm, Alarms
from tuneloop.shared.ledger.versions.drift import ReplyExcerpt
from tuneloop.shared.operations.diagnosis import Code
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry.spans import FinishedSpan, SpanId, new_span, span_of_reply, span_of_version
from tuneloop.trainer.batches.batch import Metrics
from tuneloop.trainer.evaluation.evaluation import HeldOut
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.monitoring import drift
from tuneloop.trainer.monitoring.drift import KL_BASE, REFUSALS, TOOL_ERRORS, History

if TYPE_CHECKING:
    from tuneloop.shared.telemetry.tracing import Tracing

_log = structlog.get_logger()


class PaceLog:
    def __init__(self, settings: Settings, ledger: Ledger, policy: int = 0) -> None:
        self._settings, self._ledger = settings, ledger
        self._rules = BatchRules.of(settings, policy)
        self._step_s = 0.0
        self._lags = False

    def add_step(self, seconds: float) -> None:
        self._step_s += seconds

    def end_version(self, epoch: int, consumed: int, *, publish_s: float) -> None:
        backlog = self._ledger.training.trim(epoch, self._rules)
        if backlog.set_aside and not self._lags:
            _log.warning("trainer_lags", set_aside=backlog.set_aside, waiting=backlog.waiting)
        self._lags = backlog.set_aside > 0
        if self._rules.policy:  # only the default policy's pace is reported
            self._step_s = 0.0
            return
        version = VersionPace(
            at=steady_clock(),
            consumed=consumed,
            waiting=backlog.waiting,
            set_aside=backlog.set_aside,
            step_s=self._step_s,
            publish_s=publish_s,
        )
        self._step_s = 0.0
        try:
            note_version(self._settings.job_dir, version)
        except OSError as error:  # the next version is noted too
            _log.warning("pace_not_written", reason=str(error))


class StepSpans:
    """Sends spans of steps and versions, with `tracing`; keeps the steps since the last version."""

    def __init__(self, settings: Settings, tracing: "Tracing | None") -> None:
        self._experiment = f"{settings.project}/{settings.name}"
        self._tracing = tracing
        self._steps: list[SpanId] = []

    def send_step(self, step: int, batch: Sequence[Sample], *, started: int) -> None:
        """Send a step that ends now and started at `started`, in nanoseconds since 1970."""
        if self._tracing is None:
            return
        about: dict[str, str | int] = {"tuneloop.step": step, "tuneloop.experiences": len(batch)}
        links = [span_of_reply(each) for each in dict.fromkeys(sample.msg_id for sample in batch)]
        self._steps.append(place := new_span())
        self._tracing.send(FinishedSpan("step", place, started, time.time_ns(), about, links=links))

    def forget(self) -> None:
        self._steps = []

    def send_version(self, version: int, *, step: int, steps: int, started: int) -> None:
        """Send a version of the first `steps` steps, registered now, whose publication started at `started`."""
        if self._tracing is None:
            return
        about: dict[str, str | int] = {"tuneloop.version": version, "tuneloop.step": step}
        links, self._steps = self._steps[:steps], self._steps[steps:]
        place = span_of_version(self._experiment, version)
        self._tracing.send(FinishedSpan("version", place, started, time.time_ns(), about, links=links))


NOT_FINITE = "steps_not_finite"


_MOST_REJECTED = 3  # versions rejected in a row by explorers that stop training


class FiniteSteps:
    """Counts steps in a row that were not finite, the last after `_skipped_after`; `_sound`: one was finite."""

    def __init__(self, settings: Settings, alarms: Alarms) -> None:
        self._alarms, self._most = alarms, settings.algorithm.max_skipped_steps
        self._skipped, self._skipped_after, self._why_skipped = 0, 0, ""
        self._sound = False

    @property
    def too_few(self) -> bool:
        return self._skipped >= self._most

    def note_failure(self, reason: str, *, after: int) -> None:
        self._skipped, self._skipped_after, self._why_skipped = self._skipped + 1, after, reason

    def note_success(self, step: int) -> None:
        """Note a finite step, unless it repeats one from before the last failure."""
        if step > self._skipped_after and (self._skipped or not self._sound):
            self._alarms.clear(NOT_FINITE)
            self._skipped, self._sound = 0, True

    def alarm(self, *, step: int, version: int) -> None:
        """Raise the alarm: training stops until a restart."""
        reason = f"{self._skipped} steps in a row were not finite, the last because {self._why_skipped}"
        if self._alarms.raise_alarm(Alarm(name=NOT_FINITE, reason=f"{reason}; training has stopped", step=step)):
            _log.error("training_stopped", reason=reason, version=version)


class Rejections:
    """Logs why training goes back, and stops it after many rejections in a row, since each consumes its rows.

    Such rejections mostly have a cause outside the versions, such as a folder that explorer and trainer do not share. A
    served version, clearing the alarm, or a restart resets the count.
    """

    def __init__(self, ledger: Ledger, policy: int = 0) -> None:
        self._versions, self._alarms, self._policy = ledger.versions, ledger.alarms, policy
        self._count = self._served = 0
        self._is_first = True

    def note(self, version: int) -> None:
        endings = (VersionAction.REJECTED, VersionAction.ROLLED_BACK)
        ended = [each for each in self._versions.events(version) if each.action in endings]
        by, reason = (ended[-1].actor, ended[-1].reason or "") if ended else ("", "")
        state, to = ended[-1].action.value if ended else "unknown", self._versions.newest().version
        if to > version and not ended:  # another policy's weights were promoted
            _log.info("training_goes_on_from", version=to, instead_of=version)
            return
        _log.warning("training_goes_back", version=version, to=to, state=state, by=by, reason=reason)
        served, before = self._versions.champion().version, self._served
        is_counted = state == VersionAction.REJECTED and by == "explorer"  # administrators' rejections are deliberate
        self._count, self._served = (0 if served > before else self._count) + is_counted, served
        if self._count >= _MOST_REJECTED:
            why = f"{self._count} versions in a row were rejected, the last because {reason}; training has stopped, so"
            why += (
                f" that no more rows are used. Repair the cause, then `tuneloop alarms clear {Code.VERSIONS_REJECTED}`"
            )
            self._alarms.raise_alarm(Alarm(Code.VERSIONS_REJECTED, why, version=version))
            _log.error("training_stopped", reason=why, version=version)

    @property
    def are_too_many(self) -> bool:
        if self._is_first:
            self._alarms.clear(Code.VERSIONS_REJECTED)
            self._is_first = False
        raised = {(alarm.policy, alarm.name) for alarm in self._alarms.all()} if self._count else set()
        if self._count and (self._policy, Code.VERSIONS_REJECTED) not in raised:
            self._count = self._count if self._count < _MOST_REJECTED else 0
        return self._count >= _MOST_REJECTED


#: Starts of tool calls in text that no parser could read.
CALL_MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=")

_ENOUGH = 16  # fewest replies for a share


def signals(replies: Sequence[ReplyExcerpt], refusals: Sequence[re.Pattern[str]]) -> dict[str, float]:
    """The shares of refusals and, among tool calls, of wrong ones; each only of enough replies."""
    refused = [any(pattern.search(reply.text) for pattern in refusals) for reply in replies]
    wrong = [error for reply in replies if (error := tool_error(reply)) is not None]
    shares = {REFUSALS: refused, TOOL_ERRORS: wrong}
    return {name: sum(found) / len(found) for name, found in shares.items() if len(found) >= _ENOUGH}


def tool_error(reply: ReplyExcerpt) -> bool | None:
    """Whether a reply calls a tool wrongly; None without a call.

    Wrong are arguments that are no JSON object, a tool that was not offered, and, if tools were offered, the start of a
    call in the text.
    """
    body, offered = None if reply.request is None else _json(reply.request), None
    if isinstance(body, dict):  # names of offered tools in any dialect
        tools = [*_objects(body.get("tools")), *_objects(body.get("functions"))]
        named = (each if isinstance(each := tool.get("function"), dict) else tool for tool in tools)
        offered = {name for each in named if isinstance(name := each.get("name"), str)}
    if reply.tool_calls is None:
        unread = bool(offered) and any(mark in reply.text for mark in CALL_MARKS)
        return True if unread else None
    calls = _json(reply.tool_calls)
    if not isinstance(calls, list) or not calls:
        return None
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str):
            arguments = _json(arguments)
        if not isinstance(function, dict) or not isinstance(arguments, dict):
            return True
        if offered is not None and function.get("name") not in offered:
            return True
    return False


def _objects(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _json(text: str | bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


_MOST = 32  # replies of a step that are measured


class PolicyDivergence:
    """Measures the divergence every `kl_every` steps; the base model is loaded for it and released."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def measure(self, learner: Learner, replies: Sequence[Sample]) -> Metrics:
        """The mean over tokens of sampled replies in nats, if due."""
        wanted = self._settings.monitor.drift
        sampled = [each for each in replies if each.demonstration is None][:_MOST]
        if learner.steps % wanted.kl_every or not sampled:
            return {}
        try:
            base = learner.reference if learner.reference_is_base else None
            return {KL_BASE: learner.distance(base or learner.actor.reference(self._settings), sampled)}
        except (torch.OutOfMemoryError, EnvironmentRefused) as error:
            _log.warning("distance_not_measured", reason=str(error), step=learner.steps)
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # engines may share the GPU
        return {}


_OF_NO_REWARD = frozenset({"sft", "distill"})  # methods that compare no rewards


class Monitors:
    """The monitors of one policy. Raises EnvironmentRefused for evaluation tasks that do not fit the model."""

    def __init__(self, settings: Settings, ledger: Ledger, policy: int = 0) -> None:
        self._drift, self._every = settings.monitor.drift, settings.monitor.evaluation.every
        self._ledger, self._rule = ledger, settings.reward
        self._compares_rewards = settings.algorithm.algorithm_type not in _OF_NO_REWARD
        tasks = tasks_of(settings.monitor.evaluation)
        self._distance = PolicyDivergence(settings)
        self._held_out = HeldOut(settings, tasks) if tasks else None
        self._refusals = self._drift.refusals_found
        self._policy, name = policy, f"drift-{policy}.json" if policy else "drift.json"
        self._file = settings.job_dir / "monitor" / name
        self._history = History()
        self._unwritten = False

    def begin(self, learner: Learner) -> Metrics:
        """Resume from the loaded learner. The base model is evaluated before its first step."""
        history = History()
        try:
            history = msgspec.json.decode(self._file.read_bytes(), type=History)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as error:  # the baseline restarts
            _log.warning("drift_not_read", path=str(self._file), reason=str(error))
        self._history = drift.until(history, learner.steps)
        if self._held_out is not None:
            tasks = self._held_out.fingerprint
            step = learner.steps
            if self._history.tasks not in (None, tasks):
                self._history = msgspec.structs.replace(self._history, scores=[])
                for name in self._history.raised.keys() & drift.OF_EVALUATIONS:
                    self._set_alarm(name, None, step=step)
            self._history = msgspec.structs.replace(self._history, tasks=tasks)
        if learner.steps or self._history.scores:
            return {}
        return self._evaluate(learner)

    def after_step(
        self, learner: Learner, learnt: Mapping[str, float], *, version: int, replies: Sequence[Sample] = ()
    ) -> Metrics:
        """Metrics after a step of `version`, made of these replies; raises and clears alarms."""
        seen = self._ledger_signals()
        if self._rule.clip is not None and drift.REWARD in learnt:  # as a share of the range
            low, high = self._rule.clip
            seen[drift.LEVEL] = (learnt[drift.REWARD] - low) / (high - low)
        if self._compares_rewards and "critic/rewards/max" in learnt:
            seen[drift.SPREAD] = learnt["critic/rewards/max"] - learnt["critic/rewards/min"]
        if drift.KL not in learnt:
            seen |= self._distance.measure(learner, replies)
        self._history = drift.with_step(self._drift, self._history, learner.steps, {**learnt, **seen})
        if learner.steps % self._every == 0:
            seen |= self._evaluate(learner)
        verdicts = drift.verdicts(self._drift, self._history)
        for name, over in list(drift.changes(self._history, verdicts)):
            self._set_alarm(name, verdicts.get(name) if over else None, step=learner.steps, version=version)
        draft = self._file.with_suffix(".tmp")
        try:
            make_below(self._file.parent)
            draft.write_bytes(msgspec.json.encode(self._history))
            draft.replace(self._file)
        except OSError as error:
            if not self._unwritten:
                _log.warning("drift_not_written", path=str(self._file), reason=str(error))
            self._unwritten = True
        else:
            self._unwritten = False
        figures = {f"drift/{name}": verdict.value for name, verdict in verdicts.items()}
        return seen | figures | {"drift/alarms": float(len(self._history.raised))}

    def _ledger_signals(self) -> Metrics:
        """The ledger's signals; none while it is unavailable."""
        found: Metrics = {}
        options = self._drift
        try:
            newest = self._ledger.drift.newest_replies(options.replies, marks=CALL_MARKS, policy=self._policy)
            found |= signals(newest, self._refusals)
            rater = self._ledger.drift.largest_rater(options.rater_events)
            found |= {} if rater is None else {drift.RATER: rater}
            if self._rule.clip is not None:
                extreme = self._ledger.drift.extreme_share(options.rater_events, self._rule)
                found |= {} if extreme is None else {drift.EXTREME: extreme}
        except LedgerError as error:
            _log.warning("monitors_not_read", reason=str(error))
        return found

    def _evaluate(self, learner: Learner) -> Metrics:
        if self._held_out is None:
            return {}
        try:
            scored = self._held_out.score(learner.actor)
        except (torch.OutOfMemoryError, NotEvaluated) as error:
            _log.warning("evaluation_skipped", reason=str(error), step=learner.steps)
            return {}
        score = scored["evaluation/score"]
        self._history = drift.with_score(self._drift, self._history, learner.steps, score)
        _log.info("evaluated", step=learner.steps, score=score, seconds=round(scored["time/evaluation"], 3))
        return scored

    def _set_alarm(self, name: str, raised: drift.DriftFinding | None, *, step: int, version: int = 0) -> None:
        """Raise or clear the alarm; a failure is repeated after the next step."""
        open_now = dict(self._history.raised)
        try:
            if raised is None:
                self._ledger.alarms.clear(name)
                open_now.pop(name, None)
                _log.info("alarm_cleared", alarm=name, step=step)
            else:
                alarm = Alarm(
                    name=name,
                    reason=raised.reason,
                    step=step,
                    version=version,
                    value=raised.value,
                    threshold=raised.threshold,
                    holds=self._drift.holds(name),
                )
                self._ledger.alarms.raise_alarm(alarm)
                open_now[name] = step
                _log.error("alarm_raised", alarm=name, reason=raised.reason, step=step)
        except LedgerError as error:
            _log.warning("alarm_not_recorded", alarm=name, reason=str(error))
        self._history = msgspec.structs.replace(self._history, raised=open_now)
