"""Sets the number of tokens per pass, by the settings or by the GPU's memory, computed or found by trial.

{job_dir}/micro_batch.json    the reduced number, the setting that it was reduced from, and activation checkpointing
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from resource import RUSAGE_SELF, getrusage
from threading import Event
from weakref import ref

import msgspec
import numpy as np
import structlog
import torch

from tuneloop.shared.capacity.memory import GIB, cure_of, fit_trainer, room_for_trainer, shapes_of
from tuneloop.shared.checkpoints import gigabytes
from tuneloop.shared.errors import EnvironmentRefused, RankOutOfMemory, SamplesRefused, TuneloopError
from tuneloop.shared.experience import Float32s, Sample
from tuneloop.shared.job_marks import TRAFFIC_S, traffic_stamp
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.algorithms import ALGORITHMS
from tuneloop.trainer.batches.batch import Metrics
from tuneloop.trainer.batches.rendered_lines import without_answer
from tuneloop.trainer.learner import Learner, do_nothing, recompute
from tuneloop.trainer.models.model import Actor, checkpoint_layers, device_of, is_checkpointing
from tuneloop.trainer.stop import Stop

_log = structlog.get_logger()

_FILE = "micro_batch.json"
_LEAST = 128  # below so many tokens, halving changes nothing: most micro-batches are single replies
_MOST_DROPPED = 3  # rows dropped in a row; after these, memory runs out for another reason

_CURE = "lower explorer.rollout_model.gpu_memory_utilization if an engine shares it, or choose a smaller model"
_NO_ROOM = "a GPU's memory has no room for it, a row of {} tokens, even alone"


class _Memory(msgspec.Struct, frozen=True):
    """The file's content, valid while the setting is unchanged."""

    setting: int
    tokens: int
    checkpointing: bool = False


def fit_to_memory(settings: Settings, *, free: int | None = None, total: int | None = None) -> Settings:
    """The settings with open choices made for a GPU's `free` of `total` bytes. Raises EnvironmentRefused."""
    device = device_of(settings)
    if free is None or total is None:
        if device.type != "cuda" or settings.trainer.micro_batch_tokens is not None:
            return settings
        free, total = torch.cuda.mem_get_info(device)
    try:
        shapes = shapes_of(settings)
    except EnvironmentRefused as error:
        _log.warning("memory_unknown", reason=str(error))
        return settings
    room = _room(settings, free, total)
    chosen, memory, fits, sharded = fit_trainer(settings, shapes, room)
    if not fits:
        raise EnvironmentRefused(
            f"trainer.micro_batch_tokens: no number of tokens fits into {gigabytes(room)} of GPU memory;"
            f" {cure_of(settings)}; or write a number here to try all the same"
        )
    tokens, again = chosen.trainer.micro_batch_tokens, chosen.trainer.activation_checkpointing
    _log.info(
        "micro_batch_chosen",
        tokens=tokens,
        activation_checkpointing=bool(again),
        sharded=sharded,
        reckoned=gigabytes(memory.total),
        of=gigabytes(room),
    )
    return chosen


QUIET_S = 3 * TRAFFIC_S  # without a touch of the mark for so long there is no traffic: three touches may be late
_TRAFFIC_LOOK_S = 0.05


class TrafficYield:
    def __init__(self, settings: Settings, stop: Stop) -> None:
        self._job_dir, self._stop = settings.job_dir, stop
        self._on_gpu = device_of(settings).type == "cuda"
        self._stamp = traffic_stamp(self._job_dir)
        self._touched = float("-inf")
        self._seconds = 0.0

    def __call__(self) -> None:
        """Wait until there was no traffic for `QUIET_S`, or until a stop."""
        if self._on_gpu:
            torch.cuda.synchronize()  # queued passes would run during the wait
        began = time.monotonic()
        while not self._stop.is_set():
            if (stamp := traffic_stamp(self._job_dir)) != self._stamp:
                self._stamp, self._touched = stamp, time.monotonic()
            if time.monotonic() - self._touched >= QUIET_S:
                break
            self._stop.wait(_TRAFFIC_LOOK_S)
        self._seconds += time.monotonic() - began

    def take_seconds(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _TrialEnded(TuneloopError):
    """Ends a step before its first update."""


def _room(settings: Settings, free: int, total: int) -> int:
    return min(free, room_for_trainer(settings, total))  # a sleeping engine has freed most of its memory


def must_shard(settings: Settings) -> bool:
    """Whether sharding is necessary, or the memory is unknown."""
    device = device_of(settings)
    if device.type != "cuda":
        return True
    try:
        room = _room(settings, *torch.cuda.mem_get_info(device))
        return fit_trainer(settings, shapes_of(settings), room).sharded
    except EnvironmentRefused:
        return True


class MicroBatch:
    """The tokens per pass, halved whenever memory runs out, and kept across restarts.

    Sequences are not cut. If one alone is longer, activations are recomputed first, unless
    `trainer.activation_checkpointing` forbids it. If that does not suffice, the sequence is dropped. With
    `trainer.yield_to_traffic`, each pass waits for requests until `stop` is set; several ranks wait before each step
    only.
    """

    def __init__(self, settings: Settings, stop: Stop | None = None) -> None:
        self._settings, self._setting = settings, settings.trainer.tokens_at_once
        self._path = settings.job_dir / _FILE
        memory = unchanged = _Memory(self._setting, self._setting)
        with suppress(OSError, msgspec.MsgspecError):
            memory = msgspec.json.decode(self._path.read_bytes(), type=_Memory)
        if memory.setting != self._setting or not 0 < memory.tokens <= self._setting:
            memory = unchanged
        self.tokens = memory.tokens
        self._is_checkpointing = memory.checkpointing and settings.trainer.activation_checkpointing is None
        self._samples: Sequence[Sample] = ()  # of the batch
        self._dropped = 0
        self._yielding = TrafficYield(settings, stop or Event()) if settings.trainer.yield_to_traffic else None

    def step(self, learner: Learner, samples: Sequence[Sample], *, version: int | None) -> Metrics:
        """`learner.step` in micro-batches that fit. Raises SamplesRefused, EnvironmentRefused, and its errors."""
        learner.smaller = partial(self._shrink_together, ref(learner))
        self._samples = samples
        self.prepare(learner)
        if self._is_checkpointing:
            checkpoint_activations(learner)
        if learner.ranks.size > 1:
            learner.before_pass()  # followers wait for an order without limit, but not for a pass
            learner.before_pass = do_nothing
        while True:
            learner.micro_batch_tokens = self.tokens
            try:
                metrics = learner.step(samples, version=version)
                self._dropped = 0
                on_gpu = device_of(self._settings).type == "cuda"
                most = torch.cuda.max_memory_reserved() if on_gpu else getrusage(RUSAGE_SELF).ru_maxrss << 10
                yielded = {} if self._yielding is None else {"time/yielded": self._yielding.take_seconds()}
                return metrics | yielded | {"perf/memory_peak": most / GIB}
            except RankOutOfMemory:
                self.reduce_memory(learner, samples)
                raise
            except torch.OutOfMemoryError:
                pass  # its traceback references the tensors
            self._shrink(ref(learner))

    def reduce_memory(self, learner: Learner, samples: Sequence[Sample]) -> None:
        """Reduce memory below these samples' need for the restart of all ranks. Raises EnvironmentRefused."""
        self._samples = samples
        if self._settings.trainer.activation_checkpointing is None and checkpoint_activations(learner):
            self._is_checkpointing = True
            self._remember()
        else:
            self._halve()

    def warm_up(self, learner: Learner) -> None:
        """Compile by the passes of a step of random rows, without an update."""
        algorithm, started = self._settings.algorithm, time.perf_counter()
        if learner.ranks.size > 1 or ALGORITHMS[algorithm.algorithm_type].asks(algorithm).teacher:
            return
        self.prepare(learner)
        if self._is_checkpointing:
            checkpoint_activations(learner)
        learner.micro_batch_tokens, learner.smaller, learner.before_update = self.tokens, None, _end_warm_up
        try:
            learner.step(_made_up_rows(self._settings, self.tokens, learner.actor.vocabulary))
        except _TrialEnded:
            _log.info("step_warmed_up", seconds=round(time.perf_counter() - started, 3))
        except (TuneloopError, torch.OutOfMemoryError) as error:  # the first step compiles, and reports it
            _log.warning("step_not_warmed_up", reason=str(error))
        finally:
            learner.before_update = do_nothing

    def recompute(self, learner: Learner, actor: Actor, samples: Sequence[Sample]) -> list[Float32s]:
        """`learner.recompute` in micro-batches that fit."""
        self.prepare(learner)
        self._samples = samples
        while True:
            learner.micro_batch_tokens = self.tokens
            try:
                return recompute(learner, actor, samples)
            except torch.OutOfMemoryError:
                pass
            self._halve()

    def prepare(self, learner: Learner) -> None:
        if self._yielding is not None:
            learner.before_pass = self._yielding

    def _shrink(self, stepping: ref[Learner]) -> int:
        """Use less memory; the new number of tokens per pass."""
        learner = stepping()
        may = self._settings.trainer.activation_checkpointing is None and self._longest > self.tokens
        if learner is None or not may or not checkpoint_activations(learner):
            if self._longest > self.tokens and self._dropped < _MOST_DROPPED:
                # The longest row, with its pair, is alone in its micro-batch.
                self._dropped += 1
                at = next(at for at, each in enumerate(self._samples) if _length(each) == self._longest)
                algorithm = self._settings.algorithm
                in_pairs = ALGORITHMS[algorithm.algorithm_type].asks(algorithm).pairs
                rows = self._samples[at - at % 2 :][:2] if in_pairs else [self._samples[at]]
                raise SamplesRefused({_NO_ROOM.format(self._longest): [each.id for each in rows]})
            return self._halve()
        self._is_checkpointing = True
        _log.warning(
            "activation_checkpointing_on", sequence=self._longest, tokens=self.tokens, reason="out of GPU memory"
        )
        self._remember()
        return self.tokens

    def _shrink_together(self, stepping: ref[Learner]) -> int:
        """`_shrink` within a step, in which the other ranks follow (workers/rank.py)."""
        learner = stepping()
        assert learner is not None
        with learner.ranks.agree():
            self._shrink(stepping)
        learner.ranks.decide(lambda: self.tokens)
        learner.ranks.decide(lambda: int(self._is_checkpointing))
        return self.tokens

    @property
    def _longest(self) -> int:
        return max(map(_length, self._samples))

    def _halve(self) -> int:
        """Halve the tokens. Raises EnvironmentRefused, without a change, if that cannot help."""
        if self._longest > self.tokens:
            raise EnvironmentRefused(
                f"trainer.micro_batch_tokens: one row of {self._longest} tokens does not fit into the GPU's memory, and"
                f" is not cut; {_CURE}"
            )
        if self.tokens // 2 < _LEAST:
            raise EnvironmentRefused(
                f"trainer.micro_batch_tokens: not even {self.tokens} at once fit into the GPU's memory; {_CURE}"
            )
        self.tokens //= 2
        _log.warning("micro_batch_halved", tokens=self.tokens, setting=self._setting, reason="out of GPU memory")
        self._remember()
        return self.tokens

    def _remember(self) -> None:
        try:
            beside = self._path.with_suffix(".new")
            beside.write_bytes(msgspec.json.encode(_Memory(self._setting, self.tokens, self._is_checkpointing)))
            os.replace(beside, self._path)
        except OSError as error:  # the next start repeats the trials
            _log.warning("micro_batch_not_remembered", reason=str(error))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _end_warm_up() -> None:
    raise _TrialEnded


def _made_up_rows(settings: Settings, tokens: int, vocabulary: int) -> list[Sample]:
    """Pairs of replies, slightly too long for one pass; another temperature in the last compiles its functions too."""
    random, size = np.random.default_rng(0), settings.buffer.train_batch_size
    half = max(1, min(tokens // size // 2 + 1, (settings.model.max_model_len or tokens) // 2))
    count = max(size, tokens // (2 * half) + 1)
    count += count % 2
    return [
        msgspec.structs.replace(
            without_answer(random.integers(0, vocabulary, half, dtype=np.int32).tolist(), number),
            completion_ids=random.integers(0, vocabulary, half, dtype=np.int32),
            logprobs=np.full(half, -1.0, np.float32),
            reward=float(number % 2),
            temperature=1.0 if number < count - 1 else 0.5,
            task_id=str(number // 2),
            run_id=str(number),
            group_id=number // 2,
        )
        for number in range(count)
    ]


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.completion_ids)


def checkpoint_activations(learner: Learner) -> bool:
    """Recompute activations of trained models; False if they already do, or cannot."""
    trained = [learner.actor.network, *([] if learner.critic is None else [learner.critic.body])]
    left = [each for each in trained if not is_checkpointing(each)]
    for network in left:
        checkpoint_layers(network)
    return bool(left)
