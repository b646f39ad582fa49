"""Fine-tuning jobs: each is a policy with a file to learn from, an end, and events that tell of it."""

import secrets
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from sqlalchemy import Connection, insert, select, update

from tuneloop.shared.errors import JobRefused
from tuneloop.shared.experience import JobState
from tuneloop.shared.ledger.policies import add_policy
from tuneloop.shared.ledger.storage.database import LedgerPart
from tuneloop.shared.ledger.storage.job_schema import job_events, jobs
from tuneloop.shared.ledger.versions.versions import Decision

#: The legal transitions.
_NEXT = {
    JobState.VALIDATING: {JobState.QUEUED, JobState.FAILED, JobState.CANCELLED},
    JobState.QUEUED: {JobState.RUNNING, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED},
    JobState.RUNNING: {JobState.SUCCEEDED, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED},
    JobState.PAUSED: {JobState.QUEUED, JobState.CANCELLED},
}

#: The states of a job that is not over.
OPEN = tuple(_NEXT)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `jobs`. Times are seconds since 1970; `grader` is None where the method has none."""

    id: str
    tenant: str
    policy: int
    model: str
    name: str
    suffix: str | None
    method: str
    hyperparameters: dict[str, Any]
    grader: dict[str, Any] | None
    seed: int
    metadata: dict[str, str]
    training_file: str
    validation_file: str | None
    state: JobState
    rows_in_all: int
    rows_taken: int
    total_steps: int
    trained_tokens: int
    created_at: float
    created_by: str
    finished_at: float | None
    version: int | None
    error: dict[str, Any] | None


class JobDraft(msgspec.Struct, frozen=True, kw_only=True):
    """A job that is to be made. `parent` is the version that it begins with, `options` its policy's own options."""

    tenant: str
    model: str
    parent: int
    options: dict[str, Any]
    method: str
    hyperparameters: dict[str, Any]
    grader: dict[str, Any] | None = None
    seed: int = 0
    suffix: str | None = None
    metadata: dict[str, str] = {}
    training_file: str
    validation_file: str | None = None
    rows_in_all: int
    total_steps: int
    by: str


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `job_events`; `data` is None for a message."""

    id: int
    job: str
    at: float
    level: str
    type: str
    message: str
    data: dict[str, Any] | None


_JSON = ("hyperparameters", "grader", "metadata", "error")


class Jobs(LedgerPart):
    """Makes, lists and changes jobs, and keeps what happened to them."""

    def create(self, draft: JobDraft) -> Job:
        """A new job in `validating_files`, with its policy. Raises PolicyRefused for a parent that cannot be one."""
        job_id, now = f"ftjob-{secrets.token_hex(12)}", self._clock()
        name = ":".join(("ft", draft.model, draft.suffix or "", job_id.removeprefix("ftjob-")))
        values = {each: getattr(draft, each) for each in JobDraft.__struct_fields__ if each in jobs.c}
        with self._write() as connection:
            policy = {"tenant": draft.tenant, "name": job_id, "parent": draft.parent}
            number = add_policy(connection, policy, draft.options, Decision(draft.by, now))
            made = {"id": job_id, "policy": number, "name": name, "state": JobState.VALIDATING, "created_at": now}
            counts = {"rows_taken": 0, "trained_tokens": 0, "created_by": draft.by}
            connection.execute(insert(jobs).values(_json_row(values) | made | counts))
            note_event(connection, job_id, now, f"Created fine-tuning job: {job_id}")
        return self.get(job_id)

    def get(self, job_id: str, tenant: str | None = None) -> Job:
        """That job, of a tenant or, with None, of any. Raises JobRefused if there is none."""
        chosen = select(jobs).where(jobs.c.id == job_id)
        rows = self._read(chosen if tenant is None else chosen.where(jobs.c.tenant == tenant))
        if not rows:
            raise JobRefused(f"there is no fine-tuning job {job_id}")
        return job_of(rows[0])

    def open(self, states: Collection[JobState] = OPEN) -> list[Job]:
        """The jobs in these states, oldest first."""
        chosen = select(jobs).where(jobs.c.state.in_(states)).order_by(jobs.c.created_at, jobs.c.id)
        return [job_of(row) for row in self._read(chosen)]

    def of_policies(self) -> dict[int, Job]:
        """All jobs by the ids of their policies."""
        return {row.policy: job_of(row) for row in self._read(select(jobs))}

    def change(self, job_id: str, state: JobState, message: str, **values: Any) -> Job:
        """Bring a job to a state, and tell why in an event. Raises JobRefused where it cannot come there."""
        with self._write() as connection:
            change_state(connection, job_id, state, message, self._clock(), values)
        return self.get(job_id)

    def note(self, job_id: str, message: str, *, level: str = "info", data: Mapping[str, Any] | None = None) -> None:
        """Add an event; one with `data` is of type metrics."""
        with self._write() as connection:
            note_event(connection, job_id, self._clock(), message, level=level, data=data)

    def events(self, job_id: str, *, before: int | None = None, limit: int = 20) -> list[JobEvent]:
        """The newest first; `before`: older than the event of this id."""
        chosen = select(job_events).where(job_events.c.job == job_id)
        if before is not None:
            chosen = chosen.where(job_events.c.id < before)
        rows = self._read(chosen.order_by(job_events.c.id.desc()).limit(limit))
        return [JobEvent(**{**row._mapping, "data": row.data and msgspec.json.decode(row.data)}) for row in rows]


def change_state(
    connection: Connection, job_id: str, state: JobState, message: str, at: float, values: Mapping[str, Any]
) -> None:
    """Bring a job to a state in a transaction that does more. Raises JobRefused where it cannot come there."""
    before = connection.execute(select(jobs.c.state).where(jobs.c.id == job_id).with_for_update()).scalar_one()
    if state not in _NEXT.get(JobState(before), ()):
        raise JobRefused(f"the job is {before}, and cannot become {state}")
    over = {} if state in OPEN else {"finished_at": at}
    connection.execute(update(jobs).where(jobs.c.id == job_id).values({"state": state} | over | _json_row(values)))
    note_event(connection, job_id, at, message, level="error" if state is JobState.FAILED else "info")


def note_event(
    connection: Connection,
    job_id: str,
    at: float,
    message: str,
    *,
    level: str = "info",
    data: Mapping[str, Any] | None = None,
) -> None:
    """Add an event in a transaction that does more."""
    row = {"job": job_id, "at": at, "level": level, "message": message, "type": "metrics" if data else "message"}
    encoded = msgspec.json.encode(data).decode() if data else None
    connection.execute(insert(job_events).values(row | {"data": encoded}))


def job_of(row: Any) -> Job:
    """A job of its row."""
    values = {name: getattr(row, name) for name in Job.__struct_fields__}
    decoded = {name: values[name] and msgspec.json.decode(values[name]) for name in _JSON}
    return Job(**values | decoded | {"state": JobState(row.state)})


def _json_row(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: msgspec.json.encode(value).decode() if name in _JSON and value is not None else value
        for name, value in values.items()
    }
