"""Serves policies: brings the versions of their lines to the engines, beside the default policy's and each other's.

Each version is an adapter under a name of its own, so nothing changes under what is in flight: a request ends with the
version that it began with. An engine holds a bounded number; of more, the one that was not asked for longest makes
room, and is loaded again, verified and proven as for the first time, when a request asks for it.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet, least_busy
from tuneloop.explorer.engines.model_routes import AdapterView, JobStatus, PolicyView
from tuneloop.explorer.engines.vllm import EngineControl
from tuneloop.explorer.metrics import Metrics, ProcessTotals
from tuneloop.explorer.versions.evaluation import AGAIN_S, evaluate_beside
from tuneloop.explorer.versions.loading import (
    Verifier,
    actor_of,
    is_away,
    servable_champion,
    start_verifier_ahead,
    verify_wanted,
)
from tuneloop.explorer.versions.reload import Gate, wait_for_registration
from tuneloop.explorer.versions.trial import CanaryController, CanaryTrial, current_trial
from tuneloop.shared.checkpoints import Probe
from tuneloop.shared.errors import (
    CheckpointRejected,
    CheckpointUnreadable,
    EngineError,
    EnvironmentRefused,
    LedgerError,
    LedgerUnavailable,
    NotEvaluated,
    PolicyRefused,
)
from tuneloop.shared.experience import VersionState, since_boot, steady_clock
from tuneloop.shared.job_marks import registration_stamp
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.ledger.policies import DEFAULT, JobModels, Policy
from tuneloop.shared.ledger.recording.attestation import Mismatch
from tuneloop.shared.ledger.versions.versions import SERVABLE
from tuneloop.shared.settings.policies import settings_of_policy
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.versions import RolloutSettings

log = structlog.get_logger()

#: How often the lines are looked at, at most, and how often a trial is, in seconds.
_LOOK_S, _DECIDE_S = 1.0, 5.0

#: Requests for unknown names have the ledger asked this often at most, in seconds, however many they are.
_READ_AGAIN_S = 0.1

#: How long a version that comes waits for the unloading of the one that made room, which may be in flight, in seconds;
#: and how many may be in flight so.
_UNLOAD_S, _MOST_UNLOADING = 0.5, 4

#: How often engines may fail at a version before it is rejected.
_FAILURES = 2


class AdapterAttestation:
    """Periodic proofs of the policies' adapters that engines hold."""

    def __init__(
        self,
        fleet: Fleet,
        locks: Mapping[int, asyncio.Lock],
        *,
        metrics: Metrics,
        distrust: Callable[[Mismatch], Awaitable[None]],
    ) -> None:
        """`locks`: one for each engine, held while an adapter is loaded or unloaded there."""
        self._fleet, self._locks, self._metrics, self._distrust = fleet, locks, metrics, distrust
        #: By engine and version: when the last successful proof began, in seconds since boot, and its probe.
        self.proofs: dict[tuple[int, int], tuple[float, Probe]] = {}

    async def attest(self, engines: Sequence[Engine], interval_s: float) -> None:
        """Prove each adapter that was asked since its last proof, every `interval_s` seconds; unload a wrong one.

        What a wrong adapter has sampled since its last successful proof is not trained on; the next request for its
        version has the files verified and loaded again.
        """
        for engine in engines:
            idle = await self._fleet.idle_times(engine)
            for number, adapter in [*engine.control.held.items()]:
                (proven_s, probe), began_s = self.proofs[engine.number, number], since_boot()
                age_s = began_s - proven_s
                if age_s < interval_s or idle.get(number, math.inf) > age_s:
                    continue
                try:
                    await engine.control.prove_adapter(adapter.renaming.adapter_name, probe)
                except (EngineError, CheckpointRejected) as error:
                    reason, is_wrong = str(error), isinstance(error, CheckpointRejected)
                else:
                    self._metrics.probes.labels("matched").inc()
                    self.proofs[engine.number, number] = began_s, probe
                    continue
                if not is_wrong:
                    self._metrics.probes.labels("failed").inc()
                    log.warning("engine_not_probed", engine=engine.number, version=number, reason=reason)
                is_lost = "does not exist" in reason  # vLLM's answer
                if engine.control.held.get(number) is not adapter or not (is_wrong or is_lost):
                    continue
                del engine.control.held[number]
                await self._fleet.set_state(engine, engine.state)  # the workers stop choosing it
                if is_wrong:
                    since, until = steady_clock.time_at(proven_s), steady_clock()
                    await self._distrust(Mismatch(engine.number, number, since, until, reason, {}, of_version=True))
                async with self._locks[engine.number]:
                    if number not in engine.control.held:
                        await engine.control.let_go(adapter)


class PolicyServing:
    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        places: Sequence[Engine],
        *,
        ledger: Ledger,
        metrics: Metrics,
        totals: ProcessTotals,
        distrust: Callable[[Mismatch], Awaitable[None]],
    ) -> None:
        """`places` are the engines that hold adapters: one of each process."""
        self._settings, self._fleet, self._places = settings, fleet, places
        self._ledger, self._metrics, self._totals = ledger, metrics, totals
        self._verifier = Verifier.of(settings)
        self._serves_adapters = settings.model.lora.rank > 0
        self._interval_s = min(settings.explorer.service_status_check_interval, _LOOK_S)
        #: What the workers know; None: nothing yet.
        self.views: list[PolicyView] | None = None
        self._reading, self._read_began = asyncio.Lock(), -math.inf
        self._policies: dict[int, Policy] = {}
        self._lines: dict[int, list[Version]] = {}
        #: The policy of each version that was brought to an engine.
        self._brought: dict[int, int] = {}
        self._arriving: Counter[int] = Counter()
        self._locks = {engine.number: asyncio.Lock() for engine in places}
        self.attestation = AdapterAttestation(fleet, self._locks, metrics=metrics, distrust=distrust)
        self._loads: dict[int, asyncio.Task[str]] = {}
        self._unloading: set[asyncio.Task[None]] = set()
        self._failures: Counter[int] = Counter()
        self._trials: dict[int, CanaryController] = {}
        self._reasons: dict[int, str] = {}
        self._decide_at: dict[int, float] = {}
        self._gates: dict[int, Gate] = {}
        self._evaluations: dict[int, asyncio.Task[None]] = {}
        self._evaluate_at: dict[int, float] = {}

    async def open(self) -> None:
        with suppress(LedgerUnavailable):
            await self._read()
        if self.views is None:
            await self._fleet.set_policies(None)

    async def run(self) -> None:
        async def look() -> float:
            seen = registration_stamp(self._settings.job_dir)
            await self.turn()
            await wait_for_registration(self._settings.job_dir, seen, at_most_s=self._interval_s)
            return 0.0

        async with asyncio.TaskGroup() as group:
            group.create_task(every(self._interval_s, look, task="policies", metrics=self._metrics))
            group.create_task(every(self._interval_s, self._attest, task="policy_proofs", metrics=self._metrics))

    async def turn(self) -> None:
        await self._read()
        for policy in [*self._policies.values()] if self._serves_adapters else ():
            try:
                await self._follow(policy)
            except LedgerUnavailable:
                raise
            except (LedgerError, PolicyRefused) as error:  # another decision was made meanwhile, or it cannot be served
                if self._reasons.get(policy.id) != str(error):
                    log.warning("policy_not_followed", policy=policy.name, reason=str(error))
                self._reasons[policy.id] = str(error)
        await self._spread()

    async def _read(self, since: float = math.inf) -> None:
        """Send the workers what is known about policies, unless that was begun `since` then."""
        async with self._reading:  # else an older view could come last
            if self._read_began >= since:
                return
            if since < math.inf:
                await asyncio.sleep(self._read_began + _READ_AGAIN_S - time.monotonic())
            self._read_began = time.monotonic()
            jobs = await asyncio.to_thread(self._ledger.jobs.models)
            policies = await asyncio.to_thread(self._ledger.policies.all)
            self._lines = await asyncio.to_thread(self._ledger.versions.answering)
            self._policies = {each.id: each for each in policies if each.id != DEFAULT}
            views = []
            for policy in self._policies.values():
                trial, line = None, self._lines[policy.id]
                if any(each.state is VersionState.CANARY for each in line):
                    line_of = self._ledger.versions.of(policy.id)
                    trial = await asyncio.to_thread(current_trial, line_of, self._settings.rollout)
                views.append(_view_of(policy, line, trial, jobs.get(policy.id)))
            if views != self.views:
                self.views = views
                await self._fleet.set_policies(views)

    async def _follow(self, policy: Policy) -> None:
        line = self._lines[policy.id]
        if len(line) == 1:
            return  # the champion alone, as nearly always
        own = settings_of_policy(self._settings, policy.settings)
        if any(each.state is VersionState.CANARY for each in line):
            # It is decided about as about the default policy's, by the figures of this line.
            if policy.id not in self._trials:
                self._trials[policy.id] = CanaryController(
                    own,
                    self._ledger,
                    totals=self._totals,
                    metrics=self._metrics,
                    line=self._ledger.versions.of(policy.id),
                )
            if time.monotonic() >= self._decide_at.get(policy.id, 0.0):
                self._decide_at[policy.id] = time.monotonic() + _DECIDE_S
                await self._trials[policy.id].turn()
            return
        self._trials.pop(policy.id, None)
        champion = next(each for each in line if each.state is VersionState.CHAMPION)
        waiting = [each for each in line if each.state is VersionState.CANDIDATE and each.version > champion.version]
        if not waiting or any(each.pinned for each in line):
            return
        held = await asyncio.to_thread(self._ledger.alarms.promotion_held, policy.id)
        if not held and await self._passes(own, waiting[-1], champion):
            await self._take_up(policy, waiting[-1], own.rollout)

    async def _passes(self, own: Settings, candidate: Version, champion: Version) -> bool:
        """Whether the gate lets a candidate pass now; it is evaluated beside what is asked of the engines."""
        gate, number = self._gates.get(candidate.policy), candidate.version
        if gate is None or gate.options != own.gate:
            gate = self._gates[candidate.policy] = await asyncio.to_thread(Gate, own, self._ledger)
        if gate.mode == "off":
            return True
        due = number not in self._evaluations and time.monotonic() >= self._evaluate_at.get(number, 0.0)
        if due and await gate.verdict(candidate, champion) is None:
            task = self._evaluations[number] = asyncio.create_task(self._evaluate(gate, own, candidate, champion))
            task.add_done_callback(lambda _: self._evaluations.pop(number, None))
        return await gate.admits(candidate, champion)

    async def _evaluate(self, gate: Gate, own: Settings, candidate: Version, champion: Version) -> None:
        async def control_of(version: Version) -> EngineControl:
            probe = None if version.is_base else await verify_wanted(version, self._verifier, self._ledger)
            if (engine := least_busy(self._places)) is None:
                raise NotEvaluated("no engine is ready")
            if probe is not None:
                await self._bring(engine, version, probe)
            view = engine.control.held.get(version.version)
            return engine.control.asking(view.renaming.adapter_name if view else None)

        self._arriving.update((candidate.version, champion.version))  # they are not to make room meanwhile
        try:
            await evaluate_beside(gate, own, candidate, champion, ledger=self._ledger, control_of=control_of)
        except (CheckpointRejected, EngineError, LedgerUnavailable, NotEvaluated, EnvironmentRefused) as error:
            if isinstance(error, CheckpointRejected) and not await is_away(
                candidate, self._verifier, self._ledger, error
            ):
                return await gate.reject(candidate, str(error))
            gate.give_up(candidate, str(error))
            self._evaluate_at[candidate.version] = time.monotonic() + AGAIN_S
        finally:
            self._arriving.subtract((candidate.version, champion.version))

    async def _take_up(self, policy: Policy, candidate: Version, rollout: RolloutSettings) -> None:
        line, number = self._ledger.versions.of(policy.id), candidate.version
        if not (places := self._ready()):
            return
        try:
            probe = await verify_wanted(candidate, self._verifier, self._ledger)
            for engine in places:
                await self._bring(engine, candidate, probe)
        except (CheckpointRejected, EngineError) as error:
            self._failures[number] += 1
            log.warning("policy_version_not_loaded", policy=policy.name, version=number, reason=str(error))
            again = isinstance(error, EngineError) and self._failures[number] < _FAILURES
            if not again and not await is_away(candidate, self._verifier, self._ledger, error):
                await asyncio.to_thread(line.reject, number, str(error))
            return
        if rollout.tries:
            mode, share = rollout.mode, rollout.tried_share
            reason, details = f"rollout.mode: {mode}, with {share:g} of the requests", {"mode": mode, "share": share}
            await asyncio.to_thread(line.begin_canary, number, by="explorer", reason=reason, details=details)
        else:
            await asyncio.to_thread(line.promote, number)
        log.info("policy_version_served", policy=policy.name, version=number, step=candidate.step)
        await self._read()

    async def load(self, policy: int, number: int) -> str:
        """Have a version of a policy on the engines that are ready; why that cannot be, empty where it can."""
        if not number:  # have the workers know what the ledger says of policies now
            try:
                await self._read(time.monotonic())
            except LedgerUnavailable as error:
                return str(error)
            return ""
        if (loading := self._loads.get(number)) is None:
            loading = self._loads[number] = asyncio.create_task(self._load(policy, number))
            loading.add_done_callback(lambda _: self._loads.pop(number, None))
        return await asyncio.shield(loading)

    async def _load(self, policy: int, number: int) -> str:
        began = time.monotonic()
        version = next((each for each in self._lines.get(policy, ()) if each.version == number), None)
        if version is None or policy not in self._policies:
            return ""  # the waiting request gets that answer at this moment
        name = self._policies[policy].name
        try:
            probe = await verify_wanted(version, self._verifier, self._ledger)
            bringing = (self._bring(engine, version, probe) for engine in self._ready())
            failed = [each for each in await asyncio.gather(*bringing, return_exceptions=True) if each is not None]
            if failed and not any(number in engine.control.held for engine in self._places):
                raise failed[0]
        except (CheckpointRejected, EngineError, LedgerUnavailable) as error:
            log.error("policy_version_not_loaded", policy=name, version=number, reason=str(error))
            replaced = isinstance(error, CheckpointRejected) and await self._is_replaced(version, policy, error)
            return "" if replaced else f"version {number} of policy {name} cannot be loaded; the service's log says why"
        await start_verifier_ahead()
        log.info("policy_version_loaded", policy=name, version=number, seconds=round(time.monotonic() - began, 3))
        return ""

    async def _is_replaced(self, version: Version, policy: int, error: CheckpointRejected) -> bool:
        """Whether another version answers now in the place of one that must not."""
        line = self._ledger.versions.of(policy)
        try:
            if isinstance(error, CheckpointUnreadable):
                return False
            if version.state is VersionState.CANARY:
                undo = partial(line.roll_back, only_as=VersionState.CANARY, by="explorer", reason=str(error))
                await asyncio.to_thread(undo, version.version)
            elif version.state in {VersionState.CANDIDATE, VersionState.RETIRED}:  # it was asked by a job's name
                await asyncio.to_thread(partial(line.reject, version.version, str(error), also_retired=True))
            else:
                champion, _ = await servable_champion(self._ledger, self._verifier, line)
                if champion.version == version.version:
                    return False
            await self._read()
        except (CheckpointRejected, LedgerError) as reason:
            log.error("policy_version_not_replaced", version=version.version, reason=str(reason))
            return False
        return True

    async def _spread(self) -> None:
        """Bring the champions of the policies that are asked to every engine that has room for them."""
        for engine in self._ready():
            held = {number for place in self._ready() for number in place.control.held}
            asked = {self._brought[number] for number in held if number in self._brought}
            for policy in asked & self._policies.keys():
                champion = next(each for each in self._lines[policy] if each.state is VersionState.CHAMPION)
                given_up = self._failures[champion.version] >= _FAILURES
                if champion.is_base or champion.version in engine.control.held or given_up:
                    continue
                if self._is_full(engine) and self._answering().issuperset(engine.control.held):
                    continue
                try:
                    await self._bring(engine, champion, await verify_wanted(champion, self._verifier, self._ledger))
                except (CheckpointRejected, EngineError) as error:
                    self._failures[champion.version] += 1
                    log.warning("policy_version_not_spread", version=champion.version, reason=str(error))

    def _ready(self) -> list[Engine]:
        return [each for each in self._places if each.state is EngineState.READY]

    def _answering(self) -> set[int]:
        """The versions that answer, and those that are just being brought."""
        return {*(number for view in self.views or () for number in view.versions), *(+self._arriving)}

    def _is_full(self, engine: Engine) -> bool:
        names = {each.renaming.adapter_name for each in engine.control.held.values()}
        return len(names) >= self._settings.model.lora.resident

    async def _bring(self, engine: Engine, version: Version, probe: Probe) -> None:
        """Have an engine hold a version, proven. Raises EngineError and CheckpointRejected."""
        control, number = engine.control, version.version
        self._arriving[number] += 1
        try:
            async with self._locks[engine.number]:
                if version.is_base or number in control.held:
                    return
                while self._is_full(engine):
                    # What answers no request makes room, or else what is not being asked, and was not for longest.
                    idle, answering = await self._fleet.idle_times(engine), self._answering()
                    idle_s = {each: (each not in answering, idle.get(each, math.inf)) for each in control.held}
                    oldest = max(idle_s, key=idle_s.__getitem__)
                    adapter = control.held.pop(oldest)
                    await self._fleet.set_state(engine, engine.state)  # the workers choose it no more
                    unloading = asyncio.create_task(self.unload(engine, adapter))
                    self._unloading.add(unloading)
                    unloading.add_done_callback(self._unloading.discard)
                    await asyncio.wait([unloading], timeout=_UNLOAD_S)
                while len(self._unloading) > _MOST_UNLOADING:
                    await asyncio.wait(self._unloading, return_when=asyncio.FIRST_COMPLETED)
                began_s = since_boot()
                await control.hold(number, actor_of(version), probe)
                self.attestation.proofs[engine.number, number] = began_s, probe
                self._brought[number] = version.policy
                await self._fleet.set_state(engine, engine.state)  # the workers choose it from now on
        finally:
            self._arriving[number] -= 1

    async def _attest(self) -> None:
        await self.attestation.attest(self._ready(), self._settings.explorer.probe_interval)

    async def unload(self, engine: Engine, adapter: AdapterView) -> None:
        waiting = self._fleet.wait_until_idle(engine, adapter.version)
        with suppress(TimeoutError):  # the engine ends what it has in flight all the same
            await asyncio.wait_for(waiting, self._settings.explorer.request_timeout)
        await engine.control.let_go(adapter)
        log.info("policy_version_unloaded", version=adapter.version, engine=engine.number)


def _view_of(policy: Policy, line: Sequence[Version], trial: CanaryTrial | None, job: JobModels | None) -> PolicyView:
    by_state = {each.state: each for each in line}
    champion, canary = by_state[VersionState.CHAMPION], by_state.get(VersionState.CANARY)
    answer = [each for each in line if each in (champion, canary) or (job is not None and each.state in SERVABLE)]
    return PolicyView(
        id=policy.id,
        name=policy.name,
        tenant=policy.tenant,
        champion=champion.version,
        versions={each.version: each.is_base for each in answer},
        canary=canary and canary.version,
        share=trial.share if trial else 0.0,
        job=None if job is None else JobStatus(job.job, job.name, job.state, job.versions),
    )
