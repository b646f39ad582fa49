"""The engine's turns at a GPU that the trainer has otherwise (`cluster.gpu_turn`, docs/decisions/0072).

In the trainer's turn the engine sleeps: its weights are in main memory, its cache is gone. Requests wait, and those
that were being answered go on afterwards, with the same weights.
"""

import asyncio
import time
from collections.abc import Callable

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.engines.fleet import EngineState, Fleet
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.errors import EngineError
from tuneloop.shared.job_marks import GpuLocks

log = structlog.get_logger()

_LOOK_S = 0.05
#: How often it is said that the GPU is waited for.
_SAY_EVERY_S = 60.0


class EngineSleep:
    """One engine's. With adapters side by side, several of the fleet's engines are the one."""

    def __init__(
        self, locks: GpuLocks, fleet: Fleet, metrics: Metrics, *, turn_s: float, is_busy: Callable[[], bool]
    ) -> None:
        """After a turn of the trainer's the engine has one that is as long, of `turn_s` at most.

        While its weights are changed or proven (`is_busy`) it does not give way: what one turn taught is served in the
        next, and weights that are not there are not read.
        """
        self._locks, self._fleet, self._metrics, self._turn_s = locks, fleet, metrics, turn_s
        self._is_busy, self._stays_awake = is_busy, False
        self._is_ours, self._not_before = False, 0.0

    def stay_awake(self) -> None:
        """Begin no turn of the trainer's any more: what is in flight is to end."""
        self._stays_awake = True

    async def run(self) -> None:
        """Let the trainer have the GPU whenever it waits for it and the engine has had its turn."""
        await every(_LOOK_S, self._turn, task="gpu_turns", metrics=self._metrics)

    def fileno(self) -> int:
        """See HeldGpu."""
        return self._locks.held.fileno()

    async def hold(self) -> None:
        """See HeldGpu."""
        if self._is_ours:
            return
        wanted, started, said = self._locks.wanted_by_engine, time.monotonic(), 1
        try:
            while not (wanted.take() and self._locks.held.take()):
                if (waited := time.monotonic() - started) > said * _SAY_EVERY_S:
                    log.warning("gpu_not_given_back", seconds=round(waited), sentence="the trainer has it, or waits")
                    said += 1
                await asyncio.sleep(_LOOK_S)
        finally:
            wanted.release()
        self._is_ours = True

    def let_go(self) -> None:
        """See HeldGpu."""
        self._is_ours = False
        self._locks.held.release()

    async def _turn(self) -> None:
        states = {engine.state for engine in self._fleet.engines}
        if not states <= {EngineState.READY, EngineState.RELOADING}:  # Once it is up, it answers first.
            self._not_before = time.monotonic() + self._turn_s
        ready = states == {EngineState.READY} and not self._is_busy() and not self._stays_awake
        if ready and time.monotonic() >= self._not_before and self._locks.wanted_by_trainer.is_held_by_another():
            await self._lend()

    async def _lend(self) -> None:
        """Have the engine sleep while the trainer has the GPU."""
        engines, began = self._fleet.engines, time.monotonic()
        for engine in engines:  # In the same breath: nobody else takes one of them out of rotation.
            engine.state = EngineState.ASLEEP
        await self._set_all(EngineState.ASLEEP)
        control = engines[0].control
        try:
            await control.sleep()
            await self._lend_lock()
            await self.hold()
            await control.wake_up()
        except (EngineError, OSError) as error:
            log.error("gpu_turn_failed", reason=str(error))
            await self._set_all(EngineState.DOWN)
            return
        took = time.monotonic() - began
        self._not_before = time.monotonic() + min(took, self._turn_s)
        await self._set_all(EngineState.READY)
        self._metrics.gpu_turn_seconds.observe(took)

    async def _lend_lock(self) -> None:
        """Return when the trainer has the GPU, or is no more."""
        self.let_go()
        while True:
            if self._locks.held.is_held_by_another() or not self._locks.wanted_by_trainer.is_held_by_another():
                return
            await asyncio.sleep(_LOOK_S)

    async def _set_all(self, state: EngineState) -> None:
        for engine in self._fleet.engines:
            await self._fleet.set_state(engine, state)
