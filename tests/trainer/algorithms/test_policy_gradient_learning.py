"""Every policy gradient without a critic makes a model say what is rewarded, and its memory survives a checkpoint."""

import math

import numpy as np
import pytest
import torch

from tests.trainer.factories import sample
from tuneloop.shared.settings.algorithm import OF_GROUPS
from tuneloop.trainer.checkpoints import snapshot

KINDS = ["reinforce", "reinforce++", "rloo", "grpo", "dapo", "gspo", "cispo", "multi_step_grpo"]
WANTED, PROMPT = 5, np.array([60, 61, 62], dtype=np.int32)
LIVELY = {"optimizer": {"lr": 3e-3}, "kl_coef": 0.0, "baseline": {"kind": "task"}}


def _probability(learner):
    return math.exp(learner.logprobs([*PROMPT.tolist(), WANTED])[-1])


def _sampled(learner, random, reward):
    """32 replies of a token to one prompt, as the model samples them; the first 8 so that the wanted one is seen."""
    with torch.no_grad():
        ids = torch.from_numpy(PROMPT).long()[None]
        logprobs = learner.actor.network(input_ids=ids).logits[0, -1].float().log_softmax(0).numpy()
    weights = np.exp(logprobs.astype(np.float64))
    said = random.choice(len(weights), size=32, p=weights / weights.sum())
    said[:8] = random.integers(0, 10, 8)
    return [
        sample(
            number,
            prompt_ids=PROMPT,
            completion_ids=np.array([token], dtype=np.int32),
            logprobs=logprobs[[token]],
            reward=reward(token),
            temperature=1.0,
            task_id="task",
            run_id=str(number),
            group_id=1,
        )
        for number, token in enumerate(said)
    ]


def _trained(settings, kind, reward):
    buffer = {"group_by": "task"} if kind in OF_GROUPS else {}
    algorithm = LIVELY | {"algorithm_type": kind}
    if kind == "gspo":  # at a learning rate as high as this its clip of 4e-4 lets no second update of a batch count
        algorithm |= {"clip_range": 0.2, "clip_range_high": 0.28}
    learner = snapshot.load(settings(algorithm=algorithm, buffer=buffer, trainer={"micro_batch_tokens": 4096}), None)
    random = np.random.default_rng(0)
    before = _probability(learner)
    for _ in range(50):
        learner.step(_sampled(learner, random, reward))
    return before, _probability(learner), learner


def _is_wanted(token):
    return float(token == WANTED)


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_to_say_what_is_rewarded(settings, kind):
    before, after, learner = _trained(settings, kind, lambda token: float(token == WANTED))
    assert before < 0.02
    assert after > 0.5
    assert learner.critic is None


def test_it_learns_as_much_with_an_optimizer_of_8_bits(settings, monkeypatch):
    monkeypatch.setitem(LIVELY, "optimizer", LIVELY["optimizer"] | {"bits": 8})
    before, after, _ = _trained(settings, "reinforce", lambda token: float(token == WANTED))
    assert before < 0.02
    assert after > 0.5


def _of_rank(settings, folder, rank):
    return lambda **but: settings(**{"model": {"model_path": folder, "lora": {"rank": rank}}} | but)


def test_ppo_learns_it_with_two_adapters_on_one_base(settings, opinionated):
    before, after, learner = _trained(_of_rank(settings, opinionated, 8), "ppo", _is_wanted)
    assert before < 0.02
    assert after > 0.9
    assert learner.critic is not None


def test_a_critic_s_adapter_explains_as_much_of_the_returns_as_a_whole_critic(settings, opinionated):
    """Every other prompt is rewarded, whatever is replied."""
    explained = []
    for rank in (0, 8):
        learner = snapshot.load(_of_rank(settings, opinionated, rank)(), None)
        batch = [sample(number, reward=float(number % 2)) for number in range(16)]
        for _ in range(40):
            told = learner.step(batch)
        explained.append(told["critic/vf_explained_var"])
    assert explained[1] > explained[0] - 0.02 > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_for_anything_teaches_nothing(settings, kind):
    before, after, _ = _trained(settings, kind, lambda token: 1.0)
    assert after == before


def test_what_reinforce_remembers_is_in_the_checkpoint(settings, tmp_path):
    made = settings(algorithm=LIVELY | {"algorithm_type": "reinforce"})
    learner = snapshot.load(made, None)
    learner.step(_sampled(learner, np.random.default_rng(0), float))
    assert len(learner.baselines) == 2
    folder = tmp_path / "saved"
    folder.mkdir()
    snapshot.save(learner, folder, base=made.model.model_path)
    again = snapshot.load(made, folder).baselines
    assert again == learner.baselines
    assert list(again) == list(learner.baselines)
