"""Stores policies, each trained apart on one base model with its own line of versions, and fine-tuning jobs.

Policy 0 is the default. A policy starts with a version that has its parent's weights, so every version belongs to one
policy. All policies share one sequence of version numbers. A fine-tuning job is a policy with a file, an end and
events.
"""

import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, func, insert, or_, select, text, true, update

from tuneloop.shared.errors import JobRefused, ParentEnded, PolicyRefused
from tuneloop.shared.experience import JobState, PolicyState, State, VersionAction, VersionState
from tuneloop.shared.ledger.storage.database import LedgerPart, alone
from tuneloop.shared.ledger.storage.job_schema import job_events, jobs
from tuneloop.shared.ledger.storage.schema import COMMITTED, experiences, policies, versions
from tuneloop.shared.ledger.versions.versions import SERVABLE, Decision, next_number, note

DEFAULT = 0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_WAITING = (State.RECORDED, State.REWARDED, State.COMMITTED)


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `policies`; no `tenant`: every key may use it; `settings`: what it has otherwise, by dotted names."""

    id: int
    tenant: str
    name: str
    parent: int
    settings: dict[str, Any]
    state: PolicyState
    created_at: float
    created_by: str

    def is_seen_by(self, tenant: str | None) -> bool:
        """Whether a tenant's keys may use it; None: who asks may see all."""
        return tenant is None or self.tenant in {"", tenant}


class Policies(LedgerPart):
    def create(
        self, name: str, *, tenant: str = "", parent: int = 0, settings: Mapping[str, Any] | None = None, by: str
    ) -> Policy:
        """A new policy with the weights of `parent`. Raises PolicyRefused for a name or a parent that cannot be."""
        with self._write() as connection:
            draft = {"tenant": tenant, "name": name, "parent": parent}
            number = add_policy(connection, draft, settings or {}, Decision(by, self._clock()))
        return self.get(number)

    def get(self, number: int) -> Policy:
        rows = self._read(select(policies).where(policies.c.id == number))
        if not rows:
            raise PolicyRefused(f"there is no policy {number}")
        return policy_of(rows[0])

    def all(self, tenant: str | None = None) -> list[Policy]:
        """Those that are not deleted, oldest first: all, or those that a tenant's keys may use."""
        found = [policy_of(row) for row in self._read(select(policies).where(_THERE).order_by(policies.c.id))]
        return [each for each in found if each.is_seen_by(tenant)]

    def find(self, name: str, tenant: str | None = None) -> Policy:
        """The policy of that name that a tenant's keys may use. Raises PolicyRefused, with the names that there are."""
        seen = self.all(tenant)
        found = [each for each in seen if each.name == name]
        if not found:
            raise PolicyRefused(f"there is no policy {name}; there are {', '.join(each.name for each in seen)}")
        if len(found) > 1:
            tenants = ", ".join(each.tenant for each in found)
            raise PolicyRefused(f"{name}: several tenants have a policy of that name: {tenants}; name the tenant")
        return found[0]

    def learnt_from(self, trained: Collection[int]) -> list[str]:
        names, rows = self._read_together(
            select(policies.c.id, policies.c.name).order_by(policies.c.id),
            select(versions.c.version, versions.c.policy, versions.c.path).order_by(versions.c.version),
        )
        found, weights = set[int](), set[str]()
        for row in rows:  # a copy has a higher number than what it is a copy of
            if row.version in trained or row.policy in found or row.path in weights:
                found.add(row.policy)
                weights.add(row.path)
        return [row.name for row in names if row.id in found]

    def waiting(self) -> dict[int, int]:
        committed: Any = text(COMMITTED)  # not a parameter: the partial index would not be used
        counted = select(experiences.c.policy, func.count()).where(committed).group_by(experiences.c.policy)
        return {policy: count for policy, count in self._read(counted)}

    def in_training(self, number: int, tenant: str | None = None) -> dict[State, int]:
        found = {}
        for state in (State.COMMITTED, State.LEASED):
            chosen: Any = text(f"state = '{state}'")  # not a parameter: the partial indexes would not be used
            counted = select(func.count()).where(chosen, experiences.c.policy == number)
            owned = counted if tenant is None else counted.where(experiences.c.tenant == tenant)
            found[state] = self._read(owned)[0][0]
        return found

    def set_options(self, number: int, options: Mapping[str, Any]) -> None:
        with self._write() as connection:
            changed = {"settings": msgspec.json.encode(options).decode()}
            connection.execute(update(policies).where(policies.c.id == number).values(changed))

    def pause(self, number: int, *, paused: bool = True) -> None:
        """Train it no more for now, or again, and a job of it. Raises PolicyRefused if it was deleted."""
        state = PolicyState.PAUSED if paused else PolicyState.ACTIVE
        with self._write() as connection:
            of_job = {JobState.QUEUED, JobState.RUNNING} if paused else {JobState.PAUSED}
            job_state = JobState.PAUSED if paused else JobState.QUEUED
            _change_job_of(connection, number, of_job, job_state, f"The job's policy is {state}", self._clock())
            if not connection.execute(
                update(policies).where(policies.c.id == number, _THERE).values(state=state)
            ).rowcount:
                raise PolicyRefused(f"there is no policy {number}")

    def delete(self, number: int, *, by: str) -> None:
        """End its answers; what waits is dropped, and a job of it cancelled. Raises PolicyRefused."""
        if number == DEFAULT:
            raise PolicyRefused("the default policy cannot be deleted")
        with self._write() as connection:
            alone(connection, "promote")
            message = f"The job's policy was deleted by {by}"
            _change_job_of(connection, number, OPEN, JobState.CANCELLED, message, self._clock())
            ended = update(policies).where(policies.c.id == number, _THERE).values(state=PolicyState.DELETED)
            if not connection.execute(ended).rowcount:
                raise PolicyRefused(f"there is no policy {number}")
            drop_rows(connection, number, f"its policy was deleted by {by}")

    def promote(self, number: int, *, into: int = DEFAULT, by: str, reason: str = "") -> int:
        """Make a policy's champion a candidate of another; its number. Raises PolicyRefused if it is not trained."""
        with self._write() as connection:
            alone(connection, "promote")
            for each in (number, into):
                require_there(connection, each)
            champion = versions.c.policy == number, versions.c.state == VersionState.CHAMPION
            found = connection.execute(select(versions.c.version, versions.c.consumed).where(*champion)).one()
            if number == into or not found.consumed:
                raise PolicyRefused(f"version {found.version} is not trained: there is nothing to promote")
            decision = Decision(by, self._clock(), reason or f"has the weights of version {found.version}")
            return _copy(connection, found.version, into, VersionState.CANDIDATE, decision)


_THERE = policies.c.state != PolicyState.DELETED

_PARENTS = select(versions.c.state, policies.c.tenant).join(policies, policies.c.id == versions.c.policy)


def add_policy(
    connection: Connection, draft: Mapping[str, Any], settings: Mapping[str, Any], decision: Decision
) -> int:
    """Make a policy in a transaction that makes more; its number. Raises PolicyRefused as `Policies.create` does."""
    name, tenant, parent = draft["name"], draft["tenant"], draft["parent"]
    if not _NAME.fullmatch(name):
        raise PolicyRefused(f"{name[:80]!r}: a policy's name has 1 to 64 letters, digits, or any of . _ -")
    alone(connection, "promote")
    # One of all tenants would hide a tenant's own.
    clash = true() if not tenant else policies.c.tenant.in_(("", tenant))
    if connection.execute(select(policies.c.id).where(policies.c.name == name, clash, _THERE)).first():
        raise PolicyRefused(f"{name}: there is a policy of that name")
    begins_with = connection.execute(_PARENTS.where(versions.c.version == parent, _THERE)).first()
    if begins_with is None or begins_with.tenant not in {"", tenant}:
        raise PolicyRefused(f"{name}: there is no version {parent} to begin with")
    if begins_with.state not in SERVABLE:
        raise PolicyRefused(f"{name}: version {parent} is {begins_with.state}")
    number: int = 1 + connection.execute(select(func.max(policies.c.id))).scalar_one()
    made = {"id": number, "settings": msgspec.json.encode(settings).decode(), "state": PolicyState.ACTIVE}
    who = {"created_at": decision.at, "created_by": decision.by}
    connection.execute(insert(policies).values(dict(draft) | made | who))
    begins = decision._replace(reason=f"begins as version {parent}")
    _copy(connection, parent, number, VersionState.CHAMPION, begins)
    return number


def require_there(connection: Connection, number: int) -> None:
    """Raise ParentEnded if a policy was deleted, or never was."""
    if not connection.execute(select(func.count()).where(policies.c.id == number, _THERE)).scalar() and number:
        raise ParentEnded(f"policy {number} was deleted")


def drop_rows(connection: Connection, policy: int, reason: str) -> None:
    waiting = experiences.c.policy == policy, experiences.c.state.in_(_WAITING)
    dropped = {"state": State.DROPPED, "reason": reason, "group_id": None}
    connection.execute(update(experiences).where(*waiting).values(dropped))


def drop_waiting(connection: Connection) -> None:
    """Drop what waits for a batch of a policy that was deleted, or of a job that was ended before it was done."""
    gone = select(policies.c.id).where(policies.c.state == PolicyState.DELETED)
    ended = select(jobs.c.policy).where(jobs.c.state.in_((JobState.CANCELLED, JobState.FAILED)))
    for which, reason in ((gone, "its policy was deleted"), (ended, "its job was ended")):
        late = update(experiences).where(text(COMMITTED), experiences.c.policy.in_(which))
        connection.execute(late.values(state=State.DROPPED, reason=reason, group_id=None))


def _copy(connection: Connection, version: int, policy: int, state: VersionState, decision: Decision) -> int:
    row = connection.execute(select(versions).where(versions.c.version == version)).one()
    begins = state is VersionState.CHAMPION
    same = {name: getattr(row, name) for name in ("path", "manifest_sha256")}
    number = next_number(connection)
    made = {
        "version": number,
        "policy": policy,
        "state": state,
        "step": 0 if begins else row.step,
        "epoch": row.epoch,
        "consumed": 0,
        "created_at": decision.at,
        "served_at": decision.at if begins else None,
    }
    connection.execute(insert(versions).values(same | made))
    note(connection, number, VersionAction.PROMOTED if begins else VersionAction.PUBLISHED, decision)
    return number


def policy_of(row: Any) -> Policy:
    values = {name: getattr(row, name) for name in Policy.__struct_fields__}
    return Policy(**values | {"settings": msgspec.json.decode(row.settings), "state": PolicyState(row.state)})


# Jobs.

_NEXT = {
    JobState.VALIDATING: {JobState.QUEUED, JobState.FAILED, JobState.CANCELLED},
    JobState.QUEUED: {JobState.RUNNING, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED},
    JobState.RUNNING: {JobState.SUCCEEDED, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED},
    JobState.PAUSED: {JobState.QUEUED, JobState.CANCELLED},
}

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
    """A job that is to be made, of the version `parent`, with its policy's `options`; named by `base`, or `model`."""

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
            select(jobs.c.id, jobs.c.policy, jobs.c.name, jobs.c.state, jobs.c.version).where(_OF_THOSE),
            _MADE.where(_OF_THOSE, jobs.c.state.not_in(OPEN)),
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

    def change(
        self, job_id: str, state: JobState, message: str, *, options: Mapping[str, Any] | None = None, **values: Any
    ) -> Job:
        """Bring a job to a state, with the reason in an event; `options` are added to its policy's."""
        with self._write() as connection:
            change_state(connection, job_id, state, message, self._clock(), values)
            if options is not None:
                its = policies.c.id == select(jobs.c.policy).where(jobs.c.id == job_id).scalar_subquery()
                before = connection.execute(select(policies.c.settings).where(its)).scalar_one()
                changed = msgspec.json.encode(msgspec.json.decode(before) | dict(options)).decode()
                connection.execute(update(policies).where(its).values(settings=changed))
        return self.get(job_id)

    def note(self, job_id: str, message: str, *, level: str = "info", data: Mapping[str, Any] | None = None) -> None:
        with self._write() as connection:
            note_event(connection, job_id, self._clock(), message, level=level, data=data)

    def events(self, job_id: str, *, before: int | None = None, limit: int = 20) -> list[JobEvent]:
        """The newest first; `before`: older than the event of this id."""
        chosen = select(job_events).where(job_events.c.job == job_id)
        if before is not None:
            chosen = chosen.where(job_events.c.id < before)
        rows = self._read(chosen.order_by(job_events.c.id.desc()).limit(limit))
        return [_event_of(row) for row in rows]


def _change_job_of(
    connection: Connection, policy: int, states: Collection[JobState], state: JobState, message: str, at: float
) -> None:
    """Bring the job of a policy, where it is in one of these states, to another, before the policy's row is locked."""
    found = select(jobs.c.id).where(jobs.c.policy == policy, jobs.c.state.in_(states)).with_for_update()
    for job in connection.execute(found).scalars().all():
        change_state(connection, job, state, message, at, {})


def change_state(
    connection: Connection, job_id: str, state: JobState, message: str, at: float, values: Mapping[str, Any]
) -> None:
    """Change a job's state inside the caller's transaction; raises JobRefused for an illegal transition.

    The job's policy is not trained while the job is paused or over. A failed or cancelled job drops its waiting rows.
    """
    before = connection.execute(select(jobs.c.state).where(jobs.c.id == job_id).with_for_update()).scalar_one()
    if state not in _NEXT.get(JobState(before), ()):
        raise JobRefused(f"the job is {before}, and cannot become {state}")
    over = {} if state in OPEN else {"finished_at": at}
    connection.execute(update(jobs).where(jobs.c.id == job_id).values({"state": state} | over | _json_row(values)))
    note_event(connection, job_id, at, message, level="error" if state is JobState.FAILED else "info")
    if state is JobState.RUNNING:
        return
    policy = connection.execute(select(jobs.c.policy).where(jobs.c.id == job_id)).scalar_one()
    trains = state is JobState.QUEUED
    there = policies.c.id == policy, policies.c.state == (PolicyState.PAUSED if trains else PolicyState.ACTIVE)
    changed = {"state": PolicyState.ACTIVE if trains else PolicyState.PAUSED}
    connection.execute(update(policies).where(*there).values(changed))
    if state in {JobState.FAILED, JobState.CANCELLED}:
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


_OF_THOSE: ColumnElement[bool] = jobs.c.policy.in_(select(policies.c.id).where(_THERE))

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
