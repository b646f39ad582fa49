"""Pairs: which reply is better than which, and replies put to prompts that they are no answer to."""

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from tuneloop.shared.experience import Sample

Refused = dict[str, list[Sample]]


def make_pairs(samples: Sequence[Sample]) -> tuple[list[Sample], Refused]:
    """The samples as chosen, rejected, chosen, rejected, …, and what is left over by the reason.

    Of a group's replies to one prompt (by its token ids) the best goes with the worst, the second best with the second
    worst, and so on: no reply is in two pairs. Of equal rewards the reply that was recorded first counts as better.
    """
    groups: defaultdict[object, defaultdict[bytes, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        # Without a group there is nobody to be paired with.
        group = ("alone", sample.id) if sample.group_id is None else sample.group_id
        groups[group][sample.prompt_ids.tobytes()].append(sample)
    pairs: list[Sample] = []
    refused: Refused = defaultdict(list)
    for prompts in groups.values():
        for replies in prompts.values():
            ranked = sorted(replies, key=lambda each: (-each.reward, each.id))
            if len(ranked) == 1:
                refused[_lonely(ranked[0], prompts)] += ranked
                continue
            half = len(ranked) // 2
            for better, worse in zip(ranked[:half], reversed(ranked), strict=False):
                if better.reward > worse.reward:
                    pairs += [better, worse]
                else:
                    refused["no pair: another reply to its prompt has the same reward"] += [better, worse]
            refused["no pair: it is in the middle of an odd number of replies"] += ranked[half : len(ranked) - half]
    return pairs, {reason: left for reason, left in refused.items() if left}


def mismatch_replies(samples: Sequence[Sample], *, longest: float = math.inf) -> list[Sample]:
    """Each prompt with the reply to the next one's, the last with the first; none if there is only one.

    Those of more than `longest` tokens, which the model does not take, are left out.
    """
    if len(samples) < 2:
        return []
    after = [*samples[1:], samples[0]]
    return [
        msgspec.structs.replace(one, completion_ids=other.completion_ids, logprobs=other.logprobs)
        for one, other in zip(samples, after, strict=True)
        if len(one.prompt_ids) + len(other.completion_ids) <= longest
    ]


def _lonely(sample: Sample, prompts: dict[bytes, list[Sample]]) -> str:
    if sample.group_id is None:
        return "no pair: it is in no group"
    if len(prompts) > 1:
        return "no pair: its group's other replies are to other prompts"
    return "no pair: the other replies of its group cannot be trained on"
