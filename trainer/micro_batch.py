"""How many tokens go through the model at once: as many as the settings say, or as the GPU has turned out to hold.

{job_dir}/micro_batch.json    the size that was come down to, and the setting that it was come down from
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog
import torch

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import Float32s, Sample
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.metrics import Metrics
from tuneloop.trainer.learner import Learner, recompute
from tuneloop.trainer.models.model import Actor

_log = structlog.get_logger()

_FILE = "micro_batch.json"
#: Below so many tokens most micro-batches are single replies, and halving changes nothing.
_LEAST = 128


class _Memory(msgspec.Struct, frozen=True):
    """What the file holds. It counts as long as the setting is what it was."""

    setting: int
    tokens: int


class MicroBatch:
    """The size in tokens, halved whenever memory runs out, and remembered over restarts."""

    def __init__(self, settings: Settings) -> None:
        self._setting = settings.trainer.micro_batch_tokens
        self._path = settings.job_dir / _FILE
        self.tokens = _read(self._path, self._setting)

    def step(self, learner: Learner, samples: Sequence[Sample], *, version: int | None) -> Metrics:
        """`learner.step`, in micro-batches that fit. Raises EnvironmentRefused if none does, and what that raises."""
        learner.smaller = self._halve
        while True:
            learner.micro_batch_tokens = self.tokens
            try:
                return learner.step(samples, version=version)
            except torch.OutOfMemoryError:
                pass  # its traceback holds the tensors that there was no room for
            self._halve()

    def recompute(self, learner: Learner, actor: Actor, samples: Sequence[Sample]) -> list[Float32s]:
        """The log-probabilities of `recompute`, in the same way."""
        while True:
            learner.micro_batch_tokens = self.tokens
            try:
                return recompute(learner, actor, samples)
            except torch.OutOfMemoryError:
                pass
            self._halve()

    def _halve(self) -> int:
        if self.tokens // 2 < _LEAST:
            raise EnvironmentRefused(
                f"trainer.micro_batch_tokens: not even {self.tokens} at once fit into the GPU's memory; lower "
                "explorer.rollout_model.gpu_memory_utilization if an engine shares it, or choose a smaller model"
            )
        self.tokens //= 2
        _log.warning("micro_batch_halved", tokens=self.tokens, setting=self._setting, reason="out of GPU memory")
        try:
            beside = self._path.with_suffix(".new")
            beside.write_bytes(msgspec.json.encode(_Memory(self._setting, self.tokens)))
            os.replace(beside, self._path)
        except OSError as error:  # then the next start finds out again
            _log.warning("micro_batch_not_remembered", reason=str(error))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return self.tokens


def _read(path: Path, setting: int) -> int:
    try:
        memory = msgspec.json.decode(path.read_bytes(), type=_Memory)
    except (OSError, msgspec.MsgspecError):
        return setting
    return memory.tokens if memory.setting == setting and 0 < memory.tokens <= setting else setting
