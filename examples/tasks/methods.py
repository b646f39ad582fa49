"""Settings of each method, the number of compared runs of a question, and the kind of feedback.

Shared by examples and benchmark. The learning rates fit a model of 0.36 M parameters.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from examples.tasks.calculator import MOST_CALLS

BATCH = 64
GROUP = 8
LR, CRITIC_LR, BETAS = 2e-4, 1e-3, (0.9, 0.99)

Feedback = Literal["reward", "preference", "demonstration"]


class Method(NamedTuple):
    """`runs` of a question; the kind of `feedback`; `taught`: the method needs a teacher."""

    algorithm: dict[str, Any]
    runs: int = 1
    feedback: Feedback = "reward"
    taught: bool = False

    def settings(self, task: str, changes: Sequence[str] = (), *, teacher: Path | None = None) -> dict[str, Any]:
        """The sections `algorithm` and `buffer` of the settings file; `changes` are NAME=VALUE, over `algorithm`."""
        algorithm = _over(_over(_COMMON, self.algorithm), nest(changes))
        if self.taught:
            algorithm = _over({"distill": {"teacher_path": str(teacher)}}, algorithm)
        if task == "calculator" and self.runs == 1:
            group: dict[str, Any] = {"group_by": "run"}
        elif self.runs > 1:
            group = {"group_by": "preference" if self.feedback == "preference" else "task", "group_size": self.runs}
        else:
            group = {}
        # as many groups per step as in the other tasks: with fewer, noise undoes the learning
        calls = MOST_CALLS if task == "calculator" and self.runs > 1 else 1
        return {"algorithm": algorithm, "buffer": {"train_batch_size": BATCH * calls, **group}}


_COMMON: dict[str, Any] = {
    "optimizer": {"lr": LR, "betas": list(BETAS)},
    "critic_optimizer": {"lr": CRITIC_LR, "betas": list(BETAS)},
    "mini_batches": 2,
    "kl_coef": 0.0,
}

METHODS: dict[str, Method] = {
    "ppo": Method({"algorithm_type": "ppo"}),
    "reinforce": Method({"algorithm_type": "reinforce"}),
    "reinforce++": Method({"algorithm_type": "reinforce++"}),
    "rloo": Method({"algorithm_type": "rloo"}, runs=GROUP),
    "grpo": Method({"algorithm_type": "grpo"}, runs=GROUP),
    "multi_step_grpo": Method({"algorithm_type": "multi_step_grpo"}, runs=GROUP),
    # These two do not correct for old replies: at the others' rate dpo oscillates with replies two steps late, and kto
    # forgets everything.
    "dpo": Method({"algorithm_type": "dpo", "optimizer": {"lr": 1e-4}}, runs=GROUP),
    "kto": Method({"algorithm_type": "kto", "optimizer": {"lr": 5e-5}}),
    "raft": Method({"algorithm_type": "raft"}),
    "sft": Method({"algorithm_type": "sft", "sft": {"targets": "demonstrations"}}, feedback="demonstration"),
    "distill": Method({"algorithm_type": "distill"}, taught=True),
}

#: Those that the bar of the benchmark is about.
REINFORCEMENT = ("ppo", "reinforce", "reinforce++", "rloo", "grpo", "multi_step_grpo")

#: TRL's trainers get the best of these.
LEARNING_RATES_OF_TRL = ("1e-4", "2e-4", "5e-4")


def nest(changes: Sequence[str]) -> dict[str, Any]:
    """`optimizer.lr=1e-4` as `{"optimizer": {"lr": 0.0001}}`."""
    tree: dict[str, Any] = {}
    for name, value in (each.split("=", 1) for each in changes):
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        # YAML reads 1e-4 as text.
        parsed = yaml.safe_load(value)
        node[last] = float(parsed) if isinstance(parsed, str) and _is_number(parsed) else parsed
    return tree


def _over(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: _over(settings[name], each) for name, each in changes.items() if isinstance(settings.get(name), dict)}
    return {**settings, **changes, **both}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
