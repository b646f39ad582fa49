"""The trainer's verbs: take an epoch, lease a batch under it, and register what was made of it."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, exists, func, insert, select, text, update

from tuneloop.shared.errors import LeaseLost, ParentEnded, StaleEpoch
from tuneloop.shared.experience import Sample, State, VersionAction, VersionState
from tuneloop.shared.ledger.policies import Policy, drop_waiting, policy_of, require_there
from tuneloop.shared.ledger.recording.recording import LEASE_S
from tuneloop.shared.ledger.recording.rewards import RewardsPart
from tuneloop.shared.ledger.storage.codec import sample
from tuneloop.shared.ledger.storage.database import again_after_deadlock, alone, find, portions
from tuneloop.shared.ledger.storage.job_schema import jobs
from tuneloop.shared.ledger.storage.schema import COMMITTED, RESTORE, epochs, experiences, experiment, versions
from tuneloop.shared.ledger.training.batches import Backlog, claim, demonstrations, expire, trim
from tuneloop.shared.ledger.training.groups import BatchRules
from tuneloop.shared.ledger.training.run_results import give_all_back, lock_rows
from tuneloop.shared.ledger.versions.versions import SERVABLE, Decision, next_number, note


class WaitingRows(NamedTuple):
    """How many committed rows of a policy wait, as far as counted, the oldest's age, and the job that feeds it."""

    policy: Policy
    rows: int
    seconds: float
    job: str | None = None

    def fill(self, size: int, timeout: float | None) -> bool:
        return self.rows >= size or (self.rows > 0 and timeout is not None and self.seconds >= timeout)


#: One look into the index for each policy, whatever waits.
_WAITING_ROWS = f"""
    SELECT id, tenant, name, parent, settings, state, created_at, created_by,
        (SELECT count(*) FROM (
            SELECT 1 FROM experiences {{hint}} WHERE {COMMITTED} AND policy = policies.id LIMIT :most
        ) AS counted) AS counted,
        (SELECT committed_at FROM experiences {{hint}} WHERE {COMMITTED} AND policy = policies.id
            ORDER BY committed_at LIMIT 1) AS since,
        (SELECT id FROM jobs WHERE policy = policies.id AND state IN ('queued', 'running')
            AND method <> 'reinforcement') AS job
    FROM policies WHERE state <> 'deleted' ORDER BY id
"""

_WAITING = (State.RECORDED, State.REWARDED, State.COMMITTED, State.LEASED)


class Training(RewardsPart):
    """Batches go out to the one trainer, and come back as a version. What a deadlock ends is done again."""

    def take_epoch(self, trainer: str) -> int:
        """Become the only trainer: a new epoch, and the leases of all older ones ended."""
        with self._write() as connection:
            epoch, now = _current_epoch(connection) + 1, self._clock()
            connection.execute(update(epochs).where(epochs.c.ended_at.is_(None)).values(ended_at=now))
            connection.execute(insert(epochs).values(epoch=epoch, trainer=trainer, started_at=now, seen_at=now))
            self._rewards.release(connection, experiences.c.lease_epoch < epoch)
            give_all_back(connection)
            drop_waiting(connection)
            return epoch

    def waiting(self, most: int) -> list[WaitingRows]:
        """What waits of each policy that was not deleted, by their numbers; of each `most` rows are counted."""
        now = self._clock()
        hint = "INDEXED BY ix_experiences_waiting" if self._engine.dialect.name == "sqlite" else ""
        rows = self._read(text(_WAITING_ROWS.format(hint=hint)).bindparams(most=most))
        return [
            WaitingRows(policy_of(row), row.counted, now - row.since if row.counted else 0.0, row.job) for row in rows
        ]

    @again_after_deadlock
    def lease(self, epoch: int, size: int, rules: BatchRules, *, held: Collection[int] = ()) -> list[Sample]:
        """The next `size` committed rows, or whole groups, for `epoch`; the `held` count. None unless enough."""
        now = self._clock()
        with self._write() as connection:
            fence(connection, epoch)
            expire(connection, rules, newest=newest_version(connection, rules.policy))
            ids = claim(connection, rules, size, held, now=now)
            leased = {"state": State.LEASED, "lease_epoch": epoch, "lease_until": now + LEASE_S}
            rows: list[Any] = []
            for portion in portions(ids):
                connection.execute(update(experiences).where(experiences.c.id.in_(portion)).values(leased))
                rows += connection.execute(
                    select(experiences).where(experiences.c.id.in_(portion)).order_by(experiences.c.id)
                )
            edited = demonstrations(connection, rows)
            return [sample(row, demonstration=edited.get(row.id)) for row in rows]

    @again_after_deadlock
    def trim(self, epoch: int, rules: BatchRules) -> Backlog:
        """Let what waits beyond the bound expire: when a version is registered, so that a crash changes no step."""
        with self._write() as connection:
            fence(connection, epoch)
            return trim(connection, rules)

    @again_after_deadlock
    def extend(self, epoch: int) -> None:
        """Say that the trainer is alive, and keep its leases for another LEASE_S."""
        now = self._clock()
        with self._write() as connection:
            fence(connection, epoch)
            connection.execute(update(epochs).where(epochs.c.epoch == epoch).values(seen_at=now))
            # Not each time: it writes every row again.
            half_over = and_(
                and_(experiences.c.state == State.LEASED, experiences.c.lease_epoch == epoch),
                experiences.c.lease_until < now + LEASE_S / 2,
            )
            connection.execute(update(experiences).where(half_over).values(lease_until=now + LEASE_S))

    @again_after_deadlock
    def release(self, epoch: int) -> None:
        with self._write() as connection:
            self._rewards.release(connection, experiences.c.lease_epoch == epoch)
            drop_waiting(connection)

    @again_after_deadlock
    def end(self, epoch: int) -> None:
        with self._write() as connection:
            self._rewards.release(connection, experiences.c.lease_epoch == epoch)
            ended = update(epochs).where(epochs.c.epoch == epoch, epochs.c.ended_at.is_(None))
            connection.execute(ended.values(ended_at=self._clock()))

    @again_after_deadlock
    def drop(self, epoch: int, ids: Collection[int], reason: str) -> None:
        """Take leased experiences out of training for good. What was corrected meanwhile takes its reward now."""
        dropped = {"state": State.DROPPED, "reason": reason, "lease_epoch": None, "lease_until": None}
        with self._write() as connection:
            fence(connection, epoch)
            lock_rows(connection, ids)
            for portion in portions(ids):
                connection.execute(update(experiences).where(_leased_rows(epoch, portion)).values(dropped))
            self._rewards.compute_corrected(connection, _replies(connection, ids))

    def policies_of_jobs(self) -> set[int]:
        return {row.policy for row in self._read(select(jobs.c.policy))}

    def versions_waiting(self, among: Collection[int]) -> list[int]:
        waits = (experiences.c.version_min == versions.c.version, experiences.c.state.in_(_WAITING))
        query = select(versions.c.version).where(versions.c.version.in_(among), exists().where(*waits))
        return [row.version for row in self._read(query)]

    def register(
        self,
        epoch: int,
        ids: Collection[int],
        *,
        step: int,
        publish: Callable[[int], tuple[Path, str]],
        parent: int | None = None,
        policy: int = 0,
    ) -> int:
        """Register the next version of a policy, made of `parent`, and mark the rows that it was trained on, or do
        neither.

        `publish(version)` renames the checkpoint and returns its path and its manifest's sha256. It runs between two
        transactions with the same checks: a slow disk must not hold one open. Raises LeaseLost for a row that is not
        leased under the epoch or is named twice, ParentEnded if `parent` was rejected or rolled back. Nothing is
        published then; a checkpoint that lost a race has no owner, and is deleted with old versions.
        """
        with self._write() as connection:
            version = _number_of_next(connection, epoch, ids, parent, policy)
        path, sha256 = publish(version)
        with self._write() as connection:
            if (number := _number_of_next(connection, epoch, ids, parent, policy)) != version:
                raise LeaseLost(f"version {version} was registered by another meanwhile, the next is {number}")
            connection.execute(
                insert(versions).values(
                    version=version,
                    policy=policy,
                    state=VersionState.CANDIDATE,
                    step=step,
                    epoch=epoch,
                    path=str(path),
                    manifest_sha256=sha256,
                    consumed=len(ids),
                    created_at=self._clock(),
                )
            )
            note(connection, version, VersionAction.PUBLISHED, Decision("trainer", self._clock()))
            trained = {"state": State.TRAINED, "trained_version": version, "lease_epoch": None, "lease_until": None}
            for portion in portions(ids):
                connection.execute(update(experiences).where(_leased_rows(epoch, portion)).values(trained))
            if self._rewards.compensate_late:
                self._rewards.compute_corrected(connection, _replies(connection, ids))
            return version


def _number_of_next(connection: Connection, epoch: int, ids: Collection[int], parent: int | None, policy: int) -> int:
    """The number of the next version, made of these rows. Raises what `register` does."""
    fence(connection, epoch)
    alone(connection, "promote")  # What it descends from is not rolled back meanwhile.
    if parent is not None and (newest := newest_version(connection, policy)) != parent:
        raise ParentEnded(f"version {parent} was trained on, training goes on from version {newest}")
    require_there(connection, policy)
    version = next_number(connection)
    leased = set[int]()
    for portion in portions(sorted(ids)):
        held = select(experiences.c.id).where(_leased_rows(epoch, portion)).order_by(experiences.c.id)
        leased.update(connection.execute(held.with_for_update()).scalars())
    if len(leased) != len(ids):
        raise LeaseLost(f"version {version} was trained on {len(ids)} experiences, {len(leased)} are leased")
    return version


def _leased_rows(epoch: int, ids: Sequence[int]) -> Any:
    return and_(experiences.c.id.in_(ids), experiences.c.lease_epoch == epoch)


def _replies(connection: Connection, ids: Collection[int]) -> set[str]:
    return {row.msg_id for row in find(connection.execute, select(experiences.c.msg_id), experiences.c.id, ids)}


def _current_epoch(connection: Connection) -> int:
    alone(connection, "epochs")
    return connection.execute(select(func.max(epochs.c.epoch))).scalar() or 0


def fence(connection: Connection, epoch: int) -> None:
    """Raise StaleEpoch if another epoch has taken over."""
    current = _current_epoch(connection)
    if current != epoch:
        raise StaleEpoch(f"this trainer holds epoch {epoch}, but epoch {current} has taken over")


def newest_version(connection: Connection, policy: int) -> int:
    """The version of a policy that training continues from."""
    newest = select(func.max(versions.c.version)).where(versions.c.policy == policy, versions.c.state.in_(SERVABLE))
    return connection.execute(newest).scalar() or 0


_LARGEST = (1 << 31) - 1

_NO_MANIFEST = "0" * 64


class Numbers(NamedTuple):
    version: int
    epoch: int


class Restoration(RewardsPart):
    def begin_anew(self, *, version: int, epoch: int, reason: str, path: Path) -> Numbers:
        """Give back all leases, and let versions and epochs count on after these; returns where they are then."""
        now = self._clock()
        with self._write() as connection:
            alone(connection, "epochs")
            newest: int = connection.scalar(select(func.max(versions.c.version))) or 0
            epoch = max(epoch, 1 + (connection.scalar(select(func.max(epochs.c.epoch))) or 0))
            if max(epoch, version) >= _LARGEST:
                raise OverflowError(f"no numbers are left after version {version} and epoch {epoch}")
            connection.execute(update(epochs).where(epochs.c.ended_at.is_(None)).values(ended_at=now))
            connection.execute(update(experiment).values(folder=None))  # The next service marks what was restored.
            restored = {"epoch": epoch, "trainer": RESTORE, "started_at": now, "seen_at": now, "ended_at": now}
            connection.execute(insert(epochs).values(restored))
            self._rewards.release(connection, experiences.c.lease_epoch < epoch)
            give_all_back(connection)
            if version > newest:
                decision = Decision(RESTORE, now, reason)
                connection.execute(
                    insert(versions).values(
                        version=version,
                        state=VersionState.REJECTED,
                        step=0,
                        epoch=epoch,
                        path=str(path),
                        manifest_sha256=_NO_MANIFEST,
                        consumed=0,
                        created_at=decision.at,
                        reason=decision.reason,
                    )
                )
                note(connection, version, VersionAction.REJECTED, decision)
        return Numbers(max(version, newest), epoch)

    def numbers(self) -> Numbers:
        newest = [select(func.max(column)) for column in (versions.c.version, epochs.c.epoch)]
        version, epoch = (self._read(query)[0][0] or 0 for query in newest)
        return Numbers(version, epoch)
