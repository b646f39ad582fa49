"""Policies: what is trained apart from others on one base model, each with a line of versions of its own.

Number 0 is the default policy. A policy begins with a version that has the weights of its parent, so that every version
is of one policy. All lines take their numbers from one sequence.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from sqlalchemy import Connection, func, insert, select, text, true, update

from tuneloop.shared.errors import ParentEnded, PolicyRefused
from tuneloop.shared.experience import JobState, PolicyState, State, VersionAction, VersionState
from tuneloop.shared.ledger.storage.database import LedgerPart, alone
from tuneloop.shared.ledger.storage.job_schema import job_events, jobs
from tuneloop.shared.ledger.storage.schema import COMMITTED, experiences, policies, versions
from tuneloop.shared.ledger.versions.versions import SERVABLE, Decision, next_number, note

#: The policy of all that names none.
DEFAULT = 0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

#: The states of a fine-tuning job that ends with its policy.
_UNFINISHED = (JobState.VALIDATING, JobState.QUEUED, JobState.RUNNING, JobState.PAUSED)

_WAITING = (State.RECORDED, State.REWARDED, State.COMMITTED)


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `policies`. An empty `tenant`: every key may use it. `parent` is the version that it began with.

    `settings` are the options that it has otherwise than the default policy, by dotted names.
    """

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
        """A new policy that begins with the weights of the version `parent`.

        Raises PolicyRefused for a name that is none or is taken, and for a parent that is unknown, cannot be served, or
        is another tenant's.
        """
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
        """The names of the policies whose weights hold what these versions were trained on, deleted ones too.

        Those are the policies of the versions, and those that have the weights of one of them, or of a later one.
        """
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
        """How many rows of a policy, a tenant's or all, are committed and how many are leased."""
        found = {}
        for state in (State.COMMITTED, State.LEASED):
            chosen: Any = text(f"state = '{state}'")  # not a parameter: the partial indexes would not be used
            counted = select(func.count()).where(chosen, experiences.c.policy == number)
            owned = counted if tenant is None else counted.where(experiences.c.tenant == tenant)
            found[state] = self._read(owned)[0][0]
        return found

    def set_options(self, number: int, options: Mapping[str, Any]) -> None:
        """Give it other options, which count from its next batch on."""
        with self._write() as connection:
            changed = {"settings": msgspec.json.encode(options).decode()}
            connection.execute(update(policies).where(policies.c.id == number).values(changed))

    def pause(self, number: int, *, paused: bool = True) -> None:
        """Train it no more for now, or again, and a job of it. Raises PolicyRefused if it was deleted."""
        state = PolicyState.PAUSED if paused else PolicyState.ACTIVE
        with self._write() as connection:
            of_job = {JobState.QUEUED, JobState.RUNNING} if paused else {JobState.PAUSED}
            job_state = JobState.PAUSED if paused else JobState.QUEUED
            _change_job(connection, number, of_job, job_state, f"The job's policy is {state}", self._clock())
            if not connection.execute(
                update(policies).where(policies.c.id == number, _THERE).values(state=state)
            ).rowcount:
                raise PolicyRefused(f"there is no policy {number}")

    def delete(self, number: int, *, by: str) -> None:
        """Let it answer nobody from now on; what waited to be trained on is dropped, and all rows stay.

        A fine-tuning job that was not over is cancelled.

        Raises PolicyRefused for the default policy, and if it was deleted.
        """
        if number == DEFAULT:
            raise PolicyRefused("the default policy cannot be deleted")
        with self._write() as connection:
            alone(connection, "promote")
            message = f"The job's policy was deleted by {by}"
            _change_job(connection, number, _UNFINISHED, JobState.CANCELLED, message, self._clock())
            ended = update(policies).where(policies.c.id == number, _THERE).values(state=PolicyState.DELETED)
            if not connection.execute(ended).rowcount:
                raise PolicyRefused(f"there is no policy {number}")
            drop_rows(connection, number, f"its policy was deleted by {by}")

    def promote(self, number: int, *, into: int = DEFAULT, by: str, reason: str = "") -> int:
        """Make the champion of one policy a candidate of another, which trains on from it; the candidate's number.

        Raises PolicyRefused if the champion is where the other began, or is not trained.
        """
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


#: Says the same as the partial index.
_THERE = policies.c.state != PolicyState.DELETED

_PARENTS = select(versions.c.state, policies.c.tenant).join(policies, policies.c.id == versions.c.policy)


def add_policy(
    connection: Connection, draft: Mapping[str, Any], settings: Mapping[str, Any], decision: Decision
) -> int:
    """Make a policy of its tenant, name and parent, in a transaction that makes more; its number.

    Raises PolicyRefused as `Policies.create` does.
    """
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


def _change_job(
    connection: Connection, policy: int, states: Collection[JobState], state: JobState, message: str, at: float
) -> None:
    """Bring the job of a policy, where it is in one of these states, to another, before the policy's row is locked."""
    found = select(jobs.c.id).where(jobs.c.policy == policy, jobs.c.state.in_(states)).with_for_update()
    if (job := connection.execute(found).scalar()) is not None:
        over = {"finished_at": at} if state is JobState.CANCELLED else {}
        connection.execute(update(jobs).where(jobs.c.id == job).values({"state": state} | over))
        event = {"job": job, "at": at, "level": "info", "type": "message", "message": message}
        connection.execute(insert(job_events).values(event))


def drop_waiting(connection: Connection) -> None:
    """Drop what waits for a batch of a policy that was deleted, or of a job that was ended before it was done."""
    gone = select(policies.c.id).where(policies.c.state == PolicyState.DELETED)
    ended = select(jobs.c.policy).where(jobs.c.state.in_((JobState.CANCELLED, JobState.FAILED)))
    for which, reason in ((gone, "its policy was deleted"), (ended, "its job was ended")):
        late = update(experiences).where(text(COMMITTED), experiences.c.policy.in_(which))
        connection.execute(late.values(state=State.DROPPED, reason=reason, group_id=None))


def _copy(connection: Connection, version: int, policy: int, state: VersionState, decision: Decision) -> int:
    """Register the weights of a version as the next one of a policy; its number."""
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
