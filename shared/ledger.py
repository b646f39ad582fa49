"""Every verb that changes an experience: record, commit, lease, drop, register.

Synchronous; the explorer calls it from threads. Each verb is one transaction. A database that is away raises
LedgerUnavailable, and nothing has happened then, unless the connection broke in the very moment of the commit: so every
verb may be repeated.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Select, and_, case, func, insert, or_, select, true, update

from shared.errors import EnvironmentRefused, LedgerError, StaleEpoch
from shared.experience import Exchange, Feedback, Record, Sample, State, VersionState
from shared.ledger_reports import Reports, VersionReward
from shared.ledger_rows import exchange_row, experience_row, feedback_row, sample
from shared.ledger_transactions import alone, ignoring, portions
from shared.ledger_versions import SERVABLE, Version, VersionLedger
from shared.schema import epochs, exchanges, experiences, experiment, feedback, versions

__all__ = ["LEASE_S", "Ledger", "Version", "VersionReward"]

#: Seconds that a lease lasts without being extended, which is longer than any step takes. Who took it under an older
#: epoch loses it at once.
LEASE_S = 3600.0

_REWARDABLE = (State.RECORDED, State.REWARDED, State.COMMITTED, State.EXPIRED, State.DROPPED)


class Ledger(VersionLedger, Reports):
    """The one place where the truth about experiences, feedback and versions is read and changed."""

    # The explorer's verbs.

    def own(self, project: str, name: str) -> None:
        """Mark the database as this experiment's. Raises EnvironmentRefused if it is another's."""
        with self._write() as connection:
            connection.execute(ignoring(connection, experiment), {"id": 1, "project": project, "name": name})
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
        rows = [experience_row(each, choice, now) for each in said for choice in each.experiences]
        with self._write() as connection:
            # Else a reply and its feedback, recorded by two processes at once, would not see each other.
            alone(connection, "record", shared=not heard)
            if said:
                connection.execute(ignoring(connection, exchanges), [exchange_row(each) for each in said])
            if rows:
                connection.execute(ignoring(connection, experiences), rows)
            if heard:
                connection.execute(ignoring(connection, feedback), [feedback_row(each) for each in heard])
            for portion in portions({each.msg_id for each in records}):
                connection.execute(_reward(portion))

    def commit(
        self,
        tenant: str,
        *,
        task_id: str | None = None,
        run_id: str | None = None,
        until: float | None = None,
    ) -> int:
        """Release the tenant's rewarded experiences to the trainer and return how many.

        `until` (seconds since 1970) leaves out what was received later. Leases that have run out end here too.
        """
        now = self._clock()
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
                .values(state=State.COMMITTED, committed_at=now)
            )
            connection.execute(_release(experiences.c.lease_until < now))
            return done.rowcount

    # The trainer's verbs.

    def take_epoch(self, trainer: str) -> int:
        """Become the only trainer: a new epoch, and the leases of all older ones ended."""
        with self._write() as connection:
            epoch = _current_epoch(connection) + 1
            connection.execute(insert(epochs).values(epoch=epoch, trainer=trainer, started_at=self._clock()))
            connection.execute(_release(experiences.c.lease_epoch < epoch))
            return epoch

    def lease(self, epoch: int, size: int, *, max_staleness: int | None) -> list[Sample]:
        """The oldest `size` committed experiences, claimed for `epoch`; none unless there are that many.

        Committed ones that were sampled more than `max_staleness` versions ago (None: no bound) expire first.
        """
        now = self._clock()
        with self._write() as connection:
            _fence(connection, epoch)
            if max_staleness is not None:
                connection.execute(_expire(_newest_version(connection), max_staleness))
            ids = connection.execute(oldest_committed(size)).scalars().all()
            if len(ids) < size:
                return []
            leased = {"state": State.LEASED, "lease_epoch": epoch, "lease_until": now + LEASE_S}
            rows: list[Any] = []
            for portion in portions(ids):
                connection.execute(update(experiences).where(experiences.c.id.in_(portion)).values(leased))
                rows += connection.execute(_samples(portion))
            return [sample(row) for row in rows]

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
        dropped = {"state": State.DROPPED, "reason": reason, "lease_epoch": None, "lease_until": None}
        with self._write() as connection:
            _fence(connection, epoch)
            for portion in portions(ids):
                connection.execute(update(experiences).where(_held(epoch, portion)).values(dropped))

    def register(
        self, epoch: int, ids: Collection[int], *, step: int, publish: Callable[[int], tuple[Path, str]]
    ) -> int:
        """Register the next version and mark what it was trained on, or do neither.

        `publish(version)` puts the checkpoint in its place and returns its path and the sha256 of its manifest; it runs
        inside the transaction, so that a trainer that was overtaken can never put one there.
        """
        with self._write() as connection:
            _fence(connection, epoch)
            version = 1 + (connection.execute(select(func.max(versions.c.version))).scalar() or 0)
            leased = 0
            for portion in portions(ids):
                held = select(experiences.c.id).where(_held(epoch, portion)).with_for_update()
                leased += len(connection.execute(held).all())
            if leased != len(ids):
                raise LedgerError(f"version {version} was trained on {len(ids)} experiences, {leased} are leased")
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
                    created_at=self._clock(),
                )
            )
            trained = {"state": State.TRAINED, "trained_version": version, "lease_epoch": None, "lease_until": None}
            for portion in portions(ids):
                connection.execute(update(experiences).where(_held(epoch, portion)).values(trained))
            return version


def _reward(msg_ids: Sequence[str]) -> Any:
    """Let each reply's last feedback be its reward, whichever of the two came first."""
    newest_first = func.row_number().over(
        partition_by=experiences.c.id, order_by=[feedback.c.received_at.desc(), feedback.c.id.desc()]
    )
    meant = and_(
        feedback.c.msg_id == experiences.c.msg_id,
        or_(feedback.c.choice.is_(None), feedback.c.choice == experiences.c.choice),
    )
    ranked = (
        select(experiences.c.id, feedback.c.reward, feedback.c.received_at, newest_first.label("rank"))
        .join(feedback, meant)
        .where(experiences.c.msg_id.in_(msg_ids))
        .subquery("ranked")
    )
    return (
        update(experiences)
        .where(experiences.c.id == ranked.c.id, ranked.c.rank == 1, experiences.c.state.in_(_REWARDABLE))
        .values(
            reward=ranked.c.reward,
            rewarded_at=ranked.c.received_at,
            state=case((experiences.c.state == State.RECORDED, State.REWARDED), else_=experiences.c.state),
        )
    )


def _current_epoch(connection: Connection) -> int:
    alone(connection, "epochs")
    return connection.execute(select(func.max(epochs.c.epoch))).scalar() or 0


def _fence(connection: Connection, epoch: int) -> None:
    current = _current_epoch(connection)
    if current != epoch:
        raise StaleEpoch(f"this trainer holds epoch {epoch}, but epoch {current} has taken over")


def _newest_version(connection: Connection) -> int:
    newest = select(func.max(versions.c.version)).where(versions.c.state.in_(SERVABLE))
    return connection.execute(newest).scalar() or 0


def _expire(newest: int, max_staleness: int) -> Any:
    return (
        update(experiences)
        .where(experiences.c.state == State.COMMITTED, experiences.c.version_min < newest - max_staleness)
        .values(state=State.EXPIRED, reason=f"sampled more than {max_staleness} versions before {newest}")
    )


def oldest_committed(size: int) -> Select[Any]:
    """The ids of the next batch; rows that someone is changing right now are passed over."""
    return (
        select(experiences.c.id)
        .where(experiences.c.state == State.COMMITTED)
        .order_by(experiences.c.id)
        .limit(size)
        .with_for_update(skip_locked=True)
    )


def _held(epoch: int, ids: Sequence[int]) -> Any:
    return and_(experiences.c.id.in_(ids), experiences.c.lease_epoch == epoch)


def _release(whose: Any) -> Any:
    return (
        update(experiences)
        .where(experiences.c.state == State.LEASED, whose)
        .values(state=State.COMMITTED, lease_epoch=None, lease_until=None)
    )


def _samples(ids: Sequence[int]) -> Select[Any]:
    return (
        select(experiences, exchanges.c.task_id, exchanges.c.run_id)
        .join(exchanges, exchanges.c.msg_id == experiences.c.msg_id)
        .where(experiences.c.id.in_(ids))
        .order_by(experiences.c.id)
    )
