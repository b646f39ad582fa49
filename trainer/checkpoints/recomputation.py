"""Recomputes log-probabilities that engines did not return, with the weights that sampled the reply.

Uses the request's temperature and grammar. A share of the captured ones is recomputed too, for comparison.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import msgspec
import numpy as np
import structlog
import torch
from torch import nn

from tuneloop.shared.checkpoints import ACTOR, check_files, read_manifest
from tuneloop.shared.errors import CheckpointRejected, EnvironmentRefused
from tuneloop.shared.experience import Float32s, Sample, is_captured
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.versions.alarms import Alarm
from tuneloop.shared.operations.diagnosis import CAPTURE_MISMATCH
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.batch import Metrics
from tuneloop.trainer.batches.selection import Refused, select
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.micro_batch import MicroBatch
from tuneloop.trainer.models.model import Actor, device_of

_log = structlog.get_logger()

_KEPT = 2  # actors of older versions kept in main memory
_WINDOW_TOKENS, _FEWEST_TOKENS = 4096, 256  # the mismatch is a mean over so many last tokens, from so many on
_FURTHEST = 20.0  # clamp of differences in nats, against overflow

_LOST = "its log-probabilities were not captured, and the weights of version {} that sampled it are gone"
_MIXED = "its log-probabilities were not captured, and more than one version sampled it"


class Recomputation:
    """Fills in missing log-probabilities. `version` is the learner's version, None if it is none."""

    def __init__(self, settings: Settings, ledger: Ledger, micro_batch: MicroBatch) -> None:
        self._settings, self._ledger, self._micro_batch = settings, ledger, micro_batch
        self._capture = settings.explorer.capture
        self._actors: dict[int, Actor] = {}
        #: Per compared reply: the sum of its tokens' divergences, and their number.
        self._compared: deque[tuple[float, int]] = deque()
        self._mismatch: float | None = None
        self._recomputed = 0

    def select(
        self, samples: Sequence[Sample], learner: Learner, *, version: int | None
    ) -> tuple[list[Sample], Refused]:
        """The samples that can be trained on, with log-probabilities; and the others by reason."""
        there, lost = self.without_lost(samples, version=version)
        kept, refused = select(there, self._settings, vocabulary=learner.actor.vocabulary)
        filled, damaged = self.fill(kept, learner, version=version)
        return filled, {**refused, **lost, **damaged}

    def without_lost(self, samples: Sequence[Sample], *, version: int | None) -> tuple[list[Sample], Refused]:
        """The samples; and those without log-probabilities that cannot be recomputed, by reason."""
        missing = [] if self._settings.algorithm.of_any_reply else [each for each in samples if _is_missing(each)]
        if not missing:
            return list(samples), {}
        refused: Refused = defaultdict(list)
        places = {each.version: each for each in self._ledger.versions.all()}
        there = {
            number: number == version
            or ((row := places.get(number)) is not None and (row.is_base or (row.path / ACTOR).is_dir()))
            for number in _versions_of(missing)
        }
        for sample in missing:
            if sample.version_min != sample.version_max:
                refused[_MIXED].append(sample)
            elif not there[sample.version_min]:
                refused[_LOST.format(sample.version_min)].append(sample)
        lost = {sample.id for samples in refused.values() for sample in samples}
        return [each for each in samples if each.id not in lost], dict(refused)

    def fill(self, samples: Sequence[Sample], learner: Learner, *, version: int | None) -> tuple[list[Sample], Refused]:
        """The samples with log-probabilities (0 if the method ignores them); and those whose weights are damaged."""
        if self._settings.algorithm.of_any_reply:
            return [
                (msgspec.structs.replace(each, logprobs=np.zeros_like(each.logprobs)) if _is_missing(each) else each)
                for each in samples
            ], {}
        captured: list[Sample] = []
        if self._capture.logprobs != "all":  # then compare a share of the captured ones
            captured = [
                each
                for each in samples
                if not _is_missing(each) and each.unsampled is None and each.version_min == each.version_max
            ][: math.ceil(self._capture.captured_share * len(samples))]
        wanted = {each.id: each for each in [*filter(_is_missing, samples), *captured]}
        if not wanted:
            return list(samples), {}
        self._micro_batch.prepare(learner)
        found: dict[int, Float32s] = {}
        lost: Refused = {}
        for number in sorted(_versions_of(wanted.values())):
            rows = [each for each in wanted.values() if each.version_min == number]
            try:
                with self._actor_of(number, learner, live=number == version) as actor:
                    logprobs = self._micro_batch.recompute(learner, actor, rows)
            except CheckpointRejected as error:
                _log.warning("version_not_readable", version=number, reason=str(error))
                lost[_LOST.format(number)] = [each for each in rows if _is_missing(each)]
            else:
                found |= {each.id: values for each, values in zip(rows, logprobs, strict=True)}
        gone = {each.id for rows in lost.values() for each in rows}
        filled = [
            msgspec.structs.replace(each, logprobs=found[each.id], recomputed=True) if _is_missing(each) else each
            for each in samples
            if each.id not in gone
        ]
        self._recomputed += sum(each.recomputed for each in filled)
        self._compare([each for each in wanted.values() if not _is_missing(each) and each.id in found], found)
        return filled, {reason: rows for reason, rows in lost.items() if rows}

    def take_figures(self) -> Metrics:
        """Metrics since the last call: recomputed replies, and the divergence of compared ones."""
        recomputed, self._recomputed = self._recomputed, 0
        if not recomputed and self._capture.logprobs == "all":
            return {}
        metrics: Metrics = {"capture/recomputed": float(recomputed)}
        return metrics if self._mismatch is None else metrics | {"capture/mismatch": self._mismatch}

    def _compare(self, captured: Sequence[Sample], found: dict[int, Float32s]) -> None:
        """Compare recomputed log-probabilities with the engine's; a divergence above the bound is an alarm."""
        for each in captured:
            apart = np.clip(found[each.id].astype(float) - each.logprobs, -_FURTHEST, _FURTHEST)
            self._compared.append((float((np.exp(apart) - 1 - apart).sum()), len(apart)))
        tokens = sum(count for _, count in self._compared)
        while tokens > _WINDOW_TOKENS and len(self._compared) > 1:
            tokens -= self._compared.popleft()[1]
        if tokens < _FEWEST_TOKENS:
            return
        self._mismatch = sum(total for total, _ in self._compared) / tokens
        if self._mismatch > self._capture.max_mismatch:
            self._compared.clear()  # after the alarm is cleared, the window restarts
            reason = (
                f"recomputed log-probabilities diverge from those of engines by {self._mismatch:.3g} nats a"
                " token: engines return all from now on; find out why the trainer's weights or numerics differ from the"
                " engine's, then clear the alarm"
            )
            bound = self._capture.max_mismatch
            alarm = Alarm(name=CAPTURE_MISMATCH, reason=reason, value=self._mismatch, threshold=bound)
            if self._ledger.alarms.raise_alarm(alarm):
                _log.error("alarm_raised", alarm=CAPTURE_MISMATCH, reason=reason)

    @contextmanager
    def _actor_of(self, version: int, learner: Learner, *, live: bool) -> Iterator[Actor]:
        if live:
            yield learner.actor
            return
        row = self._ledger.versions.get(version)
        assert row is not None  # `without_lost` dropped rows of unknown versions
        if row.is_base and learner.reference is not None and learner.reference_is_base:
            yield learner.reference
            return
        actor = self._actors.pop(version, None)
        if actor is None:
            folder = self._settings.model.model_path
            if not row.is_base:
                check_files(row.path, read_manifest(row.path, sha256=row.manifest_sha256), folder=ACTOR)
                folder = row.path / ACTOR
            actor = snapshot.actor_in(self._settings, folder)
        try:
            _move(actor, device_of(self._settings))
            yield actor
        except torch.OutOfMemoryError as error:
            raise EnvironmentRefused(
                "explorer.capture.logprobs: the GPU's memory has no room for the weights of an older version beside"
                " those in training, which replies that were not captured need; write all"
            ) from error
        finally:
            _move(actor, torch.device("cpu"))
        self._actors[version] = actor
        while len(self._actors) > _KEPT:
            del self._actors[min(self._actors)]


def _move(actor: Actor, device: torch.device) -> None:
    cast(nn.Module, actor.network).to(device)


def _is_missing(sample: Sample) -> bool:
    return not is_captured(sample.logprobs)


def _versions_of(samples: Iterable[Sample]) -> set[int]:
    return {each.version_min for each in samples}
