"""Held-out evaluation: the actor answers tasks that it is never trained on, and the answers are judged.

    {"messages": [{"role": "user", "content": "7+5="}], "answer": "12", "slice": "sums"}
    {"prompt": "The capital of France is", "answer": "Paris"}

Greedy, so the same weights get the same score. Dimension suffixes are explained in trainer/batch.py.
"""

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple, cast

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from shared.config import Settings
from shared.config_monitor import Evaluation
from shared.errors import EnvironmentRefused
from trainer.metrics import Metrics
from trainer.model import Actor
from trainer.tokenizer import ends_of, tokenizer_of

_LONGEST_SLICE = 64


class Task(NamedTuple):
    """A question, as messages or as the very text, and what its answer is judged by; `line` is where it stands."""

    line: int
    question: str | list[dict[str, Any]]
    answer: str
    slice: str | None


class HeldOut:
    """The tasks of an experiment, ready to be asked."""

    def __init__(self, settings: Settings, tasks: Sequence[Task]) -> None:
        """Raises EnvironmentRefused for a task that the model cannot be asked."""
        self._options = settings.monitor.evaluation
        self._budget = settings.trainer.micro_batch_tokens
        self._tokenizer = cast(PreTrainedTokenizerBase, tokenizer_of(settings))
        self._ends = ends_of(settings.model.model_path, tokenizer_of(settings))
        longest = settings.model.max_model_len
        self._asked: list[tuple[Task, list[int]]] = []
        for task in tasks:
            ids = self._ids(task)
            if not ids:
                raise self._refused(task, "the question has no tokens")
            if longest is not None and len(ids) + self._options.most_tokens > longest:
                raise self._refused(
                    task,
                    f"a question of {len(ids)} tokens and a reply of monitor.evaluation.most_tokens,"
                    f" {self._options.most_tokens}, are more than model.max_model_len, {longest}",
                )
            self._asked.append((task, ids))
        self._asked.sort(key=lambda asked: len(asked[1]))

    def score(self, actor: Actor) -> Metrics:
        """The share of right answers, of all tasks and of each slice."""
        started = time.perf_counter()
        scores: dict[str, list[float]] = defaultdict(list)
        for part in self._batches():
            for (task, _), reply in zip(part, self._replies(actor, [ids for _, ids in part]), strict=True):
                right = float(is_right(task.answer, reply, self._options))
                scores["evaluation/score"].append(right)
                if task.slice is not None:
                    scores[f"evaluation/score/{task.slice}"].append(right)
        means = {name: fmean(each) for name, each in scores.items()}
        return means | {"time/evaluation": time.perf_counter() - started}

    def _batches(self) -> Iterator[list[tuple[Task, list[int]]]]:
        """As many questions at once as fit into the trainer's budget of tokens; like goes with like."""
        part: list[tuple[Task, list[int]]] = []
        for asked in self._asked:
            if part and (len(part) + 1) * (len(asked[1]) + self._options.most_tokens) > self._budget:
                yield part
                part = []
            part.append(asked)
        yield part

    @torch.no_grad()
    def _replies(self, actor: Actor, prompts: Sequence[list[int]]) -> list[str]:
        network = actor.network
        padding = self._tokenizer.pad_token_id or 0
        # All said, so that nothing of the model's own generation_config.json applies.
        greedy = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            num_beams=1,
            max_new_tokens=self._options.most_tokens,
            temperature=1.0,
            top_k=50,
            top_p=1.0,
            repetition_penalty=1.0,
            eos_token_id=self._ends,
            pad_token_id=padding,
            use_cache=True,
        )
        ids_BT, mask_BT = (each.to(network.device) for each in _padded_left(prompts, padding))
        generated_BT = cast(Any, network).generate(ids_BT, attention_mask=mask_BT, generation_config=greedy)
        return [self._words(row.tolist()) for row in generated_BT[:, ids_BT.shape[1] :]]

    def _words(self, ids: list[int]) -> str:
        return cast(str, self._tokenizer.decode(ids, skip_special_tokens=True))

    def _ids(self, task: Task) -> list[int]:
        if isinstance(task.question, str):
            return cast(list[int], self._tokenizer(task.question)["input_ids"])
        try:
            text = self._tokenizer.apply_chat_template(task.question, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise self._refused(task, f"the model's chat template does not take the messages: {error}") from error
        return cast(list[int], self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _refused(self, task: Task, reason: str) -> EnvironmentRefused:
        return EnvironmentRefused(f"monitor.evaluation.path: {self._options.path}, line {task.line}: {reason}")


def tasks_of(options: Evaluation) -> list[Task]:
    """The tasks of the settings' file, none without one. Raises EnvironmentRefused, naming the line that is wrong."""
    if options.path is None:
        return []
    try:
        lines = options.path.read_bytes().splitlines()
    except OSError as error:
        raise EnvironmentRefused(
            f"monitor.evaluation.path: {options.path} cannot be read: {error.strerror}; name a file of tasks, or leave"
            " it away"
        ) from error
    tasks = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(_task(number, line, options))
            except ValueError as error:
                raise EnvironmentRefused(f"monitor.evaluation.path: {options.path}, line {number}: {error}") from None
    if not tasks:
        raise EnvironmentRefused(f"monitor.evaluation.path: {options.path} holds no task")
    return tasks[: options.samples]


def is_right(answer: str, reply: str, options: Evaluation) -> bool:
    """Whether the reply, without the reasoning before it, is the answer as `judge` says.

    >>> is_right("12", "<think>7+5</think> It is 12.", Evaluation(judge="contains"))
    True
    """
    said = reply.rpartition("</think>")[2]
    match options.judge:
        case "exact":
            return said.strip() == answer.strip()
        case "contains":
            return answer in said
        case "regex":
            return re.search(answer, said) is not None


def _task(number: int, line: bytes, options: Evaluation) -> Task:
    """Raises ValueError, whose message says what is wrong with the line."""
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError('must be an object, such as {"prompt": "7+5=", "answer": "12"}')
    answer, part = found.get("answer"), found.get("slice")
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError("`answer` must be text, and not empty; write a number in quotes")
    if part is not None and not (isinstance(part, str) and 0 < len(part) <= _LONGEST_SLICE):
        raise ValueError(f"`slice` must be text of at most {_LONGEST_SLICE} characters")
    if options.judge == "regex":
        _require_pattern(answer)
    return Task(number, _question(found), answer, part)


def _question(found: dict[str, Any]) -> str | list[dict[str, Any]]:
    prompt, messages = found.get("prompt"), found.get("messages")
    if (prompt is None) == (messages is None):
        raise ValueError("needs either `prompt` or `messages`")
    if prompt is not None:
        if not isinstance(prompt, str) or not prompt:
            raise ValueError("`prompt` must be text, and not empty")
        return prompt
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError('`messages` must be a list of messages, such as {"role": "user", "content": "7+5="}')
    return messages


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _require_pattern(answer: str) -> None:
    try:
        re.compile(answer)
    except re.error as error:
        raise ValueError(
            f"`answer` is no regular expression, which monitor.evaluation.judge asks for: {error}"
        ) from None


def _padded_left(prompts: Sequence[list[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask of the prompts, which all end in the last column."""
    longest = max(map(len, prompts))
    ids_BT = torch.tensor([[padding] * (longest - len(ids)) + ids for ids in prompts])
    mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    return ids_BT, mask_BT
