"""What is known of the ledger, its trainer and the spool at one moment, for `shared/operations/diagnosis.py`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from tuneloop.shared.experience import State
from tuneloop.shared.ledger.versions.alarms import Alarm
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.spool_format import Spooled

#: A trainer that was not seen for so many seconds is dead, or hangs: one that lives says so every ten.
TRAINER_SEEN_S = 60.0


class Pile(NamedTuple):
    """The experiences in one state: the oldest was sampled then, `lately` of them after the newest trained one."""

    rows: int = 0
    oldest: float | None = None
    lately: int = 0


class Trainer(NamedTuple):
    """The trainer of the newest epoch. `ended_at` None: it has not said that it stopped."""

    name: str
    epoch: int
    started_at: float
    seen_at: float
    ended_at: float | None

    def up(self, now: float) -> bool:
        """Whether it lives, as far as anyone can tell."""
        return self.ended_at is None and now - self.seen_at <= TRAINER_SEEN_S


class Weights(NamedTuple):
    """The versions: the newest of all, the champion, and the newest step that was not rejected.

    `rejected` counts the newest ones that were, in a row; `reason` is that of the last.
    """

    newest: int
    registered_at: float
    champion: int | None
    step: int
    rejected: int
    reason: str | None


class Aside(NamedTuple):
    """So many experiences are in a state aside for the same reason."""

    state: State
    reason: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFacts:
    """What the ledger says.

    Of the committed rows, `claimable` may go into the next batch, `too_old` expire when it is taken, and `ungrouped`
    are in no complete group. Of all that waits and was sampled lately, `unsampled` are no samples of the policy, where
    the trainer takes nothing else. `purged` trained rows are deleted. The leases began no earlier than `leased_since`.
    """

    piles: Mapping[State, Pile]
    claimable: int = 0
    too_old: int = 0
    ungrouped: int = 0
    unsampled: int = 0
    leased_since: float | None = None
    pending: int = 0
    pending_since: float | None = None
    versions: int = 0
    consumed: int = 0
    purged: int = 0
    trainer: Trainer | None = None
    weights: Weights | None = None
    aside: tuple[Aside, ...] = ()
    alarms: tuple[Alarm, ...] = ()

    def pile(self, state: State) -> Pile:
        """The experiences in a state."""
        return self.piles.get(state, Pile())


def uncounted(settings: Settings) -> str | None:
    """What the method learns from and the reward rule gives nothing for, with its cure; None if there is no such."""
    rule, algorithm = settings.reward, settings.algorithm
    if rule.default is not None:
        return None
    if settings.judge.url and not rule.weights.get("judge"):
        return "the judge's verdicts are worth nothing: give the metric judge a weight in reward.weights"
    if settings.buffer.group_by == "preference" and not rule.weights.get("preference"):
        return "preferences are worth nothing: give the metric preference a weight in reward.weights"
    edits = algorithm.algorithm_type == "sft" and algorithm.sft.targets != "replies"
    if edits and rule.demonstration_value is None:
        return "edited answers are worth nothing: set reward.demonstration_value"
    return None


class Rules(NamedTuple):
    """The settings that say when a step is made, and what they leave uncounted."""

    batch_size: int
    group_by: str = "none"
    save_interval: int = 1
    total_steps: int | None = None
    uncounted: str | None = None

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """What the settings say."""
        buffer, trainer = settings.buffer, settings.trainer
        return cls(
            buffer.train_batch_size, buffer.group_by, trainer.save_interval, trainer.total_steps, uncounted(settings)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that is known at the moment `now`; without a ledger, `away` says why there is none."""

    now: float
    rules: Rules
    spool: Spooled
    ledger: LedgerFacts | None
    away: str = ""
