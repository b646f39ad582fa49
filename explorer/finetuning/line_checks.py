"""Checks the lines of the files of new fine-tuning jobs, which are queued or fail by that.

The explorer that decides for all does it. Jobs that wait are found in the ledger, so that a restart loses none.
"""

import asyncio
from contextlib import suppress

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.errors import FileRefused, JobRefused, LedgerUnavailable
from tuneloop.shared.experience import JobState
from tuneloop.shared.finetuning.job_plan import plan_job
from tuneloop.shared.finetuning.lines import check_file
from tuneloop.shared.job_marks import touch_committed
from tuneloop.shared.ledger.files import FILES
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import Job
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: How often it is looked for new jobs, at most, in seconds.
_LOOK_S = 1.0

#: The mistakes of a file that a job's error names.
_MISTAKES = 5


_BUG = "an internal error while the files were checked; it has been logged"


class LineChecks:
    """Looks for jobs in `validating_files`, and checks their files, one at a time: the smallest first."""

    def __init__(self, settings: Settings, ledger: Ledger, *, metrics: Metrics) -> None:
        self._settings, self._ledger, self._metrics = settings, ledger, metrics

    async def run(self) -> None:
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
        lines = 0
        for field in ("validation_file", "training_file"):
            if (file_id := getattr(job, field)) is not None:
                lines, wrong = self._look_at(file_id, job.method)
                if wrong:
                    return self._fail(job, {"code": f"invalid_{field}", "message": wrong, "param": field})
        try:  # the plan was made for lines that were only counted: for as many it is the same
            plan = plan_job(self._settings, job.method, job.hyperparameters, lines=lines, seed=job.seed)
        except JobRefused as error:
            return self._fail(job, {"code": "invalid_value", "message": str(error), "param": "method"})
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

    def _look_at(self, file_id: str, method: str) -> tuple[int, str]:
        """How many lines a file has, and what is wrong with it."""
        if self._ledger.files.find(file_id) is None:
            return 0, f"{file_id} was deleted before its lines were checked"
        try:
            found = check_file(self._settings.job_dir / FILES / file_id, method)
        except OSError as error:
            return 0, f"{file_id} cannot be read: {error.strerror}"
        except FileRefused as error:
            return 0, f"{file_id}: {error}"
        told = [f"line {number}: {message}" for number, message in found.mistakes[:_MISTAKES]]
        if (more := len(found.mistakes) - len(told)) > 0:
            told.append(f"and {more} more, at least")
        return found.lines, "; ".join(told) or ("" if found.lines else f"{file_id} has no lines")

    def _fail(self, job: Job, error: dict[str, str | None]) -> None:
        self._ledger.jobs.change(job.id, JobState.FAILED, f"The job failed: {error['message']}", error=error)
        log.warning("fine_tuning_job_failed", job=job.id, code=error["code"])
