"""Examines versions for the gate, where no engine can be spared for it: each before the explorer may take it up.

An examination that cannot be made now says nothing of the version, which waits: it is tried again while the learner is
still that version.
"""

import time

import structlog
import torch

from shared.checkpoint import ACTOR
from shared.config import Settings
from shared.errors import EnvironmentRefused, NotEvaluated
from shared.evaluation_figures import KL, TASKS, Figure
from shared.evaluation_tasks import tasks_of
from shared.experience import Evaluator, VersionAction
from shared.gate import evaluator_of, judge
from shared.ledger import Ledger, Version
from trainer import snapshot
from trainer.evaluation import HeldOut
from trainer.learner import Learner
from trainer.model import Actor

_log = structlog.get_logger()

_AGAIN_S = 60.0


class Examination:
    """The examiner of one trainer. Raises EnvironmentRefused if the tasks cannot be asked."""

    def __init__(self, settings: Settings, ledger: Ledger, *, again_s: float = _AGAIN_S) -> None:
        self._settings, self._ledger, self._again_s = settings, ledger, again_s
        wanted = settings.gate.mode != "off" and evaluator_of(settings) is Evaluator.TRAINER
        tasks = tasks_of(settings.monitor.evaluation) if wanted else []
        self._held_out = HeldOut(settings, tasks) if tasks else None
        self._not_before = 0.0

    def examine(self, learner: Learner, version: int) -> None:
        """Record the figures of `version`, which the learner is, and of the champion, if they are not there yet."""
        if self._held_out is None or time.monotonic() < self._not_before:
            return
        champion = self._ledger.champion()
        found, before = self._figures(version), self._figures(champion.version)
        measures_kl = self._settings.gate.kl is not None and version != champion.version
        if before and found and (not measures_kl or any(each.metric == KL for each in found)):
            return
        try:
            self._compare(self._held_out, learner, version, champion)
        except NotEvaluated as error:
            self._put_off(version, str(error))
        except torch.OutOfMemoryError:
            self._put_off(version, "it does not fit into the GPU's memory")

    def _put_off(self, version: int, reason: str) -> None:
        _log.warning("version_not_evaluated", version=version, reason=reason)
        self._not_before = time.monotonic() + self._again_s

    def _compare(self, held_out: HeldOut, learner: Learner, version: int, champion: Version) -> None:
        started, found = time.perf_counter(), held_out.figures(learner.actor)
        if version == champion.version:
            self._record(version, found)
            return
        before = self._figures(champion.version)
        if not before or self._settings.gate.kl is not None:
            actor = self._actor(champion)
            if not before:
                before = held_out.figures(actor)
                self._record(champion.version, before)
            if self._settings.gate.kl is not None:
                found = (*found, held_out.distance(learner.actor, actor))
        self._record(version, found)
        verdict = judge(self._settings.gate, found, before)
        details = {"instead_of": champion.version, "passed": verdict.passed, **verdict.figures}
        reason = "; ".join(verdict.reasons) or f"no worse than version {champion.version}"
        self._ledger.note_version(version, VersionAction.EVALUATED, by="trainer", reason=reason, details=details)
        seconds = round(time.perf_counter() - started, 3)
        _log.info("version_evaluated", version=version, passed=verdict.passed, reason=reason, seconds=seconds)

    def _figures(self, version: int) -> tuple[Figure, ...]:
        """What is known of a version, if it is of these tasks."""
        assert self._held_out is not None
        found = self._ledger.evaluation(version, Evaluator.TRAINER)
        asked = next((each.value for each in found if each.metric == TASKS), None)
        return found if asked == self._held_out.fingerprint else ()

    def _record(self, version: int, figures: tuple[Figure, ...]) -> None:
        self._ledger.record_evaluation(version, Evaluator.TRAINER, figures)

    def _actor(self, version: Version) -> Actor:
        try:
            folder = version.path / ACTOR if version.version else self._settings.model.model_path
            return snapshot.actor_in(self._settings, folder)
        except EnvironmentRefused as error:
            raise NotEvaluated(str(error)) from error
