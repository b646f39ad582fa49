"""What happened to one reply: recorded, rated, committed, trained on, served; or what it waits for."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tuneloop.shared.experience import State, VersionState
from tuneloop.shared.ledger.browsing.exchange_view import ReplyHistory, ReplyView
from tuneloop.shared.ledger.export import NO_ANSWER
from tuneloop.shared.ledger.facts import Facts, Rules
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.recording.reward_rule import OF_A_FILE, OF_ITS_RESULT, EventFate, Fate
from tuneloop.shared.ledger.training.automatic_commit import due_at
from tuneloop.shared.operations.diagnosis import Code, Reason, diagnose, moment, number, when_committed
from tuneloop.shared.outbox_status import OutboxStatus
from tuneloop.shared.settings.policies import settings_of_policy
from tuneloop.shared.settings.settings import Settings

#: What a committed reply may wait for, as a tenant reads it: the diagnosis covers all tenants' rows.
_WAITS = {
    Code.STEPS_DONE: "all steps of trainer.total_steps are done",
    Code.NO_TRAINER: "no trainer is running",
    Code.DISK_FULL: "the next checkpoint has no room on the disk",
    Code.LEASED: "the trainer makes a step of other replies",
    Code.BATCH_NOT_FULL: "a batch is not full yet",
    Code.RATER_SHARE: "feedback.max_rater_share keeps replies of some raters out of the next batch",
    Code.NONE: "the trainer takes the next batch soon",
}

#: The reasons of replies that no method takes, beside those of the sampling parameters.
_OF_NO_USE = (*NO_ANSWER, "no_token_ids", "logprobs_not_finite")

_FATES = {
    Fate.EDIT_STANDS: "is the edited answer that stands",
    Fate.RETRACTION: "takes back what its source said before",
    Fate.RETRACTED: "was retracted",
    Fate.COMMENT: "is kept, and counts for no reward",
    Fate.NO_WEIGHT: "does not count: its metric has no weight in reward.weights",
    Fate.NO_VALUE: "does not count: the label has no value in reward.label_values",
    Fate.OUT_OF_WINDOW: "does not count: it came after reward.attribution_window",
    Fate.SETTLED: "does not count: a trusted rater's feedback alone decides the metric",
    Fate.RUN_FEEDBACK_UNUSED: "does not count: the reply has feedback of its own under this metric",
    Fate.UNFINISHED_RUN: "does not count: the run's last call was cut off (reward.unfinished_runs)",
    Fate.QUARANTINED: "does not count: its rater is in quarantine",
    Fate.LATE: "came after the reply was taken for training",
}


class FeedbackExplanation(NamedTuple):
    """A feedback event and what became of it. `part`: its value times the metric's weight, where it counts."""

    id: int
    received_at: float
    kind: str
    metric: str
    source: str | None
    outcome: str
    fate: str
    value: float | None
    part: float | None
    sentence: str


class ReplyExplanation(NamedTuple):
    """One choice, or a correction of it. `parts` add up to the reward, before this is clipped."""

    choice: int
    correction: int
    state: str
    sampling: str
    sampling_reason: str | None
    reward: float | None
    rule: str | None
    parts: dict[str, float]
    feedback: list[FeedbackExplanation]
    version: int | None
    step: int | None
    epoch: int | None
    waits_for: list[Reason]
    sentences: list[str]


class Explanation(NamedTuple):
    """What happened to a reply; `replies` is empty where the ledger does not have it."""

    id: str
    sentences: list[str]
    replies: list[ReplyExplanation]

    @property
    def lines(self) -> Iterator[str]:
        yield from self.sentences
        for reply in self.replies:
            name = f"choice {reply.choice}" + (f", correction {reply.correction}" if reply.correction else "")
            yield from (f"{name}: {sentence}" for sentence in reply.sentences)

    def as_json(self) -> dict[str, Any]:
        replies = [
            {
                **reply._asdict(),
                "feedback": [each._asdict() for each in reply.feedback],
                "waits_for": [each._asdict() for each in reply.waits_for],
            }
            for reply in self.replies
        ]
        return {"id": self.id, "sentences": self.sentences, "replies": replies}


def explain(
    ledger: Ledger,
    settings: Settings,
    reply_id: str,
    outbox: Callable[[], OutboxStatus],
    *,
    tenant: str | None = None,
    sees_all: bool = True,
) -> Explanation:
    """The history of a reply or choice, of any or one tenant; without `sees_all`, excludes other tenants."""
    msg_id, _, choice = reply_id.partition(":")
    history = ledger.reply_histories.get(msg_id, tenant)
    if history is None:
        return Explanation(reply_id, list(_explain_missing(ledger, msg_id, tenant, outbox)), [])
    engine = "" if history.engine is None else f" by engine {history.engine}"
    recorded = f"{msg_id} came to {history.endpoint} at {_when(history.received_at)}, and was answered{engine}"
    rows = [row for row in history.rows if not choice or str(row.choice) == choice]
    explainer = _Explainer(ledger, settings, history, outbox, sees_all=sees_all)
    breaks = (f"its run is several sequences in training: {each}" for each in ledger.runs.find_breaks_beside(msg_id))
    return Explanation(reply_id, [recorded, *breaks], [explainer.explain_row(row) for row in rows])


def _explain_missing(
    ledger: Ledger, msg_id: str, tenant: str | None, outbox: Callable[[], OutboxStatus]
) -> Iterator[str]:
    missing = ledger.reply_histories.missing(msg_id, tenant)
    if missing.deleted_at is not None:
        yield f"{msg_id[:96]} was deleted at {_when(missing.deleted_at)}: by itself, with its person, or by retention"
        return
    yield (
        f"the ledger has no reply {msg_id[:96]!r}: it was not recorded (`store: false`, or no end), is of another"
        " experiment, or the id is wrong"
    )
    if missing.pending:
        yield f"{number(missing.pending, 'feedback event')} about it wait for the reply"
    if outbox().records:
        yield "the outbox holds records that are not in the database yet: ask again later"


class _Explainer:
    def __init__(
        self,
        ledger: Ledger,
        settings: Settings,
        history: ReplyHistory,
        outbox: Callable[[], OutboxStatus],
        *,
        sees_all: bool,
    ) -> None:
        self._ledger, self._history, self._outbox = ledger, history, outbox
        self._settings, self._sees_all = settings, sees_all

    def explain_row(self, row: ReplyView) -> ReplyExplanation:
        policy = self._ledger.policies.get(row.policy)
        settings = settings_of_policy(self._settings, policy.settings) if policy.id else self._settings
        self._batch_rules, self._rules = BatchRules.of(settings, policy.id), Rules.of(settings, policy.id)
        reason, version = row.reason or "", f"version {row.version_min}"
        if row.version_max != row.version_min:
            version += f" to {row.version_max}"
        if policy.id:
            version += f" of the policy {policy.name}"
        if row.state is State.DROPPED and (reason in _OF_NO_USE or reason.startswith("sampling:")):
            sampling, verdict = "of_no_use", f"of no use to any method: {reason}"
        elif row.unsampled is not None:
            sampling, verdict = "otherwise", f"as no sample of the policy: {row.unsampled}"
        elif row.held_to_grammar:
            verdict = "as a sample of the policy among the tokens that a grammar or truncation allowed"
            sampling = "held_to_grammar"
        else:
            sampling, verdict = "sample", "as a sample of the policy"
        events = [self._explain_event(event, fate, row) for event, fate in row.feedback.events]
        waits = list(self._find_waits(row))
        trained = row.trained
        return ReplyExplanation(
            choice=row.choice,
            correction=row.correction,
            state=row.state.value,
            sampling=sampling,
            sampling_reason=row.reason if sampling == "of_no_use" else row.unsampled,
            reward=row.reward,
            rule=row.rule,
            parts={
                f"{metric} (of the run)" if of_run else metric: part
                for (metric, of_run), part in row.feedback.parts.items()
            },
            feedback=events,
            version=trained and trained.version,
            step=trained and trained.step,
            epoch=trained.epoch if trained else row.lease_epoch,
            waits_for=waits,
            sentences=[
                f"recorded {verdict}, {version}",
                *(each.sentence for each in events),
                *_explain_reward(row),
                *self._explain_state(row),
                *(f"it waits ({each.code}): {each.sentence}" for each in waits),
            ],
        )

    def _explain_event(self, event: Any, fate: EventFate, row: ReplyView) -> FeedbackExplanation:
        preferred_other = event.other_msg_id == self._history.msg_id and event.msg_id != self._history.msg_id
        about = "about its run" if event.msg_id is None else "preferring another reply" if preferred_other else ""
        says = f"{event.kind} {event.metric}" if event.kind != event.metric else event.metric
        value = "" if event.value is None else f" {event.value:g}"
        source = f" from {event.source}" if event.source else ""
        about = f" {about}" if about else ""
        what = _FATES.get(fate.fate, "")
        if fate.fate is Fate.COUNTS:
            what = f"counts {fate.value:g}, weighted {fate.part:g}"
        elif fate.fate is Fate.REPLACED:
            what = f"was replaced by the later event {fate.replaced_by}"
        elif fate.fate is Fate.EDIT_STANDS and row.edit_similarity is not None:
            what += f", {row.edit_similarity:.0%} like the reply"
        elif fate.fate is Fate.LATE:
            later = any(each.choice == row.choice and each.correction > row.correction for each in self._history.rows)
            if later:
                what += ": the correction has it"
            elif row.state is State.LEASED:
                what += ": it is looked at when the lease ends"
            elif not self._ledger.rewards.compensate_late:
                what += ": feedback.compensate_late is off"
        sentence = f"feedback {event.id} at {_when(event.received_at)}, {says}{value}{source}{about}, {what}"
        fields = (event.id, event.received_at, event.kind, event.metric, event.source, event.outcome)
        return FeedbackExplanation(*fields, fate.fate.value, fate.value, fate.part, sentence)

    def _explain_state(self, row: ReplyView) -> Iterator[str]:
        if row.committed_at is not None:
            yield f"committed at {_when(row.committed_at)}"
        if row.state is State.LEASED:
            yield f"the trainer of epoch {row.lease_epoch} is learning from it"
        elif row.state in (State.EXPIRED, State.DROPPED):
            yield f"set aside ({row.state}): {row.reason}"
        elif trained := row.trained:
            trainer = f" of trainer {trained.trainer}" if trained.trainer and self._sees_all else ""
            why = f" ({trained.reason})" if trained.reason and self._sees_all else ""
            yield f"step {trained.step}{trainer}, epoch {trained.epoch}, trained on it"
            yield f"that made version {trained.version}, now {trained.state}{why}"
            served = "not served yet" if trained.served_at is None else f"served since {_when(trained.served_at)}"
            yield f"the version, or a later one, is {served}"

    def _find_waits(self, row: ReplyView) -> Iterator[Reason]:
        waits = row.state in (State.RECORDED, State.REWARDED, State.COMMITTED)
        if waits and row.unsampled and not self._batch_rules.any_reply:
            yield Reason(Code.NOT_TRAINABLE, f"{self._rules.method} does not train on it: {row.unsampled}")
        elif waits and row.rewarded_at is not None and row.reward is None and not self._batch_rules.edited:
            yield Reason(
                Code.EDITS_NOT_LEARNT, f"{self._rules.method} does not learn edited answers: rate the reply too"
            )
        elif row.state is State.RECORDED:
            result = ", or on its run's last call" if self._batch_rules.by_result else ""
            yield Reason(Code.NO_FEEDBACK, f"no feedback on it counts: POST /feedback on it{result}")
        elif row.state is State.REWARDED:
            told = "it is not committed: POST /commit"
            if self._batch_rules.automatic and row.rewarded_at is not None:
                heard = [at for each, _ in row.feedback.events for at in (each.received_at, each.repeated_at) if at]
                at = due_at(heard, row.rewarded_at)
                told = f"{when_committed(self._batch_rules.group_by, at)}, and POST /commit hurries it"
            yield Reason(Code.NOT_COMMITTED, told)
        elif row.state is State.COMMITTED:
            yield from self._find_waits_of_committed(row)
        elif row.trained is not None and row.trained.served_at is None:
            alarms = [each.name for each in self._ledger.alarms.all() if each.holds]
            if alarms and row.trained.state is VersionState.CANDIDATE:
                named = f": {', '.join(alarms)}" if self._sees_all else ""
                yield Reason(Code.PROMOTION_HELD, f"alarms hold its version back{named}")

    def _find_waits_of_committed(self, row: ReplyView) -> Iterator[Reason]:
        batch_rules, now = self._batch_rules, self._ledger.transactions.time()
        line = self._ledger.versions.of(row.policy).now()
        staleness = sum(row.version_min < each.version <= line.newest for each in line.versions)
        if batch_rules.max_staleness is not None and staleness > batch_rules.max_staleness:
            yield Reason(Code.TOO_STALE, "it is too old for the next batch (trainer.max_staleness): it will expire")
            return
        if batch_rules.group_by != "none" and row.group_id is None:
            yield Reason(
                Code.GROUPS_INCOMPLETE,
                f"its {batch_rules.group_by} is not complete: give feedback on its other replies"
                + ("" if batch_rules.automatic else " and commit them"),
            )
        facts = self._ledger.reports.facts(batch_rules, batch=self._rules.least)
        for reason in diagnose(Facts(now=now, rules=self._rules, outbox=self._outbox(), ledger=facts)):
            if reason.code in _WAITS:
                yield reason if self._sees_all else Reason(reason.code, _WAITS[reason.code])


def _explain_reward(row: ReplyView) -> Iterator[str]:
    if row.rewarded_at is None:
        return
    at = _when(row.rewarded_at)
    if row.reward is None:
        yield f"edited at {at}, and not rated: it has no reward"
    elif row.rule == OF_ITS_RESULT:
        yield f"reward {row.reward:g}: that of the last call of its run"
    elif row.rule == OF_A_FILE:
        yield f"reward {row.reward:g}: it is a line of a file"
    elif not row.feedback.parts:
        yield f"reward {row.reward:g}: reward.default, for it had no feedback that counts until {at}"
    else:
        parts = " + ".join(
            f"{part:g} ({metric}{' of the run' if of_run else ''})"
            for (metric, of_run), part in row.feedback.parts.items()
        )
        yield f"reward {row.reward:g} since {at}: {parts}, within reward.clip"
        if row.feedback.reward != row.reward:
            yield "its feedback makes another reward now: the reward was computed when the ledger knew other feedback"


def _when(then: float) -> str:
    try:
        return moment(then)
    except (ValueError, OverflowError, OSError):  # an imported row may say anything
        return f"{then:g}"
