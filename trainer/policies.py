"""Trains policies: their order, their settings and state, leased rows, unpublished steps, and the policies in memory.

Policies share the base model, the publisher and the GPU, and train one at a time. The others' tensors wait in main
memory and return to the GPU as the same objects, so that compiled code and optimizers stay valid.
"""

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog
import torch
from transformers import PreTrainedModel

from tuneloop.shared.capacity.memory import POLICIES_IN_MEMORY
from tuneloop.shared.checkpoints import ACTOR, CheckpointStore, check_files, read_manifest
from tuneloop.shared.errors import (
    CheckpointRejected,
    EnvironmentRefused,
    LeaseLost,
    LedgerError,
    LedgerUnavailable,
    NotFinite,
    ParentEnded,
    PolicyRefused,
    SamplesRefused,
    SettingsError,
    TeacherAway,
    TuneloopError,
)
from tuneloop.shared.experience import PolicyState, Sample
from tuneloop.shared.job_marks import committed_stamp
from tuneloop.shared.ledger.ledger import Alarm, BatchRules, Ledger, Version
from tuneloop.shared.ledger.policies import DEFAULT, Job, Policy
from tuneloop.shared.ledger.training.training import WaitingRows
from tuneloop.shared.ledger.versions.versions import SERVABLE
from tuneloop.shared.operations.diagnosis import Code
from tuneloop.shared.settings.policies import settings_of_policy
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry.trackers import CurveWriter, open_curves
from tuneloop.trainer.batches.batch import Metrics, of_samples
from tuneloop.trainer.batches.rendered_lines import MixedFile, with_token_ids
from tuneloop.trainer.batches.selection import Refused, comparable
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.copies import PinnedBuffers
from tuneloop.trainer.checkpoints.publication import Publisher
from tuneloop.trainer.checkpoints.recomputation import Recomputation
from tuneloop.trainer.checkpoints.resumption import find_state, require_weights
from tuneloop.trainer.evaluation.evaluation import GateEvaluation
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.micro_batch import MicroBatch
from tuneloop.trainer.models.model import room_for_weights
from tuneloop.trainer.models.offloading import MovedTensors
from tuneloop.trainer.monitoring.monitors import FiniteSteps, Monitors, PaceLog, Rejections, StepSpans
from tuneloop.trainer.parallel import Ranks
from tuneloop.trainer.stop import Stop
from tuneloop.trainer.teacher.teacher import TeacherRetries

_log = structlog.get_logger()


class PolicyTurns:
    """Orders policies by versions: in a round, each with a batch makes one, the longest waiting row first."""

    def __init__(self) -> None:
        self._had: list[int] = []  # policies that made a version in this round, the last one last

    def order(self, ready: Collection[WaitingRows]) -> list[int]:
        """Policy numbers by precedence; a new round does not start with the last policy."""

        def place(each: WaitingRows) -> tuple[bool, bool, float, int]:
            number = each.policy.id
            return number in self._had, number in self._had[-1:], -each.seconds, number

        return [each.policy.id for each in sorted(ready, key=place)]

    def note(self, policy: int) -> None:
        self._had = [policy] if policy in self._had else [*self._had, policy]


class UnpublishedSteps:
    """Steps after the registered version `parent`. The first ones may be in the version being published."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        publisher: Publisher,
        spans: StepSpans,
        *,
        epoch: int,
        policy: int = 0,
        in_foreground: bool = False,
    ) -> None:
        self._settings, self._publisher, self._spans, self._epoch = settings, publisher, spans, epoch
        self._policy, self._in_foreground = policy, in_foreground
        self._pace = PaceLog(settings, ledger, policy)
        self._ids: list[int] = []
        self.parent = self.count = 0
        self._found_no_room = False

    @property
    def exact_version(self) -> int | None:
        """The learner's version; None after a further step."""
        return None if self.count else self.parent

    def restart(self, parent: int) -> None:
        """The learner was loaded as version `parent`."""
        self.parent, self.count, self._found_no_room = parent, 0, False
        self._ids.clear()
        self._spans.forget()

    def add(self, batch: Sequence[Sample], learnt: Metrics) -> None:
        self._ids += [sample.id for sample in batch]
        self.count += 1
        self._pace.add_step(learnt["time/train_step"])

    def are_all_made(self, learner: Learner) -> bool:
        total = self._settings.trainer.total_steps
        return total is not None and learner.steps >= total

    def are_due(self, learner: Learner) -> bool:
        """Whether to publish now; never during another publication."""
        is_enough = self.count >= self._settings.trainer.save_interval or self.are_all_made(learner)
        return self._publisher.steps_begun == 0 and self.count > 0 and is_enough

    @property
    def wait_for_room(self) -> bool:
        """Whether the last publication found the disk full and the next one is running: no step is made meanwhile."""
        return self._found_no_room and self._publisher.steps_begun > 0

    def begin(self, learner: Learner, curves: CurveWriter) -> None:
        """Start to publish all steps."""
        self._publisher.states.report(curves)
        self._publisher.begin(
            learner,
            self._ids,
            steps=self.count,
            parent=self.parent,
            policy=self._policy,
            in_foreground=self._in_foreground,
        )

    def end(self, learner: Learner, curves: CurveWriter) -> bool:
        """Whether a version was registered; the disk may have been full. Raises Publisher.end's errors."""
        ended = self._publisher.end(learner)
        self._found_no_room = ended.version is None
        if ended.version is None:
            return False
        self.parent = ended.version
        self.count -= ended.steps
        del self._ids[: ended.experiences]
        self._spans.send_version(ended.version, step=ended.step, steps=ended.steps, started=ended.began_ns)
        curves.add(ended.step, ended.measured)
        self._pace.end_version(self._epoch, ended.experiences, publish_s=ended.measured["time/save_checkpoint"])
        return True

    def wait_for_publication(self, learner: Learner, curves: CurveWriter) -> None:
        """Wait for the publication and the state under way; the ledger has the result."""
        self._publisher.wait()
        if self._publisher.is_over:
            with suppress(LedgerUnavailable, LeaseLost, ParentEnded):
                self.end(learner, curves)
        self._publisher.states.join()


class LeasedRows:
    """A policy's leased rows in one epoch. Unusable rows are dropped with their reason, and replaced."""

    def __init__(
        self, settings: Settings, ledger: Ledger, recomputation: Recomputation, *, epoch: int, policy: int = 0
    ) -> None:
        self._settings, self._training, self._epoch, self._files = settings, ledger.training, epoch, ledger.file_rows
        self._rules, self._recomputation = BatchRules.of(settings, policy), recomputation
        self.ahead: list[Sample] = []  # rows leased before the learner was loaded
        self.held: list[Sample] = []  # rows in no batch yet

    def next_batch(self, learner: Learner, *, version: int | None) -> list[Sample] | None:
        """A full batch of trainable rows, or a partial one after the batch timeout. `version` is the learner's."""
        size, timeout = self._settings.buffer.train_batch_size, self._settings.buffer.batch_timeout
        if len(self.held) < size:
            held = [sample.id for sample in self.held]
            leased = self.ahead or self._training.lease(self._epoch, size, self._rules, held=held)
            self.ahead = []
            bare = [each.msg_id for each in leased if not len(each.completion_ids)]
            unwritten: Refused = {}
            if bare:  # imported as text
                leased, unwritten = with_token_ids(leased, self._files.find_texts(bare), self._settings)
            kept, refused = self._recomputation.select(leased, learner, version=version)
            self.held += kept
            for reason, samples in (refused | unwritten).items():
                self.drop(samples, reason, step=learner.steps)
        if len(self.held) < (size if timeout is None else 1):
            return None
        batch, self.held = self.held, []
        return batch

    def drop(self, samples: Sequence[Sample], reason: str, *, step: int) -> None:
        """Exclude rows from training for good."""
        self._training.drop(self._epoch, [sample.id for sample in samples], reason)
        _log.warning("experiences_dropped", count=len(samples), reason=reason, step=step)

    def keep_rest(self, samples: list[Sample], *, step: int) -> None:
        """Keep the rest of a batch of which some were dropped, without groups that have nothing to compare."""
        rules, algorithm = self._rules, self._settings.algorithm
        self.held, refused = comparable(samples, algorithm, group_by=rules.group_by, least_runs=rules.least_runs)
        for reason, others in refused.items():
            self.drop(others, reason, step=step)

    def release(self) -> None:
        """Return all leases of the epoch."""
        self._training.release(self._epoch)
        self.held, self.ahead = [], []


RUN = "trainer"  # the run of the curves; other policies append their name
_CHUNK = 1 << 26  # size of pinned memory allocated at once for an adapter with its optimizer


class SharedParts(NamedTuple):
    """What all policies share under one epoch."""

    settings: Settings
    ledger: Ledger
    store: CheckpointStore
    publisher: Publisher
    spans: StepSpans
    ranks: Ranks
    stop: Stop
    epoch: int


class PolicyTraining:
    """A policy in memory. Call `resume` first: it makes the learner."""

    learner: Learner
    curves: CurveWriter

    def __init__(self, policy: Policy, settings: Settings, parts: SharedParts, job: Job | None = None) -> None:
        """`job` takes the rows from a file. Raises EnvironmentRefused for unusable settings."""
        self.policy, self.settings, self._parts, self.job = policy, settings, parts, job
        self.learnt: Metrics = {}  # metrics of the last step
        number, epoch = policy.id, parts.epoch
        self.ledger = ledger = parts.ledger.of_policy(number)
        self.monitors = Monitors(settings, ledger, number)
        self.micro_batch = MicroBatch(settings, parts.stop)
        self.gate = GateEvaluation(settings, ledger)
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
            in_foreground=self.gate.wanted or job is not None,
        )
        self.teacher = TeacherRetries(settings, ledger.alarms, parts.stop)
        self._room = PinnedBuffers(chunk=_CHUNK)
        self._away: MovedTensors | None = None

    def resume(self, newest: Version, state: Path | None, network: PreTrainedModel | None = None) -> None:
        """Load the newest registered version with its `state`; `network` is the base model."""
        with room_for_weights():
            self.learner = snapshot.resume(
                self.settings,
                None if newest.is_base else newest.path,
                state,
                self._parts.ranks,
                begins=newest.begins,
                network=network,
            )
            if self.learner.reference is not None and (begun := self._find_start(newest)) is not None:
                self.learner.reference = snapshot.actor_in(self.settings, begun, network=self.learner.actor.base())
                self.learner.reference.network.requires_grad_(requires_grad=False)
                self.learner.reference_is_base = False
            self.learner.mixed = MixedFile.of(self.settings) if self.policy.id == DEFAULT else None
            self.learner.teacher = self.teacher.teacher
            self.learner.micro_batch_tokens = self.micro_batch.tokens
            self._parts.publisher.prepare(self.learner)
            snapshot.probe(self.learner, self.settings)  # fails now instead of at the first publication
        self.steps.restart(newest.version)
        run = "-".join(filter(None, (RUN, self.policy.tenant, self.policy.name))) if self.policy.id else RUN
        self.curves = open_curves(self._parts.settings, run, after=self.learner.steps)
        if self.job is None:
            self.curves.add(self.learner.steps, self.monitors.begin(self.learner))
        self._waiting_since = time.perf_counter()
        self.is_cold = self.learner.actor.is_compiled
        self.committed_before = committed_stamp(self.settings.job_dir)
        self.gate.evaluate(self.learner, self.steps.parent)
        named = {"policy": self.policy.name} if self.policy.id else {}
        version, step = self.steps.parent, self.learner.steps
        _log.info("trainer_ready", version=version, step=step, epoch=self._parts.epoch, **named)

    def _find_start(self, newest: Version) -> Path | None:
        """The weights of the KL penalty: the newest that the policy started from; None: the base model's."""
        line = [each for each in self.ledger.versions.now().versions if each.version <= newest.version]
        came = [each for each in line if not each.consumed and each.state in SERVABLE]
        if not came or came[-1].is_base or not self.settings.model.lora.rank:
            return None
        start, why = came[-1], "several workers hold one model for it"
        if self._parts.ranks.size == 1:
            try:
                check_files(start.path, read_manifest(start.path, sha256=start.manifest_sha256), folder=ACTOR)
                return start.path / ACTOR
            except (CheckpointRejected, OSError) as error:
                why = f"the weights of version {start.version} cannot be read: {error}"
        _log.warning("kl_to_base", sentence=f"the divergence is measured from the base model: {why}")
        return None

    def release_gpu(self) -> None:
        """Release the GPU for another policy; no step may be unpublished."""
        if tensors := [each for each in self.learner.tensors() if each.is_cuda]:
            self._away = MovedTensors(tensors, self._room.empty())

    def return_to_gpu(self) -> None:
        """Return to the GPU. Raises EnvironmentRefused without memory."""
        if self._away is not None:
            try:
                self._away.put_back()
            except torch.OutOfMemoryError:
                with room_for_weights():  # collects garbage, which takes a second
                    self._away.put_back()
        self._away, self._waiting_since = None, time.perf_counter()

    @property
    def is_stopped(self) -> bool:
        """Whether training has stopped until a person acts."""
        return self.rejections.are_too_many or self.finite.too_few

    def learn(self, batch: list[Sample]) -> bool:
        """Whether the batch made a step; otherwise its rows are dropped, or wait for the teacher."""
        waited, started = time.perf_counter() - self._waiting_since, time.time_ns()
        drop, self.is_cold = partial(self.rows.drop, step=self.learner.steps), False
        try:
            labelled = self.teacher.label(batch)
            learnt = self.micro_batch.step(self.learner, labelled, version=self.steps.exact_version)
        except (TeacherAway, SamplesRefused) as error:
            self.rows.keep_rest(self.teacher.requeue(batch, error, drop=drop), step=self.learner.steps)
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
        if self.job is None:  # a job's drift is intended
            learnt |= self.monitors.after_step(self.learner, learnt, version=self.steps.parent, replies=batch)
        self.learnt = learnt
        self._waiting_since = time.perf_counter()
        self.curves.add(self.learner.steps, learnt)
        step, version = self.learner.steps, self.steps.parent
        if learnt.get("critic/advantages/zero") == 1:
            _log.warning("nothing_to_learn", step=step, reason="all advantages of the batch are 0 or masked")
        seconds = round(learnt["time/train_step"], 3)
        _log.info("step", step=step, version=version, reward=learnt["critic/rewards/mean"], seconds=seconds)
        self._parts.spans.send_step(step, batch, started=started)
        return True

    def note_published(self) -> None:
        """Restart the measurement of the wait for a batch."""
        self._waiting_since = time.perf_counter()


class PoliciesInMemory:
    """The policies that trained last; the current one is the last.

    Others resume from their newest version, which has all that they learnt. A policy that cannot be trained is paused
    with an alarm, and the default policy trains.
    """

    def __init__(self, parts: SharedParts) -> None:
        self._parts, self._settings, self._ledger = parts, parts.settings, parts.ledger
        #: The shared base model below adapters; None if all weights are trained.
        self._base: PreTrainedModel | None = None
        self._in_memory: dict[int, PolicyTraining] = {}  # policies in memory by number, the last trained one last
        self._chosen: dict[int, tuple[Policy, Settings]] = {}  # policies with their settings
        self.enter(self._ledger.policies.get(DEFAULT))

    @property
    def now(self) -> PolicyTraining:
        """The current policy."""
        return next(reversed(self._in_memory.values()))

    def all(self) -> list[PolicyTraining]:
        """The policies in memory, the current one last."""
        return list(self._in_memory.values())

    @property
    def largest_batch(self) -> int:
        """Rows of the largest batch of known policies."""
        sizes = [own.buffer.train_batch_size for _, own in self._chosen.values()]
        return max(self._settings.buffer.train_batch_size, *sizes, 0)

    def settings_of(self, policy: Policy) -> Settings | None:
        """A policy's settings; None if they are refused, which pauses it."""
        if policy.id == DEFAULT:
            return self._settings
        known = self._chosen.get(policy.id)
        if known is None or known[0].settings != policy.settings:
            try:
                known = self._chosen[policy.id] = policy, settings_of_policy(self._settings, policy.settings)
            except PolicyRefused as error:
                self._refuse(policy, error)
                return None
        return known[1]

    def has_steps_left(self, policy: Policy) -> bool:
        chosen, there = self.settings_of(policy), self._in_memory.get(policy.id)
        if chosen is None:
            return False
        total = chosen.trainer.total_steps
        return (
            total is None
            or (there.learner.steps if there else self._ledger.versions.of(policy.id).newest().step) < total
        )

    def may_learn(self, policy: Policy) -> bool:
        there = self._in_memory.get(policy.id)
        is_stopped = there is not None and there.is_stopped
        return policy.state is PolicyState.ACTIVE and not is_stopped and self.has_steps_left(policy)

    def enter(self, policy: Policy) -> bool:
        """Switch to a policy at its newest version, or to the default policy if it cannot be trained."""
        there = self._in_memory.get(policy.id)
        if there is not None and there.policy.settings != policy.settings and self._is_on_disk(there):
            there = None
        try:
            if there is None:
                there = self._open(policy)
            else:
                there.return_to_gpu()
        except (PolicyRefused, SettingsError, EnvironmentRefused) as error:
            self._pause_and_leave(policy, error)
            return False
        except LedgerError:
            if self._in_memory:
                self.now.return_to_gpu()
            raise
        self._in_memory.pop(policy.id, None)
        self._in_memory[policy.id] = there
        for each in list(self._in_memory.values())[:-POLICIES_IN_MEMORY]:
            if self._is_on_disk(each):
                del self._in_memory[each.policy.id]
        return True

    def forget(self, there: PolicyTraining) -> None:
        """Drop a deleted policy with its unpublished steps."""
        _log.info("policy_forgotten", policy=there.policy.name, steps=there.steps.count)
        is_now = there is self.now
        if is_now:
            there.steps.wait_for_publication(there.learner, there.curves)
            there.rows.release()
        self._parts.publisher.states.settle(there.curves, policy=there.policy.id)
        there.curves.close()
        del self._in_memory[there.policy.id]
        if is_now:
            self.enter(self._ledger.policies.get(DEFAULT))

    def renew(self, newest: Version) -> None:
        """Reload the current policy from its newest registered version."""
        now = self.now
        try:
            state = _state_of(newest, now.ledger, self._parts.store)
            self._parts.publisher.states.settle(now.curves, policy=now.policy.id)
            now.curves.close()
            del now.learner  # a GPU has no room for two
            now.resume(newest, state, self._base)
        except EnvironmentRefused as error:
            self._pause_and_leave(now.policy, error)

    def _is_on_disk(self, there: PolicyTraining) -> bool:
        """Whether a policy's newest version has all that it learnt, so that it may leave memory."""
        written = self._parts.publisher.states.finish(there.learner, there.steps.parent, there.curves)
        if written:
            there.curves.close()
        return written

    def _open(self, policy: Policy) -> PolicyTraining:
        chosen = self.settings_of(policy)
        if chosen is None:
            raise PolicyRefused("its options are refused")
        if policy.id != DEFAULT and self._parts.ranks.size > 1:
            raise PolicyRefused("trainer.workers: one worker trains several policies, and there are more")
        if policy.id != DEFAULT and not (self._settings.model.lora.rank and chosen.model.lora.rank):
            raise PolicyRefused("model.lora.rank: is 0, and an engine holds one set of weights, but several adapters")
        job = None if policy.id == DEFAULT else self._ledger.file_rows.of_policy(policy.id)
        of_file = job if job is not None and job.method != "reinforcement" else None
        opened = PolicyTraining(policy, chosen, self._parts, of_file)
        newest = opened.ledger.versions.newest()
        opened.resume(newest, _state_of(newest, opened.ledger, self._parts.store), self._base)
        if self._parts.ranks.size == 1 and self._base is None:
            self._base = opened.learner.actor.base()
        return opened

    def _pause_and_leave(self, policy: Policy, error: TuneloopError) -> None:
        """Pause a policy that cannot be trained, and switch to the default policy."""
        if policy.id == DEFAULT:
            raise error
        self._refuse(policy, error)
        self._in_memory.pop(policy.id, None)
        self.enter(self._ledger.policies.get(DEFAULT))

    def _refuse(self, policy: Policy, error: TuneloopError) -> None:
        """Pause a policy that cannot be trained."""
        if policy.state is PolicyState.ACTIVE:
            reason = f"the policy {policy.name} is paused because it cannot be trained: {error}"
            if (job := self._ledger.file_rows.of_policy(policy.id)) is not None:
                self._ledger.file_rows.fail(self._parts.epoch, job, str(error), code="policy_refused")
                _log.error("job_failed", job=job.id, reason=str(error))
                return
            self._ledger.policies.pause(policy.id)
            self._ledger.alarms.raise_alarm(Alarm(Code.POLICY_REFUSED, reason, policy=policy.id))
            _log.error("policy_refused", policy=policy.name, reason=str(error))


def _state_of(newest: Version, ledger: Ledger, store: CheckpointStore) -> Path | None:
    """The folder to resume a version from, after verifying its weights."""
    if newest.is_base:
        return None
    require_weights(newest, store)
    return find_state(newest, ledger.versions, store)
