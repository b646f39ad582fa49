"""The one place where the truth about experiences, feedback and versions is read and changed.

Synchronous; the explorer calls it from threads. Each verb is one transaction. A database that is away raises
LedgerUnavailable, and nothing has happened then, unless the connection broke in the very moment of the commit: so every
verb may be repeated.
"""

from typing import Self

from sqlalchemy import select

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.ledger.export import Exports
from tuneloop.shared.ledger.recording.attestation import Attested
from tuneloop.shared.ledger.recording.judging import Judged
from tuneloop.shared.ledger.recording.recording import Recording
from tuneloop.shared.ledger.recording.stored_completions import StoredCompletions
from tuneloop.shared.ledger.reports import Reports, VersionReward
from tuneloop.shared.ledger.storage.database import connect
from tuneloop.shared.ledger.storage.schema import experiment
from tuneloop.shared.ledger.storage.transactions import ignoring
from tuneloop.shared.ledger.training.batch_policy import BatchPolicy
from tuneloop.shared.ledger.training.held_out import Replays
from tuneloop.shared.ledger.training.training import LEASE_S, Training
from tuneloop.shared.ledger.versions.alarms import Alarm
from tuneloop.shared.ledger.versions.comparison import Comparisons
from tuneloop.shared.ledger.versions.decisions import Appointments
from tuneloop.shared.ledger.versions.drift import Drift
from tuneloop.shared.ledger.versions.evaluations import Evaluations, Lineage
from tuneloop.shared.ledger.versions.versions import Version
from tuneloop.shared.settings.settings import Settings

__all__ = ["LEASE_S", "Alarm", "BatchPolicy", "Ledger", "Version", "VersionReward"]


class Ledger(
    Recording,
    Training,
    StoredCompletions,
    Appointments,
    Reports,
    Exports,
    Judged,
    Drift,
    Comparisons,
    Attested,
    Evaluations,
    Replays,
    Lineage,
):
    """Every verb of the ledger; each of its bases is a page of them."""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The ledger of an experiment, whose schema must be there."""
        schema = settings.buffer.trainer_input.experience_buffer.name
        engine = connect(settings.database_url, schema=schema)
        return cls(engine, rule=settings.reward, compensate_late=settings.feedback.compensate_late)

    def own(self, project: str, name: str) -> None:
        """Mark the database as this experiment's. Raises EnvironmentRefused if it is another's."""
        with self._write() as connection:
            connection.execute(ignoring(connection, experiment), {"id": 1, "project": project, "name": name})
            owner = connection.execute(select(experiment.c.project, experiment.c.name)).one()
        if (owner.project, owner.name) != (project, name):
            raise EnvironmentRefused(
                f"buffer.trainer_input.experience_buffer: the database belongs to {owner.project}/{owner.name}, not to "
                f"{project}/{name}: give this experiment another path or name"
            )
