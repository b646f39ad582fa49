"""Builds a data set of tasks from logged exchanges: filters, deduplicates, orders, judges, reads and writes."""

import hashlib
import json
import math
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import JudgeFailed, LogRefused
from tuneloop.runner.judging.endpoint import Endpoint
from tuneloop.runner.judging.judge import Judge
from tuneloop.runner.judging.rubric import Example, Rubric
from tuneloop.runner.logs.exchange import LoggedExchange, essence_of, json_lines
from tuneloop.runner.private_files import private_opener
from tuneloop.runner.rewards.reply import ChatMessage, Reply, calls_of, text_of

ExchangeFilter = Callable[[LoggedExchange], bool]  # whether to keep an exchange


def all_of(*filters: ExchangeFilter) -> ExchangeFilter:
    return lambda exchange: all(each(exchange) for each in filters)


def with_reward(least: float = float("-inf"), most: float = float("inf")) -> ExchangeFilter:
    """Keeps exchanges with a reward in [least, most]."""
    return lambda exchange: exchange.reward is not None and least <= exchange.reward <= most


def between(since: float = float("-inf"), until: float = float("inf")) -> ExchangeFilter:
    """Keeps exchanges in [since, until), in seconds since 1970; drops those without a time."""
    return lambda exchange: exchange.at is not None and since <= exchange.at < until


def by_model(*names: str) -> ExchangeFilter:
    """Keeps exchanges with these models, in any version: `tiny` includes `tiny@3`."""
    return lambda exchange: exchange.model is not None and exchange.model.partition("@")[0] in names


def asks(pattern: str) -> ExchangeFilter:
    """Keeps exchanges whose last question matches the regular expression."""
    compiled = re.compile(pattern, re.IGNORECASE)

    def keeps(exchange: LoggedExchange) -> bool:
        questions = [text_of(each["content"]) for each in exchange.messages if each["role"] == "user"]
        return bool(questions) and compiled.search(questions[-1].strip()) is not None

    return keeps


def turns(most: int) -> ExchangeFilter:
    """Keeps exchanges with at most so many user messages: 1 is the start of a conversation."""
    return lambda exchange: sum(each["role"] == "user" for each in exchange.messages) <= most


def offers_tools(*names: str) -> ExchangeFilter:
    """Keeps exchanges that offer tools, or these tools."""

    def keeps(exchange: LoggedExchange) -> bool:
        offered = {str((each.get("function") or each).get("name")) for each in exchange.tools}
        return bool(offered) and offered.issuperset(names)

    return keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTask:
    """A task: the user's `messages`; `question` is the text of the last one.

    `answer` is right by a person's judgement; `reply` is a model's, right or wrong, with its `reward` and the
    `expected_calls` of tools. `provenance` has `source`, `place`, `ids`, `conversation`, and the `parent` of a derived
    task. `scores` are a judge's.
    """

    task_id: str
    question: str
    messages: tuple[ChatMessage, ...]
    answer: str | None = None
    expected_calls: tuple[Mapping[str, Any], ...] = ()
    reply: str | None = None
    reward: float | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A row without empty fields, except `answer`."""
        row = asdict(self)
        return {name: value for name, value in row.items() if name == "answer" or value not in (None, (), {}, [])}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> "ImportedTask":
        """Parse a row; only `question` is required. Raises ValueError."""
        question = row.get("question")
        if not isinstance(question, str) or not question.strip():
            raise ValueError("a task needs a question")
        turns = row.get("messages") or [{"role": "user", "content": question}]
        known = {name: row[name] for name in ("answer", "reply", "reward", "provenance", "scores") if name in row}
        lists: dict[str, Any] = {name: tuple(row.get(name) or ()) for name in ("expected_calls", "tools")}
        task_id = row.get("task_id")
        named = str(task_id) if isinstance(task_id, str | int) else _digest(turns)
        return cls(task_id=named, question=question, messages=tuple(turns), **lists, **known)


@dataclass(frozen=True, slots=True)
class ImportCounts:
    """Numbers of exchanges: read, filtered out, opted out by their owners, without a question; and of tasks."""

    read: int
    filtered: int
    opted_out: int
    without_question: int
    tasks: int


def tasks_of(
    exchanges: Iterable[LoggedExchange],
    *,
    keep: ExchangeFilter | None = None,
    trust: float | None = None,
    include_opted_out: bool = False,
) -> tuple[list[ImportedTask], ImportCounts]:
    """The tasks in exchanges, in order: one per question of a user in a conversation.

    An agent's calls between a question and its answer are one task. A conversation with any exchange that refuses
    training is dropped, unless `include_opted_out`. `keep` is a filter. A reply becomes the `answer` if it is
    corrected, is a training target, or has a reward of at least `trust`.
    """
    found = list(exchanges)
    barred = set() if include_opted_out else {(each.source, each.conversation) for each in found if not each.train}
    allowed = [each for each in found if (each.source, each.conversation) not in barred]
    wanted = [each for each in allowed if keep is None or keep(each)]
    groups: dict[tuple[str, str, str], list[LoggedExchange]] = defaultdict(list)
    silent = 0
    for each in wanted:
        turns = question_of(each.messages)
        if turns:
            groups[each.source, each.conversation, _digest(essence_of(turns))].append(each)
        else:
            silent += 1
    tasks = [_task(group, trust) for group in groups.values()]
    return tasks, ImportCounts(
        read=len(found),
        filtered=len(allowed) - len(wanted),
        opted_out=len(found) - len(allowed),
        without_question=silent,
        tasks=len(tasks),
    )


def question_of(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Messages up to the last user message with text; empty without one."""
    places = [at for at, each in enumerate(messages) if each["role"] == "user" and text_of(each["content"]).strip()]
    return tuple(messages[: places[-1] + 1]) if places else ()


def _task(group: Sequence[LoggedExchange], trust: float | None) -> ImportedTask:
    longest = max(group, key=lambda each: len(each.transcript))
    turns = question_of(longest.messages)
    after = longest.transcript[len(turns) :]
    reply = next((text_of(each.get("content")) for each in reversed(after) if each["role"] == "assistant"), None)
    calls = [call for each in after if each["role"] == "assistant" for call in calls_of(each)]
    rewards = [each.reward for each in group if each.reward is not None]
    reward = rewards[-1] if rewards else None
    right = bool(reply) and (longest.target or (trust is not None and reward is not None and reward >= trust))
    known: dict[str, Any] = {
        "source": longest.source,
        "place": longest.place,
        "ids": [each.exchange_id for each in group],
        "conversation": longest.conversation,
        "users": sorted({each.user for each in group if each.user}),
        "at": min((each.at for each in group if each.at is not None), default=None),
        "model": longest.model,
    }
    return ImportedTask(
        task_id=f"{longest.source}-{_digest([longest.conversation, essence_of(turns)])}",
        question=text_of(turns[-1]["content"]),
        messages=turns,
        answer=reply if right else None,
        expected_calls=tuple(asdict(call) for call in calls) if right else (),
        reply=reply or None,
        reward=reward,
        tools=longest.tools,
        provenance=({name: value for name, value in known.items() if value not in (None, [])} | dict(longest.labels)),
    )


def _digest(thing: object) -> str:
    return hashlib.sha256(json.dumps(thing, sort_keys=True, default=str).encode()).hexdigest()[:16]


def write_tasks(path: Path, tasks: Iterable[ImportedTask]) -> int:
    """Write JSON lines atomically. Raises ValueError for a duplicate id."""
    rows = [each.to_dict() for each in tasks]
    if twice := [name for name, count in Counter(row["task_id"] for row in rows).items() if count > 1]:
        raise ValueError(f"two tasks have the id {twice[0]}")
    beside = path.with_name(f"{path.name}.part")
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    beside.unlink(missing_ok=True)
    # Cut logs may have unpaired surrogates: write "?".
    with open(beside, "w", encoding="utf-8", errors="replace", opener=private_opener) as file:
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    return len(rows)


def read_tasks(path: Path) -> Iterator[ImportedTask]:
    """The tasks of a JSON lines file. Raises LogRefused with the number of an invalid line."""
    for number, row in json_lines(path):
        try:
            yield ImportedTask.from_dict(row)
        except (ValueError, TypeError) as error:
            raise LogRefused(f"{path}:{number}: {error}") from None


_SHINGLE = 5  # characters of a shingle: not words, since not every language has spaces

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@dataclass(frozen=True, slots=True)
class Deduplicated:
    """The first task of each kind, and the originals of exact and near duplicates, by id."""

    kept: tuple[ImportedTask, ...]
    exact: dict[str, str]
    near: dict[str, str]


def deduplicate(
    tasks: Iterable[ImportedTask], *, near: float | None = 0.8, against: Iterable[ImportedTask] = ()
) -> Deduplicated:
    """Drop repetitions, also of `against`; `near` is the least Jaccard index of question and context (None: exact)."""
    if near is not None and not 0 < near <= 1:
        raise ValueError(f"near: {near} must be above 0 and at most 1, or None")
    earlier, later = [_Text(each) for each in against], [_Text(each) for each in tasks]
    frequency = Counter(shingle for each in [*earlier, *later] for shingle in each.question)
    whole: dict[str, str] = {}
    by_shingle: dict[object, list[_Text]] = defaultdict(list)
    kept: list[ImportedTask] = []
    exact: dict[str, str] = {}
    close: dict[str, str] = {}
    for place, each in enumerate([*earlier, *later]):
        rare = [] if near is None else each.rarest(near, frequency)
        if place >= len(earlier):
            if original := whole.get(each.whole):
                exact[each.task.task_id] = original
                continue
            alike = Counter(other for shingle in rare for other in by_shingle.get(shingle, ()))
            # Compare contexts too: a long system prompt makes all its questions alike.
            found = (other for other, _ in alike.most_common() if each.is_near(other, near or 1))
            if (other := next(found, None)) is not None:
                close[each.task.task_id] = other.task.task_id
                continue
            kept.append(each.task)
        whole.setdefault(each.whole, each.task.task_id)
        for shingle in rare:
            by_shingle[shingle].append(each)
    return Deduplicated(tuple(kept), exact, close)


def normalise(text: str) -> str:
    """A text without differences of case, white space and Unicode form.

    >>> normalise("Where  is\\nmy PARCEL?")
    'where is my parcel?'
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


class _Text:
    """A task's question and context, prepared for comparison."""

    def __init__(self, task: ImportedTask) -> None:
        turns = [f"{each['role']}: {normalise(text_of(each.get('content')))}" for each in task.messages]
        self.task = task
        self.whole = "\n".join(turns)
        self.question = _shingles(normalise(task.question))
        self.context = _shingles("\n".join(turns[:-1]))
        self.numbers = tuple(sorted(_NUMBER.findall(self.whole)))

    def rarest(self, near: float, frequency: Counter[str]) -> list[object]:
        """The rarest shingles, so many that a near question shares one of them (prefix filtering).

        The numbers are part of the key: one template may yield thousands of texts that differ only in numbers.
        """
        ordered = sorted(self.question, key=lambda each: (frequency[each], each))
        return [(self.numbers, each) for each in ordered[: len(ordered) - math.ceil(near * len(ordered)) + 1]]

    def is_near(self, other: "_Text", near: float) -> bool:
        pairs = ((self.question, other.question), (self.context, other.context))
        return all(len(one & two) >= near * len(one | two) for one, two in pairs)


def _shingles(text: str) -> set[str]:
    return {text[at : at + _SHINGLE] for at in range(max(1, len(text) - _SHINGLE + 1))}


#: Every so many tasks one is new, if possible; only the newest outcomes of a task count, as the model changes.
_NEW_EVERY, _NEWEST = 5, 32


def what_teaches_most(tasks: Sequence[ImportedTask], outcomes: Mapping[str, Sequence[float]]) -> list[ImportedTask]:
    """Sort tasks, those that are solved sometimes first.

    `outcomes` are the runs' results by task id, oldest first, from 0 (not solved) to 1. The share p of solved runs has
    a Beta(1, 1) prior; the posterior mean of p(1-p) decides.
    """

    def spread(task: ImportedTask) -> float:
        runs = outcomes[task.task_id][-_NEWEST:]
        a, b = 1 + sum(runs), 1 + len(runs) - sum(runs)
        return a * b / ((a + b) * (a + b + 1))

    known = sorted((each for each in reversed(tasks) if outcomes.get(each.task_id)), key=spread)
    fresh = [each for each in reversed(tasks) if not outcomes.get(each.task_id)]
    found: list[ImportedTask] = []
    while known or fresh:
        is_new = fresh and (not known or len(found) % _NEW_EVERY == _NEW_EVERY - 1)
        found.append(fresh.pop() if is_new else known.pop())
    return found


_WANTED = "Show a request of a user that an assistant should be trained on."


@dataclass(frozen=True, slots=True)
class Screened:
    """Tasks that the judge kept, with scores, tasks that it rejected, and tasks without a usable verdict."""

    kept: tuple[ImportedTask, ...]
    rejected: tuple[ImportedTask, ...]
    unjudged: tuple[ImportedTask, ...]


def learn_task_rubric(good: Sequence[str], bad: Sequence[str], endpoint: Endpoint, *, criteria: int = 4) -> Rubric:
    """A rubric that a model writes from good and bad tasks. Raises JudgeError, ValueError."""
    if not good or not bad:
        raise ValueError("a rubric needs good tasks and bad ones")
    count = max(len(good), len(bad))
    pairs = [Example(prompt=_WANTED, good=good[at % len(good)], bad=bad[at % len(bad)]) for at in range(count)]
    return Rubric.generate(pairs, endpoint, criteria=criteria)


def screen_tasks(tasks: Iterable[ImportedTask], judge: Judge, *, least: float = 0.5) -> Screened:
    """Keep tasks with a verdict of at least `least` in [0, 1]. Raises JudgeAway."""
    found: tuple[list[ImportedTask], list[ImportedTask], list[ImportedTask]] = ([], [], [])
    for each in tasks:
        # The task is shown as a reply to a request for one, inside the judge's data marks.
        turns = [f"[{turn['role']}] {turn.get('content')}" for turn in each.messages[:-1]]
        shown = "\n\n".join([*turns, f"[user] {each.question}"]) if turns else each.question
        try:
            verdict = judge.score(
                Reply(text=shown, messages=({"role": "user", "content": _WANTED},), expected=each.answer)
            )
        except JudgeFailed:
            found[2].append(each)
            continue
        judged = replace(each, scores={**each.scores, **verdict.shares, "judge": verdict.normalised})
        found[0 if verdict.normalised >= least else 1].append(judged)
    return Screened(*map(tuple, found))
