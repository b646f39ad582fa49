"""The algorithms: a page each, pure functions of tensors; this is their table, by `algorithm.algorithm_type`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms import (
    cispo,
    dapo,
    distill,
    dpo,
    grpo,
    gspo,
    kto,
    multi_step_grpo,
    ppo,
    reinforce,
    reinforce_pp,
    rloo,
    sft,
)
from tuneloop.trainer.algorithms.terms import (
    Baselines,
    CallRewards,
    Loss,
    PolicyLoss,
    Targets,
    Totals,
    needs_start,
    ppo_policy_loss,
    surrogate,
)

Prepare = Callable[[AlgorithmSettings, Targets, CallRewards, Baselines], tuple[Targets, Baselines]]
ActorLoss = Callable[[AlgorithmSettings, Targets, Tensor, Tensor, Totals], Loss]
CriticLoss = Callable[[AlgorithmSettings, Targets, Tensor, Totals], Loss]


class Requirements(NamedTuple):
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
class Algorithm:
    """An algorithm. `prepare` is called once per step on the whole batch, without gradient; a loss on each micro-batch.

    The losses take targets and the models' answers: the actor's log-probabilities and entropies, the critic's values.
    An algorithm without `critic_loss` has no critic.
    """

    asks: Callable[[AlgorithmSettings], Requirements]
    prepare: Prepare
    actor_loss: ActorLoss
    critic_loss: CriticLoss | None = None


def policy_gradient_requirements(algorithm: AlgorithmSettings) -> Requirements:
    """What every policy gradient asks for."""
    return Requirements(reference=algorithm.kl_coef > 0, start=needs_start(algorithm.off_policy))


def _imitation_requirements(algorithm: AlgorithmSettings) -> Requirements:
    return Requirements(tempered=False)


def _distill_requirements(algorithm: AlgorithmSettings) -> Requirements:
    if algorithm.distill.mode == "replies":
        return _imitation_requirements(algorithm)
    return policy_gradient_requirements(algorithm)._replace(teacher=True)


def _policy_gradient(
    prepare: Prepare, critic_loss: CriticLoss | None = None, policy_loss: PolicyLoss = ppo_policy_loss
) -> Algorithm:
    loss = partial(surrogate, policy_loss=policy_loss)
    return Algorithm(asks=policy_gradient_requirements, prepare=prepare, actor_loss=loss, critic_loss=critic_loss)


ALGORITHMS = {
    "ppo": _policy_gradient(ppo.prepare, ppo.critic_loss),
    "reinforce": _policy_gradient(reinforce.prepare),
    "reinforce++": _policy_gradient(reinforce_pp.prepare),
    "rloo": _policy_gradient(rloo.prepare),
    "grpo": _policy_gradient(grpo.prepare),
    "dapo": _policy_gradient(dapo.prepare),
    "gspo": _policy_gradient(grpo.prepare, policy_loss=gspo.policy_loss),
    "cispo": _policy_gradient(grpo.prepare, policy_loss=cispo.policy_loss),
    "multi_step_grpo": _policy_gradient(multi_step_grpo.prepare),
    "dpo": Algorithm(
        asks=lambda _: Requirements(reference=True, tempered=False, pairs=True),
        prepare=dpo.prepare,
        actor_loss=dpo.actor_loss,
    ),
    "kto": Algorithm(
        asks=lambda _: Requirements(reference=True, tempered=False, mismatched=True),
        prepare=kto.prepare,
        actor_loss=kto.actor_loss,
    ),
    "sft": Algorithm(asks=_imitation_requirements, prepare=sft.prepare, actor_loss=sft.actor_loss),
    "raft": Algorithm(asks=_imitation_requirements, prepare=sft.prepare, actor_loss=sft.actor_loss),
    "distill": Algorithm(asks=_distill_requirements, prepare=distill.prepare, actor_loss=distill.actor_loss),
}
