"""SFT and RAFT: cross-entropy, and a model that learns by heart."""

import math
from threading import Event

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.trainer.factories import sample
from tuneloop.trainer.batches.selection import with_demonstrations
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.loop import run


@pytest.mark.parametrize(("worth", "said"), [({}, 1), ({"weights": {"judge": 1.0}}, 0)])
def test_the_trainer_says_that_a_judge_s_verdicts_are_worth_nothing(settings, worth, said):
    stop = Event()
    stop.set()
    with capture_logs() as logs:
        run(settings(judge={"url": "http://judge/v1", "model": "j"}, reward=worth), stop)
    assert [each["event"] for each in logs].count("feedback_not_counted") == said


def _probability(learner, prompt, reply):
    return math.exp(sum(learner.logprobs([*prompt, *reply])[len(prompt) - 1 :]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_edited_answer_is_learnt_by_heart(settings, dtype):
    lively = {"algorithm_type": "sft", "optimizer": {"lr": 1e-2}, "mini_batches": 1}
    changed = settings(algorithm=lively, trainer={"dtype": dtype, "micro_batch_tokens": 4096})
    learner = snapshot.load(changed, None)
    assert learner.critic is None
    assert learner.reference is None
    prompt = [60, 61, 62]
    edited = sample(1, demonstration="yes", prompt_ids=np.array(prompt, np.int32), reward=0.0)
    batch, _ = with_demonstrations([edited], changed)
    reply = batch[0].completion_ids.tolist()
    before = _probability(learner, prompt, reply)
    told = [learner.step(batch)["actor/sft_loss"] for _ in range(40)]
    assert before < 1e-6
    assert told[-1] < 0.1 * told[0]
    assert _probability(learner, prompt, reply) > 0.8


def test_log_probabilities_as_sampled_are_not_looked_at(settings):
    """Replies with a narrowed vocabulary, at temperature 0, or told without log-probabilities."""
    batch = [sample(i, logprobs=np.full_like(sample(i).logprobs, np.nan), temperature=0.0) for i in range(6)]
    learner = snapshot.load(settings(algorithm={"algorithm_type": "sft", "mini_batches": 1}), None)
    assert all(math.isfinite(value) for value in learner.step(batch).values())
