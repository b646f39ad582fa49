"""Releases rewarded replies to the trainer as time goes on, in the explorer that leads: `buffer.commit: auto`."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.errors import PolicyRefused
from tuneloop.shared.job_marks import touch_committed
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.training.automatic_commit import AutomaticCommit, Place
from tuneloop.shared.settings.policies import settings_of_policy
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: How often it is looked whether a row is due, and how soon again while there are more than one look takes.
TURN_S, _AGAIN_S = 2.0, 0.05

#: How long a turn waits for what was acknowledged before it: feedback on its way may change what is due.
_PATIENCE_S = 8.0

#: Pages of rows that one turn looks at of a policy.
_PAGES = 5


class CommitTimer:
    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        *,
        wait_until_taken: Callable[[float], Awaitable[bool]],
        metrics: Metrics,
    ) -> None:
        self._settings, self._ledger, self._metrics = settings, ledger, metrics
        self._commit = AutomaticCommit(ledger.transactions, ledger.rewards)
        self._caught_up = wait_until_taken
        self._places: dict[int, Place | None] = {}
        #: By a policy and its options; None where rows are committed by hand.
        self._rules: dict[tuple[int, str], BatchRules | None] = {}

    async def run(self) -> None:
        """Commit what is due every TURN_S seconds, and sooner while there is more."""
        pause_s = min(TURN_S, self._settings.explorer.service_status_check_interval)
        await every(pause_s, self.look, task="commit", metrics=self._metrics)

    async def look(self) -> float | None:
        """Commit some of what is due; how many seconds to wait then, None if nothing more is due now."""
        policies = await asyncio.to_thread(self._find_policies)
        if not await asyncio.to_thread(self._commit.is_due, [*policies]):
            return None
        if await asyncio.to_thread(self._ledger.explorers.lead, self._settings.explorer_name) is None:
            return None
        if not await self._caught_up(_PATIENCE_S):
            return None
        return _AGAIN_S if await asyncio.to_thread(self._commit_some, policies) else None

    def _find_policies(self) -> dict[int, BatchRules]:
        rules = {}
        for policy in self._ledger.policies.all():
            key = policy.id, repr(policy.settings)
            if key not in self._rules:
                self._rules[key] = None
                with suppress(PolicyRefused):  # Its trainer says so.
                    settings = settings_of_policy(self._settings, policy.settings) if policy.id else self._settings
                    self._rules[key] = BatchRules.of(settings, policy.id) if settings.buffer.commit == "auto" else None
            if (found := self._rules[key]) is not None:
                rules[policy.id] = found
        return rules

    def _commit_some(self, policies: dict[int, BatchRules]) -> bool:
        rewarded, committed, more = self._commit.reward_by_default(), 0, False
        for number, rules in policies.items():
            for _ in range(_PAGES):
                found = self._commit.commit_due(rules, self._places.get(number))
                committed, self._places[number] = committed + found.committed, found.place
                if found.place is None:
                    break
            more |= self._places[number] is not None
        if committed:
            log.info("committed", count=committed)
            with suppress(OSError):  # Then the trainer looks after its interval.
                touch_committed(self._settings.job_dir)
        return bool(rewarded) or (more and bool(committed))
