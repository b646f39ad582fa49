"""The learner: batches in, better weights out. Knows no database and no files.

Dimension suffixes are explained in trainer/batches/batch.py.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tuneloop.shared.errors import NotFinite, TuneloopError
from tuneloop.shared.experience import Sample
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.algorithms import ALGORITHMS
from tuneloop.trainer.algorithms.terms.estimators import explained_variance, kl, token_mean
from tuneloop.trainer.algorithms.terms.moments import Baselines
from tuneloop.trainer.algorithms.terms.off_policy import importance_weights
from tuneloop.trainer.algorithms.terms.preferences import sequence_sums
from tuneloop.trainer.algorithms.terms.targets import Targets, Totals, require
from tuneloop.trainer.batches.batch import Batch, collate, micro_batches, mini_batches
from tuneloop.trainer.batches.credit import calls_of
from tuneloop.trainer.batches.metrics import Metrics
from tuneloop.trainer.batches.pairs import mismatch_replies
from tuneloop.trainer.batches.sequences import TokenSequence, assemble
from tuneloop.trainer.models.model import Actor, Critic
from tuneloop.trainer.models.optimizer import MasterAdamW
from tuneloop.trainer.teacher.teacher import Teacher


class Learner:
    """Actor, critic and reference, their optimizers, and the random numbers that shuffle mini-batches.

    `steps` counts batches learnt from. The reference is the base model; it and the critic are None if the algorithm
    does not look at them; `critic_since` is the number of steps after which the critic was begun. `teacher` is set by
    who has one, before the first step of an algorithm that asks for it.
    `baselines` is what the algorithm remembers from step to step.
    """

    def __init__(self, settings: Settings, *, actor: Actor, critic: Critic | None, reference: Actor | None) -> None:
        self.steps = self.critic_since = 0
        self.actor, self.critic, self.reference = actor, critic, reference
        self.optimizers = {"actor": MasterAdamW(actor.network, settings.algorithm.optimizer)}
        if critic is not None:
            self.optimizers["critic"] = MasterAdamW(critic, settings.algorithm.critic_optimizer)
        self.teacher: Teacher | None = None
        self.baselines: Baselines = {}
        self.generator = torch.Generator().manual_seed(settings.trainer.seed)
        self._algorithm = settings.algorithm
        self._page = ALGORITHMS[settings.algorithm.algorithm_type]
        self._asks = self._page.asks(settings.algorithm)
        #: Tokens that go through the model at once.
        self.micro_batch_tokens = settings.trainer.micro_batch_tokens
        self._most_tokens = settings.model.max_response_tokens
        self._device = actor.network.device

    def step(self, samples: Sequence[Sample], *, version: int | None = None) -> Metrics:
        """Learn from a batch: epochs x mini-batches updates. `version` is the one that the actor is, if it is any.

        Raises NotFinite, torch.OutOfMemoryError, or what the teacher raises, and then nothing has changed.
        """
        started = time.perf_counter()
        sequences = assemble(samples, merge=self._algorithm.merge_calls and not self._asks.by_reply)
        batch = self._collate(sequences)
        go_back = self._safe_point()
        try:
            targets, told = self._targets(sequences, batch, version)
            metrics = self._learn(batch, targets)
        except (TuneloopError, torch.OutOfMemoryError):
            go_back()
            raise
        self.steps += 1
        took = time.perf_counter() - started
        alone = sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples)
        tokens = int(batch.lengths_B.sum())
        speed = {"time/train_step": took, "perf/tokens_per_second": tokens / took, "perf/merged": alone / tokens}
        return metrics | told | speed

    def forward_backward(self, batch: Batch, targets: Targets) -> Metrics:
        """Add the gradients of one mini-batch to the masters'. It does not matter how it is cut into micro-batches."""
        totals = targets.totals
        sums: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self._device))
        for index_B in micro_batches(batch.lengths_B, self.micro_batch_tokens, targets.units_B):
            part = batch.rows(index_B).to(self._device)
            for name, value in self._backward(part, targets.rows(index_B, part.mask_BR), totals).items():
                sums[name] += value
        return {name: float(value) for name, value in sums.items()}

    def optim_step(self) -> Metrics:
        """Update the weights with the gradients added up. Raises NotFinite before it touches any."""
        trained = {name: each for name, each in self.optimizers.items() if name != "actor" or not self._warming_up}
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
        last_BT = torch.arange(len(ids))[None] == len(ids) - 1
        like_BR = torch.zeros(1, len(ids) - 1)
        batch = Batch(
            ids_BT=ids_BT,
            predicts_BT=~last_BT,
            replies_BR=ids_BT[:, 1:],
            mask_BR=like_BR == 0,
            sampled_BR=like_BR,
            temperatures_BR=like_BR + 1,
            calls_BR=like_BR.long(),
            lengths_B=torch.tensor([len(ids)]),
        )
        logprobs_BR, _ = self.actor.score(batch.to(self._device))
        return [float(value) for value in logprobs_BR[0]]

    @torch.no_grad()
    def distance(self, other: Actor, samples: Sequence[Sample]) -> float:
        """The mean over the samples' tokens of KL(actor || other), in nats, as `kl_estimator` estimates it."""
        batch = self._collate(assemble(samples, merge=False))
        apart_BR = kl(self._score(self.actor, batch), self._score(other, batch), self._algorithm.kl_estimator)
        return float(token_mean(apart_BR, batch.mask_BR, batch.tokens))

    @property
    def _warming_up(self) -> bool:
        return self.critic is not None and self.steps - self.critic_since < self._algorithm.critic_warmup_steps

    def _collate(self, sequences: Sequence[TokenSequence]) -> Batch:
        batch = collate(sequences)
        if self._asks.tempered:
            return batch
        return replace(batch, temperatures_BR=torch.ones_like(batch.temperatures_BR))

    def _learn(self, batch: Batch, targets: Targets) -> Metrics:
        updates = []
        for _ in range(self._algorithm.epochs):
            parts = mini_batches(len(batch.lengths_B), self._algorithm.mini_batches, targets.units_B, self.generator)
            for index_B in parts:
                mini = batch.rows(index_B)
                metrics = self.forward_backward(mini, targets.rows(index_B, mini.mask_BR))
                _must_be_finite(metrics)
                updates.append(metrics | self.optim_step())
        # Only the first update meets the weights as they were before the step.
        first = {name: value for name, value in updates[0].items() if name.startswith("mismatch_kl/")}
        names = updates[0].keys() - first.keys()
        return first | {name: sum(each[name] for each in updates) / len(updates) for name in names}

    def _backward(self, batch: Batch, targets: Targets, totals: Totals) -> Mapping[str, Tensor]:
        metrics: dict[str, Tensor] = {}
        if self.critic is not None and self._page.critic_loss is not None:
            critic = self._page.critic_loss(self._algorithm, targets, self.critic.values(batch), totals)
            torch.autograd.backward(critic.value)
            metrics.update(critic.metrics)
        if self._warming_up:
            return metrics
        logprobs_BR, entropy_BR = self.actor.score(batch)
        actor = self._page.actor_loss(self._algorithm, targets, logprobs_BR, entropy_BR, totals)
        torch.autograd.backward(actor.value)
        return {**metrics, **actor.metrics}

    @torch.no_grad()
    def _targets(
        self, sequences: Sequence[TokenSequence], batch: Batch, version: int | None = None
    ) -> tuple[Targets, Metrics]:
        """The constants of the step, and what can be said of them."""
        targets = Targets(mask_BR=batch.mask_BR, sampled_BR=batch.sampled_BR)
        told: Metrics = {}
        if self.critic is not None:
            targets = replace(targets, values_BR=self._over(batch, self.critic.values))
        if self.reference is not None:
            targets = replace(targets, reference_BR=self._score(self.reference, batch))
        if self._asks.start:
            start_BR = self._score(self.actor, batch)
            weights_BR, weighed = importance_weights(
                self._algorithm.off_policy, start_BR, batch.sampled_BR, batch.mask_BR
            )
            targets = replace(targets, start_BR=start_BR, weights_BR=weights_BR)
            told.update(weighed)
        if self._asks.teacher:
            targets = replace(targets, teacher_BR=require(self.teacher).score(sequences))
        if self._asks.mismatched:
            targets = replace(targets, divergence=self._divergence(sequences))
        fresh = [each.version_min == each.version_max == version for sequence in sequences for each in sequence.calls]
        calls, baselines = calls_of(self._algorithm, sequences, batch, self.baselines, self._most_tokens)
        if any(fresh):
            targets = replace(targets, fresh_BR=calls.spread(torch.tensor(fresh)))
        targets, self.baselines = self._page.prepare(self._algorithm, targets, calls, baselines)
        return targets, told | _of_targets(targets)

    def _divergence(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """The mean of log(actor / reference) of replies to the prompts of others; 0 if there is but one."""
        replies = [sequence.calls[0] for sequence in sequences]
        strangers = mismatch_replies(replies)
        if not strangers:
            return torch.zeros(())
        batch = self._collate(assemble(strangers, merge=False))
        apart_BR = self._score(self.actor, batch) - self._score(require(self.reference), batch)
        return sequence_sums(apart_BR, batch.mask_BR).mean()

    def _score(self, actor: Actor, batch: Batch) -> Tensor:
        return self._over(batch, lambda part: actor.score(part)[0])

    def _over(self, batch: Batch, each: Callable[[Batch], Tensor]) -> Tensor:
        """What `each` says of the batch, micro-batch by micro-batch."""
        all_BR = torch.zeros_like(batch.sampled_BR)
        for index_B in micro_batches(batch.lengths_B, self.micro_batch_tokens):
            part_BR = each(batch.rows(index_B).to(self._device)).cpu()
            all_BR[index_B, : part_BR.shape[1]] = part_BR
        return all_BR

    def _safe_point(self) -> Callable[[], None]:
        """How to come back here. The weights are copied only if they may change before the last check."""
        random, baselines = self.generator.get_state(), self.baselines
        returns = [_return_to(optimizer) for optimizer in self.optimizers.values()] if self._many_updates else []

        def go_back() -> None:
            self.generator.set_state(random)
            self.baselines = baselines
            for each in returns:
                each()
            for optimizer in self.optimizers.values():
                optimizer.forget()

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
    mask_BR, tokens = targets.mask_BR, int(targets.mask_BR.sum())
    means = {
        "critic/advantages/mean": targets.advantages_BR,
        "critic/returns/mean": targets.returns_BR,
        "critic/values/mean": targets.values_BR,
    }
    told = {name: float(token_mean(each, mask_BR, tokens)) for name, each in means.items() if each is not None}
    factors = [each for each in (targets.advantages_BR, targets.weights_BR) if each is not None]
    if factors:
        idle_BR = torch.stack([each == 0 for each in factors]).any(0)
        told["critic/advantages/zero"] = float(token_mean(idle_BR.float(), mask_BR, tokens))
    if targets.values_BR is not None and targets.returns_BR is not None:
        explained = explained_variance(targets.values_BR, targets.returns_BR, mask_BR)
        told["critic/vf_explained_var"] = float(explained)
    return told
