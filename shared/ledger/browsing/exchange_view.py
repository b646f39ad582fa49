"""One exchange whole: its request, its replies with their log-probabilities, and what was said of them."""

import math
from typing import Any, NamedTuple

from sqlalchemy import Select, and_, func, or_, select, true

from tuneloop.shared.experience import Kind, Outcome, State, VersionState
from tuneloop.shared.ledger.recording.reward_rule import OF_NO_FEEDBACK, rule_of
from tuneloop.shared.ledger.recording.rewards import FeedbackHistory, RewardsPart, read_history
from tuneloop.shared.ledger.storage import codec
from tuneloop.shared.ledger.storage.database import LedgerPart
from tuneloop.shared.ledger.storage.schema import (
    changed_metadata,
    deletions,
    epochs,
    exchanges,
    experiences,
    feedback,
    reward_rules,
    versions,
)

MAX_EVENTS = 200


class TrainedIn(NamedTuple):
    """The version that was trained on a row; `served_at`: when it or a later version was first served."""

    version: int
    step: int
    epoch: int | None
    trainer: str | None
    state: VersionState
    reason: str | None
    served_at: float | None


class ReplyView(NamedTuple):
    """One choice of the reply; `correction` 0 is as sampled. Only the history has `feedback` and `trained`."""

    id: int
    choice: int
    correction: int
    state: State
    reason: str | None
    reward: float | None
    edit_similarity: float | None
    version_min: int
    version_max: int
    policy: int
    temperature: float
    finish_reason: str | None
    text: str
    tool_calls: bytes | None
    completion_tokens: int
    task_id: str | None
    run_id: str | None
    group_id: int | None
    rewarded_at: float | None
    committed_at: float | None
    lease_epoch: int | None
    lease_until: float | None
    trained_version: int | None
    unsampled: str | None
    rule: str | None
    held_to_grammar: bool
    feedback: FeedbackHistory = FeedbackHistory([], {}, None)
    trained: TrainedIn | None = None


class FeedbackView(NamedTuple):
    """A feedback event about the exchange, or that names it as the other one (`msg_id` is then another's)."""

    id: int
    choice: int | None
    kind: Kind
    metric: str
    value: float | None
    text: str | None
    other_msg_id: str | None
    other_choice: int | None
    source: str | None
    received_at: float
    outcome: Outcome
    msg_id: str | None


class ExchangeView(NamedTuple):
    """An exchange; `request` is the client's JSON, `metadata` JSON where it was changed."""

    msg_id: str
    endpoint: str
    user: str | None
    received_at: float
    latency_s: float
    engine: int | None
    request: bytes
    metadata: str | None
    replies: list[ReplyView]
    events: list[FeedbackView]


def _replies_of(msg_id: str) -> Select[Any]:
    columns = (experiences.c[name] for name in ReplyView._fields[: ReplyView._fields.index("rule")])
    query = select(*columns, reward_rules.c.definition, experiences.c.grammar.is_not(None))
    query = query.outerjoin_from(experiences, reward_rules, reward_rules.c.id == experiences.c.reward_rule)
    return query.where(experiences.c.msg_id == msg_id).order_by(experiences.c.choice, experiences.c.correction)


def _view_of(row: Any) -> ReplyView:
    return ReplyView(*row)._replace(state=State(row.state))


class TokenView(NamedTuple):
    """The tokens of a reply: ids, and the log-probability that each was sampled with; None if it was not captured."""

    prompt_tokens: int
    completion_ids: list[int]
    logprobs: list[float | None]
    text: str


class ExchangeViews(LedgerPart):
    def get(self, tenant: str, msg_id: str) -> ExchangeView | None:
        names = ("msg_id", "endpoint", "user_id", "received_at", "latency_s", "engine", "request")
        changed = changed_metadata.c.msg_id == exchanges.c.msg_id
        query = select(*(exchanges.c[name] for name in names), changed_metadata.c.metadata)
        query = query.outerjoin_from(exchanges, changed_metadata, changed)
        about = or_(feedback.c.msg_id == msg_id, feedback.c.other_msg_id == msg_id)
        events = select(*(feedback.c[name] for name in FeedbackView._fields)).where(feedback.c.tenant == tenant, about)
        found, sampled, feedback_events = self._read_together(
            query.where(exchanges.c.msg_id == msg_id, exchanges.c.tenant == tenant),
            _replies_of(msg_id),
            events.order_by(feedback.c.received_at.desc(), feedback.c.id.desc()).limit(MAX_EVENTS),
        )
        if not found:
            return None
        said = [
            FeedbackView(*each)._replace(kind=Kind(each.kind), outcome=Outcome(each.outcome))
            for each in reversed(feedback_events)
        ]
        exchange = ExchangeView(*(*found[0], [_view_of(each) for each in sampled], said))
        return exchange._replace(request=codec.unpack_text(exchange.request))

    def tokens(self, tenant: str, msg_id: str, choice: int) -> TokenView | None:
        which = and_(experiences.c.msg_id == msg_id, experiences.c.choice == choice, experiences.c.correction == 0)
        query = select(experiences.c.blob, experiences.c.text).where(which, experiences.c.tenant == tenant)
        rows = self._read(query)
        if not rows:
            return None
        prompt_ids, completion_ids, logprobs = codec.from_blob(rows[0].blob)
        captured = [None if math.isnan(each) else each for each in logprobs.tolist()]
        return TokenView(len(prompt_ids), completion_ids.tolist(), captured, rows[0].text)


class ReplyHistory(NamedTuple):
    msg_id: str
    endpoint: str
    received_at: float
    engine: int | None
    rows: list[ReplyView]


class MissingReply(NamedTuple):
    """What is known of a reply that the ledger does not have: when it was deleted, the feedback that waits for it."""

    deleted_at: float | None
    pending: int


class ReplyHistories(RewardsPart):
    def get(self, msg_id: str, tenant: str | None = None) -> ReplyHistory | None:
        of_tenant = true() if tenant is None else exchanges.c.tenant == tenant
        columns = (exchanges.c[name] for name in ("msg_id", "endpoint", "received_at", "engine"))
        with self._snapshot() as connection:
            found = connection.execute(select(*columns).where(exchanges.c.msg_id == msg_id, of_tenant)).one_or_none()
            if found is None:
                return None
            rows = connection.execute(_replies_of(msg_id)).all()
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
            _view_of(row)._replace(feedback=said[row.id], trained=trained.get(row.trained_version)) for row in rows
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
