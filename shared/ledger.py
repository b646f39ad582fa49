"""Every statement that touches the database, as verbs: record, commit, lease, register, and what is asked about them.

Synchronous; the explorer calls it from threads. Each verb is one transaction. A database that is away raises
LedgerUnavailable, and nothing has happened then.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    Engine,
    Row,
    Select,
    Table,
    and_,
    case,
    func,
    insert,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import InterfaceError, OperationalError

from shared import codec
from shared.errors import EnvironmentRefused, LedgerError, LedgerUnavailable, StaleEpoch
from shared.experience import Exchange, Experience, Feedback, Record, Sample, State, VersionState
from shared.schema import epochs, exchanges, experiences, experiment, feedback, versions

#: Seconds that a lease lasts without being extended. Who took it under an older epoch loses it at once.
LEASE_S = 120.0

_CORRECTABLE = (State.RECORDED, State.REWARDED, State.COMMITTED)
_SERVABLE = (VersionState.CANDIDATE, VersionState.CHAMPION, VersionState.RETIRED)


class Version(NamedTuple):
    """A row of `versions`: a published set of weights."""

    version: int
    state: VersionState
    step: int
    path: Path
    manifest_sha256: str | None
    consumed: int
    created_at: float
    served_at: float | None
    reason: str | None


class VersionReward(NamedTuple):
    """How the replies of one version were rewarded."""

    version: int
    replies: int
    rewarded: int
    reward_sum: float


class Ledger:
    """The one place where the truth about experiences, feedback and versions is read and changed."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._clock = clock

    def close(self) -> None:
        """Give the connections back."""
        self._engine.dispose()

    # The explorer's verbs.

    def own(self, project: str, name: str) -> None:
        """Mark the database as this experiment's. Raises EnvironmentRefused if it is another's."""
        with self._write() as connection:
            connection.execute(_ignoring(connection, experiment, "id"), {"id": 1, "project": project, "name": name})
            owner = connection.execute(select(experiment.c.project, experiment.c.name)).one()
        if (owner.project, owner.name) != (project, name):
            raise EnvironmentRefused(
                f"buffer.trainer_input.experience_buffer: the database belongs to {owner.project}/{owner.name}, not to "
                f"{project}/{name}: give this experiment another path or name"
            )

    def record(self, records: Sequence[Record]) -> None:
        """Store exchanges and feedback in their order; what is there already stays as it is."""
        said = [record for record in records if isinstance(record, Exchange)]
        heard = [record for record in records if isinstance(record, Feedback)]
        now = self._clock()
        with self._write() as connection:
            if said:
                connection.execute(_ignoring(connection, exchanges, "msg_id"), [_exchange_row(each) for each in said])
                rows = [_experience_row(each, choice, now) for each in said for choice in each.experiences]
                if rows:
                    connection.execute(_ignoring(connection, experiences, "msg_id", "choice"), rows)
            if heard:
                connection.execute(_ignoring(connection, feedback, "event_id"), [_feedback_row(each) for each in heard])
            _apply_feedback(connection, {each.msg_id for each in records}, now)

    def commit(
        self,
        tenant: str,
        *,
        task_id: str | None = None,
        run_id: str | None = None,
        until: float | None = None,
    ) -> int:
        """Release the tenant's rewarded experiences to the trainer and return how many.

        `until` (seconds since 1970) leaves out what was received later.
        """
        wanted = select(exchanges.c.msg_id).where(
            exchanges.c.msg_id == experiences.c.msg_id,
            exchanges.c.tenant == tenant,
            exchanges.c.task_id == task_id if task_id is not None else true(),
            exchanges.c.run_id == run_id if run_id is not None else true(),
            exchanges.c.received_at <= until if until is not None else true(),
        )
        with self._write() as connection:
            done = connection.execute(
                update(experiences)
                .where(experiences.c.state == State.REWARDED, wanted.exists())
                .values(state=State.COMMITTED, committed_at=self._clock())
            )
            return done.rowcount

    # The trainer's verbs.

    def take_epoch(self, trainer: str) -> int:
        """Become the only trainer: a new epoch, and the leases of all older ones ended."""
        with self._write() as connection:
            epoch = _current_epoch(connection) + 1
            connection.execute(insert(epochs).values(epoch=epoch, trainer=trainer, started_at=self._clock()))
            connection.execute(_release(experiences.c.lease_epoch < epoch))
            return epoch

    def lease(self, epoch: int, size: int, *, max_staleness: int) -> list[Sample]:
        """The oldest `size` committed experiences, claimed for `epoch`; none unless there are that many.

        Those sampled more than `max_staleness` versions ago expire first.
        """
        now = self._clock()
        with self._write() as connection:
            _fence(connection, epoch)
            newest = _newest_version(connection)
            connection.execute(
                update(experiences)
                .where(
                    experiences.c.state.in_([State.RECORDED, State.REWARDED, State.COMMITTED]),
                    experiences.c.version_min < newest - max_staleness,
                )
                .values(state=State.EXPIRED, reason=f"sampled more than {max_staleness} versions before {newest}")
            )
            oldest = (
                select(experiences.c.id)
                .where(experiences.c.state == State.COMMITTED)
                .order_by(experiences.c.id)
                .limit(size)
                .with_for_update(skip_locked=True)
            )
            ids = connection.execute(oldest).scalars().all()
            if len(ids) < size:
                return []
            connection.execute(
                update(experiences)
                .where(experiences.c.id.in_(ids))
                .values(state=State.LEASED, lease_epoch=epoch, lease_until=now + LEASE_S)
            )
            return [_sample(row) for row in connection.execute(_samples(ids))]

    def extend(self, epoch: int) -> None:
        """Keep the epoch's leases for another LEASE_S. Raises StaleEpoch if a newer trainer has taken over."""
        with self._write() as connection:
            _fence(connection, epoch)
            connection.execute(
                update(experiences)
                .where(experiences.c.state == State.LEASED, experiences.c.lease_epoch == epoch)
                .values(lease_until=self._clock() + LEASE_S)
            )

    def release(self, epoch: int) -> None:
        """Give back whatever the epoch still holds."""
        with self._write() as connection:
            connection.execute(_release(experiences.c.lease_epoch == epoch))

    def drop(self, epoch: int, ids: Collection[int], reason: str) -> None:
        """Take leased experiences out of training for good."""
        with self._write() as connection:
            _fence(connection, epoch)
            connection.execute(
                update(experiences)
                .where(experiences.c.id.in_(ids), experiences.c.lease_epoch == epoch)
                .values(state=State.DROPPED, reason=reason, lease_epoch=None, lease_until=None)
            )

    def register(
        self, epoch: int, ids: Collection[int], *, step: int, publish: Callable[[int], tuple[Path, str]]
    ) -> int:
        """Register the next version and mark what it was trained on, or do neither.

        `publish(version)` puts the checkpoint in its place and returns its path and the sha256 of its manifest; it runs
        inside the transaction, so that a trainer that was overtaken can never put one there.
        """
        now = self._clock()
        with self._write() as connection:
            _fence(connection, epoch)
            version = 1 + (connection.execute(select(func.max(versions.c.version))).scalar() or 0)
            path, sha256 = publish(version)
            connection.execute(
                insert(versions).values(
                    version=version,
                    state=VersionState.CANDIDATE,
                    step=step,
                    epoch=epoch,
                    path=str(path),
                    manifest_sha256=sha256,
                    consumed=len(ids),
                    created_at=now,
                )
            )
            trained = connection.execute(
                update(experiences)
                .where(experiences.c.id.in_(ids), experiences.c.lease_epoch == epoch)
                .values(state=State.TRAINED, trained_version=version, lease_epoch=None, lease_until=None)
            )
            if trained.rowcount != len(ids):
                raise LedgerError(f"version {version} was trained on {len(ids)} experiences, {trained.rowcount} are leased")
            return version

    # Versions.

    def ensure_base(self, path: Path) -> None:
        """Register the base model as version 0, served, if no version is registered."""
        now = self._clock()
        base = {"version": 0, "state": VersionState.CHAMPION, "step": 0, "path": str(path)}
        with self._write() as connection:
            connection.execute(
                _ignoring(connection, versions, "version"), base | {"consumed": 0, "created_at": now, "served_at": now}
            )

    def champion(self) -> Version:
        """The version that is served. Raises LedgerError before `ensure_base`."""
        return self._version(select(versions).where(versions.c.state == VersionState.CHAMPION))

    def newest(self) -> Version:
        """The newest version that was not rejected: where training goes on from."""
        return self._version(
            select(versions).where(versions.c.state.in_(_SERVABLE)).order_by(versions.c.version.desc()).limit(1)
        )

    def candidate(self) -> Version | None:
        """The newest candidate that is newer than the champion, if any."""
        champion = select(versions.c.version).where(versions.c.state == VersionState.CHAMPION).scalar_subquery()
        rows = self._read(
            select(versions)
            .where(versions.c.state == VersionState.CANDIDATE, versions.c.version > champion)
            .order_by(versions.c.version.desc())
            .limit(1)
        )
        return _version_of(rows[0]) if rows else None

    def promote(self, version: int) -> None:
        """Make `version` the champion; the one before it and older candidates retire."""
        now = self._clock()
        with self._write() as connection:
            connection.execute(
                update(versions)
                .where(
                    or_(
                        and_(versions.c.state == VersionState.CHAMPION, versions.c.version != version),
                        and_(versions.c.state == VersionState.CANDIDATE, versions.c.version < version),
                    )
                )
                .values(state=VersionState.RETIRED)
            )
            connection.execute(
                update(versions)
                .where(versions.c.version == version)
                .values(state=VersionState.CHAMPION, served_at=func.coalesce(versions.c.served_at, now))
            )

    def reject(self, version: int, reason: str) -> None:
        """Say that a candidate must not be served, and why."""
        with self._write() as connection:
            connection.execute(
                update(versions)
                .where(versions.c.version == version, versions.c.state == VersionState.CANDIDATE)
                .values(state=VersionState.REJECTED, reason=reason)
            )

    def versions(self) -> list[Version]:
        """All versions, oldest first."""
        return [_version_of(row) for row in self._read(select(versions).order_by(versions.c.version))]

    # What is asked.

    def counts(self) -> dict[State, int]:
        """Experiences per state."""
        rows = self._read(select(experiences.c.state, func.count()).group_by(experiences.c.state))
        found = {State(state): count for state, count in rows}
        return {state: found.get(state, 0) for state in State}

    def rewards(self) -> list[VersionReward]:
        """How each version's replies were rewarded, oldest version first."""
        version = experiences.c.version_min
        rows = self._read(
            select(
                version,
                func.count(),
                func.count(experiences.c.reward),
                func.coalesce(func.sum(experiences.c.reward), 0.0),
            )
            .group_by(version)
            .order_by(version)
        )
        return [VersionReward(*row) for row in rows]

    def feedback_to_served(self) -> list[float]:
        """For each trained experience, the seconds from its last feedback to the first reply that could use it."""
        latency = versions.c.served_at - experiences.c.rewarded_at
        joined = experiences.join(versions, experiences.c.trained_version == versions.c.version)
        return [row[0] for row in self._read(select(latency).select_from(joined).where(versions.c.served_at.is_not(None)))]

    def imbalance(self) -> list[str]:
        """What in the ledger does not add up, a sentence each; empty when all is well."""
        trained = select(func.count()).where(experiences.c.state == State.TRAINED).scalar_subquery()
        consumed = select(func.coalesce(func.sum(versions.c.consumed), 0)).scalar_subquery()
        rows = self._read(select(trained, consumed))
        if rows[0][0] != rows[0][1]:
            return [f"{rows[0][0]} experiences are trained, but the versions consumed {rows[0][1]}"]
        return []

    # Transactions.

    def _version(self, query: Select[Any]) -> Version:
        rows = self._read(query)
        if not rows:
            raise LedgerError("no version is registered yet")
        return _version_of(rows[0])

    def _read(self, query: Select[Any]) -> Sequence[Row[Any]]:
        with _translated(), self._engine.connect() as connection:
            return connection.execute(query).all()

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        with _translated(), self._engine.connect().execution_options(sqlite_begin="IMMEDIATE") as connection:
            with connection.begin():
                yield connection


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (OperationalError, InterfaceError) as error:
        raise LedgerUnavailable(str(error.orig).strip()) from error


def _ignoring(connection: Connection, table: Table, *key: str) -> Any:
    """An insert that leaves rows alone whose key is there already."""
    if connection.dialect.name == "sqlite":
        return sqlite.insert(table).on_conflict_do_nothing(index_elements=key)
    return postgresql.insert(table).on_conflict_do_nothing(index_elements=key)


def _exchange_row(exchange: Exchange) -> Mapping[str, object]:
    return {
        "msg_id": exchange.msg_id,
        "tenant": exchange.tenant,
        "endpoint": exchange.endpoint,
        "task_id": exchange.task_id,
        "run_id": exchange.run_id,
        "request": exchange.request,
        "received_at": exchange.received_at,
        "latency_s": exchange.latency_s,
    }


def _experience_row(exchange: Exchange, experience: Experience, now: float) -> Mapping[str, object]:
    return {
        "msg_id": exchange.msg_id,
        "choice": experience.choice,
        "state": State.DROPPED if experience.drop_reason else State.RECORDED,
        "reason": experience.drop_reason,
        "version_min": experience.version_min,
        "version_max": experience.version_max,
        "temperature": experience.temperature,
        "finish_reason": experience.finish_reason,
        "text": experience.text.replace("\0", "\N{REPLACEMENT CHARACTER}"),  # PostgreSQL's text holds no NUL
        "completion_tokens": len(experience.completion_ids) // 4,
        "blob": codec.to_blob(experience),
        "recorded_at": now,
    }


def _feedback_row(event: Feedback) -> Mapping[str, object]:
    return {
        "event_id": event.event_id,
        "msg_id": event.msg_id,
        "choice": event.choice,
        "tenant": event.tenant,
        "reward": event.reward,
        "task_id": event.task_id,
        "run_id": event.run_id,
        "received_at": event.received_at,
    }


def _apply_feedback(connection: Connection, msg_ids: Collection[str], now: float) -> None:
    """Let each reply's last feedback be its reward, whichever of the two came first."""
    last: dict[tuple[str, int | None], Row[Any]] = {}
    events = select(feedback).where(feedback.c.msg_id.in_(msg_ids)).order_by(feedback.c.received_at, feedback.c.id)
    for event in connection.execute(events):
        if event.choice is None:
            last = {key: value for key, value in last.items() if key[0] != event.msg_id}
        last[event.msg_id, event.choice] = event
    for (msg_id, choice), event in last.items():
        connection.execute(
            update(experiences)
            .where(
                experiences.c.msg_id == msg_id,
                experiences.c.choice == choice if choice is not None else true(),
                experiences.c.state.in_([*_CORRECTABLE, State.DROPPED]),
            )
            .values(
                reward=event.reward,
                rewarded_at=event.received_at,
                state=case((experiences.c.state == State.RECORDED, State.REWARDED), else_=experiences.c.state),
            )
        )


def _current_epoch(connection: Connection) -> int:
    newest = select(epochs.c.epoch).order_by(epochs.c.epoch.desc()).limit(1).with_for_update()
    return connection.execute(newest).scalar() or 0


def _fence(connection: Connection, epoch: int) -> None:
    current = _current_epoch(connection)
    if current != epoch:
        raise StaleEpoch(f"this trainer holds epoch {epoch}, but epoch {current} has taken over")


def _newest_version(connection: Connection) -> int:
    newest = select(func.max(versions.c.version)).where(versions.c.state.in_(_SERVABLE))
    return connection.execute(newest).scalar() or 0


def _release(whose: Any) -> Any:
    return (
        update(experiences)
        .where(experiences.c.state == State.LEASED, whose)
        .values(state=State.COMMITTED, lease_epoch=None, lease_until=None)
    )


def _samples(ids: Collection[int]) -> Select[Any]:
    return (
        select(experiences, exchanges.c.task_id, exchanges.c.run_id)
        .join(exchanges, exchanges.c.msg_id == experiences.c.msg_id)
        .where(experiences.c.id.in_(ids))
        .order_by(experiences.c.id)
    )


def _sample(row: Row[Any]) -> Sample:
    prompt_ids, completion_ids, logprobs = codec.from_blob(row.blob)
    return Sample(
        id=row.id,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=logprobs,
        reward=row.reward,
        temperature=row.temperature,
        version_min=row.version_min,
        version_max=row.version_max,
        task_id=row.task_id,
        run_id=row.run_id,
        rewarded_at=row.rewarded_at,
        committed_at=row.committed_at,
    )


def _version_of(row: Row[Any]) -> Version:
    return Version(
        version=row.version,
        state=VersionState(row.state),
        step=row.step,
        path=Path(row.path),
        manifest_sha256=row.manifest_sha256,
        consumed=row.consumed,
        created_at=row.created_at,
        served_at=row.served_at,
        reason=row.reason,
    )
