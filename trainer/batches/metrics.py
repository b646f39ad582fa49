"""What a batch says of itself, under the names that verl and Trinity-RFT use."""

from collections.abc import Sequence

import numpy as np

from tuneloop.shared.experience import Sample

Metrics = dict[str, float]


def of_samples(samples: Sequence[Sample], *, version: int) -> Metrics:
    """Rewards, lengths and age of the samples, as the trainer of `version`'s successor meets them."""
    rewards = np.array([sample.reward for sample in samples])
    replies = np.array([len(sample.completion_ids) for sample in samples])
    prompts = np.array([len(sample.prompt_ids) for sample in samples])
    ages = np.array([version - sample.version_min for sample in samples])
    return {
        "critic/rewards/mean": float(rewards.mean()),
        "critic/rewards/std": float(rewards.std()),
        "critic/rewards/max": float(rewards.max()),
        "critic/rewards/min": float(rewards.min()),
        "response_length/mean": float(replies.mean()),
        "response_length/max": float(replies.max()),
        "prompt_length/mean": float(prompts.mean()),
        "off_policy/staleness_mean": float(ages.mean()),
        "off_policy/staleness_max": float(ages.max()),
    }
