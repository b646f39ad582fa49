"""The learner: its numbers do not depend on how a batch is cut, and it learns."""

import math

import numpy as np
import pytest
import torch

from tests.trainer.factories import moments_of, sample
from tuneloop.shared.errors import NotFinite
from tuneloop.trainer.batches.batch import assemble
from tuneloop.trainer.batches.batch import collate as collate_sequences
from tuneloop.trainer.checkpoints import snapshot

BATCH = [sample(i) for i in range(12)]


def collate(samples):
    return collate_sequences(assemble(samples, merge=False))


def _gradients(learner):
    return {
        f"{name}.{key}": gradient.clone()
        for name, optimizer in learner.optimizers.items()
        for key, gradient in optimizer.gradients.items()
    }


def _one_backward(settings, *, budget, naive=False):
    learner = snapshot.load(settings(trainer={"micro_batch_tokens": budget}), None)
    sequences = assemble(BATCH, merge=False)
    batch = collate_sequences(sequences)
    targets, _ = learner._targets(sequences, batch)
    if naive:  # the usual mistake: each micro-batch divides by its own tokens
        learner._backward, honest = (lambda part, goals, _: honest(part, goals, goals.totals)), learner._backward
    metrics = learner.forward_backward(batch, targets)
    return metrics, _gradients(learner)


def _distance(one, two):
    return max(float((one[key] - two[key]).norm() / one[key].norm().clamp(min=1e-6)) for key in one)


def test_loss_and_gradients_do_not_depend_on_the_micro_batches(settings):
    metrics, gradients = _one_backward(settings, budget=100_000)
    for budget in (1, 30, 64):
        same_metrics, same_gradients = _one_backward(settings, budget=budget)
        assert _distance(gradients, same_gradients) < 1e-4
        assert same_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def _everything(learner):
    return {
        **{f"a.{name}": tensor.clone() for name, tensor in learner.actor.network.state_dict().items()},
        **{f"c.{name}": tensor.clone() for name, tensor in learner.critic.state_dict().items()},
        **{f"am.{name}": tensor.clone() for name, tensor in moments_of(learner.optimizers["actor"]).items()},
        **{f"cm.{name}": tensor.clone() for name, tensor in moments_of(learner.optimizers["critic"]).items()},
        "random": learner.generator.get_state(),
    }


def _same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("mini_batches", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_changes_nothing(settings, mini_batches, dtype):
    learner = snapshot.load(settings(algorithm={"mini_batches": mini_batches}, trainer={"dtype": dtype}), None)
    learner.step(BATCH)
    before = _everything(learner)
    spoilt = [*BATCH[:-1], sample(11, logprobs=np.full_like(BATCH[-1].logprobs, np.nan))]
    with pytest.raises(NotFinite, match="nan"):
        learner.step(spoilt)
    assert _same(_everything(learner), before)
    assert (learner.steps, learner.optimizers["actor"].updates) == (1, mini_batches)
    assert all(parameter.grad is None for parameter in learner.actor.network.parameters())


def test_after_some_updates_of_a_step_that_failed_it_says_that_it_is_spoilt(settings):
    learner = snapshot.load(settings(algorithm={"mini_batches": 3}), None)
    before, updates = _everything(learner), learner.optimizers["actor"]
    learner.actor.network.model.norm.weight.register_hook(
        lambda gradient: gradient * (float("inf") if updates.updates == 1 else 1)
    )
    with pytest.raises(NotFinite, match="actor's gradient norm"):
        learner.step(BATCH)
    assert (learner.spoilt, updates.updates, learner.steps) == (True, 1, 0)
    assert torch.equal(learner.generator.get_state(), before["random"])
    assert all(parameter.grad is None for parameter in learner.actor.network.parameters())


def test_a_step_tells_what_it_did(settings):
    metrics = snapshot.load(settings(), None).step(BATCH)
    told = """actor/pg_loss actor/ppo_kl actor/pg_clipfrac actor/entropy actor/kl_loss actor/grad_norm actor/lr
        critic/vf_loss critic/vf_clipfrac critic/vf_explained_var critic/grad_norm critic/lr critic/advantages/mean
        critic/advantages/zero critic/returns/mean critic/values/mean mismatch_kl/mean perf/merged
        perf/tokens_per_second perf/useful_tokens time/train_step"""
    assert set(told.split()) == metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values())


def _trajectory(run, calls=3):
    """Calls of one run that extend each other, with what a tool says between them."""
    random, history, made = np.random.default_rng(run), [60, 61], []
    for number in range(calls):
        reply = random.integers(0, 250, 3, dtype=np.int32)
        made.append(
            sample(
                100 * run + number,
                task_id="t",
                run_id=str(run),
                prompt_ids=np.array(history, np.int32),
                completion_ids=reply,
                logprobs=np.full(3, -5.5, np.float32),
                reward=float(random.integers(0, 3)),
                temperature=float(random.choice([0.5, 1.0])),
            )
        )
        history += [*reply.tolist(), 77, 78]
    return made


@pytest.mark.parametrize("lam", [1.0, 0.9])
def test_merging_calls_changes_no_gradient(settings, lam):
    calls = [call for run in range(4) for call in _trajectory(run)]
    gradients = {}
    for merge in (True, False):
        learner = snapshot.load(settings(algorithm={"lam": lam}), None)
        sequences = assemble(calls, merge=merge)
        batch = collate_sequences(sequences)
        assert len(sequences) == (4 if merge else 12)
        learner.forward_backward(batch, learner._targets(sequences, batch)[0])
        gradients[merge] = _gradients(learner)
    assert _distance(gradients[False], gradients[True]) < 1e-3


def test_replies_of_one_token_and_of_eight_thousand_are_learnt_from(settings):
    learner = snapshot.load(settings(trainer={"micro_batch_tokens": 1024}), None)
    random = np.random.default_rng(0)
    long = random.integers(0, 250, 8192, dtype=np.int32)
    samples = [
        sample(1, completion_ids=long, logprobs=np.full(8192, -5.7, np.float32), reward=1.0),
        *(sample(i, completion_ids=long[:1], logprobs=np.float32([-5.7]), reward=0.0) for i in (2, 3)),
    ]
    before = _everything(learner)
    metrics = learner.step(samples)
    assert all(math.isfinite(value) for value in metrics.values())
    assert not _same(_everything(learner), before)
