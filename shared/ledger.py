"""The one place where the truth about experiences, feedback and versions is read and changed.

Synchronous; the explorer calls it from threads. Each verb is one transaction. A database that is away raises
LedgerUnavailable, and nothing has happened then, unless the connection broke in the very moment of the commit: so every
verb may be repeated.
"""

from typing import Self

from sqlalchemy import select

from shared.batch_policy import BatchPolicy
from shared.config import Settings
from shared.database import connect
from shared.errors import EnvironmentRefused
from shared.ledger_alarms import Alarm
from shared.ledger_appointments import Appointments
from shared.ledger_attestation import Attested
from shared.ledger_comparison import Comparisons
from shared.ledger_drift import Drift
from shared.ledger_export import Exports
from shared.ledger_judging import Judged
from shared.ledger_lineage import Evaluations, Lineage
from shared.ledger_recording import Recording
from shared.ledger_replay import Replays
from shared.ledger_reports import Reports, VersionReward
from shared.ledger_stored import StoredCompletions
from shared.ledger_training import LEASE_S, Training
from shared.ledger_transactions import ignoring
from shared.ledger_versions import Version
from shared.schema import experiment

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
