"""Fine-tuning jobs: each is a policy with a file to learn from, an end, and events that tell of it."""

import secrets
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, func, insert, or_, select, true, update

from tuneloop.shared.errors import JobRefused
from tuneloop.shared.experience import JobState, PolicyState
from tuneloop.shared.ledger.policies import add_policy, drop_rows
from tuneloop.shared.ledger.storage.database import LedgerPart
from tuneloop.shared.ledger.storage.job_schema import job_events, jobs
from tuneloop.shared.ledger.storage.schema import policies, versions
from tuneloop.shared.ledger.versions.versions import SERVABLE, Decision

#: The legal transitions.
_NEXT = {
    JobState.VALIDATING: {JobState.QUEUED, JobState.FAILED, JobState.CANCELLED},
    JobState.QUEUED: {JobState.RUNNING, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED},
    JobState.RUNNING: {JobState.SUCCEEDED, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED},
    JobState.PAUSED: {JobState.QUEUED, JobState.CANCELLED},
}

#: The states of a job that is not over.
OPEN = tuple(_NEXT)

#: What stands in a model's name between that of its job and the step of one of the job's versions.
CHECKPOINT = ":ckpt-step-"


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
    """A job that is to be made. `parent` is the version that it begins with, `options` its policy's own options.

    `model` is what was asked for; its own model is named by `base`, or by `model` where that is empty.
    """

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
    base: str = ""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A version that a job made and that can be served, by the job's step after which it was made."""

    version: int
    step: int
    created_at: float
    metrics: dict[str, Any] = {}


class JobModels(msgspec.Struct, frozen=True, kw_only=True):
    """The names under which the versions of a job's policy may be asked: none before the job is over."""

    job: str
    name: str
    state: JobState
    versions: dict[str, int]


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
    def create(self, draft: JobDraft) -> Job:
        """A new job in `validating_files`, with its policy. Raises PolicyRefused for a parent that cannot be one."""
        job_id, now = f"ftjob-{secrets.token_hex(12)}", self._clock()
        name = ":".join(("ft", draft.base or draft.model, draft.suffix or "", job_id.removeprefix("ftjob-")))
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
        chosen = select(jobs).where(jobs.c.state.in_(states)).order_by(jobs.c.created_at, jobs.c.id)
        return [job_of(row) for row in self._read(chosen)]

    def page(
        self, tenant: str | None, *, after: str | None = None, keep: Mapping[str, str] | None = None
    ) -> Iterator[Job]:
        """A tenant's jobs, or all, newest first, whose metadata has all of `keep`; `after`: older than that one."""
        chosen = select(jobs).where(true() if tenant is None else jobs.c.tenant == tenant)
        if after is not None:
            last = self.get(after, tenant)
            older = and_(jobs.c.created_at == last.created_at, jobs.c.id < last.id)
            chosen = chosen.where(or_(jobs.c.created_at < last.created_at, older))
        found = map(job_of, self._read(chosen.order_by(jobs.c.created_at.desc(), jobs.c.id.desc())))
        return (each for each in found if (keep or {}).items() <= each.metadata.items())

    def counts(self) -> dict[JobState, int]:
        found = dict(self._read(select(jobs.c.state, func.count()).group_by(jobs.c.state)))
        return {state: found.get(state, 0) for state in JobState}

    def of_model(self, name: str, tenant: str) -> Job | None:
        """The job of a tenant that a model's name, or that of a checkpoint, is of; None if there is none."""
        job_name = name.partition(CHECKPOINT)[0]
        rows = self._read(select(jobs).where(jobs.c.name == job_name, jobs.c.tenant == tenant))
        return job_of(rows[0]) if rows else None

    def models(self) -> dict[int, JobModels]:
        """What may be asked of the jobs whose policies were not deleted, by the ids of these."""
        rows, made = self._read_together(
            select(jobs.c.id, jobs.c.policy, jobs.c.name, jobs.c.state, jobs.c.version).where(_THERE),
            _MADE.where(_THERE, jobs.c.state.not_in(OPEN)),
        )
        steps: dict[int, dict[int, int]] = {}
        for each in made:
            steps.setdefault(each.policy, {})[each.version] = each.step
        found = {}
        for row in rows:
            of_it = steps.get(row.policy, {})
            named = {row.name: row.version} if row.version in of_it else {}
            named |= {f"{row.name}{CHECKPOINT}{step}": version for version, step in of_it.items()}
            found[row.policy] = JobModels(job=row.id, name=row.name, state=JobState(row.state), versions=named)
        return found

    def checkpoints(self, job_id: str) -> list[Checkpoint]:
        """The versions that a job made, newest first, with what its events of type metrics say of their steps."""
        told = select(job_events.c.data).where(job_events.c.job == job_id, job_events.c.type == "metrics")
        made, events = self._read_together(_MADE.where(jobs.c.id == job_id), told.order_by(job_events.c.id))
        metrics: dict[int, dict[str, Any]] = {}
        for event in events:
            data = msgspec.json.decode(event.data)
            metrics.setdefault(data.get("step", 0), {}).update(data)
        found = {
            each.step: Checkpoint(
                version=each.version, step=each.step, created_at=each.created_at, metrics=metrics.get(each.step, {})
            )
            for each in made
        }
        return list(found.values())[::-1]

    def progress(self, job_id: str, *, events: int = 8) -> list[JobEvent]:
        chosen = select(job_events).where(job_events.c.job == job_id, job_events.c.type == "metrics")
        return [_event_of(row) for row in self._read(chosen.order_by(job_events.c.id.desc()).limit(events))]

    def of_policies(self) -> dict[int, Job]:
        return {row.policy: job_of(row) for row in self._read(select(jobs))}

    def change(
        self, job_id: str, state: JobState, message: str, *, options: Mapping[str, Any] | None = None, **values: Any
    ) -> Job:
        """Bring a job to a state, and tell why in an event; `options` become its policy's, beside those it has."""
        with self._write() as connection:
            change_state(connection, job_id, state, message, self._clock(), values)
            if options is not None:
                its = policies.c.id == select(jobs.c.policy).where(jobs.c.id == job_id).scalar_subquery()
                before = connection.execute(select(policies.c.settings).where(its)).scalar_one()
                changed = msgspec.json.encode(msgspec.json.decode(before) | dict(options)).decode()
                connection.execute(update(policies).where(its).values(settings=changed))
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
        return [_event_of(row) for row in rows]


def change_state(
    connection: Connection, job_id: str, state: JobState, message: str, at: float, values: Mapping[str, Any]
) -> None:
    """Bring a job to a state in a transaction that does more. Raises JobRefused where it cannot come there.

    The job's policy is trained no more while it is paused, and once it has failed or was cancelled; then what waited to
    be trained on is dropped.
    """
    before = connection.execute(select(jobs.c.state).where(jobs.c.id == job_id).with_for_update()).scalar_one()
    if state not in _NEXT.get(JobState(before), ()):
        raise JobRefused(f"the job is {before}, and cannot become {state}")
    over = {} if state in OPEN else {"finished_at": at}
    connection.execute(update(jobs).where(jobs.c.id == job_id).values({"state": state} | over | _json_row(values)))
    note_event(connection, job_id, at, message, level="error" if state is JobState.FAILED else "info")
    if state in {JobState.RUNNING, JobState.SUCCEEDED}:
        return
    policy = connection.execute(select(jobs.c.policy).where(jobs.c.id == job_id)).scalar_one()
    trains = state is JobState.QUEUED
    there = policies.c.id == policy, policies.c.state == (PolicyState.PAUSED if trains else PolicyState.ACTIVE)
    changed = {"state": PolicyState.ACTIVE if trains else PolicyState.PAUSED}
    connection.execute(update(policies).where(*there).values(changed))
    if state not in OPEN:
        drop_rows(connection, policy, f"its fine-tuning job is over: {state}")


def note_event(
    connection: Connection,
    job_id: str,
    at: float,
    message: str,
    *,
    level: str = "info",
    data: Mapping[str, Any] | None = None,
) -> None:
    row = {"job": job_id, "at": at, "level": level, "message": message, "type": "metrics" if data else "message"}
    encoded = msgspec.json.encode(data).decode() if data else None
    connection.execute(insert(job_events).values(row | {"data": encoded}))


def job_of(row: Any) -> Job:
    values = {name: getattr(row, name) for name in Job.__struct_fields__}
    decoded = {name: values[name] and msgspec.json.decode(values[name]) for name in _JSON}
    return Job(**values | decoded | {"state": JobState(row.state)})


def _event_of(row: Any) -> JobEvent:
    return JobEvent(**dict(row._mapping) | {"data": row.data and msgspec.json.decode(row.data)})


#: Jobs of policies that were not deleted.
_THERE: ColumnElement[bool] = jobs.c.policy.in_(select(policies.c.id).where(policies.c.state != PolicyState.DELETED))

#: What jobs made, and can be served.
_MADE = (
    select(versions.c.policy, versions.c.version, versions.c.step, versions.c.created_at)
    .join(jobs, jobs.c.policy == versions.c.policy)
    .where(versions.c.consumed > 0, versions.c.state.in_(SERVABLE))
    .order_by(versions.c.version)
)


def _json_row(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: msgspec.json.encode(value).decode() if name in _JSON and value is not None else value
        for name, value in values.items()
    }
