"""Reads and changes experiences, feedback and versions, whose only truth is the database.

Synchronous; the explorer calls it from threads. Each verb is one transaction. LedgerUnavailable means that nothing was
stored, unless the connection broke during the commit: so every verb is idempotent.
"""

import copy
import time
from collections.abc import Callable
from typing import Self

from sqlalchemy import Engine, select

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import TrustedRaters, steady_clock
from tuneloop.shared.ledger.browsing.exchange_view import ExchangeViews, ReplyHistories
from tuneloop.shared.ledger.browsing.reply_pages import ReplyPages, SamePrompts
from tuneloop.shared.ledger.explorers import Explorers
from tuneloop.shared.ledger.export import Exports
from tuneloop.shared.ledger.files import Files
from tuneloop.shared.ledger.keys import Keys
from tuneloop.shared.ledger.policies import DEFAULT, Jobs, Policies
from tuneloop.shared.ledger.rater_decisions import Raters
from tuneloop.shared.ledger.recording.attestation import Attestations
from tuneloop.shared.ledger.recording.judging import Judging
from tuneloop.shared.ledger.recording.recording import LEASE_S, Recording
from tuneloop.shared.ledger.recording.retention import Retention
from tuneloop.shared.ledger.recording.rewards import Rewards
from tuneloop.shared.ledger.recording.stored_completions import StoredCompletions
from tuneloop.shared.ledger.reports import Reports, VersionReward
from tuneloop.shared.ledger.storage.clock import LedgerClock
from tuneloop.shared.ledger.storage.database import Transactions, connect, ignoring
from tuneloop.shared.ledger.storage.schema import experiment
from tuneloop.shared.ledger.training.file_rows import FileRows
from tuneloop.shared.ledger.training.groups import BatchRules, Runs
from tuneloop.shared.ledger.training.training import Restoration, Training
from tuneloop.shared.ledger.versions.alarms import Alarm, Alarms
from tuneloop.shared.ledger.versions.comparison import Comparisons, Evaluations, RewardHistory
from tuneloop.shared.ledger.versions.drift import Drift
from tuneloop.shared.ledger.versions.versions import Version, Versions
from tuneloop.shared.settings.feedback import RewardRule
from tuneloop.shared.settings.settings import Settings

__all__ = ["LEASE_S", "Alarm", "BatchRules", "Ledger", "Version", "VersionReward"]


class Ledger:
    """The parts of a ledger over one database; a service takes those that it uses, a double replaces one."""

    def __init__(
        self,
        engine: Engine,
        *,
        rule: RewardRule | None = None,
        trusted_raters: TrustedRaters | None = None,
        compensate_late: bool = False,
        any_reply: bool = False,
        clock: Callable[[], float] = steady_clock,
        ticks: Callable[[], float] = time.monotonic,
        transactions: Callable[..., Transactions] = Transactions,
    ) -> None:
        """`ticks` measure a trainer's silence; `any_reply`: the method also trains on replies that are no samples."""
        self.transactions = transactions(engine, clock=clock)
        self.rewards = Rewards(rule, trusted_raters=trusted_raters, compensate_late=compensate_late, clock=clock)
        self.recording = Recording(self.transactions, self.rewards, any_reply=any_reply, ticks=ticks)
        self.training = Training(self.transactions, self.rewards)
        self.file_rows = FileRows(self.transactions)
        self.restoration = Restoration(self.transactions, self.rewards)
        self.retention = Retention(self.transactions, self.rewards)
        self.stored = StoredCompletions(self.transactions, self.rewards)
        self.versions = Versions(self.transactions)
        self.policies = Policies(self.transactions)
        self.files = Files(self.transactions)
        self.jobs = Jobs(self.transactions)
        self.alarms = Alarms(self.transactions)
        self.evaluations = Evaluations(self.transactions)
        self.attestations = Attestations(self.transactions, self.rewards)
        self.judging = Judging(self.transactions)
        self.raters = Raters(self.transactions, self.rewards)
        self.comparisons = Comparisons(self.transactions)
        self.drift = Drift(self.transactions)
        self.reports = Reports(self.transactions)
        self.runs = Runs(self.transactions)
        self.exports = Exports(self.transactions)
        self.keys = Keys(self.transactions)
        self.explorers = Explorers(self.transactions)
        self.reply_pages = ReplyPages(self.transactions)
        self.exchange_views = ExchangeViews(self.transactions)
        self.reply_histories = ReplyHistories(self.transactions, self.rewards)
        self.reward_history = RewardHistory(self.transactions)
        self.same_prompts = SamePrompts(self.transactions)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        schema = settings.buffer.trainer_input.experience_buffer.name
        engine = connect(settings.database_url, schema=schema)
        return cls(
            engine,
            rule=settings.reward,
            trusted_raters=settings.feedback.all_trusted(settings.judge),
            compensate_late=settings.feedback.compensate_late,
            any_reply=settings.algorithm.of_any_reply,
            clock=LedgerClock(engine),
        )

    def of_policy(self, policy: int) -> "Ledger":
        if policy == DEFAULT:
            return self
        line = copy.copy(self)
        line.versions, line.alarms = self.versions.of(policy), self.alarms.of(policy)
        return line

    def close(self) -> None:
        self.transactions.close()

    def own(self, project: str, name: str) -> None:
        """Mark the database as this experiment's. Raises EnvironmentRefused if it is another's."""
        with self.transactions.write() as connection:
            connection.execute(ignoring(connection, experiment), {"id": 1, "project": project, "name": name})
        self.require_owner(project, name)

    def require_owner(self, project: str, name: str) -> None:
        """Raise EnvironmentRefused if the database is marked as another experiment's."""
        found = self.transactions.read(select(experiment.c.project, experiment.c.name))
        if found and tuple(found[0]) != (project, name):
            owner = found[0]
            raise EnvironmentRefused(
                f"buffer.trainer_input.experience_buffer: the database belongs to {owner.project}/{owner.name}, not to "
                f"{project}/{name}: give this experiment another path or name"
            )
