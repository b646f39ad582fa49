"""What holds of every policy gradient, on made-up batches: merged trajectories, lone runs, constant groups."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from tests.constants import section_of
from tests.trainer.calls import calls
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms import ALGORITHMS
from tuneloop.trainer.algorithms.terms import Targets, importance_weights, surrogate

KINDS = ["ppo", "reinforce", "reinforce++", "rloo", "grpo", "multi_step_grpo"]
MODES = get_args(AlgorithmSettings.model_fields["loss_agg_mode"].annotation)

algorithms = st.builds(
    lambda kind, mode, kl_in, proximal, correction, scale, baseline: section_of(
        AlgorithmSettings,
        {
            "algorithm_type": kind,
            "loss_agg_mode": mode,
            "loss_horizon": 16,
            "kl_coef": 0.1,
            "kl_in": kl_in,
            "entropy_coef": 0.01,
            "gamma": 0.9,
            "lam": 0.8,
            "off_policy": {"proximal": proximal, "correction": correction},
            "group": {"scale": scale},
            "baseline": {"kind": baseline},
        },
    ),
    st.sampled_from(KINDS),
    st.sampled_from(MODES),
    st.sampled_from(["loss", "reward"]),
    st.sampled_from(["sampled", "recomputed"]),
    st.sampled_from(["none", "truncate", "mask"]),
    st.sampled_from(["group", "batch", "none"]),
    st.sampled_from(["running", "task", "batch"]),
)


class Made:
    """A batch of 1 to 7 sequences of 1 to 3 calls, with tool tokens between them; what models say of its tokens."""

    def __init__(self, seed):
        random = torch.Generator().manual_seed(seed)
        rows = []
        count = 0
        for _ in range(self.whole(random, 1, 7)):
            row = []
            for call in range(self.whole(random, 1, 3)):
                row += [-1] * (self.whole(random, 1, 3) if call else 0) + [count] * self.whole(random, 1, 4)
                count += 1
            rows.append(torch.tensor(row))
        of_BR = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        runs = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(row[row >= 0].unique()) for row in rows]))
        groups = torch.randint(0, 3, (len(rows),), generator=random).unique(return_inverse=True)[1][runs]
        rewards = torch.randint(0, 3, (count,), generator=random).double() / 3
        tasks = [f"t/{group}" if group else "" for group in groups.tolist()]
        self.calls = calls(rewards, runs=runs.tolist(), groups=groups.tolist(), tasks=tasks, of_BR=of_BR)
        names = ["sampled_BR", "start_BR", "reference_BR", "values_BR", "now_BR", "entropy_BR"]
        self.said = {name: torch.randn(of_BR.shape, generator=random).double() for name in names}
        self.random = random

    @staticmethod
    def whole(random, low, high):
        return int(torch.randint(low, high + 1, (), generator=random))

    def targets(self, algorithm):
        mask_BR = self.calls.of_BR >= 0
        constants = {name: self.said[name] for name in ("sampled_BR", "start_BR", "reference_BR", "values_BR")}
        weights, _ = importance_weights(algorithm.off_policy, constants["start_BR"], constants["sampled_BR"], mask_BR)
        targets = Targets(mask_BR=mask_BR, weights_BR=weights, **constants)
        return ALGORITHMS[algorithm.algorithm_type].prepare(algorithm, targets, self.calls, {})[0]

    def loss(self, algorithm):
        """The loss and its gradient on the whole batch."""
        targets, now = self.targets(algorithm), self.said["now_BR"].clone().requires_grad_()
        loss = surrogate(algorithm, targets, now, self.said["entropy_BR"], targets.totals).value
        loss.backward()
        return loss.detach(), now.grad


batches = st.integers(0, 1_000_000).map(Made)


@settings(max_examples=150)
@given(algorithms, batches)
def test_losses_and_gradients_are_finite_and_nothing_is_learnt_outside_the_mask(algorithm, made):
    loss, gradient = made.loss(algorithm)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert not gradient[made.calls.of_BR < 0].any()


@settings(max_examples=150)
@given(algorithms, batches, st.integers(1, 5))
def test_the_width_of_the_padding_changes_nothing(algorithm, made, more):
    loss, gradient = made.loss(algorithm)
    wider = {"of_BR": pad(made.calls.of_BR, (0, more), value=-1), "ends_BR": pad(made.calls.ends_BR, (0, more))}
    made.calls = replace(made.calls, **wider)
    made.said = {name: pad(each, (0, more), value=7.0) for name, each in made.said.items()}
    wide_loss, wide_gradient = made.loss(algorithm)
    torch.testing.assert_close(wide_loss, loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(wide_gradient, pad(gradient, (0, more)), rtol=0, atol=1e-12)


@settings(max_examples=150)
@given(algorithms, batches)
def test_what_models_say_of_the_users_and_tools_tokens_changes_nothing(algorithm, made):
    loss, gradient = made.loss(algorithm)
    outside_BR = made.calls.of_BR < 0
    made.said = {name: each + torch.where(outside_BR, 3.0, 0.0) for name, each in made.said.items()}
    other_loss, other_gradient = made.loss(algorithm)
    torch.testing.assert_close(other_loss, loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(other_gradient, gradient, rtol=0, atol=1e-12)


@settings(max_examples=100)
@given(algorithms, batches, st.sampled_from([0.0, 0.1, 1 / 3, -7.7, 1e6]))
def test_rewards_that_are_all_the_same_say_nothing(algorithm, made, reward):
    """But for the divergence in the reward, and the critic's values: those two are left out."""
    if algorithm.algorithm_type == "ppo":
        algorithm = algorithm.model_copy(update={"algorithm_type": "reinforce++"})
    algorithm = algorithm.model_copy(update={"kl_in": "loss", "gamma": 1.0})
    made.calls = replace(made.calls, rewards_C=torch.full_like(made.calls.rewards_C, reward))
    advantages_BR = made.targets(algorithm).advantages_BR
    assert advantages_BR.isfinite().all()
    if len(advantages_BR[made.calls.of_BR >= 0]) > 1:
        torch.testing.assert_close(advantages_BR, torch.zeros_like(advantages_BR), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["rloo", "grpo", "dapo", "gspo", "cispo", "multi_step_grpo"])
def test_a_constant_group_has_no_advantage_whatever_rounding_does_to_its_mean(kind):
    """(0.1 + 0.1 + 0.1) / 3 is not 0.1, and 1e-17 is no reason to run an optimizer's step."""
    assert sum([0.1] * 3) / 3 != 0.1
    of = calls(torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64), groups=[0, 0, 0])
    targets = Targets(mask_BR=of.of_BR >= 0, sampled_BR=torch.zeros(3, 1))
    prepared, _ = ALGORITHMS[kind].prepare(AlgorithmSettings(), targets, of, {})
    assert prepared.advantages_BR.tolist() == [[0], [0], [0]]


@pytest.mark.parametrize("kind", ["rloo", "grpo", "dapo", "gspo", "cispo", "multi_step_grpo"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_run_that_is_alone_in_its_group_has_no_advantage(kind, scale):
    """Its reward is 5; in other trainers, where its mean is 0 and its deviation 1, that would be its advantage."""
    of = calls([5.0, 0.0, 1.0], groups=[0, 1, 1])
    algorithm = section_of(AlgorithmSettings, {"algorithm_type": kind, "group": {"scale": scale}})
    targets = Targets(mask_BR=of.of_BR >= 0, sampled_BR=torch.zeros(3, 1))
    prepared, _ = ALGORITHMS[kind].prepare(algorithm, targets, of, {})
    assert prepared.advantages_BR[0].item() == 0
    assert prepared.advantages_BR[1].item() == -prepared.advantages_BR[2].item() != 0
