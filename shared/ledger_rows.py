"""The nouns of `shared.experience` as rows of the ledger, and back."""

from collections.abc import Mapping
from typing import Any

from shared import codec
from shared.experience import Exchange, Experience, Feedback, Sample, State


def exchange_row(exchange: Exchange) -> Mapping[str, object]:
    """A row of `exchanges`."""
    return {
        "msg_id": exchange.msg_id,
        "tenant": exchange.tenant,
        "endpoint": exchange.endpoint,
        "task_id": exchange.task_id,
        "run_id": exchange.run_id,
        "request": exchange.request,
        "received_at": exchange.received_at,
        "latency_s": exchange.latency_s,
    }


def experience_row(exchange: Exchange, experience: Experience, now: float) -> Mapping[str, object]:
    """A row of `experiences`, as it is when it is first recorded."""
    return {
        "msg_id": exchange.msg_id,
        "choice": experience.choice,
        "state": State.DROPPED if experience.drop_reason else State.RECORDED,
        "reason": experience.drop_reason or None,
        "version_min": experience.version_min,
        "version_max": experience.version_max,
        "temperature": experience.temperature,
        "finish_reason": experience.finish_reason,
        "text": experience.text,
        "completion_tokens": len(experience.completion_ids) // 4,
        "blob": codec.to_blob(experience),
        "recorded_at": now,
    }


def feedback_row(event: Feedback) -> Mapping[str, object]:
    """A row of `feedback`."""
    return {
        "event_id": event.event_id,
        "msg_id": event.msg_id,
        "choice": event.choice,
        "tenant": event.tenant,
        "reward": event.reward,
        "task_id": event.task_id,
        "run_id": event.run_id,
        "received_at": event.received_at,
    }


def sample(row: Any) -> Sample:
    """What the trainer sees of a row of `experiences` joined with its exchange."""
    prompt_ids, completion_ids, logprobs = codec.from_blob(row.blob)
    return Sample(
        id=row.id,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=logprobs,
        reward=row.reward,
        temperature=row.temperature,
        version_min=row.version_min,
        version_max=row.version_max,
        task_id=row.task_id,
        run_id=row.run_id,
        rewarded_at=row.rewarded_at,
        committed_at=row.committed_at,
    )
