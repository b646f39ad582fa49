"""The trainer's turns at a GPU that an engine has otherwise (`cluster.gpu_turn`, docs/decisions.md).

Between two turns all that the learner is lies in main memory: it can be saved from there, but no step be made.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import NamedTuple
from weakref import ref

import structlog
import torch
from torch import Tensor, nn

from tuneloop.shared.checkpoints import gigabytes
from tuneloop.shared.errors import TurnNotGiven
from tuneloop.shared.job_marks import GpuLocks
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.checkpoints.copies import KeptRoom
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.models.offloading import MovedTensors
from tuneloop.trainer.models.room import room_for_weights
from tuneloop.trainer.stop import Stop

_log = structlog.get_logger()

_LOOK_S = 0.01
#: How long room is waited for that the engine has given back.
_ROOM_S = 10.0
#: How often it is said that the GPU is waited for.
_SAY_EVERY_S = 60.0


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
        self._room = KeptRoom()

    def take(self) -> None:
        """Have the GPU, or wait for it. Raises TurnNotGiven if told to stop first."""
        if self._locks is None or self._is_ours:
            return
        locks, started, said = self._locks, time.monotonic(), 1
        wanted = locks.wanted_by_trainer
        try:
            while not (wanted.take() and not locks.wanted_by_engine.is_held_by_another() and locks.held.take()):
                if self._stop.wait(_LOOK_S):
                    raise TurnNotGiven("stopped while another process has the GPU")
                if (waited := time.monotonic() - started) > said * _SAY_EVERY_S:
                    _log.warning("gpu_turn_not_given", seconds=round(waited), sentence="the engine has the GPU")
                    said += 1
        finally:
            wanted.release()
        self._is_ours, self._began = True, time.monotonic()
        _log.info("gpu_turn_begun", waited=round(self._began - started, 3))

    def begin(self, learner: Learner) -> None:
        """The same, with the learner there. Raises EnvironmentRefused if there is no room for it."""
        self.take()
        if self._moved is not None and self._moved.learner() is learner:
            deadline, tensors = time.monotonic() + _ROOM_S, self._moved.tensors
            while time.monotonic() < deadline:  # What another has given back may take a moment.
                with suppress(torch.OutOfMemoryError):
                    tensors.put_back()
                    break
                time.sleep(_LOOK_S)
            else:
                with room_for_weights():
                    tensors.put_back()
        self._moved = None

    def end(self, learner: Learner) -> None:
        """Leave the GPU to the engine, and what the learner is in main memory; nothing if the turn is over already."""
        if self._locks is None or not self._is_ours:
            return
        tensors = [each for each in tensors_of(learner) if each.is_cuda]
        if tensors:
            torch.cuda.synchronize()  # Copies that are on their way come first.
            self._moved = _Moved(ref(learner), MovedTensors(tensors, self._room.empty()))
            torch.cuda.empty_cache()
        self._is_ours = False
        self._locks.held.release()
        left = torch.cuda.memory_reserved() if tensors else 0
        _log.info("gpu_turn_over", seconds=round(time.monotonic() - self._began, 3), left=gigabytes(left))

    def end_if_over(self, learner: Learner, *, publishes: bool) -> None:
        """End the turn if it has lasted as long as it may, twice that before a publication, and the engine waits."""
        if self._locks is None or self._turn_s is None or not self._is_ours:
            return
        most = 2 * self._turn_s if publishes else self._turn_s
        if time.monotonic() - self._began >= most and self._locks.wanted_by_engine.is_held_by_another():
            self.end(learner)

    def close(self) -> None:
        """Leave the GPU to others for good. Where a turn was not ended, they have it when this process is no more."""
        if self._locks is None:
            return
        if self._is_ours:
            os.dup(self._locks.held.fileno())
        self._locks.close()


def tensors_of(learner: Learner) -> Iterator[Tensor]:
    """All that a learner is between two steps."""
    models: list[nn.Module] = [each.network for each in (learner.actor, learner.reference) if each is not None]
    models += [learner.critic] if learner.critic is not None else []
    for model in models:
        yield from chain(model.parameters(), model.buffers())
    for optimizer in learner.optimizers.values():
        yield from optimizer.tensors()
