"""Maps `algorithm.algorithm_type` to algorithms; each is a module of pure functions of tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms import (
    cispo,
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
    Prepared,
    Targets,
    Totals,
    needs_start,
    ppo_policy_loss,
    surrogate,
)

Prepare = Callable[[AlgorithmSettings, Targets, CallRewards, Baselines], Prepared]
ActorLoss = Callable[[AlgorithmSettings, Targets, Tensor, Tensor, Totals], Loss]
CriticLoss = Callable[[AlgorithmSettings, Targets, Tensor, Totals], Loss]


class Requirements(NamedTuple):
    """Inputs of an algorithm: log-probabilities of the base model, at the step's start, of the teacher.

    `tempered`: log-probabilities at the sampling temperature, otherwise at 1. `mismatched`: the divergence from the
    base model on prompts with each other's replies. `pairs`: preferred and rejected replies to one prompt.
    """

    reference: bool = False
    start: bool = False
    teacher: bool = False
    tempered: bool = True
    mismatched: bool = False
    pairs: bool = False

    @property
    def by_reply(self) -> bool:
        """Whether replies are judged separately, so that calls of a run may not share a sequence."""
        return self.mismatched or self.pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An algorithm: `prepare` runs once per step on the batch, without gradient; a loss runs per micro-batch.

    Losses take targets and the models' outputs: the actor's log-probabilities and entropies, or the critic's values.
    """

    asks: Callable[[AlgorithmSettings], Requirements]
    prepare: Prepare
    actor_loss: ActorLoss
    critic_loss: CriticLoss | None = None


def policy_gradient_requirements(algorithm: AlgorithmSettings) -> Requirements:
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
    "dapo": _policy_gradient(grpo.prepare),
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
