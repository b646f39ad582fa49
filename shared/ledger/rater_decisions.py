"""Lists raters, and puts a rater into quarantine or releases it.

Feedback of a rater in quarantine is stored, but rewards, pairs and edited answers ignore it. Rows not yet trained on
are recomputed at once, or after a crash.
"""

from typing import Any, NamedTuple

from sqlalchemy import and_, func, insert, select, update

from tuneloop.shared.errors import UnknownRater
from tuneloop.shared.experience import RaterState
from tuneloop.shared.ledger.recording.recording import new_rater
from tuneloop.shared.ledger.recording.rewards import RewardsPart, replies_of
from tuneloop.shared.ledger.storage.database import alone, put
from tuneloop.shared.ledger.storage.schema import feedback, rater_events, raters

WINDOW = 5000

_PAGE = 100

_NEWEST = select(feedback.c.tenant, feedback.c.source).order_by(feedback.c.id.desc()).limit(WINDOW).subquery()
_COUNTS = select(_NEWEST.c.tenant, func.coalesce(_NEWEST.c.source, "").label("name"), func.count().label("events"))


class RaterStatus(NamedTuple):
    """Whether a rater's feedback counts, and how many of the newest WINDOW events it gave."""

    tenant: str
    name: str
    state: RaterState
    events: int
    reason: str | None


class RaterDecision(NamedTuple):
    tenant: str
    name: str
    at: float
    state: RaterState
    actor: str
    reason: str


class Raters(RewardsPart):
    def all(self) -> list[RaterStatus]:
        rows = self._read(_COUNTS.group_by(_NEWEST.c.tenant, _NEWEST.c.source))
        events = {(row.tenant, row.name): row.events for row in rows}
        columns = (raters.c.tenant, raters.c.name, raters.c.reason)
        quarantined = self._read(select(*columns).where(raters.c.state == RaterState.QUARANTINED))
        reasons = {(row.tenant, row.name): row.reason for row in quarantined}
        active, apart = RaterState.ACTIVE, RaterState.QUARANTINED
        return [
            *(RaterStatus(*who, apart, events.get(who, 0), reason) for who, reason in sorted(reasons.items())),
            *(RaterStatus(*who, active, events[who], None) for who in sorted(events.keys() - reasons.keys())),
        ]

    def decisions(self) -> list[RaterDecision]:
        query = select(*(rater_events.c[name] for name in RaterDecision._fields)).order_by(rater_events.c.id)
        return [RaterDecision(*row)._replace(state=RaterState(row.state)) for row in self._read(query)]

    def quarantine(self, tenant: str, name: str, *, by: str, reason: str) -> None:
        self._decide(tenant, name, RaterState.QUARANTINED, by=by, reason=reason)

    def release(self, tenant: str, name: str, *, by: str, reason: str) -> None:
        self._decide(tenant, name, RaterState.ACTIVE, by=by, reason=reason)

    def settle(self) -> None:
        """Compute again the rewards that the decided-on raters had a part in."""
        for row in self._read(select(raters).where(~raters.c.settled)):
            replies = sorted(self._replies_of(row.tenant, row.name))
            for begin in range(0, len(replies), _PAGE):
                with self._write() as connection:
                    alone(connection, "record")
                    self._rewards.recompute(connection, replies[begin : begin + _PAGE])
            with self._write() as connection:
                same = and_(raters.c.tenant == row.tenant, raters.c.name == row.name, raters.c.state == row.state)
                connection.execute(update(raters).where(same).values(settled=True))

    def _decide(self, tenant: str, name: str, state: RaterState, *, by: str, reason: str) -> None:
        now = self._clock()
        with self._write() as connection:
            alone(connection, "raters")
            one = and_(raters.c.tenant == tenant, raters.c.name == name)
            apart = select(raters.c.name).where(one, raters.c.state == RaterState.QUARANTINED)
            if connection.execute(apart).first() is None and not (
                connection.execute(select(feedback.c.id).where(_is_by(tenant, name)).limit(1)).first() is not None
            ):
                raise UnknownRater(f"there is no feedback by {name or 'a source without a name'} of {tenant}")
            put(connection, raters, [new_rater(tenant, name, now)])
            told = reason if state is RaterState.QUARANTINED else None
            connection.execute(update(raters).where(one).values(state=state, reason=told, settled=False))
            decision = RaterDecision(tenant, name, now, state, by, reason)
            connection.execute(insert(rater_events).values(decision._asdict()))
        self.settle()

    def _replies_of(self, tenant: str, name: str) -> set[str]:
        columns = (feedback.c[each] for each in ("msg_id", "other_msg_id", "tenant", "task_id", "run_id"))
        with self._write() as connection:
            alone(connection, "record")  # else what is being priced with the rater's word just now would be missed
            rows = connection.execute(select(*columns).distinct().where(_is_by(tenant, name))).all()
            whole_runs = {(row.tenant, row.task_id, row.run_id) for row in rows if row.msg_id is None}
            named = {each for row in rows for each in (row.msg_id, row.other_msg_id) if each is not None}
            return named | set(replies_of(connection, whole_runs))


def _is_by(tenant: str, name: str) -> Any:
    unnamed = feedback.c.source.is_(None) if not name else feedback.c.source == name
    return and_(feedback.c.tenant == tenant, unnamed)
