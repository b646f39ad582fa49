"""Records of runs read back from a tuneloop's ledger: from an export, or from its stored completions."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tuneloop.runner.collection.run_record import RunRecord
from tuneloop.runner.logs.exchange import LoggedExchange
from tuneloop.runner.logs.ledger_logs import read_export, read_stored_completions
from tuneloop.runner.logs.timelines import merge_calls

_WORDS = frozenset({"comment", "demonstration", "label"})


def records_of_export(path: Path) -> Iterator[RunRecord]:
    """The runs in a file of `tuneloop export --format experiences` (JSON lines), in their order.

    Replies without a run are a record each. `rewards` are the numbers that were said of the run or its replies by
    metric, each source's last, the mean over sources; where anybody rated the run, of that alone. `total_reward` is the
    ledger's of the last reply that has one; thumbs, labels, comments and edited answers are `user_feedback`. Raises
    LogRefused.
    """
    return _records(read_export(path))


def records_of_service(
    url: str, *, task_id: str | None = None, run_id: str | None = None, api_key: str | None = None
) -> Iterator[RunRecord]:
    """The runs in the stored completions of a service, by the metadata of their requests. Without rewards.

    `task_id` and `run_id` keep those of just that task and run. Raises ServiceRefused.
    """
    labels = {"task_id": task_id, "run_id": run_id}
    metadata = {name: value for name, value in labels.items() if value is not None}
    return _records(read_stored_completions(url, api_key=api_key, metadata=metadata))


def _records(exchanges: Iterable[LoggedExchange]) -> Iterator[RunRecord]:
    runs: dict[str, list[LoggedExchange]] = defaultdict(list)
    for each in exchanges:
        runs[each.conversation].append(each)
    for conversation, calls in runs.items():
        yield _record(conversation, calls)


def _record(conversation: str, calls: Sequence[LoggedExchange]) -> RunRecord:
    longest, *others = merge_calls(calls)
    events = {str(event["event_id"]): event for call in calls for event in call.feedback if "event_id" in event}
    rewards, feedback = _feedback(events.values())
    totals = [each.reward for each in calls if each.reward is not None]
    offered = [(each.get("function") or each).get("name") for call in calls for each in call.tools]
    return RunRecord.of_messages(
        conversation,
        longest,
        side_conversations=tuple(others),
        rewards=rewards,
        total_reward=totals[-1] if totals else None,
        user_feedback=feedback,
        task_id=calls[0].labels.get("task_id"),
        run_id=calls[0].labels.get("run_id"),
        reply_ids=tuple(each.exchange_id for each in calls),
        tools=tuple(dict.fromkeys(str(name) for name in offered if name)),
    )


def _feedback(events: Iterable[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, Any]]:
    """The numbers by metric, and what else was said, each source's last word."""
    numbers: dict[tuple[str, bool], dict[object, float]] = defaultdict(dict)
    words: dict[str, Any] = {}
    for event in sorted(events, key=lambda each: float(each.get("received_at") or 0.0)):
        kind, metric, value = event.get("kind"), str(event.get("metric")), event.get("value")
        said = numbers[metric, event.get("msg_id") is None]
        if kind == "number" and isinstance(value, int | float):
            said[event.get("source")] = float(value)
        elif kind == "boolean":
            words["thumb" if metric == "reward" else metric] = bool(value)
        elif kind in _WORDS:
            words[metric if metric != "reward" else str(kind)] = event.get("text")
        elif kind == "retraction":
            said.pop(event.get("source"), None)
    ordered = sorted(numbers.items(), key=lambda each: each[0][1])  # the run's own last
    return {metric: fmean(values.values()) for (metric, _), values in ordered if values}, words
