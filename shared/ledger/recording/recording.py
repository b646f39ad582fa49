"""The explorer's verbs: record exchanges and feedback, commit experiences, recompute rewards."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, Unpack
from zlib import crc32

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    Update,
    and_,
    bindparam,
    delete,
    exists,
    func,
    literal_column,
    not_,
    or_,
    select,
    union,
    update,
)

from tuneloop.shared.errors import Deadlock, RecordsLost
from tuneloop.shared.experience import (
    Exchange,
    Feedback,
    Kind,
    Outcome,
    Rater,
    RaterState,
    Record,
    State,
    boot,
    decode,
    voter_of,
)
from tuneloop.shared.ledger.recording.attestation import mark_untrusted
from tuneloop.shared.ledger.recording.feedback import (
    EarlyFeedback,
    FeedbackResults,
    rated_runs,
    results_of,
    store_feedback,
)
from tuneloop.shared.ledger.recording.retention import deleted_among, names_in, not_erased
from tuneloop.shared.ledger.recording.reward_rule import CUT_OFF, OF_A_FILE, OF_RUNS, RETRIED, RUN
from tuneloop.shared.ledger.recording.rewards import (
    TRAJECTORY,
    Rewards,
    Trajectory,
    replies_of,
    replies_preferred_to,
    write,
)
from tuneloop.shared.ledger.recording.stored_completions import tag
from tuneloop.shared.ledger.storage.codec import exchange_row, experience_row, unpack_text
from tuneloop.shared.ledger.storage.database import (
    LedgerPart,
    Transactions,
    Utf8Text,
    again_after_deadlock,
    alone,
    alone_each,
    ignoring,
    is_among,
    portions,
    put,
)
from tuneloop.shared.ledger.storage.schema import (
    RESTORE,
    deletions,
    epochs,
    erasures,
    exchanges,
    experiences,
    feedback,
    mismatches,
    outbox_files,
    raters,
    refused_records,
    reward_rules,
)

#: Seconds without a heartbeat after which a trainer's leases end. A newer trainer ends them at once.
LEASE_S = 600.0

#: So many voters that are in the ledger are known without a look at it.
_VOTERS_KNOWN = 100_000

_PAGE = 1000

_STORED_REPLIES = select(exchanges.c.msg_id).where(is_among(exchanges.c.msg_id, "names"))
_CALLS = select(exchanges.c.msg_id, exchanges.c.endpoint, exchanges.c.request).join(
    experiences, experiences.c.msg_id == exchanges.c.msg_id
)
_UNCOMMITTED = (State.RECORDED, State.REWARDED)
_NEWEST_EPOCH = select(epochs.c.epoch, epochs.c.seen_at).order_by(epochs.c.epoch.desc()).limit(1)


_NUMBERS = select(outbox_files.c.file, outbox_files.c.number).where(is_among(outbox_files.c.file, "files"))
_LOCKED = _NUMBERS.order_by(outbox_files.c.file).with_for_update()
_MOVING = (
    update(outbox_files)
    .where(outbox_files.c.file == bindparam("its_file"))
    .values(number=bindparam("its_number"), seen_at=bindparam("now"))
)


#: Whether there are any rows of kinds that most ledgers have none of, by one query.
_PRESENT: Executable = select(
    *(exists().select_from(table).label(table.name) for table in (deletions, erasures, mismatches)),
    # Feedback that waits for its reply; the second condition has the index used.
    exists().where(literal_column("outcome = 'pending'"), feedback.c.id > 0).label("pending"),
    exists().where(feedback.c.other_msg_id.is_not(None)).label("preferences"),
    exists().where(feedback.c.msg_id.is_(None)).label("of_runs"),
    # When the database was put back to an earlier moment.
    select(func.max(epochs.c.started_at)).where(epochs.c.trainer == RESTORE).scalar_subquery().label("restored_at"),
)

#: Whether `its_tenant` has feedback about a reply that waits for it, and whether any reply was preferred to another.
_RATED, _PREFERRED_TO = (
    select(named).where(is_among(named, "replies")) for named in (feedback.c.msg_id, feedback.c.other_msg_id)
)


class RecomputeResult(NamedTuple):
    replies: int
    changed: int


class RefusedRecord(NamedTuple):
    """A record that the database refused, without its bytes. A damaged one has the number of the one before it."""

    file: str
    end_offset: int
    number: int
    reason: str
    size: int
    refused_at: float


class CommitLimits(TypedDict, total=False):
    """What is committed of a tenant's: of a task, a run, some tasks, or sampled `until` then (since 1970)."""

    task_id: str | None
    run_id: str | None
    task_ids: Sequence[str] | None
    until: float | None


class Recording(LedgerPart):
    """Records and commits exchanges and feedback; `any_reply`: the method also trains on other than samples."""

    def __init__(
        self,
        transactions: Transactions,
        rewards: Rewards,
        *,
        any_reply: bool = False,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(transactions)
        self._any_reply = any_reply
        #: Raises LedgerForbidden if the database's file was deleted or replaced; asks the file system alone.
        self.check_place = transactions.file.check
        self._boot_time = transactions.boot_time
        self._rewards = rewards
        self._voters: set[Rater] = set()
        self._ticks, self._early = ticks, EarlyFeedback(ticks)
        #: What the trainer last wrote, and since when by our own ticks: its clock and ours need not agree.
        self._heartbeat: tuple[object, float] = None, ticks()

    def record(
        self,
        records: Sequence[Record],
        places: Sequence[tuple[str, int]] = (),
        known: Mapping[str, int] = MappingProxyType({}),
    ) -> FeedbackResults:
        """Store exchanges and feedback in their order, and return the outcome of the feedback; existing rows stay.

        `places` are the records' files and numbers: a record that was taken before is skipped. `known` are numbers
        already taken: raises RecordsLost, and stores nothing, if the ledger lacks them.
        """
        with suppress(Deadlock):
            return self._record(records, places, known)
        return self._record(records, places, known, nobody_else=True)

    @again_after_deadlock
    def _record(
        self,
        records: Sequence[Record],
        places: Sequence[tuple[str, int]],
        known: Mapping[str, int],
        *,
        nobody_else: bool = False,
    ) -> FeedbackResults:
        voters: set[Rater] = set()
        with self._write() as connection:
            dated = self._date_records(records)
            heard = [record for record in dated if isinstance(record, Feedback)]
            if nobody_else:
                alone(connection, "record")
            else:
                _wait_for_others(connection, dated)
            last: dict[str, int] = {}
            for file, number in places:
                last[file] = max(number, last.get(file, 0))
            taken = _move_on(connection, last, self._clock(), known=known)
            if places:
                dated = [each for each, (file, at) in zip(dated, places, strict=True) if at > taken[file]]
            new_exchanges = [record for record in dated if isinstance(record, Exchange)]
            new_feedback = [record for record in dated if isinstance(record, Feedback)]
            present = connection.execute(_PRESENT).one()
            dropped: dict[str, Outcome] = {}
            if present.deletions or present.erasures:
                offered = new_feedback
                new_exchanges, new_feedback = not_erased(connection, new_exchanges, new_feedback)
                if len(new_feedback) < len(offered):
                    deleted = deleted_among({name for each in offered for name in names_in(each)}, connection.execute)
                    dropped = {each.event_id: Outcome.UNKNOWN for each in offered if deleted & names_in(each)}
            if present.mismatches:
                new_exchanges = mark_untrusted(connection, new_exchanges)
            msg_ids = [each.msg_id for each in new_exchanges]
            choices = [experience_row(each, choice) for each in new_exchanges for choice in each.experiences]
            there = {
                name
                for portion in portions({*msg_ids})
                for name in connection.execute(_STORED_REPLIES, {"names": portion}).scalars()
            }
            put(connection, exchanges, [exchange_row(each) for each in new_exchanges])
            if untagged := [each for each in new_exchanges if each.msg_id not in there]:
                tag(connection, untagged)
            put(connection, experiences, choices)
            _drop_retried(connection, new_exchanges)
            offered, new_feedback = new_feedback, self._early.within_bound(connection, new_feedback)
            full = {each.event_id for each in offered} - {each.event_id for each in new_feedback}
            found = store_feedback(connection, new_feedback, names={each.event_id for each in heard})
            sources = {(each.tenant, each.source or "") for each in found.new.values()}
            named = (each for each in sources if each not in self._rewards.trusted_raters)
            voters = {(tenant, voter_of(source)) for tenant, source in named} - self._voters
            put(connection, raters, [new_rater(*voter, self._clock()) for voter in sorted(voters)])
            touched = set(_replies(connection, [*found.new.values(), *found.moved, *rated_runs(heard)]))
            for wanted, earlier in ((present.pending, _RATED), (present.preferences, _PREFERRED_TO)):
                for portion in portions(msg_ids if wanted else ()):
                    touched.update(connection.execute(earlier, {"replies": portion}).scalars())
            if present.of_runs:
                touched.update(each.msg_id for each in new_exchanges if None not in (each.task_id, each.run_id))
                touched.update(replies_of(connection, _runs_with_lost_calls(connection, new_exchanges)))
            decided = self._rewards.compute(connection, touched)
            dropped |= dict.fromkeys(full, Outcome.FULL)
            results = results_of(
                *(connection, heard, found, decided, self._rewards.rule),
                dropped=dropped,
                restored_at=present.restored_at,
                any_reply=self._any_reply,
            )
        if len(self._voters) > _VOTERS_KNOWN:
            self._voters.clear()
        self._voters |= voters
        return results

    def refuse(
        self,
        file: str,
        number: int,
        end_offset: int,
        payload: bytes,
        reason: str,
        known: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Store a refused record, unless its person was erased, and advance past it; raises RecordsLost."""
        with self._write() as connection:
            alone(connection, "record", shared=True)  # else a deletion might not see it, nor it the deletion
            _move_on(connection, {file: number}, now := self._clock(), known=known)
            try:
                [record] = self._date_records([decode(payload)])
            except msgspec.MsgspecError:
                erased_at = connection.execute(select(func.max(erasures.c.erased_at))).scalar()
                if erased_at is not None and file < f"{int(erased_at * 1e9):020d}":  # a name begins with its time
                    payload = b""  # the owner of these bytes is unknown
            else:
                said, heard = ([record], []) if isinstance(record, Exchange) else ([], [record])
                if not any(not_erased(connection, said, heard)):
                    return
            row = {"file": file, "end_offset": end_offset, "number": number, "reason": reason, "payload": payload}
            connection.execute(ignoring(connection, refused_records), row | {"refused_at": now})

    def last_events_of(self, tenant: str, source: str) -> list[Any]:
        subject = [feedback.c[name] for name in ("msg_id", "choice", "task_id", "run_id", "metric")]
        ours = and_(feedback.c.tenant == tenant, feedback.c.source == source)
        rows = self._read(select(*subject, feedback.c.kind).where(ours).order_by(feedback.c.received_at, feedback.c.id))
        return list({tuple(row)[:-1]: row for row in rows}.values())

    def refused_records(self) -> list[RefusedRecord]:
        columns = (refused_records.c[name] for name in ("file", "end_offset", "number", "reason"))
        query = select(*columns, func.length(refused_records.c.payload), refused_records.c.refused_at)
        order = (refused_records.c[name] for name in ("refused_at", "file", "end_offset"))
        return [RefusedRecord(*row) for row in self._read(query.order_by(*order))]

    def refused_payload(self, file: str, end_offset: int) -> bytes | None:
        rows = self._read(select(refused_records.c.payload).where(_at(file, end_offset)))
        return bytes(rows[0].payload) if rows else None

    def delete_refused(self, file: str, end_offset: int) -> bool:
        with self._write() as connection:
            return bool(connection.execute(delete(refused_records).where(_at(file, end_offset))).rowcount)

    def unseen_files(self, present: Collection[str], silent_s: float) -> list[str]:
        """The files that are not removed, that are not `present`, and that nothing was taken of for so long."""
        silent = outbox_files.c.removed_at.is_(None), outbox_files.c.seen_at < self._clock() - silent_s
        rows = self._read(select(outbox_files.c.file).where(*silent).order_by(outbox_files.c.file))
        return [row.file for row in rows if row.file not in present]

    def taken_numbers(self, files: Collection[str]) -> dict[str, int]:
        found = (row for portion in portions(files) for row in self._read(_NUMBERS, {"files": portion}))
        return {row.file: row.number for row in found}

    def note_removed(self, files: Collection[str]) -> None:
        gone = update(outbox_files).where(is_among(outbox_files.c.file, "files")).values(removed_at=self._clock())
        with self._write() as connection:
            for portion in portions(files):
                connection.execute(gone, {"files": portion})

    def commit(self, tenant: str, **limits: Unpack[CommitLimits]) -> int:
        with self._write() as connection:
            now = self._clock()
            given = {f"its_{name}": value for name, value in limits.items() if value is not None}
            names, values = frozenset(given), {**given, "its_tenant": tenant, "now": now}
            if (rewarding := self._rewards.by_default(connection)) is not None:
                closed, given_by_default = rewarding
                those = update(experiences).where(closed, _limited_to(names))
                connection.execute(those.values(given_by_default), values)
            return connection.execute(_committing(names), values).rowcount

    def _date_records(self, records: Sequence[Record]) -> list[Record]:
        """The ledger's time replaces what processes assumed, in records of this start of the machine."""
        began, this_boot = self._boot_time(), boot()
        return [
            msgspec.structs.replace(each, received_at=began + each.stamp.seconds)
            if began is not None and each.stamp and each.stamp.boot == this_boot
            else each
            for each in records
        ]

    def end_silent_leases(self) -> None:
        """Release the leases of a trainer that was not seen for LEASE_S, as long as this process has watched."""
        for beat in self._read(_NEWEST_EPOCH):
            if beat != self._heartbeat[0]:
                self._heartbeat = beat, self._ticks()
            if self._ticks() - self._heartbeat[1] > LEASE_S:
                with self._write() as connection:
                    if connection.execute(_NEWEST_EPOCH).one() == beat:
                        self._rewards.release(connection, experiences.c.lease_epoch <= beat.epoch)

    def recompute_rewards(
        self, *, dry_run: bool = False, examined: Callable[[int], object] = lambda count: None
    ) -> RecomputeResult:
        """Recompute rewards of untrained rows, one portion a transaction; `examined` gets the portion's size."""
        replies = changed = 0
        last = ""
        of_files = select(reward_rules.c.id).where(reward_rules.c.definition == OF_A_FILE)
        is_of_file = experiences.c.reward_rule.in_(of_files) & experiences.c.reward_rule.is_not(None)
        open_ = and_(experiences.c.state.not_in((State.LEASED, State.TRAINED)), not_(is_of_file))
        query = select(experiences.c.msg_id).distinct().where(open_).order_by(experiences.c.msg_id).limit(_PAGE)
        while page := [row.msg_id for row in self._read(query.where(experiences.c.msg_id > last))]:
            with self._write() as connection:
                alone(connection, "record")
                decided = self._rewards.plan(connection, page)
                if not dry_run:
                    rule_id = self._rewards.rule_id(connection)
                    write(connection, decided._replace(repeats=[]), rule_id, repeat=False)
                    # Store that these rewards are the rule's, unchanged ones included.
                    same = and_(experiences.c.msg_id.in_(page), experiences.c.rewarded_at.is_not(None), open_)
                    connection.execute(update(experiences).where(same).values(reward_rule=rule_id))
            replies, changed, last = replies + len(page), changed + len(decided.changes), page[-1]
            examined(len(page))
        return RecomputeResult(replies, changed)


#: A server has room for some thousands of locks in all, and a group may bring hundreds of replies.
_STRIPES = 1024

_THERE = select(experiences.c.msg_id).distinct().where(is_among(experiences.c.msg_id, "replies"))
_ROWS = select(experiences.c.id).where(is_among(experiences.c.msg_id, "replies"))
_LOCKED_ROWS = _ROWS.order_by(experiences.c.id).with_for_update()
_LABELS = union(
    *(
        select(table.c.msg_id, *(table.c[name] for name in TRAJECTORY)).where(
            is_among(table.c.msg_id, "replies"), or_(table.c.task_id.is_not(None), table.c.run_id.is_not(None))
        )
        for table in (experiences, feedback)
    )
)


class _Subjects(NamedTuple):
    """Replies with rows that feedback bears on, locks to hold alone and to share; `read`: others may add to them."""

    rows: set[str]
    own: set[int]
    shared: set[int]
    read: bool


def _wait_for_others(connection: Connection, records: Sequence[Record]) -> None:
    """Keep other processes from deciding the same rewards. Raises Deadlock if others made these more."""
    if connection.dialect.name != "postgresql":
        return
    alone(connection, "record", shared=True)
    wanted = _subjects(connection, records)
    alone_each(connection, "record", wanted.own, shared=wanted.shared)
    for portion in portions(sorted(wanted.rows)):
        connection.execute(_LOCKED_ROWS, {"replies": portion})
    now = _subjects(connection, records) if wanted.read else wanted
    if now.rows - wanted.rows or now.own - wanted.own or now.shared - wanted.own - wanted.shared:
        raise Deadlock("others have recorded of the same runs or preferences meanwhile")


def _subjects(connection: Connection, records: Sequence[Record]) -> _Subjects:
    brought = {each.msg_id for each in records if isinstance(each, Exchange)}
    heard = [each for each in records if isinstance(each, Feedback)]
    whole_runs = {(each.tenant, each.task_id or "", each.run_id or "") for each in heard if each.msg_id is None}
    whole_runs |= _runs_with_lost_calls(connection, (each for each in records if isinstance(each, Exchange)))
    retracted = {each.msg_id for each in heard if each.kind is Kind.RETRACTION and each.msg_id is not None}
    named = {name for each in heard for name in names_in(each)} | {*replies_preferred_to(connection, retracted)}
    rows = {name for some in portions(named) for name in connection.execute(_THERE, {"replies": some}).scalars()}
    # Runs whose calls the replies are, or may become by labels that feedback gives them.
    labels: list[tuple[str | None, ...]] = [
        (each.msg_id, each.tenant, each.task_id, each.run_id)
        for each in records
        if isinstance(each, Exchange) or (each.msg_id and (each.task_id or each.run_id) is not None)
    ]
    open_ = {name for name, _, *given in labels if name is not None and (None in given or name not in brought)}
    for some in portions(open_):
        labels += [tuple(row) for row in connection.execute(_LABELS, {"replies": some})]
    tasks, runs = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for name, _, task_id, run_id in labels:
        for of, label in ((tasks, task_id), (runs, run_id)):
            of[name or ""] |= {label} if label is not None else set()
    joined = {(tenant, *run) for name, tenant, *_ in labels for run in product(tasks[name or ""], runs[name or ""])}
    own = {_number("run", *run) for run in whole_runs} | {_stripe(name) for name in named - rows - brought}
    shared = {_stripe(name) for name in brought} | {_number("run", tenant or "", *run) for tenant, *run in joined}
    read = bool(retracted or whole_runs or open_)
    return _Subjects(rows | {*replies_of(connection, whole_runs)}, own, shared - own, read)


def _runs_with_lost_calls(connection: Connection, recorded: Iterable[Exchange]) -> set[Trajectory]:
    """Those of the runs of these exchanges with a call that was cut off or asked again, now or before."""
    runs, lost = set[Trajectory](), set[Trajectory]()
    for each in recorded:
        if each.task_id is not None and each.run_id is not None:
            is_lost = each.is_retry or any(choice.drop_reason == CUT_OFF for choice in each.experiences)
            (lost if is_lost else runs).add((each.tenant, each.task_id, each.run_id))
    cut = OF_RUNS.where(experiences.c.reason == CUT_OFF)
    return lost | {
        row for few in portions(runs - lost, of=3) for row in map(tuple, connection.execute(cut, {"runs": few}))
    }


def _drop_retried(connection: Connection, recorded: Sequence[Exchange]) -> None:
    """Drop the call before them that these ask again; one with feedback has reached its client, and stays."""
    for each in recorded:
        if not each.is_retry or each.task_id is None or each.run_id is None:
            continue
        run = (column == name for column, name in zip(RUN, (each.tenant, each.task_id, each.run_id), strict=True))
        before = _CALLS.where(*run, experiences.c.sampled_at < each.received_at)
        for row in connection.execute(before.order_by(experiences.c.sampled_at.desc()).limit(1)):
            if row.endpoint == each.endpoint and unpack_text(row.request) == each.request:
                about = select(feedback.c.id).where(feedback.c.msg_id == row.msg_id).exists()
                which = experiences.c.msg_id == row.msg_id, experiences.c.state.in_(_UNCOMMITTED), ~about
                connection.execute(update(experiences).where(*which).values(state=State.DROPPED, reason=RETRIED))


def _stripe(msg_id: str) -> int:
    return _number("reply", str(crc32(msg_id.encode()) % _STRIPES))


def _number(*names: str) -> int:
    return crc32(Utf8Text.storable("/".join(names)).encode()) - (1 << 31)


def _move_on(
    connection: Connection, numbers: Mapping[str, int], now: float, *, known: Mapping[str, int]
) -> dict[str, int]:
    """Note that records up to these numbers were taken of the files; returns the numbers up to which they were before.

    Who takes of one of the files meanwhile waits until this transaction ends: each record is taken once. Raises
    RecordsLost where fewer were taken before than are `known` to have been: those between would never come.
    """
    if not numbers:
        return {}
    names = {"files": sorted(numbers)}
    before = {row.file: row.number for row in connection.execute(_LOCKED, names)}
    if len(before) < len(numbers):
        new = [{"file": file, "number": 0, "seen_at": now} for file in names["files"] if file not in before]
        connection.execute(ignoring(connection, outbox_files), new)
        before = {row.file: row.number for row in connection.execute(_LOCKED, names)}
    for file in names["files"]:
        if (had := known.get(file, 0)) > before[file]:
            raise RecordsLost(f"of the file {file} {had} records were taken, and the ledger has {before[file]}")
    moves = [{"its_file": file, "its_number": max(before[file], numbers[file]), "now": now} for file in names["files"]]
    connection.execute(_MOVING, moves)
    return before


def _at(file: str, end_offset: int) -> ColumnElement[bool]:
    return and_(refused_records.c.file == file, refused_records.c.end_offset == end_offset)


def _limited_to(given: frozenset[str]) -> ColumnElement[bool]:
    limits = {
        "its_task_id": experiences.c.task_id == bindparam("its_task_id"),
        "its_run_id": experiences.c.run_id == bindparam("its_run_id"),
        "its_task_ids": is_among(experiences.c.task_id, "its_task_ids"),
        "its_until": experiences.c.sampled_at <= bindparam("its_until"),
    }
    return and_(experiences.c.tenant == bindparam("its_tenant"), *(limits[name] for name in sorted(given)))


@cache
def _committing(given: frozenset[str]) -> Update:
    rewarded = update(experiences).where(experiences.c.state == State.REWARDED, _limited_to(given))
    return rewarded.values(state=State.COMMITTED, committed_at=bindparam("now"))


def _replies(connection: Connection, events: Sequence[Any]) -> Iterator[str]:
    trajectories: set[Trajectory] = set()
    for event in events:
        if event.msg_id is not None:
            yield event.msg_id
        elif event.task_id is not None and event.run_id is not None:
            trajectories.add((event.tenant, event.task_id, event.run_id))
        if event.other_msg_id is not None:
            yield event.other_msg_id
    yield from replies_of(connection, trajectories)
    retracted = {event.msg_id for event in events if event.kind == Kind.RETRACTION and event.msg_id is not None}
    yield from replies_preferred_to(connection, retracted)


def new_rater(tenant: str, name: str, now: float) -> dict[str, Any]:
    undecided = {"state": RaterState.ACTIVE, "settled": True, "reason": None}
    return undecided | {"tenant": tenant, "name": name, "updated_at": now}
