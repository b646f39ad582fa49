"""Held-out replies as an actor in this process would have said them: exactly, at the temperature of each.

Dimension suffixes are explained in trainer/batches/batch.py.
"""

from collections.abc import Sequence

import numpy as np
import torch

from tuneloop.shared.evaluation.off_policy import HeldOutReply
from tuneloop.trainer.batches.batch import collate, micro_batches
from tuneloop.trainer.batches.sequences import TokenSequence
from tuneloop.trainer.models.model import Actor


@torch.no_grad()
def likelihoods(actor: Actor, replies: Sequence[HeldOutReply], *, budget: int) -> list[float]:
    """The actor's log-probability of each reply, whole; at most `budget` positions are read at a time."""
    if not replies:
        return []
    batch = collate([_sequence(each) for each in replies])
    sums_B = torch.zeros(len(replies), dtype=torch.float64)
    for index_B in micro_batches(batch.lengths_B, budget, padded=not actor.is_packed):
        part = batch.rows(index_B)
        logprobs_BR = actor.logprobs(part).cpu()
        sums_B[index_B] = (logprobs_BR.double() * part.mask_BR).sum(1)
    return [float(value) for value in sums_B]


def known_to(actor: Actor, reply: HeldOutReply) -> bool:
    """Whether the actor has all its tokens; one that came from elsewhere may have others."""
    ids = np.concatenate([reply.prompt_ids, reply.completion_ids])
    return bool(((ids >= 0) & (ids < actor.vocabulary)).all())


def _sequence(reply: HeldOutReply) -> TokenSequence:
    quiet, sampled = np.zeros(len(reply.prompt_ids), np.float32), np.ones(len(reply.completion_ids), np.float32)
    return TokenSequence(
        ids=np.concatenate([reply.prompt_ids, reply.completion_ids]),
        of=np.concatenate([quiet - 1, sampled - 1]).astype(np.int32),
        sampled=np.concatenate([quiet, reply.logprobs]),
        temperatures=np.concatenate([quiet + 1, sampled * np.float32(reply.temperature)]),
        calls=(),
    )
