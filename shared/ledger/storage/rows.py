"""The nouns of `tuneloop.shared.experience` as rows of the ledger, and back."""

from collections.abc import Mapping
from typing import Any

from tuneloop.shared.experience import Exchange, Experience, Sample, State
from tuneloop.shared.ledger.storage import codec

#: Plain text: a driver may take an enumeration for its name.
_DROPPED, _RECORDED = State.DROPPED.value, State.RECORDED.value

#: The columns that a sample has as they are.
_SAME = (
    *("id", "temperature", "version_min", "version_max", "tenant", "task_id", "run_id", "group_id", "rewarded_at"),
    *("committed_at", "msg_id", "choice", "finish_reason", "unsampled", "sampled_at"),
)


def exchange_row(exchange: Exchange) -> Mapping[str, object]:
    """A row of `exchanges`."""
    return {
        "msg_id": exchange.msg_id,
        "tenant": exchange.tenant,
        "endpoint": exchange.endpoint,
        "user_id": exchange.user,
        "request": codec.pack_text(exchange.request),
        "received_at": exchange.received_at,
        "latency_s": exchange.latency_s,
        "engine": exchange.engine,
        "key": exchange.key or None,
    }


def experience_row(exchange: Exchange, experience: Experience) -> Mapping[str, object]:
    """A row of `experiences`, as it is when it is first recorded."""
    return {
        "msg_id": exchange.msg_id,
        "choice": experience.choice,
        "correction": 0,
        "tenant": exchange.tenant,
        "task_id": exchange.task_id,
        "run_id": exchange.run_id,
        "priority": exchange.priority,
        "state": _DROPPED if experience.drop_reason else _RECORDED,
        "reason": experience.drop_reason or None,
        "version_min": experience.version_min,
        "version_max": experience.version_max,
        "temperature": experience.temperature,
        "finish_reason": experience.finish_reason,
        "text": experience.text,
        "tool_calls": experience.tool_calls,
        "completion_tokens": len(experience.completion_ids) // 4,
        "blob": codec.to_blob(experience),
        "sampled_at": exchange.received_at,
        "unsampled": experience.unsampled or None,
        "grammar": codec.pack_grammar(experience.grammar),
    }


def sample(row: Any, *, demonstration: str | None = None) -> Sample:
    """What the trainer sees of a row of `experiences`, and of the answer as somebody edited it."""
    prompt_ids, completion_ids, logprobs = codec.from_blob(row.blob)
    return Sample(
        **{name: getattr(row, name) for name in _SAME},
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=logprobs,
        reward=row.edit_similarity if row.reward is None else row.reward,
        demonstration=demonstration,
        grammar=codec.unpack_grammar(row.grammar),
    )
