"""REINFORCE for single replies: without group and critic, with a baseline kept across steps.

    advantage  (reward - baseline) / (their root mean square + 1e-6)                 Williams 1992, section 4
    baseline   running   decaying mean m of the rewards before this batch            as in SPIRAL, arXiv 2506.24119
               task      (n m_task + m) / (n + 1), where m_task is the like mean of
                         the task's rewards, from n batches, older ones counting less
               batch     the batch's own mean                                        as OpenRLHF's flash_reinforce
    actor      the clipped loss of terms.py

Each token of a call has the call's advantage. The first batch uses its own mean. The root mean square, unlike a
deviation, is not near 0 when all replies exceed the baseline equally. Rewards equal to the baseline give exactly 0. The
last 10 000 tasks are kept, by a digest of tenant and name. With `kl_in: reward` a call's reward includes the penalty
for its tokens' divergence. Not implemented: discounting by token (`gamma`) and whitening; a baseline by prompt text,
which is a critic (ppo.py).
"""

from collections import defaultdict
from dataclasses import replace
from hashlib import blake2b

import torch
from torch import Tensor

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.shared.settings.algorithm import BaselineSettings as Options
from tuneloop.trainer.algorithms.terms import (
    EPSILON,
    Baselines,
    CallRewards,
    Prepared,
    Targets,
    kl_penalties,
    mean_of,
    update_moments,
)

MAX_TASKS = 10_000

_ALL = "reinforce"
_TASK = "reinforce/"


def prepare(algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards, baselines: Baselines) -> Prepared:
    options = algorithm.baseline
    scores_C = calls.rewards_C.double() + kl_penalties(algorithm, targets, calls)
    tasks = [(_TASK + blake2b(task.encode(), digest_size=12).hexdigest() if task else "") for task in calls.tasks]
    baseline_C = _baseline(options, scores_C, tasks, baselines)
    over_C = (scores_C - baseline_C).masked_fill(torch.isclose(scores_C, baseline_C, rtol=1e-9, atol=0), 0)
    baselines = _update_baselines(options, scores_C, tasks, baselines)
    over_C = over_C / (float(over_C.square().mean().sqrt()) + EPSILON)
    return replace(targets, advantages_BR=calls.spread(over_C.to(calls.rewards_C.dtype))), baselines


def _baseline(options: Options, scores_C: Tensor, tasks: list[str], baselines: Baselines) -> Tensor:
    before = baselines.get(_ALL)
    if options.kind == "batch" or before is None:
        return scores_C.mean().expand_as(scores_C)
    mean = mean_of(before)
    if options.kind == "running":
        return torch.full_like(scores_C, mean)
    found = torch.full_like(scores_C, mean)
    for number, name in enumerate(tasks):
        if task := baselines.get(name):
            batches = task.weight / (1 - options.decay)  # shrunk towards the overall mean by one batch of weight
            found[number] = (batches * mean_of(task) + mean) / (batches + 1)
    return found


def _update_baselines(options: Options, scores_C: Tensor, tasks: list[str], baselines: Baselines) -> Baselines:
    """Moments of all rewards and, for `task`, of tasks, ordered by their last batch."""
    kept = {**baselines, _ALL: update_moments(baselines.get(_ALL), scores_C, decay=options.decay)}
    if options.kind != "task":
        return kept
    members: defaultdict[str, list[int]] = defaultdict(list)
    for number, task in enumerate(tasks):
        members[task].append(number)
    members.pop("", None)
    for task, numbers in members.items():
        kept[task] = update_moments(kept.pop(task, None), scores_C[numbers], decay=options.decay)
    remembered = [name for name in kept if name.startswith(_TASK)]
    for name in remembered[: max(len(remembered) - MAX_TASKS, 0)]:
        del kept[name]
    return kept
