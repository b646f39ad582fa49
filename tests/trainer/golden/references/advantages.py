"""Advantages of verl, TRL, OpenRLHF and Trinity-RFT."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from tests.trainer.golden.references.policies import CORE, Case, case, numbers, replies, verl
from tests.trainer.golden.references.wheels import Wheel

#: Runs of four groups; the third group's rewards are all the same.
UNEQUAL = [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
EQUAL = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


def gae(wheels: Path) -> tuple[dict[str, Tensor], list[Case]]:
    """verl's advantages, whitened, and returns, with tool tokens in the middle of a reply."""
    normal, (wheel, of) = numbers(3), verl(wheels)
    x = {"rewards": normal(6, 9), "values": normal(6, 9), "mask": replies()}
    x["rewards"][~x["mask"]] = 0
    cases = []
    for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (0.97, 0.9), (0.9, 0.0)):
        advantages, returns = of["compute_gae_advantage_return"](
            x["rewards"], x["values"], x["mask"].double(), gamma, lam
        )
        settings = {"gamma": gamma, "lam": lam}
        cases.append(
            case(
                wheel,
                "compute_gae_advantage_return",
                settings,
                {"advantages": advantages * x["mask"], "returns": returns * x["mask"]},
            )
        )
    return x, cases


def reinforce_pp(wheels: Path) -> tuple[dict[str, Tensor], list[Case]]:
    """verl's REINFORCE++, with and without a divergence in the reward."""
    normal, (wheel, of) = numbers(4), verl(wheels)
    mask_BR = replies()
    sampled_BR = -normal(6, 9).abs() - 0.05
    x = {"scores": normal(6), "mask": mask_BR, "sampled": sampled_BR, "reference": sampled_BR + 0.4 * normal(6, 9)}
    last_B = (torch.arange(9) * mask_BR).argmax(1)
    scores_BR = torch.zeros(6, 9, dtype=torch.float64)
    scores_BR[torch.arange(6), last_B] = x["scores"]
    rewards = wheel.take(CORE, ["compute_rewards"], {"torch": torch})["compute_rewards"]
    cases = []
    for gamma in (1.0, 0.97):
        for coefficient in (0.0, 0.05):
            rewards_BR = rewards(scores_BR, x["sampled"], x["reference"], coefficient) * mask_BR
            advantages, returns = of["compute_reinforce_plus_plus_outcome_advantage"](
                rewards_BR, mask_BR.double(), SimpleNamespace(gamma=gamma)
            )
            settings = {"gamma": gamma, "kl_coef": coefficient, "kl_estimator": "k1", "kl_in": "reward"}
            outputs = {"advantages": advantages, "returns": returns}
            cases.append(case(wheel, "compute_reinforce_plus_plus_outcome_advantage", settings, outputs))
    return x, cases


def groups(wheels: Path) -> tuple[dict[str, Tensor], list[Case]]:
    """One advantage a run: GRPO and RLOO of verl and TRL, the mean of the batch of OpenRLHF."""
    rewards = numbers(5)(12)
    rewards[5:8] = 0.75
    equal = rewards.clone()
    equal[8:] = -0.5
    cases = [*_verl_groups(wheels, rewards), *_trl_groups(wheels, equal), *_openrlhf_groups(wheels, equal)]
    return {"rewards": rewards}, cases


def _verl_groups(wheels: Path, rewards: Tensor) -> Iterator[Case]:
    wheel = Wheel(wheels, "verl")
    names = ["compute_grpo_outcome_advantage", "compute_rloo_outcome_advantage"]
    of = wheel.take(CORE, names, {"torch": torch, "np": np, "defaultdict": defaultdict, "Optional": Optional})
    token, mask = rewards[:, None], torch.ones(12, 1, dtype=torch.float64)
    group = np.array(UNEQUAL)
    for scale in ("group", "none"):
        each = of[names[0]](token, mask, group, 1e-6, scale == "group")[0]
        settings = {"algorithm_type": "grpo", "scale": scale, "epsilon": 1e-6}
        yield case(wheel, names[0], settings, {"advantages": each[:, 0]}, groups=UNEQUAL)
    each = of[names[1]](token, mask, group)[0]
    yield case(wheel, names[1], {"algorithm_type": "rloo"}, {"advantages": each[:, 0]}, groups=UNEQUAL)


def _trl_groups(wheels: Path, rewards: Tensor) -> Iterator[Case]:
    wheel = Wheel(wheels, "trl")
    given = wheel.take("trl/trainer/utils.py", ["nanstd"], {"torch": torch})
    given |= {"num_generations": 4, "device": "cpu", "rewards": rewards}
    given |= {"rewards_per_func": rewards[:, None], "unscorable_mask": torch.zeros(12, dtype=torch.bool)}
    for scale in ("group", "batch", "none"):
        trainer = SimpleNamespace(multi_objective_aggregation="sum_then_normalize", scale_rewards=scale)
        trainer.reward_weights = torch.ones(1, dtype=torch.float64)
        ran = wheel.run(
            "trl/trainer/grpo_trainer.py",
            "GRPOTrainer._generate_and_score_completions",
            "self.multi_objective_aggregation == 'sum_then_normalize'",
            given | {"self": trainer},
            assigns="advantages",
        )
        settings = {"algorithm_type": "grpo", "scale": scale, "epsilon": 1e-4}
        outputs = {"advantages": ran["advantages"]}
        function = "GRPOTrainer._generate_and_score_completions"
        yield case(wheel, function, settings, outputs, groups=EQUAL, rewards=rewards)
    grouped = rewards.view(3, 4)
    given |= {"grouped_rewards": grouped, "grouped_sum": grouped.sum(1, keepdim=True)}
    given["scorable_counts"] = torch.full((3, 1), 4)
    function = "RLOOTrainer._generate_and_score_completions"
    ran = wheel.run("trl/trainer/rloo_trainer.py", function, "num_generations > 1", given, assigns="baselines")
    outputs = {"advantages": ran["advantages"]}
    yield case(wheel, function, {"algorithm_type": "rloo"}, outputs, groups=EQUAL, rewards=rewards)


def _openrlhf_groups(wheels: Path, rewards: Tensor) -> Iterator[Case]:
    wheel = Wheel(wheels, "openrlhf")
    given: dict[str, Any] = {"torch": torch, "rewards": rewards.view(3, 4)}
    names = {"rloo": "rloo", "dr_grpo": "grpo", "group_norm": "grpo", "flash_reinforce": "reinforce"}
    for estimator, algorithm in names.items():
        chosen = SimpleNamespace(estimator=estimator)
        args = SimpleNamespace(algo=SimpleNamespace(advantage=chosen), rollout=SimpleNamespace(n_samples_per_prompt=4))
        ran = wheel.run(
            "trainer/ppo_utils/experience_maker.py",
            "RemoteExperienceMaker.compute_advantages_and_returns",
            "args.algo.advantage.estimator == 'rloo'",
            given | {"args": args},
            assigns="baseline",
        )
        settings = {"algorithm_type": algorithm, "scale": "group" if estimator == "group_norm" else "none"}
        settings |= {"epsilon": 1e-9, "kind": "batch"}
        outputs = {"advantages": ran["rewards"].flatten()}
        function = f"RemoteExperienceMaker.compute_advantages_and_returns ({estimator})"
        yield case(wheel, function, settings, outputs, groups=EQUAL, rewards=rewards)


def multi_step(wheels: Path) -> tuple[dict[str, Tensor], list[Case]]:
    """Trinity-RFT's multi_step_grpo, in float32: an advantage a call of runs of 1 to 3 calls in two groups."""
    runs, tasks = [0, 0, 1, 2, 2, 2, 3, 4, 4, 5], [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    rewards = torch.tensor([0.5, 1.0, 0.25, 0.0, 0.125, 0.75, -1.0, 0.5, 0.5, 2.0], dtype=torch.float64)
    wheel = Wheel(wheels, "trinity_rft")
    given = wheel.take("trinity/common/experience.py", ["group_by"], {})
    given |= {"torch": torch, "AdvantageFn": type("Parent", (), {}), "ExperienceOperator": type("Other", (), {})}
    given["aggregate_metrics"] = lambda metrics, prefix: {}
    name, file = "StepWiseGRPOAdvantageFn", "advantage_fn/multi_step_grpo_advantage.py"
    algorithm = wheel.take(file, [name], given)[name]
    cases = []
    for scale in ("group", "batch"):
        for step_norm in (False, True):
            calls = [
                SimpleNamespace(eid=SimpleNamespace(tid=task, rid=run), reward=float(reward), action_mask=torch.ones(1))
                for task, run, reward in zip(tasks, runs, rewards, strict=True)
            ]
            algorithm(enable_step_norm=step_norm, std_cal_level=scale).process(calls)
            outputs = {"advantages": torch.cat([call.advantages for call in calls])}
            settings = {"algorithm_type": "multi_step_grpo", "scale": scale, "step_norm": step_norm, "epsilon": 1e-6}
            cases.append(case(wheel, f"{name}.process", settings, outputs))
    return {"rewards": rewards, "runs": torch.tensor(runs), "groups": torch.tensor(tasks)}, cases


FILES = {"gae": gae, "reinforce_pp": reinforce_pp, "groups": groups, "multi_step": multi_step}
