"""The explorers of an experiment: who they are, which of them decides for all, and what they count together."""

from collections.abc import Mapping
from typing import NamedTuple

from sqlalchemy import Connection, delete, func, select, update

from tuneloop.shared.errors import VersionRefused
from tuneloop.shared.ledger.storage.database import LedgerPart, alone, ignoring
from tuneloop.shared.ledger.storage.schema import epochs, experiment, explorers, shared_counts

#: An explorer that was not seen for so many seconds is taken for one that does not run.
SEEN_S = 30.0

#: Seconds until another explorer may decide, where the one that did is silent.
LEAD_S = 30.0

#: What explorers count together of replies that were not kept, for so many seconds after the last.
NOT_STORED, NOT_STORED_S = "tuneloop_replies_not_stored", 7 * 86400.0

_NEVER = 1e300
_FORGOTTEN_S = 7 * 86400.0


class ExplorerStatus(NamedTuple):
    """An explorer: where it answers, its release, the version that it serves (None: none), when it was seen last."""

    name: str
    address: str
    release: str
    version: int | None
    seen_at: float

    def up(self, now: float) -> bool:
        return now - self.seen_at < SEEN_S


class Lead(NamedTuple):
    """The right of one explorer to decide about rollouts for all, which ends with the epoch."""

    holder: str
    epoch: int


def require_lead(connection: Connection, lead: Lead | None, now: float) -> None:
    """Raise VersionRefused unless the lead is still its holder's; None needs none."""
    held = select(explorers.c.name).where(
        explorers.c.lead_epoch == (lead and lead.epoch), explorers.c.leads_until > now
    )
    if lead is not None and connection.execute(held.with_for_update()).scalar() != lead.holder:
        raise VersionRefused("another explorer decides about rollouts by now")


class Explorers(LedgerPart):
    def see(self, name: str, *, address: str, release: str, version: int | None) -> None:
        """Note that an explorer runs, and what it serves. Those that were not seen for a week are removed."""
        now = self._clock()
        row = {"address": address, "release": release, "version": version, "seen_at": now}
        with self._write() as connection:
            connection.execute(ignoring(connection, explorers), {"name": name} | row)
            connection.execute(update(explorers).where(explorers.c.name == name).values(row))
            connection.execute(delete(explorers).where(explorers.c.seen_at < now - _FORGOTTEN_S))

    def all(self) -> list[ExplorerStatus]:
        columns = (explorers.c[name] for name in ExplorerStatus._fields)
        return [ExplorerStatus(*row) for row in self._read(select(*columns).order_by(explorers.c.name))]

    def running(self) -> list[ExplorerStatus]:
        now = self._clock()
        return [each for each in self.all() if each.up(now)]

    def hosts(self) -> set[str]:
        since = self._clock() - SEEN_S
        trainers = select(epochs.c.trainer).where(epochs.c.ended_at.is_(None), epochs.c.seen_at > since)
        names = trainers.union(select(explorers.c.name).where(explorers.c.seen_at > since))
        return {name.rpartition(":")[0] for (name,) in self._read(names)}

    def lead(self, name: str) -> Lead | None:
        """The right to decide, from now on for LEAD_S; None while another explorer has it."""
        now = self._clock()
        with self._write() as connection:
            alone(connection, "lead")
            holder = connection.execute(select(explorers.c.name).where(explorers.c.leads_until > now)).scalar()
            if holder not in {None, name}:
                return None
            newest = connection.execute(select(func.max(explorers.c.lead_epoch))).scalar() or 0
            lead = Lead(name, newest + (holder is None))
            new = {"name": name, "address": "", "release": "", "seen_at": now}
            connection.execute(ignoring(connection, explorers), new)
            renewed = {"lead_epoch": lead.epoch, "leads_until": now + LEAD_S}
            connection.execute(update(explorers).where(explorers.c.name == name).values(renewed))
            return lead

    def add(self, scope: str, amounts: Mapping[str, float], *, until: float) -> None:
        """Add to what explorers have counted together under a scope, which is kept until then."""
        with self._write() as connection:
            connection.execute(delete(shared_counts).where(shared_counts.c.until <= self._clock()))
            for name, amount in sorted(amounts.items()):
                row = {"scope": scope, "name": name, "amount": 0.0, "until": until}
                connection.execute(ignoring(connection, shared_counts), row)
                same = update(shared_counts).where(shared_counts.c.scope == scope, shared_counts.c.name == name)
                connection.execute(same.values(amount=shared_counts.c.amount + amount, until=until))

    def counts(self, scope: str) -> dict[str, float]:
        query = select(shared_counts.c.name, shared_counts.c.amount).where(shared_counts.c.scope == scope)
        return {row.name: row.amount for row in self._read(query)}

    def take(self, scope: str, count: int, *, most: int, until: float) -> bool:
        """Count so many, unless they are more than `most` together with those before; whether they are not."""
        self.add(scope, {"taken": 0}, until=until)
        room = shared_counts.c.scope == scope, shared_counts.c.amount + count <= most
        with self._write() as connection:
            taken = update(shared_counts).where(*room).values(amount=shared_counts.c.amount + count)
            return bool(connection.execute(taken).rowcount)

    def advance(self, what: str, number: int) -> int | None:
        """Let what one of them does for all be done up to a number; the one before, None at the very first."""
        row = {"scope": what, "name": "", "amount": float(number), "until": _NEVER}
        with self._write() as connection:
            alone(connection, "advance")
            before = connection.execute(select(shared_counts.c.amount).where(shared_counts.c.scope == what)).scalar()
            connection.execute(ignoring(connection, shared_counts), row)
            lower = shared_counts.c.scope == what, shared_counts.c.amount < number
            connection.execute(update(shared_counts).where(*lower).values(amount=float(number)))
            return None if before is None else int(before)

    def folder(self, mark: str | None = None) -> str | None:
        """The mark of the experiment's folder, which is this one if it had none; None before the first."""
        with self._write() as connection:
            if mark is not None:
                connection.execute(update(experiment).where(experiment.c.folder.is_(None)).values(folder=mark))
            return connection.execute(select(experiment.c.folder)).scalar()
