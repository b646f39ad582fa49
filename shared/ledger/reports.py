"""Reports about the ledger: counts, rewards, delays, and whether it balances."""

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Executable, Select, and_, func, literal, not_, or_, select, text, true, union

from tuneloop.shared.experience import State, VersionState
from tuneloop.shared.ledger.facts import DropCount, HeldBack, LedgerFacts, StateCount, Trainer, Weights
from tuneloop.shared.ledger.storage.codec import unpack_text
from tuneloop.shared.ledger.storage.counters import FOLD
from tuneloop.shared.ledger.storage.database import LedgerPart, Transactions, alone, literally
from tuneloop.shared.ledger.storage.schema import (
    COMMITTED,
    EDITED,
    REWARDED,
    epochs,
    exchanges,
    experience_counts,
    experiences,
    feedback,
    policies,
    versions,
    worth,
)
from tuneloop.shared.ledger.training.batches import committed_by, edited_rows, held_by_shares, unsampled_rows
from tuneloop.shared.ledger.training.groups import BatchRules, takable, young
from tuneloop.shared.ledger.versions.alarms import Alarms

_LEASED = literally(f"state = '{State.LEASED}'")
_PENDING = literally("outcome = 'pending'")
_COMMITTED = literally(COMMITTED)
_OF_LEASED = select(func.min(experiences.c.committed_at), func.max(experiences.c.committed_at)).where(_LEASED)

_WAITING = (State.RECORDED, State.REWARDED, State.COMMITTED)

_counted = experience_counts.c
_COUNTS = select(_counted.state, func.sum(_counted.rows)).group_by(_counted.state)

#: So many of the newest replies are checked for names, and for what is not trained on.
_NEWEST = 2_000

_sampled = experiences.c.sampled_at
_until = select(func.coalesce(func.max(_sampled), 0.0)).where(experiences.c.state == State.TRAINED)
_since = select(experiences.c.state, experiences.c.unsampled).where(_sampled > _until.scalar_subquery())
_newest = _since.order_by(_sampled.desc()).limit(_NEWEST).subquery().c
#: By their states those of the newest replies that were sampled after the newest that was trained on.
_LATELY = select(_newest.state, func.count().label("rows"), func.count(_newest.unsampled).label("unsampled"))

_policies = union(select(policies.c.id), select(literal(0))).subquery()
_of_each = experiences.c.policy == _policies.c.id
_EDITED_COMMITTED = committed_by("edited", func.count()).where(literally(EDITED))

_Read = Callable[[Executable], Sequence[Any]]


class VersionReward(NamedTuple):
    version: int
    replies: int
    rewarded: int
    reward_sum: float


class FirstReply(NamedTuple):
    request: bytes
    text: str


class Reports(LedgerPart):
    def __init__(self, transactions: Transactions) -> None:
        super().__init__(transactions)
        self._alarms = Alarms(transactions)

    def reply(self, tenant: str, msg_id: str) -> FirstReply | None:
        first = and_(
            experiences.c.msg_id == exchanges.c.msg_id, experiences.c.choice == 0, experiences.c.correction == 0
        )
        query = select(exchanges.c.request, experiences.c.text).join(experiences, first)
        rows = self._read(query.where(exchanges.c.msg_id == msg_id, exchanges.c.tenant == tenant))
        return FirstReply(unpack_text(rows[0].request), rows[0].text) if rows else None

    def newest_names(self, *, among: int) -> list[tuple[str, str]]:
        names = experiences.c.tenant, experiences.c.msg_id, experiences.c.id
        newest = select(*names).order_by(experiences.c.id.desc()).limit(_NEWEST).subquery()
        query = select(newest.c.tenant, newest.c.msg_id).join(exchanges, exchanges.c.msg_id == newest.c.msg_id)
        rows = self._read(query.where(exchanges.c.engine.is_not(None)).order_by(newest.c.id.desc()).limit(among))
        return [(row.tenant, row.msg_id) for row in rows]

    def counts(self, tenant: str | None = None) -> dict[State, int]:
        query = _COUNTS if tenant is None else _COUNTS.where(_counted.tenant == tenant)
        found = {State(state): int(count) for state, count in self._read(query)}
        return {state: found.get(state, 0) for state in State}

    def fold_counts(self) -> None:
        """Sum what transactions have added to the counts since: their sums become no other by it."""
        if self._engine.dialect.name == "postgresql":
            with self._write() as connection:
                alone(connection, "counts")
                connection.execute(FOLD)

    def rewards(self) -> list[VersionReward]:
        sums = [func.sum(_counted[name]) for name in ("rows", "rewarded", "reward_sum")]
        query = select(_counted.version, *sums).where(~_counted.corrects).group_by(_counted.version)
        rows = self._read(query.having(sums[0] > 0).order_by(_counted.version))
        return [VersionReward(each[0], int(each[1]), int(each[2]), each[3]) for each in rows]

    def feedback_to_served(self, version: int | None = None) -> list[float]:
        """Seconds from each trained row's last feedback to the first reply that could use it; of `version`, or all."""
        first = versions.alias()
        served = select(func.min(first.c.version)).where(
            first.c.version >= experiences.c.trained_version, first.c.served_at.is_not(None)
        )
        latency = versions.c.served_at - experiences.c.rewarded_at
        query = select(latency).join_from(experiences, versions, versions.c.version == served.scalar_subquery())
        if version is not None:
            query = query.where(versions.c.version == version)
        return [row[0] for row in self._read(query)]

    def newest_commit(self, tenant: str | None = None) -> float | None:
        """The newest commit time of the committed rows, of a tenant or of all; None without rows."""
        if not self.counts(tenant)[State.COMMITTED]:
            return None
        newest = committed_by("waiting", experiences.c.committed_at).where(_of_each, _of(tenant))
        newest_of = newest.order_by(experiences.c.committed_at.desc()).limit(1).scalar_subquery()
        return self._read(select(func.max(newest_of)).select_from(_policies))[0][0]  # type: ignore[no-any-return]

    def claimable(self, rules: BatchRules, tenant: str) -> int:
        _, fit, grouped = _count_committed(self._read, rules, tenant)
        return fit if rules.group_by == "none" else grouped

    def facts(self, rules: BatchRules, *, drops: int = 0, batch: int | None = None) -> LedgerFacts:
        """Why no step is happening, with so many reasons of `drops`; with `batch`, what shares hold back."""
        alarms = tuple(self._alarms.all())
        with self._snapshot() as connection:  # one for all: to begin and to end takes as long as most of them

            def read(query: Executable) -> Sequence[Any]:
                return connection.execute(query).all()

            columns = (epochs.c.trainer, epochs.c.epoch, epochs.c.started_at, epochs.c.seen_at, epochs.c.ended_at)
            rows = read(select(*columns).order_by(epochs.c.epoch.desc()).limit(1))
            trainer, weights = Trainer(*rows[0]) if rows else None, _weights(read, rules.policy)
            counts = {State(state): int(count) for state, count in read(_COUNTS) if count}
            oldest_of = (
                select(func.min(experiences.c.sampled_at)).where(experiences.c.state == state).scalar_subquery()
                for state in counts
            )
            oldest_sampled = read(select(*oldest_of))[0] if counts else ()
            lately = {row.state: row for row in read(_LATELY.group_by(_newest.state))}
            states = {
                state: StateCount(counts[state], since, lately[state].rows if state in lately else 0)
                for state, since in zip(counts, oldest_sampled, strict=True)
            }
            committed, young, grouped = _count_committed(read, rules)
            oldest_commit = committed_by("waiting", experiences.c.committed_at).where(takable(rules))
            since = next(iter(read(oldest_commit.order_by(experiences.c.committed_at).limit(1))), (None,))[0]
            [(pending, pending_since)] = read(select(func.count(), func.min(feedback.c.received_at)).where(_PENDING))
            [(count, consumed, purged)] = read(
                select(func.count().filter(versions.c.version > 0), _sum(versions.c.consumed), _sum(versions.c.purged))
            )
            claimable = young if rules.group_by == "none" else grouped
            held = held_by_shares(connection, rules, batch) if batch is not None and claimable >= batch else {}
            [(leased, leased_since)] = read(_OF_LEASED)
            if leased_since is not None:  # at the earliest: what is leased was committed before
                began = [trainer.started_at] if trainer else []
                leased_since = max([leased_since, *began, *([weights.registered_at] if weights else [])])
            rewarded = text(REWARDED), experiences.c.policy == rules.policy
            oldest = {State.COMMITTED: since, State.LEASED: leased}
            return LedgerFacts(
                states={state: each._replace(oldest=oldest.get(state, each.oldest)) for state, each in states.items()},
                claimable=claimable,
                held_back=tuple(HeldBack(*rater, rows) for rater, rows in held.items()),
                too_old=committed - young,
                ungrouped=0 if rules.group_by == "none" else young - grouped,
                unsampled=0 if rules.any_reply else sum(lately[each].unsampled for each in _WAITING if each in lately),
                edited=0 if rules.edited else read(_EDITED_COMMITTED)[0][0],
                unfit=() if rules.any_reply else _most_frequent(read, drops, experiences.c.unsampled, _WAITING),
                leased_since=leased_since,
                rewarded_since=read(select(func.min(experiences.c.rewarded_at)).where(*rewarded))[0][0],
                pending=pending,
                pending_since=pending_since,
                versions=count,
                consumed=consumed,
                purged=purged,
                trainer=trainer,
                weights=weights,
                drops=_most_frequent(read, drops, experiences.c.reason, (State.DROPPED, State.EXPIRED)),
                alarms=alarms,
            )

    def imbalance(self) -> list[str]:
        """A sentence for each sum that does not balance; empty when all do."""
        rows = select(_sum(_counted.rows)).where(_counted.state == State.TRAINED)
        sums = (select(_sum(column)) for column in (versions.c.purged, versions.c.consumed))
        [(trained, purged, consumed)] = self._read(select(*(each.scalar_subquery() for each in (rows, *sums))))
        if trained + purged != consumed:
            deleted = f" and {purged} that were are deleted" if purged else ""
            return [f"{trained} experiences are trained{deleted}, but the versions consumed {consumed}"]
        return []

    def audit(self) -> list[str]:
        found = self.imbalance()
        # What an index has each.
        by_state, by_version = (experiences.c.state, _counted.state), (experiences.c.version_min, _counted.version)
        for (key, counted_key), rows, counted in (
            (by_state, func.count(), _counted.rows),
            (by_version, func.count(), _counted.rows),
            (by_version, func.count(worth), _counted.rewarded),
        ):
            queries = select(key, rows).group_by(key), select(counted_key, _sum(counted)).group_by(counted_key)
            there, told = (dict(map(tuple, each)) for each in self._read_together(*queries))
            found += [
                f"{counted.name} of {counted_key.name} {each}: {there.get(each, 0)}, counted are {told.get(each, 0)}"
                for each in sorted(there.keys() | told.keys())
                if there.get(each, 0) != told.get(each, 0)
            ]
        version, trained = experiences.c.trained_version, func.count().label("trained")
        named = select(version, trained).where(version.is_not(None)).group_by(version).subquery()
        count = func.coalesce(named.c.trained, 0)
        uneven = (
            select(versions.c.version, count, versions.c.purged, versions.c.consumed)
            .join_from(versions, named, named.c.trained_version == versions.c.version, isouter=True)
            .where(count + versions.c.purged != versions.c.consumed)
        )
        for number, rows, purged, consumed in self._read(uneven.order_by(versions.c.version)):
            found.append(f"version {number} consumed {consumed}, but {rows} rows name it and {purged} are purged")
        current = select(func.max(epochs.c.epoch)).scalar_subquery()
        for what, condition in {
            "leased under an epoch that has ended": and_(_LEASED, experiences.c.lease_epoch != current),
            "in a group that is named after a later one": and_(
                or_(_COMMITTED, _LEASED), experiences.c.group_id > experiences.c.id
            ),
        }.items():
            [(misplaced,)] = self._read(select(func.count()).select_from(experiences).where(condition))
            if misplaced:
                found.append(f"experiences {what}: {misplaced}")
        return found


def _count_committed(read: _Read, rules: BatchRules, tenant: str | None = None) -> tuple[int, int, int]:
    """The committed rows that a batch takes, those young enough now, those in groups: all but what is counted here."""

    def count(query: Select[Any], *which: ColumnElement[bool]) -> int:
        return int(read(query.where(*which, _of(tenant)))[0][0])

    sampled = true() if rules.any_reply else experiences.c.unsampled.is_(None)
    of_other = committed_by("waiting", func.count()).where(_of_each, _of(tenant))
    others = select(_sum(of_other.scalar_subquery())).where(_policies.c.id != rules.policy)
    kept = select(_sum(_counted.rows)).where(_counted.state == State.COMMITTED, _of(tenant, _counted.tenant))
    committed = int(read(kept)[0][0]) - int(read(others)[0][0])
    committed -= 0 if rules.any_reply else count(unsampled_rows(rules, func.count()))
    committed -= 0 if rules.edited else count(edited_rows(rules, func.count()), sampled)
    fit, is_bounded, of_groups = young(rules), rules.max_staleness is not None, rules.group_by != "none"
    too_old = count(committed_by("committed_by_version", func.count()), takable(rules), not_(fit)) if is_bounded else 0
    in_group = takable(rules), fit, experiences.c.group_id.is_not(None)
    grouped = count(committed_by("grouped", func.count()), *in_group) if of_groups else 0
    return committed, committed - too_old, grouped


def _weights(read: _Read, policy: int) -> Weights | None:
    columns = (versions.c[name] for name in ("version", "state", "step", "created_at", "reason", "pinned"))
    line = select(*columns).where(versions.c.policy == policy)
    rows = read(line.order_by(versions.c.version.desc()))
    if not rows:
        return None
    unfit = (VersionState.REJECTED, VersionState.ROLLED_BACK)
    rejected = list(takewhile(lambda row: row.state in unfit, rows))
    newer = takewhile(lambda row: row.state != VersionState.CHAMPION, rows)
    waiting = [row.created_at for row in newer if row.state == VersionState.CANDIDATE]
    held = any(row.pinned or row.state == VersionState.CANARY for row in rows)
    return Weights(
        newest=rows[0].version,
        registered_at=rows[0].created_at,
        champion=next((row.version for row in rows if row.state == VersionState.CHAMPION), None),
        step=next((row.step for row in rows if row.state not in unfit), 0),
        rejected=len(rejected),
        reason=rejected[0].reason if rejected else None,
        servable=next((row.version for row in rows if row.state not in unfit), 0),
        waiting_since=None if held else min(waiting, default=None),
    )


def _most_frequent(read: _Read, limit: int, reason: Any, states: Collection[State]) -> tuple[DropCount, ...]:
    if not limit:
        return ()
    state, count = experiences.c.state, func.count()
    query = select(state, reason, count).where(state.in_(states), reason.is_not(None)).group_by(state, reason)
    rows = read(query.order_by(count.desc(), state, reason).limit(limit))
    return tuple(DropCount(State(row[0]), *row[1:]) for row in rows)


def _of(tenant: str | None, column: ColumnElement[str] = experiences.c.tenant) -> ColumnElement[bool]:
    return true() if tenant is None else column == tenant


def _sum(column: Any) -> Any:
    return func.coalesce(func.sum(column), 0)
