"""Deletes rows beyond the retention bounds, and all rows of a person.

A deleted record may still be in an outbox and must not return. Deleted trained rows count in their version's `purged`,
so that the ledger balances.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    and_,
    delete,
    exists,
    func,
    insert,
    literal_column,
    or_,
    select,
    true,
    tuple_,
    update,
)

from tuneloop.shared.experience import (
    KEY_SOURCE,
    Exchange,
    Feedback,
    Kind,
    Outcome,
    Record,
    State,
    decode,
    person_behind,
)
from tuneloop.shared.ledger.recording.rewards import RewardsPart, Trajectory, replies_of
from tuneloop.shared.ledger.storage.database import (
    Utf8Text,
    alone,
    find,
    is_among,
    literally,
    portions,
    put,
    translating_errors,
)
from tuneloop.shared.ledger.storage.schema import (
    deletions,
    erasures,
    exchanges,
    experiences,
    exports,
    feedback,
    rater_events,
    raters,
    refused_records,
    versions,
)
from tuneloop.shared.settings.feedback import RetentionSettings as Bounds
from tuneloop.shared.settings.settings import Settings

Person = tuple[str, str]


_ERASED = select(erasures).where(is_among(tuple_(erasures.c.tenant, erasures.c.user_id), "people"))


def without_erased(
    records: Iterable[Record],
    erased: Mapping[Person, float],
    *,
    deleted: Iterable[str] = (),
    hidden: Callable[[str], str] = lambda name: name,
) -> Iterator[Record]:
    """The records but those of an erased person, and feedback about them; `hidden` makes their pseudonym."""
    gone = set(deleted)

    def are_of_erased(record: Record, name: str | None) -> bool:
        names = {name, hidden(name)} if name is not None else ()
        return any(
            (record.received_at <= erased.get((record.tenant, stored_name(each)), float("-inf"))) for each in names
        )

    for record in records:
        if isinstance(record, Exchange):
            theirs = record.msg_id in gone or are_of_erased(record, record.user)
            gone.update([record.msg_id] if theirs else [])
        else:
            about = names_in(record) & gone
            said_by = record.source and person_behind(record.source)
            theirs = bool(about) or are_of_erased(record, said_by)
        if not theirs:
            yield record


def not_erased(
    connection: Connection, new_exchanges: Sequence[Exchange], new_feedback: Sequence[Feedback]
) -> tuple[list[Exchange], list[Feedback]]:
    """The exchanges and the feedback that may be stored. Earlier feedback about one that may not is deleted."""
    named = {each.msg_id for each in new_exchanges} | {name for each in new_feedback for name in names_in(each)}
    if deleted := deleted_among(named, connection.execute):
        new_exchanges = [each for each in new_exchanges if each.msg_id not in deleted]
        new_feedback = [each for each in new_feedback if not deleted & names_in(each)]
    people = [(each.tenant, each.user) for each in new_exchanges] + [
        (each.tenant, each.source and person_behind(each.source)) for each in new_feedback
    ]
    erased = erased_among(connection, {(tenant, stored_name(name)) for tenant, name in people if name is not None})
    if not erased:
        return list(new_exchanges), list(new_feedback)
    remaining = list(without_erased([*new_exchanges, *new_feedback], erased))
    remaining_exchanges = [each for each in remaining if isinstance(each, Exchange)]
    left = {each.msg_id for each in remaining_exchanges}
    refused = [each for each in new_exchanges if each.msg_id not in left]
    forget_feedback(connection, {each.msg_id for each in refused})
    mark_deleted(connection, refused, at=max(erased.values()))
    return remaining_exchanges, [each for each in remaining if isinstance(each, Feedback)]


def deleted_among(msg_ids: Collection[str], read: Callable[[Select[Any]], Iterable[Any]]) -> set[str]:
    """Those of these exchanges that were deleted one by one, or with their person; `read` finds what a query asks."""
    return {row.msg_id for row in find(read, select(deletions.c.msg_id), deletions.c.msg_id, msg_ids)}


def erased_among(connection: Connection, people: Collection[Person]) -> dict[Person, float]:
    found: dict[Person, float] = {}
    for portion in portions(people, of=2):
        for row in connection.execute(_ERASED, {"people": portion}):
            found[row.tenant, row.user_id] = row.erased_at
    return found


def forget_feedback(connection: Connection, msg_ids: Collection[str]) -> None:
    for portion in portions(msg_ids):
        about = or_(feedback.c.msg_id.in_(portion), feedback.c.other_msg_id.in_(portion))
        connection.execute(delete(feedback).where(about))


def mark_deleted(connection: Connection, rows: Iterable[Any], *, at: float) -> None:
    """Note that these exchanges were deleted: feedback about them, which may come later, is not taken."""
    names = ("msg_id", "tenant", "received_at")
    put(connection, deletions, [{name: getattr(each, name) for name in names} | {"deleted_at": at} for each in rows])


def stored_name(name: str) -> str:
    return Utf8Text.storable(name)


def names_in(record: Record) -> set[str]:
    if isinstance(record, Exchange):
        return {record.msg_id}
    return {msg_id for msg_id in (record.msg_id, record.other_msg_id) if msg_id is not None}


#: What may be purged. Trained rows come first: the repeat of one may be purged in the same run, and spares it still.
PURGEABLE = (State.TRAINED, State.RECORDED, State.REWARDED, State.EXPIRED, State.DROPPED)

PORTION = 2000

_PENDING = literally(f"outcome = '{Outcome.PENDING}'")

# What is kept of an exchange that was deleted with its person, beside its id.
_DELETED = exchanges.c.tenant, exchanges.c.received_at

# Between two portions, so that who waits for SQLite's lock gets it.
_PAUSE_S = 0.02


class PurgeResult(NamedTuple):
    experiences: dict[State, int]
    parked: int


class ErasureResult(NamedTuple):
    """What a person's deletion came to: `trained` by version, `labels` of tasks and runs."""

    msg_ids: frozenset[str]
    experiences: int
    feedback: int
    trained: dict[int, int]
    labels: frozenset[str]


NOTHING_ERASED = ErasureResult(frozenset(), 0, 0, {}, frozenset())


class Export(NamedTuple):
    path: str
    rows: int


def bounds_of(retention: Bounds) -> dict[State, float]:
    """Retention by state, in seconds after sampling; no bound for a state that is missing."""
    return {State(name): bound for name, bound in retention.model_dump().items() if bound is not None}


def bounds_of_tenants(settings: Settings) -> dict[str, dict[State, float]]:
    """The same for each tenant that has bounds of its own: what they do not name is as for all."""
    common = settings.retention.model_dump()
    named = {name: tenant.retention.model_dump(exclude_unset=True) for name, tenant in settings.tenants.items()}
    return {name: bounds_of(Bounds.model_validate(common | own)) for name, own in named.items() if own}


class Retention(RewardsPart):
    def purge(
        self,
        bounds: Mapping[State, float],
        *,
        of_tenants: Mapping[str, Mapping[State, float]] | None = None,
        dry_run: bool = False,
        deleted: Callable[[int], object] = lambda count: None,
    ) -> PurgeResult:
        """Delete the experiences of each state that were sampled longer ago than its bound, in seconds.

        `of_tenants` are bounds of single tenants. An exchange goes with its last experience, and its feedback too. A
        row stays while its repeat with a later reward waits for training. Feedback about an unknown reply has the bound
        of `recorded`. One transaction a portion, so that others can write; `deleted` gets its size. Raises ValueError
        for another state.
        """
        of_tenants = of_tenants or {}
        if in_work := {state for each in (bounds, *of_tenants.values()) for state in each} - set(PURGEABLE):
            raise ValueError(f"experiences that are {', '.join(sorted(in_work))} wait for the trainer")
        now, purged, parked = self._clock(), dict[State, int](), 0
        for tenant, within in ((None, bounds), *of_tenants.items()):
            for state in (each for each in PURGEABLE if each in within):
                theirs = _of_tenants(experiences, tenant, of_tenants)
                found = self._purge(state, now - within[state], theirs, dry_run, deleted)
                purged[state] = purged.get(state, 0) + found
            if State.RECORDED in within:
                other = select(exchanges.c.msg_id).where(exchanges.c.msg_id == feedback.c.other_msg_id)
                old = feedback.c.received_at < now - within[State.RECORDED]
                waiting = and_(_PENDING, old, ~other.exists(), _of_tenants(feedback, tenant, of_tenants))
                if dry_run:
                    parked += int(self._read(select(func.count()).where(waiting))[0][0])
                    continue
                with self._write() as connection:
                    alone(connection, "record")
                    parked += connection.execute(delete(feedback).where(waiting)).rowcount
        if not dry_run and (parked or any(purged.values())):
            self.empty_log()
        return PurgeResult(purged, parked)

    def erase(self, tenant: str, user: str, *, at: float | None = None, dry_run: bool = False) -> ErasureResult:
        """Delete a person: their exchanges, the feedback about these, and the feedback that they gave.

        Others' untrained replies get their rewards without that feedback. Records from before now that are still in an
        outbox are not stored, nor later feedback on the person's replies. `at` is the time of an earlier erasure.
        """
        with self._write() as connection:
            alone(connection, "record")
            alone(connection, "exports")  # else a file might be listed, with their rows in it, after the check
            alone(connection, "raters")  # else they might be named there, by feedback that is deleted
            rows = connection.execute(
                _columns().where(experiences.c.msg_id.in_(_exchanges_of(tenant, user))).with_for_update()
            ).all()
            theirs = connection.execute(_exchanges_of(tenant, user, *_DELETED)).all()
            msg_ids = {each.msg_id for each in theirs}
            events = {event.id: event for event in _feedback_to_erase(connection, tenant, user, rows, msg_ids)}
            if not dry_run:
                runs = {(each.tenant, each.task_id, each.run_id) for each in events.values() if each.msg_id is None}
                named = {name for each in events.values() for name in (each.msg_id, each.other_msg_id)}
                touched = {*replies_of(connection, runs), *named} - msg_ids - {None}
                at = self._clock() if at is None else at
                _note_erased(connection, tenant, user, at)
                mark_deleted(connection, theirs, at=at)
                regroup(connection, rows)
                _delete(connection, rows)
                delete_by(connection, exchanges, exchanges.c.msg_id, msg_ids)
                delete_by(connection, feedback, feedback.c.id, events)
                for table in (raters, rater_events):
                    alike = select(table.c.name).where(table.c.tenant == tenant, _may_be(table.c.name, user))
                    names = {name for name in connection.execute(alike).scalars() if person_behind(name) == user}
                    connection.execute(delete(table).where(table.c.tenant == tenant, table.c.name.in_(names)))
                _forget_refused(connection, (tenant, stored_name(user)), msg_ids)
                self._rewards.recompute(connection, touched)
        return _result_of(msg_ids, rows, len(events))

    def erase_line(self, tenant: str, file_id: str, line: int, *, dry_run: bool = False) -> ErasureResult:
        """Delete what jobs have made of a line of a file: exchanges and tasks whose names begin with both."""
        prefix = f"{file_id}:{line}:"

        def begins(column: ColumnElement[str]) -> ColumnElement[bool]:
            found = column.startswith(prefix, autoescape=True)
            # SQLite's LIKE uses no index, PostgreSQL's collations have orders of their own.
            is_sqlite = self._engine.dialect.name == "sqlite"
            return and_(found, column >= prefix, column < f"{prefix[:-1]};") if is_sqlite else found

        with self._write() as connection:
            alone(connection, "record")
            alone(connection, "exports")
            asked = select(experiences.c.msg_id).where(
                experiences.c.tenant == tenant, experiences.c.task_id.is_not(None), begins(experiences.c.task_id)
            )
            named = or_(begins(exchanges.c.msg_id), exchanges.c.msg_id.in_(asked))
            columns = select(exchanges.c.msg_id, *_DELETED)
            theirs = connection.execute(columns.where(exchanges.c.tenant == tenant, named)).all()
            msg_ids = {each.msg_id for each in theirs}
            rows = find(connection.execute, _columns().with_for_update(), experiences.c.msg_id, msg_ids)
            events = len(find(connection.execute, select(feedback.c.id), feedback.c.msg_id, msg_ids))
            if not dry_run:
                at, label = self._clock(), prefix[:-1]
                mark_deleted(connection, theirs, at=at)
                regroup(connection, rows)
                delete_with_exchanges(connection, rows)
                delete_by(connection, exchanges, exchanges.c.msg_id, msg_ids)
                _forget_refused(connection, (tenant, label), msg_ids)
                # No person has such a name: it has the explorers let their outbox files go, as they do for a person.
                _note_erased(connection, tenant, label, at)
        return _result_of(msg_ids, rows, events)

    def erasures(self) -> dict[Person, float]:
        return {(row.tenant, row.user_id): row.erased_at for row in self._read(select(erasures))}

    def exported_files(self) -> list[Export]:
        return [Export(row.path, row.rows) for row in self._read(select(exports).order_by(exports.c.id))]

    def exported_rows(self, path: str, rows: int) -> None:
        with self._write() as connection:
            connection.execute(update(exports).where(exports.c.path == path).values(rows=rows))

    def empty_log(self) -> bool:
        """Empty SQLite's write-ahead log of what was deleted; False if a reader prevented it."""
        if self._engine.dialect.name != "sqlite":
            return True
        with translating_errors():
            connection = self._engine.raw_connection()
            try:
                cursor = connection.cursor()
                busy: int = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            finally:
                connection.close()
        return not busy

    def _purge(
        self, state: State, before: float, theirs: ColumnElement[bool], dry_run: bool, deleted: Callable[[int], object]
    ) -> int:
        repeat = experiences.alias()
        same = and_(repeat.c.msg_id == experiences.c.msg_id, repeat.c.choice == experiences.c.choice)
        untrained = (State.RECORDED, State.REWARDED, State.COMMITTED, State.LEASED)
        old = and_(
            theirs,
            experiences.c.state == state,
            experiences.c.sampled_at < before,
            # The second condition makes them few, and a parameter would hide that.
            ~exists().where(
                same,
                repeat.c.correction > literal_column("0"),
                repeat.c.correction > experiences.c.correction,
                repeat.c.state.in_(untrained),
            ),
        )
        if dry_run:
            return int(self._read(select(func.count()).where(old))[0][0])
        # The lower correction first: were the later one gone alone, it would be made again.
        portion = _columns().where(old).order_by(experiences.c.sampled_at, experiences.c.id).limit(PORTION)
        total, found = 0, PORTION
        while found == PORTION:
            with self._write() as connection:
                alone(connection, "record")
                rows = connection.execute(portion.with_for_update(skip_locked=True)).all()
                delete_with_exchanges(connection, rows)
            found = len(rows)
            total += found
            deleted(found)
            time.sleep(_PAUSE_S if found == PORTION else 0)
        return total


def _note_erased(connection: Connection, tenant: str, user: str, at: float) -> None:
    person = and_(erasures.c.tenant == tenant, erasures.c.user_id == user)
    if not connection.execute(update(erasures).where(person).values(erased_at=at)).rowcount:
        connection.execute(insert(erasures).values(tenant=tenant, user_id=user, erased_at=at))


def _result_of(msg_ids: Collection[str], rows: Sequence[Any], events: int) -> ErasureResult:
    trained = Counter(row.trained_version for row in rows if row.trained_version is not None)
    labels = frozenset(name for row in rows for name in (row.task_id, row.run_id) if name is not None)
    return ErasureResult(frozenset(msg_ids), len(rows), events, dict(sorted(trained.items())), labels)


def _of_tenants(table: Table, tenant: str | None, but: Collection[str]) -> ColumnElement[bool]:
    if tenant is not None:
        return table.c.tenant == tenant
    return table.c.tenant.not_in(but) if but else true()


def _columns() -> Any:
    names = ("id", "msg_id", "tenant", "task_id", "run_id", "group_id", "trained_version")
    return select(*(experiences.c[name] for name in names))


def _exchanges_of(tenant: str, user: str, *columns: ColumnElement[Any]) -> Any:
    # Stated twice, so that the index of those with a user is seen to apply.
    theirs = and_(exchanges.c.user_id.is_not(None), exchanges.c.user_id == user)
    return select(exchanges.c.msg_id, *columns).where(exchanges.c.tenant == tenant, theirs)


def _feedback_to_erase(
    connection: Connection, tenant: str, user: str, rows: Sequence[Any], msg_ids: Collection[str]
) -> Iterator[Any]:
    """Their feedback, and the feedback about their replies, or about runs that were all theirs."""
    attributed = and_(feedback.c.tenant == tenant, feedback.c.source.is_not(None))
    for row in connection.execute(select(feedback).where(attributed, _may_be(feedback.c.source, user))):
        if person_behind(row.source) == user:  # a name may have slashes
            yield row
    for portion in portions(msg_ids, of=2):
        about = or_(feedback.c.msg_id.in_(portion), feedback.c.other_msg_id.in_(portion))
        yield from connection.execute(select(feedback).where(about))
    theirs = experiences.c.msg_id.in_(_exchanges_of(tenant, user))
    for few in portions(_trajectories(rows), of=3):
        about_runs = and_(_of_trajectories(few), ~_has_replies(~theirs))
        yield from connection.execute(select(feedback).where(about_runs))


def _forget_refused(connection: Connection, person: Person, msg_ids: Collection[str]) -> None:
    """Delete these people's refused records, and the damaged bytes, whose owner is unknown."""
    places = refused_records.c.file, refused_records.c.end_offset
    gone = {*msg_ids}
    for place in connection.execute(select(*places).order_by(*places)).all():
        this = tuple_(*places) == place
        with suppress(msgspec.MsgspecError):
            record = decode(connection.execute(select(refused_records.c.payload).where(this)).scalar_one())
            if list(without_erased([record], {person: math.inf}, deleted=gone)):
                continue
            gone |= {record.msg_id} if isinstance(record, Exchange) else set()
        connection.execute(delete(refused_records).where(this))


def _may_be(name: ColumnElement[str], user: str) -> ColumnElement[bool]:
    """Whether a rater's name is the person's, or ends in it behind the name of a client's key."""
    by_key = and_(name.startswith(KEY_SOURCE), name.endswith(f"/{user}", autoescape=True))
    return or_(name == user, by_key)


def regroup(connection: Connection, rows: Sequence[Any]) -> None:
    """Gather the remaining members of groups again: one member may be alone."""
    for portion in portions({row.group_id for row in rows if row.group_id is not None}):
        waits = experiences.c.state.in_((State.COMMITTED, State.LEASED))
        left = and_(experiences.c.group_id.in_(portion), waits)
        connection.execute(update(experiences).where(left).values(group_id=None))


def delete_with_exchanges(connection: Connection, rows: Sequence[Any]) -> None:
    """Delete experiences, the exchanges that have none left, and the feedback that is about nothing any more."""
    _delete(connection, rows)
    gone: set[str] = set()
    for portion in portions({row.msg_id for row in rows}):
        left = exists().where(experiences.c.msg_id == exchanges.c.msg_id)
        empty = select(exchanges.c.msg_id).where(exchanges.c.msg_id.in_(portion), ~left)
        gone |= set(connection.execute(empty).scalars())
    delete_by(connection, exchanges, exchanges.c.msg_id, gone)
    for portion in portions(gone):
        # Whether a preference was taken back: it must not outlive the word that took it back.
        later = feedback.alias()
        same = (later.c[name] == feedback.c[name] for name in ("tenant", "msg_id", "metric"))
        later_at, at = (func.coalesce(each.repeated_at, each.received_at) for each in (later.c, feedback.c))
        connection.execute(
            delete(feedback).where(
                feedback.c.msg_id.in_(portion),
                and_(
                    feedback.c.kind == Kind.PREFERENCE,
                    exists().where(
                        later.c.kind == Kind.RETRACTION,
                        *same,
                        later.c.source.is_not_distinct_from(feedback.c.source),
                        tuple_(later_at, later.c.id) > tuple_(at, feedback.c.id),
                        or_(later.c.choice.is_(None), later.c.choice == feedback.c.choice),
                    ),
                ),
            )
        )
    # A preference stays as long as either of its two replies: it makes both of their rewards.
    either = exists().where(exchanges.c.msg_id.in_((feedback.c.msg_id, feedback.c.other_msg_id)))
    for portion in portions(gone, of=2):
        of_the_worse = and_(feedback.c.other_msg_id.in_(portion), feedback.c.outcome != Outcome.PENDING)
        about = or_(feedback.c.msg_id.in_(portion), of_the_worse)
        connection.execute(delete(feedback).where(about, ~either))
    for few in portions(_trajectories(rows), of=3):
        connection.execute(delete(feedback).where(_of_trajectories(few), ~_has_replies()))


def _delete(connection: Connection, rows: Sequence[Any]) -> None:
    for version, count in Counter(row.trained_version for row in rows).items():
        trained = versions.c.version == version
        connection.execute(update(versions).where(trained).values(purged=versions.c.purged + count))
    for portion in portions([row.id for row in rows]):
        connection.execute(delete(experiences).where(experiences.c.id.in_(portion)))


def delete_by(connection: Connection, table: Table, column: ColumnElement[Any], values: Collection[Any]) -> None:
    for portion in portions(values):
        connection.execute(delete(table).where(column.in_(portion)))


def _trajectories(rows: Sequence[Any]) -> set[Trajectory]:
    return {(row.tenant, row.task_id, row.run_id) for row in rows if None not in (row.task_id, row.run_id)}


def _of_trajectories(trajectories: Sequence[Trajectory]) -> ColumnElement[bool]:
    named = tuple_(feedback.c.tenant, feedback.c.task_id, feedback.c.run_id)
    return and_(feedback.c.msg_id.is_(None), named.in_(trajectories))


def _has_replies(*which: ColumnElement[bool]) -> ColumnElement[bool]:
    """Whether there are experiences of the trajectory that a row of `feedback` is about."""
    same = and_(*(experiences.c[name] == feedback.c[name] for name in ("tenant", "task_id", "run_id")))
    return exists().where(experiences.c.task_id.is_not(None), same, *which)
