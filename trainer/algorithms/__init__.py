"""The algorithms: a page each, pure functions of tensors; this is their table, by `algorithm.algorithm_type`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shared.config import Algorithm
from trainer.algorithms import ppo
from trainer.algorithms.targets import Loss, Targets


class ActorLoss(Protocol):
    """The actor's loss, of its log-probabilities and entropies."""

    def __call__(
        self, algorithm: Algorithm, targets: Targets, logprobs_BR: Tensor, entropy_BR: Tensor, *, tokens: int
    ) -> Loss:
        """The share of a micro-batch in the loss of a mini-batch of `tokens` action tokens."""
        ...


class CriticLoss(Protocol):
    """The critic's loss, of its values."""

    def __call__(self, algorithm: Algorithm, targets: Targets, values_BR: Tensor, *, tokens: int) -> Loss:
        """The share of a micro-batch in the loss of a mini-batch of `tokens` action tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What the learner asks of an algorithm. `advantages` maps rewards, old values, mask to advantages and returns."""

    advantages: Callable[[Algorithm, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    actor_loss: ActorLoss
    critic_loss: CriticLoss


ALGORITHMS = {
    "ppo": Page(advantages=ppo.advantages, actor_loss=ppo.actor_loss, critic_loss=ppo.critic_loss),
}
