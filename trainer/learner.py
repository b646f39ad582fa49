"""Updates weights from batches, without database and files."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor

from tuneloop.shared.errors import EnvironmentRefused, NotFinite, RankOutOfMemory, TuneloopError
from tuneloop.shared.experience import Float32s, Sample
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.algorithms import ALGORITHMS, sft
from tuneloop.trainer.algorithms.terms import (
    Baselines,
    Targets,
    Totals,
    explained_variance,
    importance_weights,
    kl,
    require,
    sequence_sums,
    token_mean,
)
from tuneloop.trainer.batches.batch import (
    Batch,
    Metrics,
    Positions,
    TokenSequence,
    all_but_first,
    assemble,
    calls_of,
    collate,
    count_positions,
    micro_batches,
    mini_batches,
    share_of,
)
from tuneloop.trainer.batches.rendered_lines import MixedFile
from tuneloop.trainer.batches.selection import mismatch_replies
from tuneloop.trainer.models.model import Actor, Critic, is_checkpointing
from tuneloop.trainer.models.optimizer import MasterAdamW
from tuneloop.trainer.parallel import ALONE, GatherOrder, Ranks, SequenceGroup, StepOrder, gathered_on_rank_0
from tuneloop.trainer.teacher.teacher import Teacher
from tuneloop.trainer.transfer import hand_over

#: A model's pass over a micro-batch, made together by the ranks of a group.
_Pass = Callable[[Batch, SequenceGroup | None], Tensor]


class Learner:
    """Actor, critic and reference with their optimizers, and the generator that shuffles mini-batches.

    `steps` counts trained batches. The reference is the base model unless replaced; it and the critic are None if the
    algorithm needs none. `mixed` is a file whose rows are trained beside each batch. `teacher` must be set before the
    first step of an algorithm that needs one. `baselines` are the algorithm's moments. The next update waits for copies
    that a GPU is `copying`. `spoilt`: a step failed after some updates, so the learner must be loaded again. Each of
    several `ranks` has a learner; rank 0's leads the steps of all.
    """

    def __init__(
        self, settings: Settings, *, actor: Actor, critic: Critic | None, reference: Actor | None, ranks: Ranks = ALONE
    ) -> None:
        self.ranks, self.spoilt = ranks, False
        self.steps = 0
        self.actor, self.critic, self.reference = actor, critic, reference
        adam = partial(MasterAdamW, ranks=ranks, compiled=actor.is_compiled, offload=settings.trainer.optimizer_offload)
        self.optimizers = {"actor": adam(actor.network, settings.algorithm.optimizer)}
        if critic is not None:
            self.optimizers["critic"] = adam(critic, settings.algorithm.adamw_of_critic)
        self.teacher: Teacher | None = None
        self.mixed: MixedFile | None = None
        self.reference_is_base = True
        self.baselines: Baselines = {}
        self.copying: list[torch.cuda.Event] = []
        self.generator = torch.Generator().manual_seed(settings.trainer.seed)
        self._algorithm = settings.algorithm
        self._page = ALGORITHMS[settings.algorithm.algorithm_type]
        self._asks = self._page.asks(settings.algorithm)
        #: Tokens per pass, and a function that reduces them when memory runs out within a step.
        self.micro_batch_tokens = settings.trainer.tokens_at_once
        self.smaller: Callable[[], int] | None = None
        self.before_pass: Callable[[], None] = do_nothing
        self.before_update: Callable[[], None] = do_nothing
        self._longest = settings.model.max_model_len or actor.longest
        self._most_tokens, self._device = settings.model.max_response_tokens, actor.network.device

    def step(self, samples: Sequence[Sample], *, version: int | None = None) -> Metrics:
        """Train on a batch, epochs x mini-batches updates. `version` is the actor's, if any.

        Raises NotFinite, torch.OutOfMemoryError, and the teacher's errors, without any change unless `spoilt`. Values
        that are not finite in the batch are found before the first update.
        """
        started = time.perf_counter()
        halves, again = self.smaller is not None, is_checkpointing(self.actor.network)
        self.ranks.lead(StepOrder(list(samples), version, self.micro_batch_tokens, halves, again))
        sequences = assemble(samples, merge=not self._asks.by_reply)
        batch = _collate(sequences, tempered=self._asks.tempered)
        random, baselines, updates = self.generator.get_state(), self.baselines, _updates_made(self.optimizers)
        models = [each for each in (self.actor, self.critic, self.reference) if each is not None]
        for model in models:
            model.positions = Positions()
        try:
            targets, measured = self._targets(sequences, batch, version)
            _must_be_finite(_constants(targets, sampled=self._asks.tempered))
            metrics = self._learn(batch, targets)
        except (TuneloopError, torch.OutOfMemoryError):
            self.generator.set_state(random)
            self.baselines = baselines
            _forget(self.optimizers)
            self.spoilt = _updates_made(self.optimizers) != updates
            raise
        self.steps += 1
        read = self.ranks.add_up_numbers(count_positions(model.positions for model in models))
        took, tokens = time.perf_counter() - started, int(batch.lengths_B.sum())
        alone = sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples)
        speed = {"time/train_step": took, "perf/tokens_per_second": tokens / took, "perf/merged": alone / tokens}
        return metrics | measured | speed | {"perf/useful_tokens": read["useful"] / read["processed"]}

    def tensors(self) -> Iterator[Tensor]:
        """The tensors of this learner alone, without a base model below adapters."""
        for model in (self.actor.network, self.critic):
            if model is not None:
                yield from (each for each in model.parameters() if each.requires_grad)
        for optimizer in self.optimizers.values():
            yield from optimizer.tensors()

    def forward_backward(self, batch: Batch, targets: Targets) -> Metrics:
        """Add a mini-batch's gradients to the masters', whatever its micro-batches."""
        with self.ranks.agree():
            # This rank's share; one of the ranks that share rows returns it.
            totals = targets.totals
            sums: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self._device))
            for index_B, counts in self._micro_batches(batch, targets.units_B, self.ranks):
                self.before_pass()
                part = batch.rows(index_B)
                if not counts:  # the same communication as `_backward`, without a gradient
                    if self.critic is not None and self._page.critic_loss is not None:
                        torch.autograd.backward(self.critic.values(part, self.ranks.sequence).sum() * 0)
                    torch.autograd.backward(self.actor.score(part, self.ranks.sequence)[0].sum() * 0)
                    continue
                goals = targets.rows(index_B, hand_over(part.mask_BR, self._device))
                for name, value in self._backward(part, goals, totals).items():
                    sums[name] += value
            metrics = {name: float(value) for name, value in sums.items()} if self.ranks.reports else {}
        for optimizer in self.optimizers.values():
            optimizer.add_up()
        return self.ranks.add_up_numbers(metrics)

    def optim_step(self) -> Metrics:
        """Update the weights. Raises NotFinite before any change, EnvironmentRefused after."""
        norms = {name: optimizer.gradient_norm() for name, optimizer in self.optimizers.items()}
        _must_be_finite({f"the {name}'s gradient norm": norm for name, norm in norms.items()})
        metrics = {f"{name}/grad_norm": norm for name, norm in norms.items()}
        while self.copying:
            self.copying.pop().wait()
        for name, optimizer in self.optimizers.items():
            metrics[f"{name}/lr"] = optimizer.lr
            try:
                optimizer.update(norm=norms[name], max_norm=self._algorithm.max_grad_norm)
            except torch.OutOfMemoryError as error:
                # Other weights, here or on other ranks, may be updated already.
                raise EnvironmentRefused(f"model.model_path: a GPU has no room for AdamW's state: {error}") from None
        return metrics

    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """The actor's log-probability of each id but the first, at temperature 1."""
        with self.reading_alone(self.actor):
            return [float(value) for value in self.actor.logprobs(all_but_first(ids))[0].cpu()]

    @torch.no_grad()
    def distance(self, other: Actor, samples: Sequence[Sample]) -> float:
        """This rank's mean over tokens of KL(actor || other) in nats, by `kl_estimator`."""
        batch = _collate(assemble(samples, merge=False), tempered=self._asks.tempered)
        with self.reading_alone(self.actor, other):
            here_BR, there_BR = (self._over(batch, each.logprobs, ALONE) for each in (self.actor, other))
        apart_BR = kl(here_BR, there_BR, self._algorithm.kl_estimator)
        return float(token_mean(apart_BR, batch.mask_BR, batch.tokens))

    def _learn(self, batch: Batch, targets: Targets) -> Metrics:
        updates, beside = [], self.mixed.rows(self.steps) if self.mixed else []
        for _ in range(self._algorithm.epochs):
            parts = mini_batches(len(batch.lengths_B), self._algorithm.mini_batches, targets.units_B, self.generator)
            for place, index_B in enumerate(parts):
                mini, rows = batch.rows(index_B), beside[place :: self._algorithm.mini_batches]
                updates.append(self._update(mini, targets.rows(index_B, mini.mask_BR), rows))
        # Means over updates; but only the first update sees the weights from before the step.
        first = {name: value for name, value in updates[0].items() if name.startswith("mismatch_kl/")}
        names = updates[0].keys() - first.keys()
        return first | {name: sum(each[name] for each in updates) / len(updates) for name in names}

    def imitate(self, rows: Sequence[Sample]) -> Metrics:
        """Add the gradients of mixed rows to the masters', weighted by their share."""
        batch, share = _collate(assemble(rows, merge=False), tempered=False), self.mixed.share if self.mixed else 0.0
        targets, loss = Targets(mask_BR=batch.mask_BR, sampled_BR=batch.sampled_BR), 0.0
        with self.ranks.agree():
            for index_B, counts in self._micro_batches(batch, None, self.ranks):
                self.before_pass()
                part = batch.rows(index_B)
                goals = targets.rows(index_B, hand_over(part.mask_BR, self._device))
                scores = self.actor.score(part, self.ranks.sequence)
                of_part = sft.actor_loss(self._algorithm, goals, *scores, targets.totals)
                torch.autograd.backward(of_part.value * (share if counts else 0.0))
                loss += float(of_part.value.detach()) if counts and self.ranks.reports else 0.0
        for optimizer in self.optimizers.values():
            optimizer.add_up()
        return self.ranks.add_up_numbers({"actor/mix_loss": loss})

    def _update(self, batch: Batch, targets: Targets, beside: Sequence[Sample] = ()) -> Metrics:
        """One update with the mixed rows `beside`. Out of memory, it is repeated with smaller micro-batches."""
        while True:
            try:
                metrics = self.forward_backward(batch, targets)
                if beside:
                    metrics |= self.imitate(beside)
                _must_be_finite(metrics)
                self.before_update()
                return metrics | self.optim_step()
            except torch.OutOfMemoryError:
                if self.smaller is None:
                    raise
            _forget(self.optimizers)
            self.micro_batch_tokens = self.smaller()

    def _backward(self, batch: Batch, targets: Targets, totals: Totals) -> Mapping[str, Tensor]:
        metrics: dict[str, Tensor] = {}
        if self.critic is not None and self._page.critic_loss is not None:
            values_BR = self.critic.values(batch, self.ranks.sequence)
            critic = self._page.critic_loss(self._algorithm, targets, values_BR, totals)
            torch.autograd.backward(critic.value)
            metrics.update(critic.metrics)
        logprobs_BR, entropy_BR = self.actor.score(batch, self.ranks.sequence)
        actor = self._page.actor_loss(self._algorithm, targets, logprobs_BR, entropy_BR, totals)
        torch.autograd.backward(actor.value * (1 - self.mixed.share) if self.mixed else actor.value)
        return {**metrics, **actor.metrics}

    @torch.no_grad()
    def _targets(
        self, sequences: Sequence[TokenSequence], batch: Batch, version: int | None = None
    ) -> tuple[Targets, Metrics]:
        """The constants of the step, and their metrics."""
        targets = Targets(mask_BR=batch.mask_BR, sampled_BR=batch.sampled_BR)
        metrics: Metrics = {}
        if self.critic is not None:
            targets = replace(targets, values_BR=self._over(batch, self.critic.values, self.ranks))
        if self.reference is not None:
            targets = replace(targets, reference_BR=self._over(batch, self.reference.logprobs, self.ranks))
        if self._asks.start:
            start_BR = self._over(batch, self.actor.logprobs, self.ranks)
            weights_BR, weighed = importance_weights(
                self._algorithm.off_policy, start_BR, batch.sampled_BR, batch.mask_BR
            )
            targets = replace(targets, start_BR=start_BR, weights_BR=weights_BR)
            metrics.update(weighed)
        if self._asks.teacher:
            targets = replace(targets, teacher_BR=_teacher_logprobs(self, sequences, batch))
        if self._asks.mismatched:
            targets = replace(targets, divergence=_divergence(self, sequences))
        fresh = [
            (each.version_min == each.version_max == version and not each.recomputed)
            for sequence in sequences
            for each in sequence.calls
        ]
        calls = calls_of(self._algorithm, sequences, batch, self._most_tokens)
        if any(fresh):
            targets = replace(targets, fresh_BR=calls.spread(torch.tensor(fresh)))
        targets, self.baselines = self._page.prepare(self._algorithm, targets, calls, self.baselines)
        return targets, metrics | _of_targets(targets)

    def _over(self, batch: Batch, each: _Pass, ranks: Ranks) -> Tensor:
        """The result of `each` on the batch; each rank computes its micro-batches."""

        def score(index_B: Tensor) -> Tensor:
            self.before_pass()
            return each(batch.rows(index_B), ranks.sequence)

        all_BR, cut = torch.zeros_like(batch.sampled_BR), self._micro_batches(batch, None, ranks)
        with ranks.agree():
            parts = [score(index_B) for index_B, _ in cut]  # queue all on the GPU before waiting
            for (index_B, counts), part_BR in zip(cut, parts, strict=True) if ranks.reports else ():
                if counts:
                    all_BR[index_B, : part_BR.shape[1]] = part_BR.cpu()
        ranks.add_up([all_BR])
        return all_BR

    def _micro_batches(self, batch: Batch, units_B: Tensor | None, ranks: Ranks) -> list[tuple[Tensor, bool]]:
        """This rank's micro-batches, and whether each counts: ranks that share weights make equal numbers of passes."""
        models = (self.actor, self.critic, self.reference)
        padded = not all(model.is_packed for model in models if model is not None)

        def cut(share: int) -> list[Tensor]:
            mine_B = share_of(share, ranks.share[1], batch.lengths_B, units_B, width=self.actor.width)
            of_mine_B = None if units_B is None else units_B[mine_B]
            parts = micro_batches(batch.lengths_B[mine_B], self.micro_batch_tokens, of_mine_B, padded=padded)
            return [mine_B[index_B] for index_B in parts]

        mine = cut(ranks.share[0])
        passes = max(len(cut(share)) for share in range(ranks.share[1])) if ranks.is_sharded else len(mine)
        return [(index_B, True) for index_B in mine] + [(batch.lengths_B.argmin()[None], False)] * (passes - len(mine))

    @contextmanager
    def reading_alone(self, *actors: Actor) -> Iterator[None]:
        """In the block, rank 0 may call these actors alone, without gradient."""
        with ExitStack() as gathering:
            for actor in {id(each): each for each in actors}.values():
                if self.ranks.is_sharded and actor in (self.actor, self.reference):
                    self.ranks.lead(GatherOrder(reference=actor is self.reference))
                    try:
                        gathering.enter_context(gathered_on_rank_0(actor.network))
                    except torch.OutOfMemoryError as error:  # the other ranks wait
                        raise RankOutOfMemory(f"no memory for the whole model between steps: {error}") from None
            yield


def do_nothing() -> None:
    """The default callback: does nothing."""


@torch.no_grad()
def recompute(learner: Learner, actor: Actor, samples: Sequence[Sample]) -> list[Float32s]:
    """Log-probabilities of the replies by `actor`, at their temperatures, on this rank."""
    batch = _collate(assemble(samples, merge=False), tempered=True)
    with learner.reading_alone(actor):
        all_BR = learner._over(batch, actor.logprobs, ALONE)
    return [row_R[: len(each.completion_ids)].numpy() for each, row_R in zip(samples, all_BR, strict=True)]


@torch.no_grad()
def held_out_loss(learner: Learner, samples: Sequence[Sample]) -> tuple[float, int]:
    """The method's loss on these samples on this rank, and its number of tokens or pairs."""
    sequences = assemble(samples, merge=not learner._asks.by_reply)
    batch, baselines = _collate(sequences, tempered=learner._asks.tempered), learner.baselines
    targets, _ = learner._targets(sequences, batch)
    learner.baselines, loss = baselines, 0.0
    for index_B, _ in learner._micro_batches(batch, targets.units_B, ALONE):
        learner.before_pass()
        part = batch.rows(index_B)
        goals = targets.rows(index_B, hand_over(part.mask_BR, learner._device))
        scores = learner.actor.score(part)
        loss += float(learner._page.actor_loss(learner._algorithm, goals, *scores, targets.totals).value)
    return loss, targets.totals.units if learner._asks.pairs else targets.totals.tokens


def _collate(sequences: Sequence[TokenSequence], *, tempered: bool) -> Batch:
    batch = collate(sequences)
    return batch if tempered else replace(batch, temperatures_BR=torch.ones_like(batch.temperatures_BR))


def _teacher_logprobs(learner: Learner, sequences: Sequence[TokenSequence], batch: Batch) -> Tensor:
    """The teacher's log-probabilities, from rank 0."""
    found_BR, ranks = torch.zeros_like(batch.sampled_BR), learner.ranks
    with ranks.agree():
        try:
            if ranks.rank == 0:
                found_BR = require(learner.teacher).score(sequences, tokens=learner.micro_batch_tokens)
        finally:
            ranks.wait_for_rank_0()
    return ranks.from_rank_0(found_BR)


def _divergence(learner: Learner, sequences: Sequence[TokenSequence]) -> Tensor:
    """The mean of log(actor / reference) on replies to other prompts; 0 if there are none."""
    strangers = mismatch_replies([sequence.calls[0] for sequence in sequences], longest=learner._longest)
    if not strangers:
        return torch.zeros(())
    batch = _collate(assemble(strangers, merge=False), tempered=learner._asks.tempered)
    here_BR = learner._over(batch, learner.actor.logprobs, learner.ranks)
    there_BR = learner._over(batch, require(learner.reference).logprobs, learner.ranks)
    return sequence_sums(here_BR - there_BR, batch.mask_BR).mean()


def _forget(optimizers: Mapping[str, MasterAdamW]) -> None:
    for optimizer in optimizers.values():
        optimizer.forget()


def _updates_made(optimizers: Mapping[str, MasterAdamW]) -> int:
    return sum(optimizer.updates for optimizer in optimizers.values())


def _constants(targets: Targets, *, sampled: bool) -> Metrics:
    """Sums that are finite if all values are, except a teacher's (-inf is valid) and unused `sampled` ones."""
    left_out = {"teacher_BR"} if sampled else {"teacher_BR", "sampled_BR"}
    names = [each.name for each in fields(targets) if each.name.endswith("_BR") and each.name not in left_out]
    found = {name: each for name in names if (each := getattr(targets, name)) is not None}
    return {
        f"the sum of {name.removesuffix('_BR')}": float(torch.where(targets.mask_BR, each, 0.0).double().sum())
        for name, each in found.items()
    }


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
    metrics = {name: float(token_mean(each, mask_BR, tokens)) for name, each in means.items() if each is not None}
    factors = [each for each in (targets.advantages_BR, targets.weights_BR) if each is not None]
    if factors:
        idle_BR = torch.stack([each == 0 for each in factors]).any(0)
        metrics["critic/advantages/zero"] = float(token_mean(idle_BR.float(), mask_BR, tokens))
    if targets.values_BR is not None and targets.returns_BR is not None:
        explained = explained_variance(targets.values_BR, targets.returns_BR, mask_BR)
        metrics["critic/vf_explained_var"] = float(explained)
    return metrics
