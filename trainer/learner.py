"""The learner: batches in, better weights out. Knows no database and no files.

Dimension suffixes are explained in trainer/batch.py.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shared.config import Settings
from shared.errors import TuneloopError
from shared.experience import Sample
from trainer.algorithms import ALGORITHMS
from trainer.algorithms.estimators import explained_variance, token_mean
from trainer.algorithms.targets import Targets
from trainer.batch import Batch, collate, micro_batches
from trainer.metrics import Metrics
from trainer.model import Actor, Critic
from trainer.optimizer import MasterAdamW


class NotFinite(TuneloopError):
    """A loss or gradient was not finite; the learner is as it was before the step."""


class Learner:
    """Actor, critic and reference, their optimizers, and the random numbers that shuffle mini-batches.

    `steps` counts batches learnt from. The reference is the base model, or None if the algorithm does not look at it.
    """

    def __init__(self, settings: Settings, *, actor: Actor, critic: Critic, reference: Actor | None) -> None:
        self.steps = 0
        self.actor, self.critic, self.reference = actor, critic, reference
        self.actor_optimizer = MasterAdamW(actor.network, settings.algorithm.optimizer)
        self.critic_optimizer = MasterAdamW(critic, settings.algorithm.critic_optimizer)
        self.generator = torch.Generator().manual_seed(settings.trainer.seed)
        self._algorithm = settings.algorithm
        self._page = ALGORITHMS[settings.algorithm.algorithm_type]
        self._budget = settings.trainer.micro_batch_tokens
        self._device = actor.network.device

    def step(self, samples: Sequence[Sample]) -> Metrics:
        """Learn from a batch: epochs x mini-batches updates. Raises NotFinite, and then nothing has changed."""
        started = time.perf_counter()
        batch = collate(samples)
        go_back = self._safe_point()
        try:
            targets = self._targets(batch)
            metrics = self._learn(batch, targets)
        except NotFinite:
            go_back()
            raise
        self.steps += 1
        took = time.perf_counter() - started
        tokens = int(batch.lengths_B.sum())
        return metrics | _of_targets(targets) | {"time/train_step": took, "perf/tokens_per_second": tokens / took}

    def forward_backward(self, batch: Batch, targets: Targets) -> Metrics:
        """Add the gradients of one mini-batch to the masters'. It does not matter how it is cut into micro-batches."""
        sums: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self._device))
        for index_B in micro_batches(batch.lengths_B, self._budget):
            part = batch.rows(index_B).to(self._device)
            for name, value in self._backward(part, targets.rows(index_B, part.mask_BR), batch.tokens).items():
                sums[name] += value
        return {name: float(value) for name, value in sums.items()}

    def optim_step(self) -> Metrics:
        """Update the weights with the gradients added up. Raises NotFinite before it touches any."""
        trained = {"critic": self.critic_optimizer} | ({} if self._warming_up else {"actor": self.actor_optimizer})
        norms = {name: optimizer.gradient_norm() for name, optimizer in trained.items()}
        _must_be_finite({f"the {name}'s gradient norm": norm for name, norm in norms.items()})
        metrics = {f"{name}/grad_norm": norm for name, norm in norms.items()}
        for name, optimizer in trained.items():
            metrics[f"{name}/lr"] = optimizer.lr
            optimizer.update(norm=norms[name], max_norm=self._algorithm.max_grad_norm)
        return metrics

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """The actor's log-probability of each id but the first after those before it, at temperature 1."""
        ids_BT = torch.tensor([ids])
        here_BT = torch.ones_like(ids_BT, dtype=torch.bool)
        last_BT = torch.arange(len(ids))[None] == len(ids) - 1
        batch = Batch(
            ids_BT=ids_BT,
            predicts_BT=~last_BT,
            replies_BR=ids_BT[:, 1:],
            mask_BR=here_BT[:, 1:],
            sampled_BR=torch.zeros(1, len(ids) - 1),
            rewards_BR=torch.zeros(1, len(ids) - 1),
            temperatures_B=torch.ones(1),
            lengths_B=torch.tensor([len(ids)]),
        )
        logprobs_BR, _ = self.actor.score(batch.to(self._device))
        return [float(value) for value in logprobs_BR[0]]

    @property
    def _warming_up(self) -> bool:
        return self.steps < self._algorithm.critic_warmup_steps

    def _learn(self, batch: Batch, targets: Targets) -> Metrics:
        updates = []
        for _ in range(self._algorithm.epochs):
            order_B = torch.randperm(len(batch.lengths_B), generator=self.generator)
            for index_B in order_B.tensor_split(min(self._algorithm.mini_batches, len(order_B))):
                mini = batch.rows(index_B)
                metrics = self.forward_backward(mini, targets.rows(index_B, mini.mask_BR))
                _must_be_finite(metrics)
                updates.append(metrics | self.optim_step())
        means = {name: sum(each[name] for each in updates) / len(updates) for name in updates[0]}
        # Only the first update meets the weights as they were before the step.
        return means | {name: value for name, value in updates[0].items() if name.startswith("mismatch_kl/")}

    def _backward(self, batch: Batch, targets: Targets, tokens: int) -> Mapping[str, Tensor]:
        values_BR = self.critic.values(batch)
        critic = self._page.critic_loss(self._algorithm, targets, values_BR, tokens=tokens)
        torch.autograd.backward(critic.value)
        if self._warming_up:
            return critic.metrics
        logprobs_BR, entropy_BR = self.actor.score(batch)
        actor = self._page.actor_loss(self._algorithm, targets, logprobs_BR, entropy_BR, tokens=tokens)
        torch.autograd.backward(actor.value)
        return {**critic.metrics, **actor.metrics}

    @torch.no_grad()
    def _targets(self, batch: Batch) -> Targets:
        values_BR = self._over(batch, self.critic.values)
        reference = self.reference
        advantages_BR, returns_BR = self._page.advantages(self._algorithm, batch.rewards_BR, values_BR, batch.mask_BR)
        return Targets(
            mask_BR=batch.mask_BR,
            sampled_BR=batch.sampled_BR,
            reference_BR=None if reference is None else self._over(batch, lambda part: reference.score(part)[0]),
            values_BR=values_BR,
            advantages_BR=advantages_BR,
            returns_BR=returns_BR,
        )

    def _over(self, batch: Batch, each: Callable[[Batch], Tensor]) -> Tensor:
        """What `each` says of the batch, micro-batch by micro-batch."""
        all_BR = torch.zeros_like(batch.sampled_BR)
        for index_B in micro_batches(batch.lengths_B, self._budget):
            part_BR = each(batch.rows(index_B).to(self._device)).cpu()
            all_BR[index_B, : part_BR.shape[1]] = part_BR
        return all_BR

    def _safe_point(self) -> Callable[[], None]:
        """How to come back here. The weights are copied only if they may change before the last check."""
        random = self.generator.get_state()
        returns = [_return_to(self.actor_optimizer), _return_to(self.critic_optimizer)] if self._many_updates else []

        def go_back() -> None:
            self.generator.set_state(random)
            for each in returns:
                each()
            self.actor_optimizer.forget()
            self.critic_optimizer.forget()

        return go_back

    @property
    def _many_updates(self) -> bool:
        return self._algorithm.epochs * self._algorithm.mini_batches > 1


def _return_to(optimizer: MasterAdamW) -> Callable[[], None]:
    updates = optimizer.updates
    weights = {name: weight.to("cpu", copy=True) for name, weight in optimizer.weights().items()}
    moments = {name: moment.to("cpu", copy=True) for name, moment in optimizer.moments().items()}
    return lambda: optimizer.restore(updates=updates, weights=weights, moments=moments)


def _must_be_finite(numbers: Mapping[str, float]) -> None:
    strange = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]
    if strange:
        raise NotFinite("; ".join(strange))


def _of_targets(targets: Targets) -> Metrics:
    tokens = int(targets.mask_BR.sum())
    means = {
        "critic/advantages/mean": targets.advantages_BR,
        "critic/returns/mean": targets.returns_BR,
        "critic/values/mean": targets.values_BR,
    }
    explained = explained_variance(targets.values_BR, targets.returns_BR, targets.mask_BR)
    return {name: float(token_mean(each_BR, targets.mask_BR, tokens)) for name, each_BR in means.items()} | {
        "critic/vf_explained_var": float(explained)
    }
