"""The verbs about alarms: raised by a monitor, open until it or an administrator clears them."""

import math
from collections.abc import Collection
from typing import Any, NamedTuple, Self

from sqlalchemy import ColumnElement, exists, insert, select, true, update

from tuneloop.shared.experience import AlarmState
from tuneloop.shared.ledger.storage.database import LedgerPart, Transactions, alone, literally
from tuneloop.shared.ledger.storage.schema import alarms

_OPEN = literally("state = 'raised'")


class Alarm(NamedTuple):
    """A row of `alarms`, one open of a name and policy. `holds`: no new version of the policy is served meanwhile."""

    name: str
    reason: str
    step: int | None = None
    version: int | None = None
    value: float | None = None
    threshold: float | None = None
    holds: bool = False
    raised_at: float = 0.0
    cleared_at: float | None = None
    policy: int = 0


class Alarms(LedgerPart):
    def __init__(self, transactions: Transactions, policy: int = 0) -> None:
        super().__init__(transactions)
        self._transactions, self._policy = transactions, policy

    def of(self, policy: int) -> Self:
        return type(self)(self._transactions, policy)

    def raise_alarm(self, alarm: Alarm) -> bool:
        """Open it for the policy; False if one of its name is open, which stays but for `holds`."""
        with self._write() as connection:
            alone(connection, "alarms")
            same = self._open_of(alarm.name, policy := alarm.policy or self._policy)
            if connection.execute(update(alarms).where(*same).values(holds=alarm.holds)).rowcount:
                return False
            row = {
                "name": alarm.name,
                "state": AlarmState.RAISED,
                "holds": alarm.holds,
                "raised_at": self._clock(),
                "step": alarm.step,
                "version": alarm.version,
                "value": _finite(alarm.value),
                "threshold": _finite(alarm.threshold),
                "reason": alarm.reason,
                "policy": policy,
            }
            connection.execute(insert(alarms).values(row))
            return True

    def clear(self, name: str) -> bool:
        cleared = {"state": AlarmState.CLEARED, "cleared_at": self._clock()}
        with self._write() as connection:
            alone(connection, "alarms")
            found = update(alarms).where(*self._open_of(name, self._policy))
            return connection.execute(found.values(cleared)).rowcount > 0

    def keep_own(self, name: str, reason: str | None, *, about: str, opened: Collection[Alarm]) -> bool:
        same = [each for each in opened if each.name == name]
        if reason is not None:
            return not same and self.raise_alarm(Alarm(name, about + reason))
        if any(each.reason.startswith(about) for each in same):
            self.clear(name)
        return False

    def all(self, *, cleared: bool = False) -> list[Alarm]:
        query = select(*(alarms.c[name] for name in Alarm._fields)).where(true() if cleared else _OPEN)
        return [Alarm(*row) for row in self._read(query.order_by(alarms.c.raised_at, alarms.c.id))]

    def promotion_held(self, policy: int | None = None) -> bool:
        """Whether an open alarm forbids that a new version is served: of this policy, or of another."""
        of_it = alarms.c.policy == (self._policy if policy is None else policy)
        held: Any = select(exists().where(_OPEN, of_it, alarms.c.holds))
        return bool(self._read(held)[0][0])

    def _open_of(self, name: str, policy: int) -> tuple[ColumnElement[bool], ...]:
        return _OPEN, alarms.c.policy == policy, alarms.c.name == name


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
