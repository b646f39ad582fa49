"""The gate: lets a candidate pass to be served once its evaluation says that it may; decided from the ledger alone."""

import asyncio

import structlog

from tuneloop.shared.evaluation.gate import GateVerdict, evaluator_of, gate_verdict
from tuneloop.shared.evaluation.scores import Figure, figures_on
from tuneloop.shared.evaluation.tasks import fingerprint, judge_of, tasks_of
from tuneloop.shared.experience import Evaluator, VersionAction, steady_clock
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: A candidate that has waited longer for its evaluation is told of, in seconds.
PATIENCE_S = 300.0


class Gate:
    """Stands between a candidate and whoever would serve it. Raises EnvironmentRefused without tasks or judge."""

    def __init__(self, settings: Settings, ledger: Ledger, *, patience_s: float = PATIENCE_S) -> None:
        self.mode = settings.gate.mode
        self.tasks = tasks_of(settings.monitor.evaluation) if self.mode != "off" else []
        self.on_engine = self.mode != "off" and evaluator_of(settings) is Evaluator.ENGINE
        self.options = settings.gate
        if self.tasks:
            judge_of(settings.monitor.evaluation)  # What is refused is so now.
        self._evaluator = evaluator_of(settings)
        self._fingerprint = fingerprint(self.tasks, settings.monitor.evaluation, settings.judge)
        self._ledger = ledger
        self._patience_s = patience_s
        self._unanswered: dict[int, str] = {}
        self._reported: set[int] = set()

    async def admits(self, candidate: Version, champion: Version) -> bool:
        if self.mode == "off":
            return True
        verdict = await self.verdict(candidate, champion)
        if verdict is None and self.mode == "report":
            # The trainer reports by itself, whenever it is done.
            return not self.on_engine or candidate.version in self._unanswered
        if verdict is None:
            if candidate.version not in self._reported and steady_clock() - candidate.created_at > self._patience_s:
                self._reported.add(candidate.version)
                whose = "an engine to be tried on" if self.on_engine else "the trainer's evaluation"
                why = self._unanswered.get(candidate.version, "there is none yet")
                reason = f"waits for {whose} before it may be served: {why}"
                log.warning("version_waits_at_the_gate", version=candidate.version, reason=reason)
                note = self._ledger.versions.note
                await asyncio.to_thread(note, candidate.version, VersionAction.EVALUATED, by="explorer", reason=reason)
            return False
        if verdict.passed or self.mode == "report":
            return True
        reason = f"it did not pass the gate: {'; '.join(verdict.reasons)}"
        await self.reject(candidate, reason, verdict.figures | {"instead_of": champion.version})
        return False

    async def verdict(self, candidate: Version, champion: Version) -> GateVerdict | None:
        """What comes of the figures of both; None as long as some are not there."""
        return await self.decide(await self.figures(candidate.version), champion)

    async def decide(self, new: tuple[Figure, ...], champion: Version) -> GateVerdict | None:
        """What comes of a candidate's figures and the champion's; None as long as some are not there."""
        old = await self.figures(champion.version)
        return gate_verdict(self.options, new, old) if new and old else None

    async def figures(self, version: int) -> tuple[Figure, ...]:
        found = await asyncio.to_thread(self._ledger.evaluations.of, version, self._evaluator)
        return figures_on(found, self._fingerprint)

    async def record(self, version: int, figures: tuple[Figure, ...]) -> None:
        await asyncio.to_thread(self._ledger.evaluations.record, version, self._evaluator, figures)

    def give_up(self, candidate: Version, reason: str) -> None:
        if candidate.version not in self._unanswered:
            log.warning("version_not_evaluated", version=candidate.version, reason=reason)
        self._unanswered[candidate.version] = reason

    async def reject(self, version: Version, reason: str, figures: dict[str, object] | None = None) -> None:
        line = self._ledger.versions.of(version.policy)
        await asyncio.to_thread(line.reject, version.version, reason, details=figures)
