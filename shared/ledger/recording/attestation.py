"""What is recorded, or was, of engines that answered with other weights than they should have had."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, insert, or_, select, true, update

from tuneloop.shared.experience import Exchange, State, VersionAction
from tuneloop.shared.ledger.recording.retention import regroup
from tuneloop.shared.ledger.recording.rewards import RewardsPart
from tuneloop.shared.ledger.storage.database import alone, portions
from tuneloop.shared.ledger.storage.schema import exchanges, experiences, mismatches
from tuneloop.shared.ledger.versions.versions import Decision, Details, note

#: Seconds that no reply takes. The time when a reply ended has no index, but the one when it began has.
_LONGEST = 86_400.0

REASON = "engine_mismatch"

_MISMATCHES = select(*(mismatches.c[name] for name in ("engine", "since", "until", "explorer", "version")))

_UNTRAINED = (State.RECORDED, State.REWARDED, State.COMMITTED, State.LEASED)


class Mismatch(NamedTuple):
    """An engine did not serve `version`, as it should, from its last good proof to its last request.

    With `of_version`, its replies of that version alone are not trusted: an adapter beside others.
    """

    engine: int
    version: int
    since: float
    until: float
    reason: str
    figures: Details
    explorer: str | None = None
    of_version: bool = False


class Distrusted(NamedTuple):
    """How many experiences will not be trained on, and how many have been, by the versions that contain them."""

    dropped: int
    trained: dict[int, int]


class Attestations(RewardsPart):
    def distrust(self, found: Mismatch) -> Distrusted:
        """Take all that the engine sampled meanwhile out of training for good, what comes in later too."""
        with self._write() as connection:
            alone(connection, "epochs")  # before the next: no trainer's verb waits for it
            alone(connection, "record")
            row = {name: getattr(found, name) for name in ("engine", "since", "until", "explorer")}
            row["version"] = found.version if found.of_version else None
            same = (mismatches.c[name].is_not_distinct_from(value) for name, value in row.items())
            if connection.execute(select(mismatches.c.id).where(*same)).first():
                return Distrusted(0, {})
            connection.execute(insert(mismatches).values(row))
            query = select(experiences.c.id, experiences.c.group_id, experiences.c.msg_id).join_from(
                experiences, exchanges
            )
            ordered = query.where(_sampled_meanwhile(found), experiences.c.state.in_(_UNTRAINED)).order_by(
                experiences.c.id
            )
            rows = connection.execute(ordered.with_for_update(of=experiences)).all()
            gone = {"state": State.DROPPED, "reason": REASON, "lease_epoch": None, "lease_until": None}
            for portion in portions([row.id for row in rows]):
                connection.execute(update(experiences).where(experiences.c.id.in_(portion)).values(gone))
            regroup(connection, rows)
            self._rewards.compute_corrected(connection, {row.msg_id for row in rows})
            trained = select(experiences.c.trained_version).join_from(experiences, exchanges)
            trained = trained.where(_sampled_meanwhile(found), experiences.c.state == State.TRAINED)
            done = Distrusted(len(rows), dict(sorted(Counter(connection.execute(trained).scalars()).items())))
            by_version = {str(version): count for version, count in done.trained.items()}
            details = {**found.figures, **row, "dropped": done.dropped, "trained": by_version}
            decision = Decision("explorer", self._clock(), found.reason, details)
            note(connection, found.version, VersionAction.MISMATCH, decision)
            return done


def _sampled_meanwhile(found: Mismatch) -> ColumnElement[bool]:
    of_explorer = or_(exchanges.c.explorer.is_(None), exchanges.c.explorer == found.explorer)
    return and_(
        exchanges.c.engine == found.engine,
        true() if found.explorer is None else of_explorer,
        experiences.c.version_max == found.version if found.of_version else true(),
        experiences.c.sampled_at >= found.since - _LONGEST,
        experiences.c.sampled_at < found.until,
        exchanges.c.received_at + exchanges.c.latency_s >= found.since,
    )


def mark_untrusted(connection: Connection, new_exchanges: Sequence[Exchange]) -> list[Exchange]:
    mismatched = connection.execute(_MISMATCHES).all()
    found = []
    for each in new_exchanges:
        ended_at = each.received_at + each.latency_s
        during = (row for row in mismatched if each.received_at < row.until and ended_at >= row.since)
        same = (row for row in during if row.engine == each.engine)
        versions = {
            row.version for row in same if None in (each.explorer, row.explorer) or each.explorer == row.explorer
        }
        marked = (
            msgspec.structs.replace(one, drop_reason=one.drop_reason or REASON)
            if versions & {None, one.version_max}
            else one
            for one in each.experiences
        )
        found.append(msgspec.structs.replace(each, experiences=tuple(marked)) if versions else each)
    return found
