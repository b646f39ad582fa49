"""The ranks but 0: they do what rank 0 orders, and know nothing of the ledger."""

from contextlib import suppress

import structlog
import torch
from transformers.utils.logging import disable_progress_bar

from tuneloop.shared.errors import NotFinite, RankFailed
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.models.room import room_for_weights
from tuneloop.trainer.ranks.orders import EndOrder, LoadOrder, StateOrder, StepOrder
from tuneloop.trainer.ranks.ranks import JoinedRanks

_log = structlog.get_logger()


def follow(settings: Settings, ranks: JoinedRanks) -> None:
    """Do what rank 0 orders until it says that there is no more. An error ends this rank, unless all ranks have it."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    learner: Learner | None = None
    while True:
        match ranks.follow():
            case LoadOrder() as order:
                learner = None  # A GPU has no room for two.
                with room_for_weights():
                    learner = snapshot.resume(settings, *order.paths, ranks)
                _log.info("rank_ready", rank=ranks.rank, folder=order.folder)
            case StepOrder() as order:
                assert learner is not None
                _step(learner, order)
            case StateOrder():
                assert learner is not None
                snapshot.give_state(learner)
            case EndOrder():
                return


def _step(learner: Learner, order: StepOrder) -> None:
    learner.micro_batch_tokens = order.tokens
    learner.smaller = _rank_0_says if order.halves else None
    # What all ranks raise together, of which rank 0 decides what comes of it.
    with suppress(NotFinite, RankFailed, torch.OutOfMemoryError):
        learner.step(order.samples, version=order.version)


def _rank_0_says() -> int:
    raise RankFailed("rank 0 alone says how small micro-batches are")
