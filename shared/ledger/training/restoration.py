"""The verbs after a database was put back to an earlier moment: numbers given since are not given again."""

from pathlib import Path
from typing import NamedTuple

from sqlalchemy import func, insert, select, update

from tuneloop.shared.experience import VersionAction, VersionState
from tuneloop.shared.ledger.recording.rewards import Rewards
from tuneloop.shared.ledger.storage.database import LedgerPart, Transactions, alone
from tuneloop.shared.ledger.storage.schema import RESTORE, epochs, experiences, experiment, versions
from tuneloop.shared.ledger.training.run_results import give_all_back
from tuneloop.shared.ledger.versions.versions import Decision, note

#: The largest number that the database has room for.
_LARGEST = (1 << 31) - 1

_NO_MANIFEST = "0" * 64


class Numbers(NamedTuple):
    version: int
    epoch: int


class Restoration(LedgerPart):
    def __init__(self, transactions: Transactions, rewards: Rewards) -> None:
        super().__init__(transactions)
        self._rewards = rewards

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
        """The newest version and epoch that were registered; 0 where there is none."""
        newest = [select(func.max(column)) for column in (versions.c.version, epochs.c.epoch)]
        version, epoch = (self._read(query)[0][0] or 0 for query in newest)
        return Numbers(version, epoch)
