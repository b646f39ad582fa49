"""Imitation: which replies are learnt by heart, and edited answers as replies."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

from tuneloop.shared.experience import Sample
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.edited_answers import edited_answer_ids
from tuneloop.trainer.batches.sequences import run_of, runs, with_completion

Refused = dict[str, list[Sample]]

_TOO_LONG = "the edited answer is too long: the model takes {:.0f} tokens with the prompt"


def with_demonstrations(samples: Sequence[Sample], settings: Settings) -> tuple[list[Sample], Refused]:
    """The samples, those that somebody edited with the edited answer as their reply; and those that cannot be so.

    One that the model could not have sampled, since it is too long, is refused.
    """
    if not settings.algorithm.of_edited_answers:
        return list(samples), {}
    taken: list[Sample] = []
    refused: Refused = defaultdict(list)
    longest = _longest(settings)
    for sample in samples:
        if sample.demonstration is None:
            taken.append(sample)
            continue
        ids = edited_answer_ids(sample, sample.demonstration, settings)
        if isinstance(ids, str):
            refused[ids].append(sample)
        elif len(sample.prompt_ids) + len(ids) > longest:
            refused[_TOO_LONG.format(longest)].append(sample)
        else:
            taken.append(with_completion(sample, ids))
    return taken, dict(refused)


def imitable(samples: Sequence[Sample], algorithm: AlgorithmSettings) -> tuple[list[Sample], Refused]:
    """What `sft` or `raft` imitates, and the others by the reason. `raft` takes the best run of each group."""
    sft = algorithm.algorithm_type == "sft"
    edited = algorithm.of_edited_answers
    whole = not sft or algorithm.sft.targets != "demonstrations"
    least = algorithm.sft.least_reward
    taken: list[Sample] = []
    refused: Refused = defaultdict(list)
    for sample in samples:
        if edited and sample.demonstration is not None:
            taken.append(sample)
        elif not whole:
            refused["not imitated: nobody edited it"].append(sample)
        elif sample.finish_reason == "length":
            refused["not imitated: it was cut off at its token limit"].append(sample)
        elif sample.reward < least:
            refused[f"not imitated: its reward is below {least:g}"].append(sample)
        else:
            taken.append(sample)
    if not sft:
        # The run of each group whose calls have the best mean reward, of equals the first; without a group, every
        # run.
        found = runs(samples)
        groups: dict[object, tuple[str, ...]] = {}
        for run, calls in sorted(
            found.items(), key=lambda each: (-fmean(call.reward for call in each[1]), each[1][0].id)
        ):
            groups.setdefault(run if calls[0].group_id is None else calls[0].group_id, run)
        best = set(groups.values())
        worse = [sample for sample in taken if run_of(sample) not in best]
        taken = [sample for sample in taken if run_of(sample) in best]
        if worse:
            refused["not imitated: another run of its group has a better reward"] += worse
    return taken, dict(refused)


def _longest(settings: Settings) -> float:
    """The most tokens of prompt and reply together, infinite where nothing says it."""
    if settings.model.max_model_len is not None:
        return settings.model.max_model_len
    return _longest_of(settings.model.model_path)


@cache
def _longest_of(folder: Path) -> float:
    file = folder / "config.json"
    config = json.loads(file.read_bytes()) if file.is_file() else {}
    config |= config.get("text_config") or {}
    stretched = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return (config.get("max_position_embeddings") or math.inf) * max(1, stretched.get("factor") or 1)
