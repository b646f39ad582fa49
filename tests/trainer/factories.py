"""Experiences made up for tests."""

import numpy as np

from shared.experience import Exchange, Experience, Feedback, Sample, pack_ids, pack_logprobs
from shared.ledger import Ledger


def sample(number: int = 0, **but: object) -> Sample:
    """A made-up sample, always the same for the same number."""
    random = np.random.default_rng(number)
    length = int(random.integers(1, 9))
    values: dict[str, object] = {
        "id": number,
        "prompt_ids": random.integers(0, 250, int(random.integers(1, 12)), dtype=np.int32),
        "completion_ids": random.integers(0, 250, length, dtype=np.int32),
        "logprobs": random.normal(-5.7, 0.1, length).astype(np.float32),
        "reward": float(random.integers(0, 2)),
        "temperature": float(random.choice([0.7, 1.0])),
        "version_min": 0,
        "version_max": 0,
        "task_id": None,
        "run_id": None,
        "rewarded_at": 0.0,
        "committed_at": 0.0,
    }
    return Sample(**(values | but))  # type: ignore[arg-type]


def commit(ledger: Ledger, samples: list[Sample]) -> None:
    """Bring samples into the ledger the way that the explorer does."""
    for each in samples:
        experience = Experience(
            choice=0,
            prompt_ids=pack_ids(each.prompt_ids.tolist()),
            completion_ids=pack_ids(each.completion_ids.tolist()),
            logprobs=pack_logprobs(each.logprobs.tolist()),
            version_min=each.version_min,
            version_max=each.version_max,
            temperature=each.temperature,
            finish_reason="stop",
            text="",
        )
        msg_id = f"m{each.id}"
        said = Exchange(
            msg_id=msg_id,
            tenant="t",
            endpoint="chat",
            request=b"{}",
            received_at=1.0,
            latency_s=0.1,
            experiences=(experience,),
        )
        heard = Feedback(
            event_id=f"e{each.id}", msg_id=msg_id, choice=None, tenant="t", reward=each.reward, received_at=2.0
        )
        ledger.record([said, heard])
    ledger.commit("t")
