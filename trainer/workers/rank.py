"""Runs one rank of the trainer; all but rank 0 follow its orders."""

from functools import partial
from weakref import ref

import structlog
import torch
from transformers.utils.logging import disable_progress_bar

from tuneloop.shared.errors import NotFinite, RankFailed, RankOutOfMemory
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.rendered_lines import MixedFile
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.loop import run
from tuneloop.trainer.micro_batch import MicroBatch, checkpoint_activations, fit_to_memory, must_shard
from tuneloop.trainer.models.model import device_of, room_for_weights
from tuneloop.trainer.parallel import (
    EndOrder,
    GatherOrder,
    JoinedRanks,
    LoadOrder,
    StateOrder,
    StepOrder,
    WeightsOrder,
    gathered_on_rank_0,
)
from tuneloop.trainer.stop import Stop

_log = structlog.get_logger()


def train_as_worker(settings: Settings, stop: Stop) -> None:
    """Train as the rank that the environment names. Raises RankFailed, and `run`'s errors."""
    together = settings.trainer.ulysses_sequence_parallel_size
    serve(settings, JoinedRanks.join(device_of(settings), together=together), stop)


def serve(settings: Settings, ranks: JoinedRanks, stop: Stop) -> None:
    """Lead as rank 0, which `stop` stops, or follow."""
    ranks.shards = bool(ranks.decide(lambda: must_shard(settings)))
    if ranks.rank:
        follow(fit_to_memory(settings), ranks)
    else:
        run(settings, stop, ranks)
        ranks.lead(EndOrder())
    ranks.leave()


def follow(settings: Settings, ranks: JoinedRanks) -> None:
    """Execute rank 0's orders until the last one. An error ends this rank, unless all ranks raise it."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    learner: Learner | None = None
    while True:
        match ranks.follow():
            case LoadOrder() as order:
                learner = None  # a GPU has no room for two
                with room_for_weights():
                    learner = snapshot.resume(settings, *order.paths, ranks)
                learner.mixed = MixedFile.of(settings)
                _log.info("rank_ready", rank=ranks.rank, folder=order.folder)
            case StepOrder() as order:
                assert learner is not None
                learner.micro_batch_tokens = order.tokens
                learner.smaller = partial(_shrink_with_rank_0, ref(learner)) if order.halves else None
                if order.checkpointing:
                    checkpoint_activations(learner)
                # All ranks raise these together, and rank 0 handles them.
                try:
                    learner.step(order.samples, version=order.version)
                except RankOutOfMemory:
                    MicroBatch(settings).reduce_memory(learner, order.samples)
                    raise
                except (NotFinite, RankFailed, torch.OutOfMemoryError):
                    pass
            case StateOrder():
                assert learner is not None
                snapshot.copy_state(learner, None)
            case WeightsOrder():
                assert learner is not None
                snapshot.copy_weights(learner, None)
            case GatherOrder() as order:
                assert learner is not None
                actor = learner.reference if order.reference else learner.actor
                assert actor is not None
                with gathered_on_rank_0(actor.network, keep=False):
                    pass
            case EndOrder():
                return


def _shrink_with_rank_0(stepping: ref[Learner]) -> int:
    learner = stepping()
    assert learner is not None
    with learner.ranks.agree():
        pass  # rank 0 may raise that nothing smaller helps
    tokens, is_checkpointing = (learner.ranks.decide(_leave_to_rank_0) for _ in range(2))
    if is_checkpointing:
        checkpoint_activations(learner)
    return tokens


def _leave_to_rank_0() -> int:
    raise RankFailed("rank 0 alone decides how a step takes less memory")
