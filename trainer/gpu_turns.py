"""The trainer's turns at a GPU that an engine has otherwise (`cluster.gpu_turn`, docs/decisions/0072).

Between two turns all that the learner is lies in main memory: it can be saved from there, but no step be made.
"""

import time
from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import NamedTuple
from weakref import ref

import structlog
import torch
from torch import Tensor, nn

from tuneloop.shared.disk_space import gigabytes
from tuneloop.shared.errors import TurnNotGiven
from tuneloop.shared.job_marks import GpuLocks
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.checkpoints.pinned_memory import PinnedMemory
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.models.offloading import MovedTensors
from tuneloop.trainer.stop import Stop

_log = structlog.get_logger()

_LOOK_S = 0.01


class _Moved(NamedTuple):
    """What is not on the GPU, of a learner that may be no more."""

    learner: ref[Learner]
    tensors: MovedTensors


class GpuTurns:
    """One trainer's. Where the GPU is not had by turns, it is always the trainer's, and nothing is moved."""

    def __init__(self, settings: Settings, stop: Stop) -> None:
        self._stop, self._turn_s = stop, settings.cluster.gpu_turn
        self._locks = None if self._turn_s is None else GpuLocks.of(settings.job_dir)
        self._is_ours, self._began = False, 0.0
        self._moved: _Moved | None = None
        self._memory = PinnedMemory()
        #: What was taken of it, by its place in the order of leaving.
        self._rooms: dict[int, Tensor] = {}

    def take(self) -> None:
        """Have the GPU, or wait for it. Raises TurnNotGiven if told to stop first."""
        if self._locks is None or self._is_ours:
            return
        locks, started = self._locks, time.monotonic()
        wanted = locks.wanted_by_trainer
        try:
            while not (wanted.take() and not locks.wanted_by_engine.is_held_by_another() and locks.held.take()):
                if self._stop.wait(_LOOK_S):
                    raise TurnNotGiven("told to stop while another has the GPU")
        finally:
            wanted.release()
        self._is_ours, self._began = True, time.monotonic()
        _log.info("gpu_turn_begun", waited=round(self._began - started, 3))

    def begin(self, learner: Learner) -> None:
        """The same, with the learner there."""
        self.take()
        moved, self._moved = self._moved, None
        if moved is not None and moved.learner() is learner:
            moved.tensors.put_back()

    def end(self, learner: Learner) -> None:
        """Leave the GPU to the engine, and what the learner is in main memory; nothing if the turn is over already."""
        if self._locks is None or not self._is_ours:
            return
        tensors = [each for each in _tensors(learner) if each.is_cuda]
        if tensors:
            torch.cuda.synchronize()  # Copies that are on their way come first.
            self._moved = _Moved(ref(learner), MovedTensors(tensors, self._same_room()))
            torch.cuda.empty_cache()
        self._is_ours = False
        self._locks.held.release()
        left = torch.cuda.memory_reserved() if tensors else 0
        _log.info("gpu_turn_over", seconds=round(time.monotonic() - self._began, 3), left=gigabytes(left))

    def end_if_over(self, learner: Learner) -> None:
        """The same, if the turn has lasted as long as it may, and the engine waits."""
        if self._locks is None or self._turn_s is None or not self._is_ours:
            return
        if time.monotonic() - self._began >= self._turn_s and self._locks.wanted_by_engine.is_held_by_another():
            self.end(learner)

    def close(self) -> None:
        """Leave the GPU to others for good."""
        if self._locks is not None:
            self._locks.close()

    def _same_room(self) -> Callable[[Tensor], Tensor]:
        """Room for one leaving: for each tensor the same as in the last one, if it is as large."""
        places = count()

        def room(whole: Tensor) -> Tensor:
            place = next(places)
            held = self._rooms.get(place)
            if held is None or len(held) != len(whole):
                held = self._rooms[place] = self._memory.take(whole)
            return held

        return room


def _tensors(learner: Learner) -> Iterator[Tensor]:
    """All that a learner is between two steps."""
    models: list[nn.Module] = [each.network for each in (learner.actor, learner.reference) if each is not None]
    models += [learner.critic] if learner.critic is not None else []
    for model in models:
        yield from chain(model.parameters(), model.buffers())
    for optimizer in learner.optimizers.values():
        yield from optimizer.tensors()
