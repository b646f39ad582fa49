"""Looks at the ledger now and then: the gauges of /metrics and the curves of what was served."""

import asyncio
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.metrics import Metrics, ProcessTotals
from tuneloop.explorer.transcript import ReplyIdSigner
from tuneloop.shared.capacity.pace import find_pace
from tuneloop.shared.errors import LedgerError
from tuneloop.shared.experience import State, steady_clock
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.explorers import NOT_STORED, NOT_STORED_S
from tuneloop.shared.ledger.facts import Facts, LedgerFacts, Rules, Standstill
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage.clock import CLOCK_SKEW, ClockSkew
from tuneloop.shared.ledger.versions.alarms import Alarm
from tuneloop.shared.operations.diagnosis import STOPS, TRAINER_SILENT, WAITING, Code, diagnose, find_silent_trainer
from tuneloop.shared.outbox_status import OutboxStatus
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.tensorboard import Curves

log = structlog.get_logger()

#: Of how many versions /metrics says what they earn.
_REWARDS_SHOWN = 8

REFUSED = "records_refused"

#: The key of reply ids is not the one that the newest replies were named with.
KEY_CHANGED, _NAMES_LOOKED_AT = "reply_key_changed", 100


class LedgerGauges:
    """Sets the gauges, and writes `served/…` curves; `reached`: whether the database answered the last time."""

    def __init__(
        self,
        ledger: Ledger,
        metrics: Metrics,
        settings: Settings,
        *,
        outbox: Callable[[], OutboxStatus],
        interval_s: float,
        stops: Callable[[], tuple[Standstill, ...]] = tuple,
        totals: ProcessTotals | None = None,
    ) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._settings = settings
        self._curves = Curves(settings.tensorboard_dir / "explorer")
        self._interval_s = interval_s
        self.reached = True
        self._written: dict[int, tuple[int, int, float]] = {}
        self._alarmed: set[str] = set()
        self._shown_rewards: set[str] = set()
        self._outbox, self.stops = outbox, stops
        self._key_checked = self._is_untrainable = False
        self._totals = totals
        self._not_stored: dict[str, float] = {}
        self._added_not_stored: dict[str, float] = {}

    async def run(self) -> None:
        async def look() -> None:
            families = self._totals.collect() if self._totals else ()
            samples = (sample for family in families if family.name == NOT_STORED for sample in family.samples)
            self._not_stored |= {each.labels["reason"]: each.value for each in samples if each.name.endswith("_total")}
            await asyncio.to_thread(self.update)

        await every(self._interval_s, look, task="ledger_gauges", metrics=self._metrics)

    def update(self) -> None:
        """Bring gauges and curves up to date. Raises LedgerError, with the gauges that say so set."""
        try:
            self._ledger.recording.end_silent_leases()
            self._ledger.raters.settle()
            self._ledger.reports.fold_counts()
            counted = dict(self._not_stored)
            new = {reason: count - self._added_not_stored.get(reason, 0.0) for reason, count in counted.items()}
            if any(new.values()):
                self._ledger.explorers.add(NOT_STORED, new, until=self._ledger.transactions.time() + NOT_STORED_S)
                self._added_not_stored = counted
            if not self._key_checked:  # once: later the newest replies have names of the key that there is now
                path, names = self._settings.job_dir / KEY, self._ledger.reports.newest_names(among=_NAMES_LOOKED_AT)
                signer = ReplyIdSigner(load_key(path))
                if names and not any(signer.parse(msg_id, tenant) for tenant, msg_id in names):
                    reason = (
                        f"the newest {len(names)} replies were named with another key than {path} of"
                        f" {socket.gethostname()}: feedback on them is answered 404; restore the key from a copy and"
                        " start the explorer again"
                    )
                    if self._ledger.alarms.raise_alarm(Alarm(KEY_CHANGED, reason)):
                        log.error("alarm_raised", name=KEY_CHANGED, reason=reason)
                self._key_checked = True
            least = Rules.of(self._settings).least
            self._set_gauges(self._ledger.reports.facts(BatchRules.of(self._settings), batch=least))
            imbalance = self._ledger.reports.imbalance()
            for sentence in imbalance:
                log.error("ledger_imbalance", sentence=sentence)
            self._metrics.ledger_imbalance.set(len(imbalance))
            rewards = self._ledger.reports.rewards()
            # What the newest versions earn, and no more of older ones: a label's values must not grow for ever.
            rewarded = sorted((each for each in rewards if each.rewarded), key=lambda each: each.version)
            shown = {str(each.version): each.reward_sum / each.rewarded for each in rewarded[-_REWARDS_SHOWN:]}
            for version in self._shown_rewards - set(shown):
                self._metrics.version_reward.remove(version)
            for version, mean in shown.items():
                self._metrics.version_reward.labels(version).set(mean)
            self._shown_rewards = set(shown)
            for served in rewards:
                now = (served.replies, served.rewarded, served.reward_sum)
                points: dict[str, float] = {"served/requests": served.replies, "served/rewarded": served.rewarded}
                if served.rewarded:
                    points["served/reward_mean"] = served.reward_sum / served.rewarded
                if self._written.get(served.version) != now and self._curves.add(served.version, points):
                    self._written[served.version] = now
            self.reached = True
        except LedgerError as error:
            self.reached = False
            self._set_gauges(None, away=str(error))
            raise

    def _set_gauges(self, ledger: LedgerFacts | None, *, away: str = "") -> None:
        now, metrics = steady_clock(), self._metrics
        outbox = self._outbox()
        if ledger is not None:
            outbox = outbox._replace(refused_records=len(self._ledger.recording.refused_records()))
        facts = Facts(
            now=now, rules=Rules.of(self._settings), outbox=outbox, ledger=ledger, away=away, stops=self.stops()
        )
        holds = dict(diagnose(facts))
        if ledger is not None and Code.NOT_TRAINABLE in holds and not self._is_untrainable:
            named = self._ledger.reports.facts(BatchRules.of(self._settings), drops=1)  # reads each of these rows
            found = dict(diagnose(replace(facts, ledger=named))).get(Code.NOT_TRAINABLE)
            log.warning("not_trainable", sentence=found or holds[Code.NOT_TRAINABLE])
        self._is_untrainable = Code.NOT_TRAINABLE in holds
        for code in Code:
            metrics.no_step.labels(code.value).set(code in holds)
        if ledger is None:
            return
        # This machine's clock and the database's, compared with the ledger's time.
        transactions = self._ledger.transactions
        transactions.keep_time()
        skew = ClockSkew(time.time() - transactions.time(), transactions.clock_skew())
        metrics.clock_skew.labels("machine").set(skew.machine_s)
        metrics.clock_skew.labels("database").set(skew.database_s)
        held = f"{outbox.refused_records} records that the database refused: `tuneloop outbox list`"
        self._keep_alarms(
            dict.fromkeys(STOPS)
            | {stop.code: stop.sentence for stop in facts.stops}
            | {
                TRAINER_SILENT: find_silent_trainer(ledger, now),
                REFUSED: held if outbox.refused_records else None,
                CLOCK_SKEW: f"clocks do not agree with the ledger's time: {skew.sentence}" if skew.wrong else None,
            },
            ledger.alarms,
        )
        for state in State:
            metrics.experiences.labels(state.value).set(ledger.count(state).rows)
        for job_state, count in self._ledger.jobs.counts().items():
            metrics.jobs.labels(job_state.value).set(count)
        for state in WAITING:
            oldest = ledger.count(state).oldest
            metrics.waiting_seconds.labels(state.value).set(0.0 if oldest is None else max(0.0, now - oldest))
        metrics.trainer_up.set(ledger.trainer is not None and ledger.trainer.up(now))
        pace = find_pace(self._settings.job_dir, now)
        if (weights := ledger.weights) is not None:
            metrics.version_newest.set(weights.newest)
            metrics.version_waiting.set(0.0 if weights.waiting_since is None else max(0.0, now - weights.waiting_since))
            metrics.last_version.set(weights.registered_at)
        metrics.training_lag.set(0.0 if pace is None else pace.lag)
        metrics.feedback_pending.set(ledger.pending)
        metrics.held_back.set(sum(each.rows for each in ledger.held_back))
        open_ = {alarm.name for alarm in ledger.alarms} | {stop.code for stop in facts.stops}
        self._alarmed |= open_
        for name in self._alarmed:
            metrics.alarm.labels(name).set(name in open_)

    def _keep_alarms(self, reasons: Mapping[str, str | None], opened: Collection[Alarm]) -> None:
        """Raise and clear, of those that are open, the alarms of which each machine has its own."""
        about = f"{socket.gethostname()}: "
        for name, reason in reasons.items():
            try:
                if self._ledger.alarms.keep_own(name, reason, about=about, opened=opened):
                    log.error("alarm_raised", name=name, reason=f"{about}{reason}")
            except LedgerError as error:  # the next turn tries again; the gauge shows it meanwhile
                log.warning("alarm_not_stored", name=name, reason=str(error))

    def close(self) -> None:
        self._curves.close()
