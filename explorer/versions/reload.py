"""Takes up new versions while requests are in flight: verify, pause, load, forget, resume, prove."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet, TrafficSplit
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.versions.loading import (
    KnownProbes,
    Replacements,
    Verifier,
    is_away,
    load,
    load_paused,
    servable_champion,
    start_verifier_ahead,
    tell_unreadable,
    verify_wanted,
)
from tuneloop.explorer.versions.trial import CanaryTrial, current_trial, division, to_try_on
from tuneloop.shared.checkpoints import Probe
from tuneloop.shared.errors import CheckpointRejected, EngineError, LedgerError, VersionRefused
from tuneloop.shared.evaluation.gate import GateVerdict, evaluator_of, gate_verdict
from tuneloop.shared.evaluation.scores import Figure, figures_on
from tuneloop.shared.evaluation.tasks import fingerprint, judge_of, tasks_of
from tuneloop.shared.experience import Evaluator, VersionAction, VersionState, steady_clock
from tuneloop.shared.job_marks import registration_stamp
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: How often the trainer's note is looked at.
_NOTICE_S = 0.05

#: How often a version may take an engine down with it before it is rejected.
_DEATHS = 2

#: How long an engine that is to be ended may take to end replies of a version that must not be served, in seconds.
_UNFIT_S = 30.0

_NOT_OURS = (
    "engines of engine_urls are not ours to start again: one that does not come back from a reload with the right "
    "weights answers no requests until its owner has started it. If that happens after every version, vLLM reloads "
    "this architecture wrongly: let the explorer start the engines (explorer.rollout_model.engine_num)"
)


async def wait_for_registration(job_dir: Path, seen: tuple[int, int], *, at_most_s: float) -> None:
    """Until the trainer notes a version that came after `seen` in the job folder, which is quick on one machine."""
    ends = time.monotonic() + at_most_s
    while (left := ends - time.monotonic()) > 0:
        if await asyncio.to_thread(registration_stamp, job_dir) != seen:
            return
        await asyncio.sleep(min(_NOTICE_S, left))


class WeightSwapper:
    def __init__(
        self, fleet: Fleet, probes: KnownProbes, *, metrics: Metrics, drain_s: float, least_running: int
    ) -> None:
        """An engine is waited for at most `drain_s` to end what it has in flight, where that is wanted.

        `least_running` others must be ready before one leaves the rotation, where there are so many.
        """
        self.probes = probes
        self._fleet = fleet
        self._metrics = metrics
        self._drain_s = drain_s
        self._least_running = least_running
        self._replacements = Replacements(fleet, probes, drain=self._drain)
        #: Held while versions are loaded. Code that finds an engine ready, and sets its state before an await, needs no
        #: lock for that engine.
        self.swapping = asyncio.Lock()

    async def _swap(
        self,
        engine: Engine,
        version: Version,
        probe: Probe,
        *,
        back_to: Version,
        drain: bool,
        entering: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Give an engine a version. `entering` is called with the proven engine before it is in rotation again."""
        started = time.monotonic()

        async def prove(proven: Engine) -> None:
            await proven.control.prove(probe)
            if entering:
                await entering()

        if await self._replacements.replace(engine, version, prove=prove, back_to=back_to):
            return self._metrics.reload_seconds.observe(time.monotonic() - started)
        await self._fleet.set_state(engine, EngineState.RELOADING)
        if drain or engine.restarts:
            await self._drain(engine)
        if not engine.restarts and not await self._pause(engine, version, probe):
            return
        try:
            await load_paused(engine, version, self._fleet)
            await prove(engine)
        except LedgerError:
            await self.put_back(engine, back_to)
            raise
        except (EngineError, CheckpointRejected) as error:
            await self.put_back(engine, back_to)
            if engine.state is EngineState.READY:
                raise CheckpointRejected(str(error)) from error
            raise EngineError(str(error)) from error
        await self._fleet.set_state(engine, EngineState.READY)
        self._metrics.reload_seconds.observe(time.monotonic() - started)

    async def _pause(self, engine: Engine, version: Version, probe: Probe) -> bool:
        try:
            await engine.control.cache_probe(probe)
            await engine.control.pause("keep")
        except EngineError as error:
            # It has not seen the version yet, so this is none of the version's doing.
            log.error("engine_lost_before_reload", engine=engine.number, version=version.version, reason=str(error))
            await self._fleet.set_state(engine, EngineState.DOWN)
            return False
        return True

    async def _bring_back(self, engine: Engine, champion: Version, *, drain: bool, fit: bool) -> None:
        """Give an engine in rotation the champion; one whose version is not `fit` answers no requests from now on."""
        if not fit:
            await self._fleet.set_state(engine, EngineState.RELOADING)
        if await self._replacements.follow(engine, champion):
            return
        await self._fleet.set_state(engine, EngineState.RELOADING)
        if fit and (drain or engine.restarts):
            await self._drain(engine)
        elif engine.restarts:
            await self._drain(engine, at_most_s=_UNFIT_S)
        await self.put_back(engine, champion)

    async def put_back(self, engine: Engine, champion: Version) -> None:
        """Give an engine out of rotation its weights again; one that cannot load them is marked down, and restarted."""
        try:
            await load(engine, champion, fleet=self._fleet)
            await self.probes.prove(engine, champion)
        except (EngineError, CheckpointRejected) as error:
            sentence = None if engine.starter else _NOT_OURS
            log.error(
                "engine_not_put_back",
                engine=engine.number,
                version=champion.version,
                reason=str(error),
                sentence=sentence,
            )
            await self._fleet.set_state(engine, EngineState.DOWN)
        else:
            await self._fleet.set_state(engine, EngineState.READY)

    def _may_leave(self, engine: Engine) -> bool:
        """Whether an engine may leave the rotation: others answer, or another one takes its place before."""
        if self._replacements.room_beside(engine):
            return True
        others = [each.state is EngineState.READY for each in self._fleet.engines if each is not engine]
        return sum(others) >= min(self._least_running, len(others))

    async def _drain(self, engine: Engine, *, at_most_s: float | None = None) -> None:
        if not engine.control.loads_in_place:  # nothing changes under what is in flight
            return
        with contextlib.suppress(TimeoutError):
            drain_s = self._drain_s if at_most_s is None else min(at_most_s, self._drain_s)
            await asyncio.wait_for(self._fleet.wait_until_idle(engine), drain_s)


class Reloader(WeightSwapper):
    def __init__(self, settings: Settings, fleet: Fleet, *, ledger: Ledger, metrics: Metrics) -> None:
        least = settings.explorer.min_running_model_num
        super().__init__(
            fleet,
            KnownProbes(ledger),
            metrics=metrics,
            drain_s=settings.explorer.request_timeout,
            least_running=int(settings.rollout.mode == "rolling") if least is None else least,
        )
        self._job_dir = settings.job_dir
        self._interval_s = settings.explorer.service_status_check_interval
        self._drain_first = settings.explorer.on_reload == "wait"
        self._verifier = Verifier.of(settings)
        self._rollout = settings.rollout
        self._ledger = ledger
        self._deaths: Counter[int] = Counter()
        self._held: int | None = None
        self._champion: int | None = None
        self.gate = Gate(settings, ledger)

    async def run(self) -> None:
        """Look for a new version every `service_status_check_interval` seconds, or when one is registered here."""

        async def look() -> float:
            seen = registration_stamp(self._job_dir)
            try:
                await self.turn()
            except VersionRefused as error:  # another decision was made meanwhile
                log.warning("version_not_taken_up", reason=str(error))
            await start_verifier_ahead()
            await wait_for_registration(self._job_dir, seen, at_most_s=self._interval_s)
            return 0.0

        await every(self._interval_s, look, task="reload", metrics=self._metrics)

    async def turn(self) -> None:
        """Take up the newest candidate, if nothing holds it; bring engines to what they should serve."""
        async with self.swapping:
            champion = await asyncio.to_thread(self._ledger.versions.champion)
            await self._see(champion)
            trial = await asyncio.to_thread(current_trial, self._ledger.versions, self._rollout)
            pinned = await asyncio.to_thread(self._ledger.versions.pinned_version)
            split = division(self._fleet.engines, self._fleet.split, champion.version, trial)
            if split != self._fleet.split:
                await self._fleet.set_split(split)
            self._metrics.canary_version.set(trial.version.version if trial else 0)
            self._metrics.canary_share.set(split.share if split else 0)
            candidate = None if trial or pinned else await asyncio.to_thread(self._ledger.versions.candidate)
            ready = any(engine.state is EngineState.READY for engine in self._fleet.engines)
            waits = not ready or self._fleet.split or (candidate is not None and await self._is_held(candidate))
            if candidate is None or waits or not await self.gate.admits(candidate, champion):
                await self._align(champion, trial)
                # Clear the alarm about versions that cannot be read where no version is waited for.
                engines = [each for each in self._fleet.engines if each.state is not EngineState.SPARE]
                served = all(each.state is EngineState.READY and each.version == champion.version for each in engines)
                if candidate is None and served:
                    await tell_unreadable(None, self._verifier, self._ledger)
            elif self._rollout.tries:
                await self._align(champion)
                await self._try(candidate, champion)
            else:
                await self._take_up(candidate, champion)

    async def _see(self, champion: Version) -> None:
        self._metrics.version_served.set(champion.version)
        if self._champion is not None and champion.version != self._champion:
            if champion.version > self._champion:
                for seconds in await asyncio.to_thread(self._ledger.reports.feedback_to_served, champion.version):
                    self._metrics.feedback_to_served.observe(seconds)
            log.info("version_served", version=champion.version, from_version=self._champion, step=champion.step)
        self._champion = champion.version

    async def _is_held(self, candidate: Version) -> bool:
        """Whether an alarm forbids that a new version is served; said once, and once when it is over."""
        held = await asyncio.to_thread(self._ledger.alarms.promotion_held)
        if held and self._held is None:
            names = [alarm.name for alarm in await asyncio.to_thread(self._ledger.alarms.all) if alarm.holds]
            log.warning("promotion_held", version=candidate.version, alarms=names)
        elif not held and self._held is not None:
            log.info("promotion_released", version=candidate.version, held_since_version=self._held)
        self._held = (self._held or candidate.version) if held else None
        return held

    async def _align(self, champion: Version, trial: CanaryTrial | None = None) -> None:
        split = self._fleet.split
        tried = []
        if trial and split and split.version == trial.version.version:
            tried = to_try_on(self._fleet.engines, split.version, trial.share)
        whole = False
        for engine in self._fleet.engines:
            if engine.state is not EngineState.READY or engine.version == champion.version or engine in tried:
                continue
            if not whole:  # Damaged, another one is the champion from the next turn on.
                try:
                    whole = (await servable_champion(self._ledger, self._verifier))[0].version == champion.version
                except CheckpointRejected:
                    return
            if not whole:
                return
            fit = await self._is_fit(engine.version)
            if engine.state is EngineState.READY and (self._may_leave(engine) or not fit):
                await self._bring_back(engine, champion, drain=self._drain_first, fit=fit)
        for engine in tried:
            if trial and engine.state is EngineState.READY and engine.version != trial.version.version:
                await self._try_on(engine, trial.version, champion)

    async def _is_fit(self, number: int) -> bool:
        """Whether replies of a version may be let to their end."""
        version = await asyncio.to_thread(self._ledger.versions.get, number)
        return version is not None and version.state not in {VersionState.REJECTED, VersionState.ROLLED_BACK}

    async def _try(self, candidate: Version, champion: Version) -> None:
        mode, share = self._rollout.mode, self._rollout.tried_share
        split = TrafficSplit(candidate.version, share=share)

        async def begin() -> None:
            await asyncio.to_thread(
                self._ledger.versions.begin_canary,
                candidate.version,
                by="explorer",
                reason=f"rollout.mode: {mode}, with {share:g} of the requests",
                details={"mode": mode, "share": share},
            )
            await self._fleet.set_split(split)

        for engine in to_try_on(self._fleet.engines, candidate.version, share)[:1]:
            await self._try_on(engine, candidate, champion, entering=begin)

    async def _try_on(
        self,
        engine: Engine,
        version: Version,
        champion: Version,
        *,
        entering: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        try:
            probe = await verify_wanted(version, self._verifier, self._ledger)
            if engine.state is not EngineState.READY:
                return
            # What is in flight there is the champion's: it must not be ended by what is only tried.
            await self._swap(engine, version, probe, back_to=champion, drain=True, entering=entering)
        except (CheckpointRejected, EngineError) as error:
            if not await is_away(version, self._verifier, self._ledger, error) and await self._ends(version, error):
                await self._align(champion)

    async def _take_up(self, candidate: Version, champion: Version) -> None:
        try:
            probe = await verify_wanted(candidate, self._verifier, self._ledger)
            for engine in self._fleet.engines:
                if engine.state is not EngineState.READY or engine.version == candidate.version:
                    continue
                if not await self._is_fit(candidate.version):  # another decision was made meanwhile
                    return
                if self._may_leave(engine):
                    await self._swap(engine, candidate, probe, back_to=champion, drain=self._drain_first)
        except (CheckpointRejected, EngineError) as error:
            if await is_away(candidate, self._verifier, self._ledger, error) or await self._ends(candidate, error):
                await self._align(champion)
            return
        if candidate.version in self._fleet.served_versions:  # a number that a dead engine has is no answer
            await asyncio.to_thread(self._ledger.versions.promote, candidate.version)
            await self._see(candidate)

    async def _ends(self, version: Version, error: CheckpointRejected | EngineError) -> bool:
        """Whether what went wrong is the end of the version: not every failure is its own."""
        reason = str(error)
        if isinstance(error, EngineError):
            log.error("engine_lost_in_reload", version=version.version, reason=reason)
            self._deaths[version.version] += 1
            if self._deaths[version.version] < _DEATHS:
                return False
            reason = f"engines die of it: {reason}"
        if version.state is VersionState.CANARY:
            await asyncio.to_thread(self._ledger.versions.roll_back, version.version, by="explorer", reason=reason)
        else:
            await asyncio.to_thread(self._ledger.versions.reject, version.version, reason)
        return True


#: A candidate that has waited so many seconds for its evaluation is logged.
PATIENCE_S = 300.0


class Gate:
    """Evaluates a candidate before it is served. Raises EnvironmentRefused without tasks or judge."""

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self.mode = settings.gate.mode
        self.tasks = tasks_of(settings.monitor.evaluation) if self.mode != "off" else []
        self.on_engine = self.mode != "off" and evaluator_of(settings) is Evaluator.ENGINE
        self.options = settings.gate
        if self.tasks:
            judge_of(settings.monitor.evaluation)  # What is refused is so now.
        self._evaluator = evaluator_of(settings)
        self._fingerprint = fingerprint(self.tasks, settings.monitor.evaluation, settings.judge)
        self._ledger = ledger
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
            if candidate.version not in self._reported and steady_clock() - candidate.created_at > PATIENCE_S:
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
