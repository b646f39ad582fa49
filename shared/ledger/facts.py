"""The state of the ledger, its trainer and the outbox at one moment, for `shared/operations/diagnosis.py`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from tuneloop.shared.checkpoints import DiskSpace
from tuneloop.shared.experience import State
from tuneloop.shared.job_marks import step_rules_in
from tuneloop.shared.ledger.versions.alarms import Alarm
from tuneloop.shared.outbox_status import OutboxStatus
from tuneloop.shared.settings.settings import Settings

#: A trainer without a heartbeat for so many seconds is dead, or stopped: one that lives sends one every ten.
TRAINER_SEEN_S = 40.0


class StateCount(NamedTuple):
    """The experiences in a state, `lately` since the newest trained one; when the oldest was sampled, or committed."""

    rows: int = 0
    oldest: float | None = None
    lately: int = 0


class Trainer(NamedTuple):
    """The trainer of the newest epoch. `ended_at` None: it has not reported its end."""

    name: str
    epoch: int
    started_at: float
    seen_at: float
    ended_at: float | None

    def up(self, now: float) -> bool:
        return self.ended_at is None and now - self.seen_at <= TRAINER_SEEN_S


class Weights(NamedTuple):
    """A policy's versions: so many of the newest were `rejected`, the last for a `reason`; since when one waits."""

    newest: int
    registered_at: float
    champion: int | None
    step: int
    rejected: int
    reason: str | None
    servable: int
    waiting_since: float | None = None


class HeldBack(NamedTuple):
    """How many rows a rater's share keeps out of batches; the rater is a key, or a source without one."""

    tenant: str
    rater: str
    rows: int


class DropCount(NamedTuple):
    """How many experiences were dropped, have expired, or wait to be set aside, for the same reason."""

    state: State
    reason: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFacts:
    """The ledger's counts.

    Of the committed rows, `claimable` may go into the next batch, `too_old` expire at the next claim, `ungrouped` have
    no complete group. `held_back`: raters whose shares fill no batch, the largest first. `unsampled` counts recent
    waiting rows that the method cannot train on; `unfit` counts them by state and reason. `edited` committed rows have
    an edited answer and no reward, under a method that needs rewards. `purged` trained rows are deleted. No lease is
    older than `leased_since`, no uncommitted reward older than `rewarded_since`.
    """

    states: Mapping[State, StateCount]
    claimable: int = 0
    too_old: int = 0
    ungrouped: int = 0
    held_back: tuple[HeldBack, ...] = ()
    unsampled: int = 0
    edited: int = 0
    unfit: tuple[DropCount, ...] = ()
    leased_since: float | None = None
    rewarded_since: float | None = None
    pending: int = 0
    pending_since: float | None = None
    versions: int = 0
    consumed: int = 0
    purged: int = 0
    trainer: Trainer | None = None
    weights: Weights | None = None
    drops: tuple[DropCount, ...] = ()
    alarms: tuple[Alarm, ...] = ()

    def count(self, state: State) -> StateCount:
        return self.states.get(state, StateCount())


def find_ignored_feedback(settings: Settings) -> str | None:
    """The feedback that the method needs and the reward rule ignores, with the cure; None if there is none."""
    rule = settings.reward
    if rule.default is not None:
        return None
    if settings.judge.url and not rule.weights.get("judge"):
        return "the judge's verdicts are worth nothing: give the metric judge a weight in reward.weights"
    if settings.buffer.group_by == "preference" and not rule.weights.get("preference"):
        return "preferences are worth nothing: give the metric preference a weight in reward.weights"
    return None


class Rules(NamedTuple):
    """The settings that decide when a step is made, and the feedback that they ignore."""

    batch_size: int
    group_by: str = "none"
    save_interval: int = 1
    total_steps: int | None = None
    ignored_feedback: str | None = None
    batch_timeout: float | None = None
    method: str = "ppo"
    #: Whether candidates wait for their evaluation.
    gated: bool = False
    #: Whether rows are committed by themselves.
    automatic: bool = False

    @property
    def least(self) -> int:
        """The fewest experiences of which a step is made, sooner or later."""
        return self.batch_size if self.batch_timeout is None else 1

    @classmethod
    def of(cls, settings: Settings, policy: int = 0) -> Self:
        """The rules of a policy's settings; the default policy's steps are those of the trainer that started last."""
        steps = (step_rules_in(settings.job_dir) if not policy else None) or settings.step_rules
        return cls(
            steps.batch_size,
            settings.buffer.group_by,
            steps.save_interval,
            steps.total_steps,
            find_ignored_feedback(settings),
            steps.batch_timeout,
            settings.algorithm.algorithm_type,
            settings.gate.mode != "off",
            settings.buffer.commit == "auto",
        )


class Standstill(NamedTuple):
    """A stalled part, by the code of its reason. `serves`: requests are still answered."""

    code: str
    sentence: str
    serves: bool = True


class EngineFacts(NamedTuple):
    """An engine that answers, or will: for how long it has shown no sign of work, though requests or weights wait."""

    number: int
    loads: bool
    still_s: float


class ExplorerFacts(NamedTuple):
    """What a running explorer sees: seconds of silence, files that may be opened, what the database refuses."""

    engines: tuple[EngineFacts, ...] = ()
    database_s: float = 0.0
    append_s: float = 0.0
    control_s: float = 0.0
    judge_s: float = 0.0
    descriptors: int | None = None
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything at the moment `now`; `away` says why there is no ledger, `stops` come from the running explorer.

    `disk`: what the next checkpoint needs and finds, once a version's size is known and its folder is readable.
    """

    now: float
    rules: Rules
    outbox: OutboxStatus
    ledger: LedgerFacts | None
    away: str = ""
    disk: DiskSpace | None = None
    stops: tuple[Standstill, ...] = ()
