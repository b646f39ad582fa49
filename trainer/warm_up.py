"""What a step compiles, compiled before there is a batch: on a GPU that takes a quarter of a minute."""

from collections.abc import Sequence

import numpy as np
import torch

from tuneloop.shared.experience import Sample
from tuneloop.trainer.batches.batch import Batch, collate
from tuneloop.trainer.batches.sequences import TokenSequence
from tuneloop.trainer.learner import Learner

#: How long made-up prompts and replies are, in tokens: of different lengths, or one would be compiled for that alone.
_LENGTHS = ((37, 53), (71, 29))


def warm_up(learner: Learner, *, temperature: float, entropy: bool) -> None:
    """Run each model once as a step does, on made-up tokens, and forget the gradients.

    Weights, moments, random numbers and counts stay as they are. `entropy`: whether a step learns from it.
    """
    actor, critic, reference = learner.actor, learner.critic, learner.reference
    batch = _made_up(_LENGTHS, vocabulary=actor.vocabulary, temperature=temperature)
    devices = [actor.network.device] if actor.network.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            if critic is not None:
                torch.autograd.backward(critic.values(batch).sum())
            logprobs_BR, entropy_BR = actor.score(batch)
            torch.autograd.backward([logprobs_BR.sum(), entropy_BR.sum()] if entropy else [logprobs_BR.sum()])
            with torch.no_grad():
                for each in (actor, reference):
                    if each is not None:
                        each.logprobs(batch)
                if critic is not None:
                    critic.values(batch)
    finally:
        for optimizer in learner.optimizers.values():
            optimizer.forget()


def _made_up(lengths: Sequence[tuple[int, int]], *, vocabulary: int, temperature: float) -> Batch:
    return collate(
        [
            TokenSequence.alone(_sample(np.arange(prompt + reply, dtype=np.int32) % vocabulary, prompt, temperature))
            for prompt, reply in lengths
        ]
    )


def _sample(ids: "np.ndarray[tuple[int], np.dtype[np.int32]]", prompt: int, temperature: float) -> Sample:
    return Sample(
        id=0,
        prompt_ids=ids[:prompt],
        completion_ids=ids[prompt:],
        logprobs=np.zeros(len(ids) - prompt, np.float32),
        reward=0.0,
        temperature=temperature,
        version_min=0,
        version_max=0,
        tenant="",
        task_id=None,
        run_id=None,
        group_id=None,
        rewarded_at=0.0,
        committed_at=0.0,
    )
