"""Checks the lines of the files of new fine-tuning jobs, which are queued or fail by that.

The explorer that decides for all does it. Jobs that wait are found in the ledger, so that a restart loses none.
"""

import asyncio
from contextlib import suppress
from pathlib import Path

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.errors import FileRefused, JobRefused, LedgerUnavailable, PolicyRefused
from tuneloop.shared.experience import JobState
from tuneloop.shared.finetuning.job_plan import plan_job
from tuneloop.shared.finetuning.lines import check_file
from tuneloop.shared.job_marks import touch_committed
from tuneloop.shared.ledger.files import FILES, StoredFile
from tuneloop.shared.ledger.jobs import Job
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: How often it is looked for new jobs, at most, in seconds.
_LOOK_S = 1.0

#: The mistakes of a file that a job's error names.
_MISTAKES = 5


class _CheckFailed(Exception):
    """A file of a job cannot be learnt from: its field, and the reason."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


class LineChecks:
    """Looks for jobs in `validating_files`, and checks their files, one at a time: the smallest first."""

    def __init__(self, settings: Settings, ledger: Ledger, *, metrics: Metrics) -> None:
        self._settings, self._ledger, self._metrics = settings, ledger, metrics

    async def run(self) -> None:
        """Check files for ever."""
        interval_s = min(self._settings.explorer.service_status_check_interval, _LOOK_S)
        await every(interval_s, self.turn, task="fine_tuning_files", metrics=self._metrics)

    async def turn(self) -> None:
        """Check the files of the jobs that there are now."""
        waiting = await asyncio.to_thread(self._ledger.jobs.open, (JobState.VALIDATING,))
        if not waiting:
            return
        files = {job.id: await asyncio.to_thread(self._ledger.files.find, job.training_file) for job in waiting}

        def size(job: Job) -> int:
            return file.bytes if (file := files[job.id]) is not None else 0

        for job in sorted(waiting, key=size):
            # Another explorer may decide by now; what two have checked is decided by the first.
            if await asyncio.to_thread(self._ledger.explorers.lead, self._settings.explorer_name) is None:
                return
            try:
                await asyncio.to_thread(self.check, job)
            except LedgerUnavailable:
                raise
            except JobRefused as error:  # it was cancelled meanwhile
                log.info("fine_tuning_job_not_checked", job=job.id, reason=str(error))
            except Exception:
                log.exception("fine_tuning_job_not_checked", job=job.id)
                bug = {"code": "server_error", "message": _BUG, "param": None}
                with suppress(JobRefused):
                    await asyncio.to_thread(self._fail, job, bug)

    def check(self, job: Job) -> None:
        """Check the files of a job: it is queued, or fails. Raises JobRefused where it is over by then."""
        try:
            lines = self._lines_of(job, "training_file", job.training_file)
            if job.validation_file is not None:
                self._lines_of(job, "validation_file", job.validation_file)
            # The plan was made for lines that were only counted; it gives the same answer for as many.
            plan = plan_job(self._settings, job.method, job.hyperparameters, lines=lines, seed=job.seed)
        except _CheckFailed as error:
            code = f"invalid_{error.field}"
            self._fail(job, {"code": code, "message": str(error), "param": error.field})
            return
        except (JobRefused, PolicyRefused) as error:
            self._fail(job, {"code": "invalid_value", "message": str(error), "param": "method"})
            return
        self._ledger.jobs.change(
            job.id,
            JobState.QUEUED,
            f"Files validated ({lines} lines); the job is queued",
            options=plan.options,
            hyperparameters=plan.hyperparameters,
            rows_in_all=plan.rows_in_all,
            total_steps=plan.total_steps,
        )
        with suppress(OSError):
            touch_committed(self._settings.job_dir)  # the trainer looks now
        log.info("fine_tuning_job_queued", job=job.id, lines=lines)

    def _lines_of(self, job: Job, field: str, file_id: str) -> int:
        """How many lines a file has, all of them right. Raises _CheckFailed."""
        stored: StoredFile | None = self._ledger.files.find(file_id)
        if stored is None:
            raise _CheckFailed(field, f"{file_id} was deleted before its lines were checked")
        path: Path = self._settings.job_dir / FILES / file_id
        try:
            found = check_file(path, job.method)
        except OSError as error:
            raise _CheckFailed(field, f"{file_id} cannot be read: {error.strerror}") from None
        except FileRefused as error:
            raise _CheckFailed(field, f"{file_id}: {error}") from None
        if found.mistakes:
            told = [f"line {number}: {message}" for number, message in found.mistakes[:_MISTAKES]]
            more = len(found.mistakes) - len(told)
            raise _CheckFailed(field, "; ".join([*told, *([f"and {more} more, at least"] if more > 0 else [])]))
        if not found.lines:
            raise _CheckFailed(field, f"{file_id} has no lines")
        return found.lines

    def _fail(self, job: Job, error: dict[str, str | None]) -> None:
        self._ledger.jobs.change(job.id, JobState.FAILED, f"The job failed: {error['message']}", error=error)
        log.warning("fine_tuning_job_failed", job=job.id, code=error["code"])


_BUG = "an internal error while the files were checked; it has been logged"
