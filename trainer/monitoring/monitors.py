"""Watches training: after each step it looks at the step, the newest replies and feedback, and raises or clears alarms.

What it remembers is in `monitor/drift.json` of the job folder, written after each step. A trainer that goes back to an
older version goes back in it, too. Nothing that fails here stops training: what cannot be read or told is skipped at
that step, with a warning.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import structlog
import torch

from tuneloop.shared.errors import LedgerError, NotEvaluated
from tuneloop.shared.evaluation.tasks import tasks_of
from tuneloop.shared.experience import Sample
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.versions.alarms import Alarm
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.metrics import Metrics
from tuneloop.trainer.evaluation.evaluation import HeldOut
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.monitoring import drift
from tuneloop.trainer.monitoring.distance import Distance
from tuneloop.trainer.monitoring.drift import History
from tuneloop.trainer.monitoring.replies import CALL_MARKS, signals

_log = structlog.get_logger()


class Monitors:
    """The monitors of one trainer. Raises EnvironmentRefused if the evaluation's tasks cannot be asked."""

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self._drift, self._every = settings.monitor.drift, settings.monitor.evaluation.every
        self._ledger, self._rule = ledger, settings.reward
        tasks = tasks_of(settings.monitor.evaluation)
        self._distance = Distance(settings)
        self._held_out = HeldOut(settings, tasks) if tasks else None
        self._refusals = self._drift.refusals_found
        self._file = settings.job_dir / "monitor" / "drift.json"
        self._history = History()
        self._unwritten = False

    def begin(self, learner: Learner) -> Metrics:
        """Go on from the learner as it was loaded. The base model is evaluated before its first step."""
        self._history = drift.until(_read(self._file), learner.steps)
        if self._held_out is not None:
            tasks = self._held_out.fingerprint
            step = learner.steps
            if self._history.tasks not in (None, tasks):
                self._history = msgspec.structs.replace(self._history, scores=[])
                for name in self._history.raised.keys() & drift.OF_EVALUATIONS:
                    self._turn(name, None, step=step)
            self._history = msgspec.structs.replace(self._history, tasks=tasks)
        if learner.steps or self._history.scores:
            return {}
        return self._evaluate(learner)

    def after_step(
        self, learner: Learner, learnt: Mapping[str, float], *, version: int, replies: Sequence[Sample] = ()
    ) -> Metrics:
        """What is to be seen after a step that said `learnt`, made of `version` and of these replies.

        Alarms are raised and cleared.
        """
        seen = self._ledger_signals() | self._level(learnt)
        if drift.KL not in learnt:
            seen |= self._distance.measure(learner, replies)
        self._history = drift.with_step(self._drift, self._history, learner.steps, {**learnt, **seen})
        if learner.steps % self._every == 0:
            seen |= self._evaluate(learner)
        verdicts = drift.verdicts(self._drift, self._history)
        for name, over in list(drift.changes(self._drift, self._history, verdicts)):
            self._turn(name, verdicts.get(name) if over else None, step=learner.steps, version=version)
        draft = self._file.with_suffix(".tmp")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
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

    def _level(self, learnt: Mapping[str, float]) -> Metrics:
        """The mean reward as a share of what rewards can be, where they have a range."""
        if self._rule.clip is None or drift.REWARD not in learnt:
            return {}
        low, high = self._rule.clip
        return {drift.LEVEL: (learnt[drift.REWARD] - low) / (high - low)}

    def _ledger_signals(self) -> Metrics:
        """The signals that the ledger knows of; none while it is away."""
        found: Metrics = {}
        options = self._drift
        try:
            found |= signals(self._ledger.drift.newest_replies(options.replies, marks=CALL_MARKS), self._refusals)
            rater = self._ledger.drift.largest_rater(options.rater_events)
            found |= {} if rater is None else {drift.RATER: rater}
            found |= self._suspect_signals()
        except LedgerError as error:
            _log.warning("monitors_not_read", reason=str(error))
        return found

    def _suspect_signals(self) -> Metrics:
        options, found = self._drift, Metrics()
        if self._rule.clip is not None:
            extreme = self._ledger.drift.extreme_share(options.rater_events, self._rule)
            found |= {} if extreme is None else {drift.EXTREME: extreme}
        outliers = self._ledger.drift.quarantined_share(options.rater_events)
        return found if outliers is None else found | {drift.OUTLIERS: outliers}

    def _evaluate(self, learner: Learner) -> Metrics:
        if self._held_out is None:
            return {}
        try:
            scored = self._held_out.score(learner.actor)
        except torch.OutOfMemoryError:
            _log.warning("evaluation_skipped", reason="it does not fit into the GPU's memory", step=learner.steps)
            return {}
        except NotEvaluated as error:
            _log.warning("evaluation_skipped", reason=str(error), step=learner.steps)
            return {}
        score = scored["evaluation/score"]
        self._history = drift.with_score(self._drift, self._history, learner.steps, score)
        _log.info("evaluated", step=learner.steps, score=score, seconds=round(scored["time/evaluation"], 3))
        return scored

    def _turn(self, name: str, raised: drift.DriftFinding | None, *, step: int, version: int = 0) -> None:
        """Raise the alarm, or clear it; what the ledger did not take is told again after the next step."""
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


def _read(file: Path) -> History:
    """What was written; an empty history if there is none, or none that can be read: the baseline begins anew then."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=History)
    except FileNotFoundError:
        return History()
    except (OSError, msgspec.MsgspecError) as error:
        _log.warning("drift_not_read", path=str(file), reason=str(error))
        return History()
