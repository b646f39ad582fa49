"""Evaluates versions for the gate, where no engine can be spared for it: each before the explorer may take it up.

An evaluation that cannot be made now says nothing of the version, which waits: it is tried again while the learner is
still that version.
"""

import time
from collections.abc import Callable

import structlog
import torch

from tuneloop.shared.checkpoints import ACTOR
from tuneloop.shared.errors import EnvironmentRefused, NotEvaluated
from tuneloop.shared.evaluation.gate import evaluator_of, gate_verdict
from tuneloop.shared.evaluation.scores import Figure, figures_of, figures_on
from tuneloop.shared.evaluation.tasks import fingerprint, tasks_of
from tuneloop.shared.experience import Evaluator, VersionAction
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.evaluation.evaluation import HeldOut
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.models.model import Actor

_log = structlog.get_logger()

_AGAIN_S = 60.0


def is_evaluated_here(settings: Settings) -> bool:
    """Whether the trainer evaluates versions for the gate."""
    return settings.gate.mode != "off" and evaluator_of(settings) is Evaluator.TRAINER


class GateEvaluation:
    """Evaluates versions for one trainer. Raises EnvironmentRefused if the tasks cannot be asked."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        *,
        again_s: float = _AGAIN_S,
        take_gpu: Callable[[Learner], None] | None = None,
    ) -> None:
        """`take_gpu` is called before a GPU is needed."""
        self._settings, self._ledger, self._again_s, self._take_gpu = settings, ledger, again_s, take_gpu
        #: Whether versions are evaluated here, each while the learner is that version.
        self.wanted = is_evaluated_here(settings)
        tasks = tasks_of(settings.monitor.evaluation) if self.wanted else []
        self._held_out = HeldOut(settings, tasks) if tasks else None
        self._fingerprint = fingerprint(tasks, settings.monitor.evaluation, settings.judge)
        self._not_before = 0.0

    def evaluate(self, learner: Learner, version: int) -> None:
        """Record the figures of `version`, which the learner is, and of the champion, if they are not there yet."""
        if not self.wanted or time.monotonic() < self._not_before:
            return
        champion = self._ledger.versions.champion()
        found, before = self._figures(version), self._figures(champion.version)
        if before and found:
            return
        if self._take_gpu is not None:
            self._take_gpu(learner)
        try:
            self._compare(learner, version, champion, before)
        except (NotEvaluated, torch.OutOfMemoryError) as error:
            reason = str(error) if isinstance(error, NotEvaluated) else "it does not fit into the GPU's memory"
            _log.warning("version_not_evaluated", version=version, reason=reason)
            self._not_before = time.monotonic() + self._again_s

    def _compare(self, learner: Learner, version: int, champion: Version, before: tuple[Figure, ...]) -> None:
        started, record = time.perf_counter(), self._ledger.evaluations.record
        with learner.reading_alone(learner.actor):
            found = self._answers(learner.actor)
        if version == champion.version:
            return record(version, Evaluator.TRAINER, found)
        if not before:
            folder = self._settings.model.model_path if champion.is_base else champion.path / ACTOR
            try:
                actor = snapshot.actor_in(self._settings, folder)
            except EnvironmentRefused as error:
                raise NotEvaluated(str(error)) from error
            before = self._answers(actor)
            record(champion.version, Evaluator.TRAINER, before)
        verdict = gate_verdict(self._settings.gate, found, before)
        details = verdict.details(champion.version)
        reason = verdict.reason(champion.version)
        self._ledger.versions.note(version, VersionAction.EVALUATED, by="trainer", reason=reason, details=details)
        # Only now: with them in the ledger the version may be rejected, or served, at once.
        record(version, Evaluator.TRAINER, found)
        seconds = round(time.perf_counter() - started, 3)
        _log.info("version_evaluated", version=version, passed=verdict.passed, reason=reason, seconds=seconds)

    def _answers(self, actor: Actor) -> tuple[Figure, ...]:
        """What its answers to the tasks come to; without tasks, only that there are none."""
        if self._held_out is None:
            return figures_of((), fingerprint=self._fingerprint, refusals=())
        return self._held_out.figures(actor)

    def _figures(self, version: int) -> tuple[Figure, ...]:
        """What is known of a version, if it is of these tasks."""
        return figures_on(self._ledger.evaluations.of(version, Evaluator.TRAINER), self._fingerprint)
