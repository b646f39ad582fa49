"""How many tokens go through the model at once: as many as the settings say, or the GPU's memory holds by computation
or by trial.

{job_dir}/micro_batch.json    the size that was come down to, the setting that it was come down from, and whether
                              activations are made again
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
from tuneloop.trainer.learner import Learner, go_ahead, recompute
from tuneloop.trainer.models.model import Actor, checkpoint_layers, device_of, is_checkpointing
from tuneloop.trainer.stop import Stop

_log = structlog.get_logger()

_FILE = "micro_batch.json"
#: Below so many tokens most micro-batches are single replies, and halving changes nothing.
_LEAST = 128

#: So many rows are dropped one after the other; then the cause is another.
_MOST_GIVEN_UP = 3

_CURE = "lower explorer.rollout_model.gpu_memory_utilization if an engine shares it, or choose a smaller model"
_NO_ROOM = "a GPU's memory has no room for it, a row of {} tokens, even alone"


class _Memory(msgspec.Struct, frozen=True):
    """What the file holds. It counts as long as the setting is what it was."""

    setting: int
    tokens: int
    checkpointing: bool = False


def fit_to_memory(settings: Settings, *, free: int | None = None, total: int | None = None) -> Settings:
    """The settings, with what they leave open chosen for a GPU's `free` of `total` bytes. Raises EnvironmentRefused."""
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


#: A mark that has not been touched for so long says that no request is being answered: three touches may be late.
QUIET_S = 3 * TRAFFIC_S
_TRAFFIC_LOOK_S = 0.05


class TrafficYield:
    """To be called before each pass through a model, if `trainer.yield_to_traffic`. No two clocks are compared."""

    def __init__(self, settings: Settings, stop: Stop) -> None:
        self._job_dir, self._stop = settings.job_dir, stop
        self._on_gpu = device_of(settings).type == "cuda"
        self._stamp = traffic_stamp(self._job_dir)
        self._touched = float("-inf")
        self._seconds = 0.0

    def __call__(self) -> None:
        """Wait until there has been no traffic for `QUIET_S`, or until asked to stop."""
        if self._on_gpu:
            torch.cuda.synchronize()  # Else passes that were begun long ago would go on while this one waits.
        began = time.monotonic()
        while not self._stop.is_set():
            if (stamp := traffic_stamp(self._job_dir)) != self._stamp:
                self._stamp, self._touched = stamp, time.monotonic()
            if time.monotonic() - self._touched >= QUIET_S:
                break
            self._stop.wait(_TRAFFIC_LOOK_S)
        self._seconds += time.monotonic() - began

    def take_seconds(self) -> float:
        """The seconds waited since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _TrialEnded(TuneloopError):
    """Ends a step before its first update."""


def _room(settings: Settings, free: int, total: int) -> int:
    # Of what is taken now, an engine that sleeps has given back most.
    return min(free, room_for_trainer(settings, total))


def must_shard(settings: Settings) -> bool:
    """Whether shares are better than the whole of what is trained on each GPU; where that is unknown, they are."""
    device = device_of(settings)
    if device.type != "cuda":
        return True
    try:
        room = _room(settings, *torch.cuda.mem_get_info(device))
        return fit_trainer(settings, shapes_of(settings), room).sharded
    except EnvironmentRefused:
        return True


class MicroBatch:
    """The size in tokens, halved whenever memory runs out, and remembered over restarts.

    A sequence is not cut. Where one alone is longer, activations are made again, if `trainer.activation_checkpointing`
    leaves it open, before the size is halved. Where that does not help either, it is dropped, so that others are
    learnt from.

    Before each of them requests are let go first, if `trainer.yield_to_traffic`, until `stop` is set; of several ranks
    before each step.
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
        self._given_up = 0
        self._yielding = TrafficYield(settings, stop or Event()) if settings.trainer.yield_to_traffic else None

    def step(self, learner: Learner, samples: Sequence[Sample], *, version: int | None) -> Metrics:
        """`learner.step`, in micro-batches that fit. Raises SamplesRefused, EnvironmentRefused, as that does."""
        learner.smaller = partial(self._shrink_together, ref(learner))
        self._samples = samples
        self.prepare(learner)
        if self._is_checkpointing:
            checkpoint_activations(learner)
        if learner.ranks.size > 1:
            # Those that follow wait for an order as long as it takes, but not for a pass.
            learner.before_pass()
            learner.before_pass = go_ahead
        while True:
            learner.micro_batch_tokens = self.tokens
            try:
                metrics = learner.step(samples, version=version)
                self._given_up = 0
                on_gpu = device_of(self._settings).type == "cuda"
                most = torch.cuda.max_memory_reserved() if on_gpu else getrusage(RUSAGE_SELF).ru_maxrss << 10
                yielded = {} if self._yielding is None else {"time/yielded": self._yielding.take_seconds()}
                return metrics | yielded | {"perf/memory_peak": most / GIB}
            except RankOutOfMemory:
                self.take_less(learner, samples)
                raise
            except torch.OutOfMemoryError:
                pass  # its traceback holds the tensors that there was no room for
            self._shrink(ref(learner))

    def take_less(self, learner: Learner, samples: Sequence[Sample]) -> None:
        """Remember, before all ranks start again, to take less memory than these samples. Raises EnvironmentRefused."""
        self._samples = samples
        if self._settings.trainer.activation_checkpointing is None and checkpoint_activations(learner):
            self._is_checkpointing = True
            self._remember()
        else:
            self._halve()

    def rehearse(self, learner: Learner) -> None:
        """Make the passes of a step of made-up rows, and no update: for the first step all is compiled then."""
        algorithm, started = self._settings.algorithm, time.perf_counter()
        if learner.ranks.size > 1 or ALGORITHMS[algorithm.algorithm_type].asks(algorithm).teacher:
            return
        self.prepare(learner)
        if self._is_checkpointing:
            checkpoint_activations(learner)
        learner.micro_batch_tokens, learner.smaller, learner.before_update = self.tokens, None, _end_rehearsal
        try:
            learner.step(_made_up_rows(self._settings, self.tokens, learner.actor.vocabulary))
        except _TrialEnded:
            _log.info("step_rehearsed", seconds=round(time.perf_counter() - started, 3))
        except (TuneloopError, torch.OutOfMemoryError) as error:  # The first step compiles, and says what is wrong.
            _log.warning("step_not_rehearsed", reason=str(error))
        finally:
            learner.before_update = go_ahead

    def recompute(self, learner: Learner, actor: Actor, samples: Sequence[Sample]) -> list[Float32s]:
        """The log-probabilities of `recompute`, in the same way."""
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
        """Have the learner yield to traffic before each pass, if the settings ask for it."""
        if self._yielding is not None:
            learner.before_pass = self._yielding

    def _shrink(self, stepping: ref[Learner]) -> int:
        """Take less memory, and how many tokens go through the model at once from now on."""
        learner = stepping()
        may = self._settings.trainer.activation_checkpointing is None and self._longest > self.tokens
        if learner is None or not may or not checkpoint_activations(learner):
            if self._longest > self.tokens and self._given_up < _MOST_GIVEN_UP:
                # The longest row, with the other of its pair, is alone in its micro-batch.
                self._given_up += 1
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
        """`_shrink` within a step, where the other ranks wait for the order (workers/rank.py)."""
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
        """Take less by half. Raises EnvironmentRefused, and remembers nothing, where that cannot help."""
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
        except OSError as error:  # then the next start finds out again
            _log.warning("micro_batch_not_remembered", reason=str(error))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _end_rehearsal() -> None:
    raise _TrialEnded


def _made_up_rows(settings: Settings, tokens: int, vocabulary: int) -> list[Sample]:
    """Pairs of replies to a task, a good one and a bad one, that are just too long to go through the model at once.

    The last is at another temperature, for which other functions are compiled.
    """
    random, size = np.random.default_rng(0), settings.buffer.train_batch_size
    half = max(1, min(tokens // size // 2 + 1, (settings.model.max_model_len or tokens) // 2))
    count = max(size, tokens // (2 * half) + 1)
    count += count % 2
    return [
        Sample(
            id=number,
            prompt_ids=random.integers(0, vocabulary, half, dtype=np.int32),
            completion_ids=random.integers(0, vocabulary, half, dtype=np.int32),
            logprobs=np.full(half, -1.0, np.float32),
            reward=float(number % 2),
            temperature=1.0 if number < count - 1 else 0.5,
            version_min=0,
            version_max=0,
            tenant="",
            task_id=str(number // 2),
            run_id=str(number),
            group_id=number // 2,
            rewarded_at=0.0,
            committed_at=0.0,
        )
        for number in range(count)
    ]


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.completion_ids)


def checkpoint_activations(learner: Learner) -> bool:
    """Have what is trained make its activations again; False if it does, or has no layers that can."""
    trained = [learner.actor.network, *([] if learner.critic is None else [learner.critic.body])]
    left = [each for each in trained if not is_checkpointing(each)]
    for network in left:
        checkpoint_layers(network)
    return bool(left)
