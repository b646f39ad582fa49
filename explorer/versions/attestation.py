"""Proves again and again that each engine has the weights that it should have, and acts when one has not."""

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.versions.reload import Reloader
from tuneloop.shared.checkpoints import Probe
from tuneloop.shared.errors import CheckpointRejected, EngineError, LedgerError, LedgerUnavailable
from tuneloop.shared.experience import since_boot, steady_clock
from tuneloop.shared.ledger.ledger import Alarm, Ledger, Version
from tuneloop.shared.ledger.recording.attestation import Mismatch
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

ALARM = "engine_mismatch"

#: How often it is looked whether an engine has new weights, which are probed at once, in seconds.
_LOOK_S = 1.0

#: Two explorers would put their own weights back again and again.
_NOT_ALONE = (
    "; it was right before, and this explorer has loaded nothing since: another process has, such as another explorer"
    " with the same explorer.rollout_model.engine_urls"
)


@dataclass(frozen=True, slots=True)
class _Proof:
    """When a probe that found an engine right began, since boot; `whole_s`: one of all its weights."""

    began_s: float
    swaps: int
    whole_s: float


@dataclass(frozen=True, slots=True)
class _Fault:
    reason: str
    figures: dict[str, float]

    @property
    def is_of_weights(self) -> bool:
        """Whether it has other weights, rather than a wrong cache or nothing to say; infinities are no figures."""
        if self.figures.get("parts"):
            return True
        return bool(self.figures) and not self.figures.get("weights", math.inf) <= self.figures["allowed"]


class Attestation:
    def __init__(
        self, settings: Settings, fleet: Fleet, *, ledger: Ledger, metrics: Metrics, reloader: Reloader
    ) -> None:
        self._name = settings.explorer_name
        self._interval_s = settings.explorer.probe_interval
        self._of_others = bool(settings.explorer.rollout_model.engine_urls)
        self._fleet = fleet
        self._ledger = ledger
        self._metrics = metrics
        self._reloader = reloader
        self._began_s = since_boot()
        self._proofs: dict[int, _Proof] = {}
        self.probes = reloader.probes
        self._untold: list[Mismatch] = []

    async def run(self) -> None:
        """Probe each engine when it has new weights, and every `probe_interval` seconds."""
        async with asyncio.TaskGroup() as group:
            for engine in self._fleet.engines:
                group.create_task(self._watch(engine))

    async def _watch(self, engine: Engine) -> None:
        async def turn() -> None:
            await self._tell()
            if self._due(engine):
                await self.attest(engine)
            elif engine.state is EngineState.SPARE:
                self._metrics.forget_engine(engine.number)

        await every(min(_LOOK_S, self._interval_s), turn, task="attestation", metrics=self._metrics)

    def _due(self, engine: Engine) -> bool:
        if engine.state is not EngineState.READY:
            return False
        proof = self._proofs.get(engine.number)
        return proof is None or proof.swaps != engine.swaps or self._whole_due(proof)

    def _whole_due(self, proof: _Proof) -> bool:
        return since_boot() - proof.whole_s >= self._interval_s

    async def attest(self, engine: Engine) -> None:
        before, now, last = engine.proof, since_boot(), self._proofs.get(engine.number)
        base = engine.control.loads_in_place or last is None or self._whole_due(last)
        proof = _Proof(now, engine.swaps, now if last is None or base else last.whole_s)
        try:
            version, probe = await self.probes.of(engine)
            # Once more before anything is done about it: a number on the edge of what is allowed is no mismatch.
            fault = await _fault_of(engine, probe, base=base) and await _fault_of(engine, probe, base=base)
        except (EngineError, CheckpointRejected, LedgerError) as error:
            self._metrics.probes.labels("failed").inc()
            log.warning("engine_not_probed", engine=engine.number, version=engine.version, reason=str(error))
            return
        # Where versions were swapped meanwhile, this was said by either.
        if engine.state is not EngineState.READY or engine.swaps != proof.swaps:
            return
        if fault is None:
            self._note(engine, proof)
            if engine.proof != before:
                await self._fleet.set_state(engine, EngineState.READY)  # the workers answer clients
        else:
            await self._set_right(engine, version, probe, fault)

    def _note(self, engine: Engine, proof: _Proof) -> None:
        self._proofs[engine.number] = proof
        self._metrics.probes.labels("matched").inc()
        self._metrics.last_good_probe.labels(str(engine.number)).set(steady_clock.time_at(proof.began_s))
        self._metrics.has_fingerprint.labels(str(engine.number)).set(engine.proof == "fingerprint")

    async def _set_right(self, engine: Engine, version: Version, probe: Probe, fault: _Fault) -> None:
        """To be called without an await after the engine is seen to be ready: then nothing else swaps its weights."""
        await self._fleet.set_state(engine, EngineState.RELOADING)
        await self._doubt(engine, version, fault)
        await self._reloader.put_back(engine, version)
        if engine.state is not EngineState.READY:
            return
        proof, again = _Proof(since_boot(), engine.swaps, since_boot()), None
        with suppress(EngineError):
            again = await _fault_of(engine, probe)
            if again is None:
                self._note(engine, proof)
        if again is not None and engine.state is EngineState.READY:
            await self._fleet.set_state(engine, EngineState.DOWN)  # its supervisor starts it again
            await self._doubt(engine, version, again)

    async def doubt_restarted(self, engine: Engine, since_s: float) -> None:
        """Take out of training what a restarted engine has sampled since so many seconds after boot."""
        self._proofs.pop(engine.number, None)
        reason = "it was restarted, and answered before it was given these weights again"
        since = steady_clock.time_at(since_s)
        await self.distrust(Mismatch(engine.number, engine.version, since, steady_clock(), reason, {}))

    async def _doubt(self, engine: Engine, version: Version, fault: _Fault) -> None:
        """Take out of training what an engine that is out of rotation has sampled since it was found right; alarm."""
        proof = self._proofs.get(engine.number)
        began_s = (proof.whole_s if fault.figures.get("parts") else proof.began_s) if proof else self._began_s
        since = steady_clock.time_at(began_s)
        alone = not (self._of_others and proof and proof.swaps == engine.swaps and fault.is_of_weights)
        reason = fault.reason if alone else fault.reason + _NOT_ALONE
        await self.distrust(Mismatch(engine.number, version.version, since, steady_clock(), reason, fault.figures))

    async def distrust(self, found: Mismatch) -> None:
        found = found._replace(explorer=self._name)
        log.error("engine_mismatch", engine=found.engine, version=found.version, reason=found.reason, since=found.since)
        self._metrics.probes.labels("mismatched").inc()
        self._untold.append(found)
        try:
            await self._tell()
        except LedgerUnavailable as error:  # said later: until then the engine must not wait for it
            log.warning("database_away", reason=str(error))

    async def _tell(self) -> None:
        while self._untold:
            found = self._untold[0]
            done = await asyncio.to_thread(self._ledger.attestations.distrust, found)
            which = f"engine {found.engine} of {self._name} did not answer with the weights of version {found.version}"
            reason = f"{which}: {found.reason}"
            await asyncio.to_thread(self._ledger.alarms.raise_alarm, Alarm(ALARM, reason, version=found.version))
            log.warning("experiences_distrusted", engine=found.engine, dropped=done.dropped, trained=done.trained)
            if found in self._untold:
                self._untold.remove(found)


async def _fault_of(engine: Engine, probe: Probe, *, base: bool = True) -> _Fault | None:
    try:
        found = await engine.control.measure_probe(probe, base=base)
    except CheckpointRejected as error:  # no answer that can be read
        return _Fault(str(error), {})
    if found.problem is None:
        return None
    figures = {"weights": found.weights, "cache": found.cache, "allowed": found.allowed}
    finite = {name: value for name, value in figures.items() if abs(value) < float("inf")}
    if found.parts:
        finite["parts"] = float(len(found.parts))
    return _Fault(found.problem, finite)
