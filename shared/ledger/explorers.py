"""The explorers of an experiment: who they are, who decides for all, and what they count together."""

from typing import NamedTuple

from sqlalchemy import Connection, and_, delete, func, insert, select, update

from tuneloop.shared.errors import VersionRefused
from tuneloop.shared.ledger.storage.database import LedgerPart, alone, ignoring
from tuneloop.shared.ledger.storage.schema import experiment, explorers, leads, token_uses, trial_counts

#: An explorer that was not seen for so many seconds is taken for one that does not run.
SEEN_S = 30.0

#: Seconds until another explorer may decide, where the one that did is silent.
LEAD_S = 30.0

_FORGOTTEN_S = 7 * 86400.0


class ExplorerStatus(NamedTuple):
    """An explorer: where it answers, its release, the version that it serves (None: none), when it was seen last."""

    name: str
    address: str
    release: str
    version: int | None
    seen_at: float

    def up(self, now: float) -> bool:
        """Whether it runs, as far as is known."""
        return now - self.seen_at < SEEN_S


class Lead(NamedTuple):
    """The right to do something for all explorers, which ends with the epoch."""

    what: str
    holder: str
    epoch: int


class TrialCounts(NamedTuple):
    """Requests that a version was asked, and failed; its copies, and sums over those that it answered."""

    asked: int = 0
    failed: int = 0
    copies: int = 0
    broken: int = 0
    refused: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    seconds_squared: float = 0.0
    tokens_squared: float = 0.0
    seconds_by_tokens: float = 0.0


def require_lead(connection: Connection, lead: Lead | None, now: float) -> None:
    """Raise VersionRefused unless the lead is still its holder's; None needs none."""
    if lead is not None:
        held = and_(leads.c.what == lead.what, leads.c.epoch == lead.epoch, leads.c.until > now)
        if connection.execute(select(leads.c.epoch).where(held).with_for_update()).first() is None:
            raise VersionRefused(f"another explorer decides about the {lead.what} by now")


class Explorers(LedgerPart):
    """What explorers tell each other."""

    def see(self, name: str, *, address: str, release: str, version: int | None) -> None:
        """Note that an explorer runs, and what it serves. Those that nobody saw for a week are forgotten."""
        now = self._clock()
        row = {"address": address, "release": release, "version": version, "seen_at": now}
        with self._write() as connection:
            connection.execute(ignoring(connection, explorers), {"name": name} | row)
            connection.execute(update(explorers).where(explorers.c.name == name).values(row))
            connection.execute(delete(explorers).where(explorers.c.seen_at < now - _FORGOTTEN_S))

    def all(self) -> list[ExplorerStatus]:
        """All that are known, by their names."""
        return [ExplorerStatus(*row) for row in self._read(select(explorers).order_by(explorers.c.name))]

    def are_several(self) -> bool:
        """Whether more than one explorer runs."""
        running = select(func.count()).where(explorers.c.seen_at > self._clock() - SEEN_S)
        return bool(self._read(running)[0][0] > 1)

    def others_with(self, version: int, *, name: str) -> list[str]:
        """The others that run, and serve this version: one that its engines were proven to have."""
        running = explorers.c.seen_at > self._clock() - SEEN_S
        query = select(explorers.c.name).where(running, explorers.c.version == version, explorers.c.name != name)
        return [row.name for row in self._read(query.order_by(explorers.c.name))]

    def lead(self, what: str, name: str) -> Lead | None:
        """The right to do this for all, from now on for LEAD_S; None while another explorer has it."""
        now = self._clock()
        with self._write() as connection:
            alone(connection, "leads")
            held = connection.execute(select(leads).where(leads.c.what == what)).one_or_none()
            if held is None:
                first = {"what": what, "holder": name, "epoch": 1, "until": now + LEAD_S}
                connection.execute(insert(leads).values(first))
                return Lead(what, name, 1)
            if held.holder != name and held.until > now:
                return None
            epoch = held.epoch + (held.holder != name or held.until <= now)
            renewed = {"holder": name, "epoch": epoch, "until": now + LEAD_S}
            connection.execute(update(leads).where(leads.c.what == what).values(renewed))
            return Lead(what, name, epoch)

    def count(self, began: float, name: str, counted: dict[int, TrialCounts]) -> None:
        """Add what an explorer has counted of versions of the trial that `began` then."""
        with self._write() as connection:
            for version, more in sorted(counted.items()):
                key = {"began": began, "version": version, "explorer": name}
                connection.execute(ignoring(connection, trial_counts), key | TrialCounts()._asdict())
                same = (trial_counts.c[column] == value for column, value in key.items())
                sums = {column: trial_counts.c[column] + value for column, value in more._asdict().items()}
                connection.execute(update(trial_counts).where(*same).values(sums))

    def counted(self, began: float) -> dict[int, TrialCounts]:
        """What all explorers have counted of that trial, by version."""
        sums = (func.sum(trial_counts.c[column]) for column in TrialCounts._fields)
        query = select(trial_counts.c.version, *sums).where(trial_counts.c.began == began)
        return {version: TrialCounts(*found) for version, *found in self._read(query.group_by(trial_counts.c.version))}

    def take_of_token(self, nonce: str, key_id: str, count: int, *, most: int, of_key: int, expires_at: float) -> bool:
        """Count events that a token brings, unless it allows less, or `of_key` others of its key are in use."""
        with self._write() as connection:
            alone(connection, f"tokens {key_id}"[:32])
            connection.execute(delete(token_uses).where(token_uses.c.expires_at <= self._clock()))
            same = token_uses.c.nonce == nonce
            used = connection.execute(select(token_uses.c.events).where(same)).scalar()
            in_use = select(func.count()).where(token_uses.c.key_id == key_id)
            if (used or 0) + count > most or (used is None and connection.execute(in_use).scalar_one() >= of_key):
                return False
            row = {"nonce": nonce, "key_id": key_id, "events": 0, "expires_at": expires_at}
            connection.execute(ignoring(connection, token_uses), row)
            connection.execute(update(token_uses).where(same).values(events=token_uses.c.events + count))
            return True

    def folder(self) -> str | None:
        """The mark of the experiment's folder; None before the first."""
        return next((row.folder for row in self._read(select(experiment.c.folder))), None)

    def take_folder(self, mark: str | None) -> str | None:
        """Give the experiment its folder, unless it has one; the mark that it has then. None: forget it."""
        with self._write() as connection:
            unset = experiment.c.folder.is_(None) if mark is not None else experiment.c.id > 0
            connection.execute(update(experiment).where(unset).values(folder=mark))
            return connection.execute(select(experiment.c.folder)).scalar()
