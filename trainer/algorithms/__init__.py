"""The algorithms: a page each, pure functions of tensors; this is their table, by `algorithm.algorithm_type`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms import (
    distill,
    dpo,
    grpo,
    kto,
    multi_step_grpo,
    ppo,
    reinforce,
    reinforce_pp,
    rloo,
    sft,
)
from tuneloop.trainer.algorithms.terms import off_policy
from tuneloop.trainer.algorithms.terms.moments import Baselines
from tuneloop.trainer.algorithms.terms.policy_loss import surrogate
from tuneloop.trainer.algorithms.terms.targets import Calls, Loss, Targets, Totals

Prepare = Callable[[AlgorithmSettings, Targets, Calls, Baselines], tuple[Targets, Baselines]]
ActorLoss = Callable[[AlgorithmSettings, Targets, Tensor, Tensor, Totals], Loss]
CriticLoss = Callable[[AlgorithmSettings, Targets, Tensor, Totals], Loss]


class Asks(NamedTuple):
    """What an algorithm wants to see: log-probabilities of the base model, at the start of the step, of the teacher.

    `tempered`: log-probabilities at the temperature of the sampling, else at 1. `mismatched`: the divergence from the
    base model on prompts with each other's replies. `pairs`: two replies to one prompt, of which one is better.
    """

    reference: bool = False
    start: bool = False
    teacher: bool = False
    tempered: bool = True
    mismatched: bool = False
    pairs: bool = False

    @property
    def by_reply(self) -> bool:
        """Whether each reply is judged by itself: calls of a run must not share a sequence."""
        return self.mismatched or self.pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec:
    """An algorithm. `prepare` is called once per step on the whole batch, without gradient; a loss on each micro-batch.

    The losses take targets and the models' answers: the actor's log-probabilities and entropies, the critic's values.
    An algorithm without `critic_loss` has no critic.
    """

    asks: Callable[[AlgorithmSettings], Asks]
    prepare: Prepare
    actor_loss: ActorLoss
    critic_loss: CriticLoss | None = None


def policy_gradient(algorithm: AlgorithmSettings) -> Asks:
    """What every policy gradient asks for."""
    return Asks(reference=algorithm.kl_coef > 0, start=off_policy.needs_start(algorithm.off_policy))


def _preference(algorithm: AlgorithmSettings) -> Asks:
    return Asks(reference=not algorithm.dpo.reference_free, tempered=False, pairs=True)


def _by_itself(algorithm: AlgorithmSettings) -> Asks:
    return Asks(reference=True, tempered=False, mismatched=True)


def _imitation(algorithm: AlgorithmSettings) -> Asks:
    return Asks(tempered=False)


def _of_a_teacher(algorithm: AlgorithmSettings) -> Asks:
    if algorithm.distill.mode == "replies":
        return _imitation(algorithm)
    return policy_gradient(algorithm)._replace(teacher=True)


ALGORITHMS = {
    "ppo": AlgorithmSpec(asks=policy_gradient, prepare=ppo.prepare, actor_loss=surrogate, critic_loss=ppo.critic_loss),
    "reinforce": AlgorithmSpec(asks=policy_gradient, prepare=reinforce.prepare, actor_loss=surrogate),
    "reinforce++": AlgorithmSpec(asks=policy_gradient, prepare=reinforce_pp.prepare, actor_loss=surrogate),
    "rloo": AlgorithmSpec(asks=policy_gradient, prepare=rloo.prepare, actor_loss=surrogate),
    "grpo": AlgorithmSpec(asks=policy_gradient, prepare=grpo.prepare, actor_loss=surrogate),
    "multi_step_grpo": AlgorithmSpec(asks=policy_gradient, prepare=multi_step_grpo.prepare, actor_loss=surrogate),
    "dpo": AlgorithmSpec(asks=_preference, prepare=dpo.prepare, actor_loss=dpo.actor_loss),
    "kto": AlgorithmSpec(asks=_by_itself, prepare=kto.prepare, actor_loss=kto.actor_loss),
    "sft": AlgorithmSpec(asks=_imitation, prepare=sft.prepare, actor_loss=sft.actor_loss),
    "raft": AlgorithmSpec(asks=_imitation, prepare=sft.prepare, actor_loss=sft.actor_loss),
    "distill": AlgorithmSpec(asks=_of_a_teacher, prepare=distill.prepare, actor_loss=distill.actor_loss),
}
