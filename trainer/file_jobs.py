"""Trains fine-tuning jobs on files: turns their lines into rows, epoch by epoch.

Each epoch shuffles the lines by the job's seed. Lines are rendered in portions whenever less than a batch waits, which
bounds memory, and an epoch starts when all rows of the previous one are in a version. `rows_taken`, written with the
rows, counts the lines of all epochs, and is where a trainer resumes.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count, islice

import msgspec
import numpy as np
import numpy.typing as npt
import structlog
import torch

from tuneloop.shared.errors import FileRefused
from tuneloop.shared.experience import Exchange, Sample, VersionState
from tuneloop.shared.finetuning.lines import LineIndex, read_lines
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.files import FILES
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import Job, Policy
from tuneloop.shared.ledger.training.file_rows import ENDPOINT, FileChunk, FileRow
from tuneloop.shared.ledger.training.training import WaitingRows
from tuneloop.shared.privacy.redactor import Redactor
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.rendered_lines import LineSkipped, answers_in, held_out, render
from tuneloop.trainer.learner import held_out_loss
from tuneloop.trainer.policies import PolicyTraining

_log = structlog.get_logger()

_BATCHES, _LINES, _BYTES = 4, 64, 16 << 20  # batches per portion, its fewest lines, and its most bytes (or one line)
_NAMED = 20  # line numbers named in a warning
_SCORED = 64  # rows of a validation file scored at once
_LOOKED_THROUGH = 100  # newest events searched for the last reported step


class FileJobs:
    """The jobs of one trainer's epoch. Raises the ledger's errors."""

    def __init__(
        self, settings: Settings, ledger: Ledger, settings_of: Callable[[Policy], Settings | None], epoch: int
    ) -> None:
        self._settings, self._ledger, self._settings_of, self._epoch = settings, ledger, settings_of, epoch
        self._indexes: dict[str, LineIndex] = {}
        self._orders: dict[str, tuple[int, npt.NDArray[np.int64]]] = {}
        self._noted: dict[str, int] = {}
        self._redactor: Redactor | None = None

    def feed(self, waiting: Sequence[WaitingRows], now: PolicyTraining) -> bool:
        """Add rows for jobs that need them, and end finished or stopped jobs; whether any changed."""
        changed = False
        for each in waiting:
            chosen = self._settings_of(each.policy) if each.job else None
            if each.job is None or chosen is None:
                continue
            job = self._ledger.jobs.get(each.job)
            if now.policy.id == job.policy and now.is_stopped:
                reasons = [one.reason for one in self._ledger.alarms.all() if one.policy == job.policy]
                reasons += self._ledger.file_rows.count_dropped(job.policy)
                self._fail(job, reasons[0] if reasons else "its steps were not finite")
                now.rows.release()
                changed = True
                continue
            try:
                changed |= self._advance(job, each, chosen)
            except (FileRefused, OSError) as error:
                reason = str(error) if isinstance(error, FileRefused) else f"its file cannot be read: {error.strerror}"
                self._fail(job, reason, code="invalid_file")
                changed = True
        return changed

    def _advance(self, job: Job, waiting: WaitingRows, chosen: Settings) -> bool:
        """Add lines of a job if it needs some, or end it; whether anything changed."""
        if job.training_file not in self._indexes:
            self._indexes[job.training_file] = LineIndex.of(self._settings.job_dir / FILES / job.training_file)
        index, size = self._indexes[job.training_file], chosen.buffer.train_batch_size
        in_all = index.lines * int(job.hyperparameters["n_epochs"])
        if not index.lines:
            raise FileRefused("its file is empty")
        if in_all != job.rows_in_all:
            self._ledger.file_rows.count_lines(self._epoch, job, in_all)
        if job.rows_taken and job.rows_taken % index.lines == 0 and self._ledger.file_rows.are_left(job.policy):
            return job.state == "queued" and self._ledger.file_rows.take(self._epoch, job, _nothing(job))
        if job.rows_taken >= in_all:
            self._end(job)
            return True
        rows, changed = waiting.rows, False
        while rows < size:
            taken = self._portion(job, index, chosen, most=max(_LINES, _BATCHES * size))
            if not self._ledger.file_rows.take(self._epoch, job, taken):
                break
            changed, rows = True, rows + sum(len(each.rewards) for each in taken.rows)
            job = msgspec.structs.replace(job, rows_taken=taken.after)
            if taken.after % index.lines == 0:
                break
        if not changed and job.state == "queued":
            changed = self._ledger.file_rows.take(self._epoch, job, _nothing(job))
        return changed

    def _portion(self, job: Job, index: LineIndex, chosen: Settings, *, most: int) -> FileChunk:
        """The next lines of the epoch, rendered. Unusable lines are skipped, and reported in the first epoch."""
        epoch, begin = divmod(job.rows_taken, index.lines)
        if self._orders.get(job.id, (-1,))[0] != epoch:
            shuffled = np.random.default_rng([job.seed % (1 << 63), epoch]).permutation(index.lines)
            self._orders[job.id] = epoch, shuffled
        order = self._orders[job.id][1][begin : begin + most]
        sizes = (index.places[order + 1] - index.places[order]).cumsum()
        order = order[: max(1, int(np.searchsorted(sizes, _BYTES, side="right")))]
        rows: list[FileRow] = []
        tokens, left_out = 0, defaultdict[str, list[int]](list)
        for line in index.read(order.tolist(), job.method):
            try:
                learnt = [(each, render(each, line.tools, chosen)) for each in answers_in(line)]
            except LineSkipped as error:
                left_out[re.sub(r"\d+ tokens", "more tokens", str(error))].append(line.number)
                continue
            for at, (each, answers) in enumerate(learnt):
                request = {"messages": each.messages} | ({"tools": line.tools} if line.tools else {})
                name = f"{job.training_file}:{line.number}:{job.id}:{epoch}" + (f":{at}" if at else "")
                # A conversation's answers become one sequence if their prompts extend each other.
                in_run = job.method == "supervised"
                exchange = Exchange(
                    msg_id=name,
                    tenant=job.tenant,
                    endpoint=ENDPOINT,
                    request=msgspec.json.encode(request),
                    received_at=0.0,
                    latency_s=0.0,
                    experiences=tuple(answers),
                    task_id=f"{job.training_file}:{line.number}" if in_run else None,
                    run_id=f"{job.id}:{epoch}" if in_run else None,
                    policy=job.policy,
                )
                tokens += sum(len(one.prompt_ids) + len(one.completion_ids) for one in answers) // 4
                rows.append(FileRow(exchange, each.rewards))
        if self._redactor is None:
            self._redactor = Redactor.open(self._settings, load_key(self._settings.job_dir / KEY))
        if self._redactor:
            rows = [each._replace(exchange=self._redactor.exchange(each.exchange)) for each in rows]
        warnings = [
            f"{len(numbers)} lines are skipped, {reason}: {', '.join(map(str, sorted(numbers)[:_NAMED]))}"
            + (" and more" if len(numbers) > _NAMED else "")
            for reason, numbers in left_out.items()
            if epoch == 0
        ]
        return FileChunk(job.rows_taken, job.rows_taken + len(order), rows, tokens, warnings)

    def _end(self, job: Job) -> None:
        line = self._ledger.versions.of(job.policy).now().versions
        ended = [each for each in line if each.state in {VersionState.REJECTED, VersionState.ROLLED_BACK}]
        newest = self._ledger.versions.of(job.policy).newest()
        dropped = self._ledger.file_rows.count_dropped(job.policy)
        if ended:
            reason = self._ledger.versions.events(ended[-1].version)[-1].reason
            return self._fail(job, f"version {ended[-1].version} of it was {ended[-1].state}: {reason}")
        if not newest.consumed:
            why = next(iter(dropped), None) or next(
                (each.message for each in self._ledger.jobs.events(job.id) if each.level == "warn"), "it has no answers"
            )
            return self._fail(job, f"no line of the file can be learnt: {why}", code="invalid_file")
        for reason, rows in dropped.items():
            self._ledger.jobs.note(job.id, f"{rows} rows were not learnt: {reason}", level="warn")
        message = "The job has successfully completed"
        self._ledger.file_rows.complete(
            self._epoch, job, message, version=newest.version, total_steps=newest.step, rows_taken=job.rows_taken
        )
        self._forget(job)
        _log.info("job_succeeded", job=job.id, version=newest.version, steps=newest.step)

    def _fail(self, job: Job, reason: str, *, code: str = "training_failed") -> None:
        self._ledger.file_rows.fail(self._epoch, job, reason, code=code)
        self._forget(job)
        _log.error("job_failed", job=job.id, reason=reason)

    def _forget(self, job: Job) -> None:
        self._indexes.pop(job.training_file, None)
        self._orders.pop(job.id, None)
        self._noted.pop(job.id, None)

    def note_start(self, now: PolicyTraining) -> None:
        if now.job is not None and not now.learner.steps and self._last_noted(now.job) < 0:
            if (loss := self._validation_loss(now.job, now)) is not None:
                self._note(now.job, f"Before the first step: full validation loss={loss:.4g}", 0, full_valid_loss=loss)
            self._noted[now.job.id] = 0

    def note_step(self, now: PolicyTraining) -> None:
        job, step, learnt = now.job, now.learner.steps, now.learnt
        if job is None or step <= self._last_noted(job):
            return
        loss = learnt["actor/dpo_loss" if job.method == "dpo" else "actor/sft_loss"]
        more = {"train_accuracy": learnt["rewards/accuracies"]} if job.method == "dpo" else {}
        self._note(
            job, f"Step {step}/{max(step, job.total_steps)}: training loss={loss:.4g}", step, train_loss=loss, **more
        )
        self._noted[job.id] = step

    def note_version(self, now: PolicyTraining) -> None:
        if (job := now.job) is None:
            return
        message = f"Checkpoint created at step {now.learner.steps}: version {now.steps.parent}"
        if (loss := self._validation_loss(job, now)) is None:
            self._ledger.jobs.note(job.id, message)
        else:
            self._note(job, f"{message}, full validation loss={loss:.4g}", now.learner.steps, full_valid_loss=loss)

    def _note(self, job: Job, message: str, step: int, **figures: float) -> None:
        self._ledger.jobs.note(job.id, message, data={"step": step} | figures)

    def _last_noted(self, job: Job) -> int:
        """The last reported step; -1 before the first."""
        if job.id not in self._noted:
            events = self._ledger.jobs.events(job.id, limit=_LOOKED_THROUGH)
            steps = (
                each.data["step"] for each in events if each.data and each.data.keys() != {"step", "full_valid_loss"}
            )
            self._noted[job.id] = max(steps, default=0 if any(each.data for each in events) else -1)
        return self._noted[job.id]

    def _validation_loss(self, job: Job, now: PolicyTraining) -> float | None:
        """The method's loss on the validation file; None without one, or if unreadable."""
        if job.validation_file is None:
            return None

        def rows() -> Iterator[Sample]:  # pairs are adjacent
            numbers, file = count(), self._settings.job_dir / FILES / str(job.validation_file)
            for line in read_lines(file, job.method):
                for learnt in answers_in(line):
                    with suppress(LineSkipped):
                        yield from (held_out(each, next(numbers)) for each in render(learnt, line.tools, now.settings))

        total, weight = 0.0, 0
        try:
            now.micro_batch.prepare(now.learner)
            now.learner.micro_batch_tokens = now.micro_batch.tokens
            samples = rows()
            while some := list(islice(samples, _SCORED)):
                loss, learnt = held_out_loss(now.learner, some)
                total, weight = total + loss * learnt, weight + learnt
        except (FileRefused, OSError, torch.OutOfMemoryError) as error:
            _log.warning("validation_loss_failed", job=job.id, reason=str(error))
            return None
        return total / weight if weight else None


def _nothing(job: Job) -> FileChunk:
    return FileChunk(job.rows_taken, job.rows_taken)
