"""Imitation: which replies are learnt by heart, and edited answers as replies."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import TemplateError

from tuneloop.shared.experience import Sample
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.sequences import run_of, runs, with_completion
from tuneloop.trainer.batches.tokenizer import Tokenizer, ends_of, tokenizer_of

Refused = dict[str, list[Sample]]

_TOO_LONG = "the edited answer is too long: the model takes {:.0f} tokens with the prompt"


def with_demonstrations(samples: Sequence[Sample], settings: Settings) -> tuple[list[Sample], Refused]:
    """The samples, those that somebody edited with the edited answer as their reply; and those that cannot be so.

    The answer is tokenised with the base model's tokenizer, and ends with the token that the model's own reply ended
    with, or else with the tokenizer's end. A message with calls of tools is written by the chat template. One that the
    model could not have sampled, since it is too long, is refused.
    """
    if settings.algorithm.algorithm_type != "sft" or settings.algorithm.sft.targets == "replies":
        return list(samples), {}
    taken: list[Sample] = []
    refused: Refused = defaultdict(list)
    longest = _longest(settings)
    for sample in samples:
        if sample.demonstration is None:
            taken.append(sample)
            continue
        ids = _demonstration_ids(sample, sample.demonstration, settings)
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
    edited = sft and algorithm.sft.targets != "replies"
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
        best = _best(samples)
        worse = [sample for sample in taken if run_of(sample) not in best]
        taken = [sample for sample in taken if run_of(sample) in best]
        if worse:
            refused["not imitated: another run of its group has a better reward"] += worse
    return taken, dict(refused)


def _best(samples: Sequence[Sample]) -> set[tuple[str, ...]]:
    """The run of each group whose calls have the best mean reward, of equals the first; without a group, every run."""
    found = runs(samples)
    groups: dict[object, tuple[str, ...]] = {}
    for run, calls in sorted(found.items(), key=lambda each: (-fmean(call.reward for call in each[1]), each[1][0].id)):
        groups.setdefault(run if calls[0].group_id is None else calls[0].group_id, run)
    return set(groups.values())


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


def _demonstration_ids(sample: Sample, answer: str, settings: Settings) -> list[int] | str:
    """The token ids of an edited answer, or why there are none."""
    words = tokenizer_of(settings)
    ends = ends_of(settings.model.model_path, words)
    message = _message(answer)
    text = answer if message is None else message.get("content") or ""
    if message is not None and message.get("tool_calls"):
        text = _template_text(message, words, ends)
    if not isinstance(text, str):
        return "the edited answer is more than text"
    if not text:
        return "the edited answer is empty, or the chat template has no place for it"
    if not _is_unicode(text):
        return "the edited answer is not Unicode: half of a surrogate pair is in it"
    own = int(sample.completion_ids[-1]) if len(sample.completion_ids) else None
    return [*words.encode(text, add_special_tokens=False), own if own in ends and own is not None else ends[0]]


def _is_unicode(text: str) -> bool:
    """JSON's escapes can name half of a surrogate pair, of which no tokenizer makes tokens."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _message(answer: str) -> dict[str, Any] | None:
    """The assistant's message that an answer is the JSON of, None for a text."""
    if not answer.startswith("{"):
        return None
    try:
        message = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and message.get("role") == "assistant" else None


def _template_text(message: dict[str, Any], words: Tokenizer, ends: Sequence[int]) -> str:
    """What the chat template adds for a message, up to the end of the turn; empty if that cannot be told."""
    if words.chat_template is None:
        return ""
    question: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    try:
        before = words.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        whole = words.apply_chat_template([*question, _with_parsed_arguments(message)], tokenize=False)
    except (TemplateError, AttributeError, TypeError, ValueError, RecursionError):
        return ""
    if not whole.startswith(before):
        return ""
    reply = whole[len(before) :]
    found = [at for end in words.convert_ids_to_tokens(list(ends)) if (at := reply.rfind(end)) >= 0]
    return reply[: max(found)] if found else ""


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's clients send a call's arguments as JSON in a string; templates want the object."""
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or {})
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
        calls.append({**call, "function": function})
    return {**message, "content": message.get("content") or "", "tool_calls": calls}
