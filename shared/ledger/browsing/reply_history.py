"""The history of one reply: how each of its choices was sampled, rewarded and trained on."""

from typing import NamedTuple

from sqlalchemy import func, select, true

from tuneloop.shared.experience import Outcome, State, VersionState
from tuneloop.shared.ledger.recording.reward_rule import OF_NO_FEEDBACK, rule_of
from tuneloop.shared.ledger.recording.rewards import FeedbackHistory, Rewards, read_history
from tuneloop.shared.ledger.storage.database import LedgerPart, Transactions
from tuneloop.shared.ledger.storage.schema import (
    deletions,
    epochs,
    exchanges,
    experiences,
    feedback,
    reward_rules,
    versions,
)

_ROW = (
    *("id", "choice", "correction", "state", "reason", "unsampled", "reward", "edit_similarity", "version_min"),
    *("version_max", "sampled_at", "rewarded_at", "committed_at", "group_id", "lease_epoch", "lease_until"),
    *("trained_version", "policy"),
)


class TrainedIn(NamedTuple):
    """The version that was trained on a row; `served_at`: when it, or else a later one, was served first."""

    version: int
    step: int
    epoch: int | None
    trainer: str | None
    state: VersionState
    reason: str | None
    served_at: float | None


class RowHistory(NamedTuple):
    """One choice, or a correction of it. `rule` is the reward rule, as JSON."""

    id: int
    choice: int
    correction: int
    state: State
    reason: str | None
    unsampled: str | None
    reward: float | None
    edit_similarity: float | None
    version_min: int
    version_max: int
    sampled_at: float
    rewarded_at: float | None
    committed_at: float | None
    group_id: int | None
    lease_epoch: int | None
    lease_until: float | None
    trained_version: int | None
    policy: int
    held_to_grammar: bool
    rule: str | None
    feedback: FeedbackHistory
    trained: TrainedIn | None


class ReplyHistory(NamedTuple):
    msg_id: str
    endpoint: str
    received_at: float
    engine: int | None
    rows: list[RowHistory]


class MissingReply(NamedTuple):
    """What is known of a reply that the ledger does not have: when it was deleted, the feedback that waits for it."""

    deleted_at: float | None
    pending: int


class ReplyHistories(LedgerPart):
    def __init__(self, transactions: Transactions, rewards: Rewards) -> None:
        super().__init__(transactions)
        self._rewards = rewards

    def get(self, msg_id: str, tenant: str | None = None) -> ReplyHistory | None:
        of_tenant = true() if tenant is None else exchanges.c.tenant == tenant
        columns = (exchanges.c[name] for name in ("msg_id", "endpoint", "received_at", "engine"))
        row_columns = (*(experiences.c[name] for name in _ROW), experiences.c.grammar.is_not(None))
        of_rows = select(*row_columns, reward_rules.c.definition).where(experiences.c.msg_id == msg_id)
        of_rows = of_rows.outerjoin_from(experiences, reward_rules, reward_rules.c.id == experiences.c.reward_rule)
        with self._snapshot() as connection:
            found = connection.execute(select(*columns).where(exchanges.c.msg_id == msg_id, of_tenant)).one_or_none()
            if found is None:
                return None
            rows = connection.execute(of_rows.order_by(experiences.c.choice, experiences.c.correction)).all()
            own = {row.id: row.definition for row in rows if row.definition not in {None, *OF_NO_FEEDBACK}}
            rules = {id_: rule_of(definition) for id_, definition in own.items()}
            said = read_history(
                connection, msg_id, lambda id_: rules.get(id_, self._rewards.rule), self._rewards.trusted_raters
            )
            trained = {}
            for number in {row.trained_version for row in rows} - {None}:
                served = select(func.min(versions.c.served_at)).where(versions.c.version >= number).scalar_subquery()
                names = (versions.c.version, versions.c.step, versions.c.epoch, epochs.c.trainer)
                query = select(*names, versions.c.state, versions.c.reason, served)
                query = query.outerjoin_from(versions, epochs, epochs.c.epoch == versions.c.epoch)
                [row] = connection.execute(query.where(versions.c.version == number))
                trained[number] = TrainedIn(*row)._replace(state=VersionState(row.state))
        histories = [
            RowHistory._make([*row, said[row.id], trained.get(row.trained_version)])._replace(state=State(row.state))
            for row in rows
        ]
        return ReplyHistory(*(*found, histories))

    def missing(self, msg_id: str, tenant: str | None = None) -> MissingReply:
        deleted, waiting = select(deletions.c.deleted_at), select(func.count()).select_from(feedback)
        if tenant is not None:
            deleted, waiting = deleted.where(deletions.c.tenant == tenant), waiting.where(feedback.c.tenant == tenant)
        gone, [(pending,)] = self._read_together(
            deleted.where(deletions.c.msg_id == msg_id),
            waiting.where(feedback.c.msg_id == msg_id, feedback.c.outcome == Outcome.PENDING),
        )
        return MissingReply(gone[0][0] if gone else None, pending)
