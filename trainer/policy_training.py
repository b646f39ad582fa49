"""What one policy is trained with: its learner, its rows and steps, its monitors and curves.

Policies share the base model, the publisher and the GPU. One of them trains at a time; what the others have learnt lies
in main memory meanwhile, and goes back to the GPU in the same tensors, so that compiled code and optimizers go on.
"""

import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog
from transformers import PreTrainedModel

from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.errors import NotFinite, SamplesRefused, TeacherAway
from tuneloop.shared.experience import Sample
from tuneloop.shared.job_marks import committed_stamp
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.ledger.policies import Policy
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry.trackers import CurveWriter, open_curves
from tuneloop.trainer.batches.batch import of_samples
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.copies import KeptRoom
from tuneloop.trainer.checkpoints.publication import Publisher
from tuneloop.trainer.checkpoints.recomputation import Recomputation
from tuneloop.trainer.evaluation.gate import GateEvaluation
from tuneloop.trainer.gpu_turns import GpuTurns
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.leased_rows import LeasedRows, UnpublishedSteps
from tuneloop.trainer.micro_batch import MicroBatch
from tuneloop.trainer.models.offloading import MovedTensors
from tuneloop.trainer.models.room import room_for_weights
from tuneloop.trainer.monitoring.monitors import FiniteSteps, Monitors, Rejections, StepSpans
from tuneloop.trainer.parallel import Ranks
from tuneloop.trainer.stop import Stop
from tuneloop.trainer.teacher.teacher import TeacherRetries

_log = structlog.get_logger()

#: The run of the curves, of other policies with their name.
RUN = "trainer"

#: What is got at once of pinned memory for an adapter with its optimizer.
_CHUNK = 1 << 26


class SharedParts(NamedTuple):
    """What all policies are trained with, under one epoch."""

    settings: Settings
    ledger: Ledger
    store: CheckpointStore
    publisher: Publisher
    spans: StepSpans
    turns: GpuTurns
    ranks: Ranks
    stop: Stop
    epoch: int


class PolicyTraining:
    """Of a policy that is in memory. `resume` makes its learner before anything else is asked of it."""

    learner: Learner
    curves: CurveWriter

    def __init__(self, policy: Policy, settings: Settings, parts: SharedParts) -> None:
        """`settings` are the policy's. Raises EnvironmentRefused for what they name and cannot be used."""
        self.policy, self.settings, self._parts = policy, settings, parts
        number, epoch = policy.id, parts.epoch
        self.ledger = ledger = parts.ledger.of_policy(number)
        self.monitors = Monitors(settings, ledger, number)
        self.micro_batch = MicroBatch(settings, parts.stop, take_gpu=parts.turns.begin)
        self.gate = GateEvaluation(settings, ledger, take_gpu=parts.turns.begin)
        self.finite, self.rejections = FiniteSteps(settings, ledger.alarms), Rejections(ledger, number)
        self.recomputation = Recomputation(settings, ledger, self.micro_batch)
        self.rows = LeasedRows(settings, ledger, self.recomputation, epoch=epoch, policy=number)
        self.steps = UnpublishedSteps(
            settings,
            ledger,
            parts.publisher,
            parts.spans,
            epoch=epoch,
            policy=number,
            in_foreground=self.gate.wanted,
        )
        self.teacher = TeacherRetries(settings, ledger.alarms, parts.stop)
        self._room = KeptRoom(chunk=_CHUNK)
        self._away: MovedTensors | None = None

    def resume(self, newest: Version, state: Path | None, network: PreTrainedModel | None = None) -> None:
        """Become the newest registered version, with the `state` that was found for it; `network` is the base model."""
        self._parts.turns.take()
        with room_for_weights():
            self.learner = snapshot.resume(
                self.settings,
                None if newest.is_base else newest.path,
                state,
                self._parts.ranks,
                begins=newest.begins,
                network=network,
            )
            self.learner.teacher = self.teacher.teacher
            self.learner.micro_batch_tokens = self.micro_batch.tokens
            self._parts.publisher.prepare(self.learner)
            snapshot.probe(self.learner, self.settings)  # What would refuse a publication does so before the work.
        self.steps.restart(newest.version)
        run = "-".join(filter(None, (RUN, self.policy.tenant, self.policy.name))) if self.policy.id else RUN
        self.curves = open_curves(self._parts.settings, run, after=self.learner.steps)
        self.curves.add(self.learner.steps, self.monitors.begin(self.learner))
        self._waiting_since = time.perf_counter()
        # By turns the GPU is the engine's while rows are awaited.
        self.is_cold = self.learner.actor.is_compiled and self.settings.cluster.gpu_turn is None
        self.committed_before = committed_stamp(self.settings.job_dir)
        self.gate.evaluate(self.learner, self.steps.parent)
        named = {"policy": self.policy.name} if self.policy.id else {}
        version, step = self.steps.parent, self.learner.steps
        _log.info("trainer_ready", version=version, step=step, epoch=self._parts.epoch, **named)

    def leave(self) -> None:
        """Let another policy train; of this one no step is unpublished."""
        self._parts.turns.begin(self.learner)
        if tensors := [each for each in self.learner.tensors() if each.is_cuda]:
            self._away = MovedTensors(tensors, self._room.empty())

    def come_back(self) -> None:
        """Train again. Raises EnvironmentRefused if the GPU has no room for it."""
        if self._away is not None:
            with room_for_weights():
                self._away.put_back()
        self._away, self._waiting_since = None, time.perf_counter()

    @property
    def is_stopped(self) -> bool:
        """Whether nothing more is to be learnt, until somebody has done something about it."""
        return self.rejections.are_too_many or self.finite.too_few

    def learn(self, batch: list[Sample]) -> bool:
        """Whether a step was made of the batch; if not, its rows are dropped, or wait for the teacher."""
        waited, started = time.perf_counter() - self._waiting_since, time.time_ns()
        drop, self.is_cold = partial(self.rows.drop, step=self.learner.steps), False
        try:
            labelled = self.teacher.label(batch)
            learnt = self.micro_batch.step(self.learner, labelled, version=self.steps.exact_version)
        except (TeacherAway, SamplesRefused) as error:
            self._parts.turns.end(self.learner)
            left = self.teacher.requeue(batch, error, drop=drop)
            self.rows.take_back(left, step=self.learner.steps)
            return False
        except NotFinite as error:
            drop(batch, f"the step was not finite: {error}")
            self.finite.note_failure(str(error), after=self.learner.steps)
            return False
        finally:
            self._waiting_since = time.perf_counter()
        self.steps.add(batch, learnt)
        self.teacher.succeeded()
        self.finite.note_success(self.learner.steps)
        buffer = self.settings.buffer
        size = buffer.group_size if buffer.group_by == "task" else 0
        learnt |= of_samples(batch, version=self.steps.parent, group_size=size) | {"time/batch_wait": waited}
        learnt |= self.recomputation.take_figures()
        learnt |= self.monitors.after_step(self.learner, learnt, version=self.steps.parent, replies=batch)
        self._waiting_since = time.perf_counter()
        self.curves.add(self.learner.steps, learnt)
        step, version = self.learner.steps, self.steps.parent
        if learnt.get("critic/advantages/zero") == 1:
            reason = "every advantage of the batch is 0, or its token masked"
            _log.warning("nothing_to_learn", step=step, reason=reason)
        seconds = round(learnt["time/train_step"], 3)
        _log.info("step", step=step, version=version, reward=learnt["critic/rewards/mean"], seconds=seconds)
        self._parts.spans.send_step(step, batch, started=started)
        return True

    def begin_publication(self) -> None:
        """Publish all steps; where that is done behind the next ones, begin to."""
        self._parts.turns.begin(self.learner)
        self.steps.begin(self.learner, self.curves)

    def note_published(self) -> None:
        """The seconds until the next batch count from now."""
        self._waiting_since = time.perf_counter()
