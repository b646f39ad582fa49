"""Selection: which leased samples can be trained on, and why the others cannot."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

import numpy as np

from tuneloop.shared.experience import MAX_REWARD, REDACTED, Sample, is_captured
from tuneloop.shared.settings.algorithm import OF_GROUPS, AlgorithmSettings
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.allowed_tokens import with_allowed_tokens
from tuneloop.trainer.batches.imitation import imitable, with_demonstrations
from tuneloop.trainer.batches.pairs import make_pairs
from tuneloop.trainer.batches.sequences import run_of, runs, superseded_calls

Refused = dict[str, list[Sample]]


def select(samples: Sequence[Sample], settings: Settings, *, vocabulary: int) -> tuple[list[Sample], Refused]:
    """The samples that can be trained on, with edited answers where these are learnt; and the others by the reason.

    Those that a grammar held have with them what it allowed.
    """
    edited, unwritable = with_demonstrations(samples, settings)
    held, not_rebuilt = with_allowed_tokens(edited, settings, vocabulary=vocabulary)
    group_by = settings.buffer.group_by
    kept, refused = sort_out(held, settings.algorithm, vocabulary=vocabulary, group_by=group_by, sampled=samples)
    return kept, unwritable | not_rebuilt | refused


def sort_out(
    samples: Sequence[Sample],
    algorithm: AlgorithmSettings,
    *,
    vocabulary: int,
    group_by: str,
    sampled: Sequence[Sample] = (),
) -> tuple[list[Sample], Refused]:
    """The samples that can be trained on, and the others by the reason.

    By `run` or `task` the samples are whole trajectories: superseded calls are left out, as the run went on from what
    was `sampled`, where a sample has another reply by now. By `task` they are whole groups: a run that is left alone
    has nothing to be compared with, and goes too; so does, if the method compares runs, a group in which all are
    rewarded alike.
    """
    refused: Refused = defaultdict(list)
    kept = []
    for sample in samples:
        reason = untrainable(sample, algorithm, vocabulary=vocabulary)
        if reason is None:
            kept.append(sample)
        else:
            refused[reason].append(sample)
    if group_by in {"run", "task"}:
        own = {sample.id: sample for sample in sampled}
        found = runs(own.get(sample.id, sample) for sample in kept)
        again = [call for calls in found.values() for call in superseded_calls(calls)]
        kept = _without(kept, again, refused, "superseded by another reply to the same prompt")
    for keep in (partial(comparable, group_by=group_by), _of_the_method):
        kept, left = keep(kept, algorithm)
        for reason, others in left.items():
            refused[reason] += others
    return kept, dict(refused)


def comparable(samples: list[Sample], algorithm: AlgorithmSettings, *, group_by: str) -> tuple[list[Sample], Refused]:
    """The samples without those of groups by `task` in which there is nothing to compare, and these by the reason."""
    refused: Refused = defaultdict(list)
    if group_by != "task":
        return samples, refused
    kept = _without_groups(samples, _alone, refused, "alone in its group: the others cannot be trained on")
    if algorithm.algorithm_type in OF_GROUPS:
        reason = "all runs of its group have the same reward: it says nothing"
        judged = _by_the_last if algorithm.by_result else _by_the_mean
        kept = _without_groups(
            kept, lambda group: len({judged(calls) for calls in runs(group).values()}) < 2, refused, reason
        )
    return kept, refused


def untrainable(sample: Sample, algorithm: AlgorithmSettings, *, vocabulary: int) -> str | None:
    """Why the sample must not reach the loss, if so; the sentence becomes the reason of its row."""
    ids = np.concatenate([sample.prompt_ids, sample.completion_ids])
    known = ids[ids != REDACTED]
    answered = algorithm.algorithm_type == "distill" and algorithm.distill.mode == "replies"
    rules = {
        "the reply has no tokens": len(sample.completion_ids) > 0,
        "the prompt has no tokens, so the reply's first one was predicted from nothing": len(sample.prompt_ids) > 0,
        f"the reward is not a number within ±{MAX_REWARD:g}": abs(sample.reward) <= MAX_REWARD,
        f"a token is outside the model's vocabulary of {vocabulary}": bool(((known >= 0) & (known < vocabulary)).all()),
        "all of the reply was redacted": not len(sample.completion_ids)
        or bool((sample.completion_ids != REDACTED).any()),
        "its prompt was redacted, so the teacher cannot answer it": not answered or REDACTED not in sample.prompt_ids,
        "the reply has not one log-probability per token": len(sample.logprobs) == len(sample.completion_ids),
    }
    if not algorithm.of_any_reply:
        rules |= {
            "it was redacted: what was sampled cannot be read again": len(known) == len(ids),
            "a log-probability is not finite": not is_captured(sample.logprobs)
            or bool(np.isfinite(sample.logprobs).all()),
            "the reply was chosen at temperature 0, not sampled": 0 < sample.temperature < float("inf"),
        }
    return next((reason for reason, fulfilled in rules.items() if not fulfilled), None)


def _of_the_method(samples: list[Sample], algorithm: AlgorithmSettings) -> tuple[list[Sample], Refused]:
    match algorithm.algorithm_type:
        case "dpo":
            return make_pairs(samples)
        case "sft" | "raft":
            return imitable(samples, algorithm)
        case _:
            return samples, {}


def _without(kept: list[Sample], left: Sequence[Sample], refused: Refused, reason: str) -> list[Sample]:
    ids = {sample.id for sample in left}
    if ids:
        refused[reason] += left
    return [sample for sample in kept if sample.id not in ids]


def _without_groups(
    kept: list[Sample], is_so: Callable[[Sequence[Sample]], bool], refused: Refused, reason: str
) -> list[Sample]:
    groups: defaultdict[int | None, list[Sample]] = defaultdict(list)
    for sample in kept:
        groups[sample.group_id].append(sample)
    return _without(kept, [each for group in groups.values() if is_so(group) for each in group], refused, reason)


def _alone(group: Sequence[Sample]) -> bool:
    return len({run_of(sample) for sample in group}) < 2


def _by_the_last(calls: Sequence[Sample]) -> float:
    return calls[-1].reward


def _by_the_mean(calls: Sequence[Sample]) -> float:
    return fmean(call.reward for call in calls)
