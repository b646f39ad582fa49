"""What a model does with tasks: it writes variations, and chooses by a rubric."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tuneloop.runner.errors import JudgeFailed
from tuneloop.runner.judging.endpoint import Endpoint
from tuneloop.runner.judging.judge import Judge
from tuneloop.runner.judging.prompts import object_in, variation_prompt
from tuneloop.runner.judging.rubric import Example, Rubric
from tuneloop.runner.rewards.reply import Reply
from tuneloop.runner.tasks.task_set import ImportedTask, deduplicate, with_scores

#: The longest question of a variation, in characters, beside that of its parent.
_LONGEST = 4

_QUESTION = {"type": "object", "properties": {"question": {"type": "string"}, "answer": {"type": "string"}}}


@dataclass(slots=True)
class AugmentCounts:
    """What came of it: of `asked` variations, so many were `made`, and why others were not.

    `invalid` ones have no question, or one that is far too long; `duplicates` repeat a task or another variation;
    `missing` were not written; `failed` counts parents on which the model gave no usable answer.
    """

    asked: int = 0
    made: int = 0
    invalid: int = 0
    duplicates: int = 0
    missing: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Augmented:
    """The variations, without their parents, and the counts."""

    tasks: tuple[ImportedTask, ...]
    counts: AugmentCounts = field(default_factory=AugmentCounts)


def augment_tasks(
    tasks: Sequence[ImportedTask], endpoint: Endpoint, *, each: int = 3, answers: bool = False, near: float = 0.9
) -> Augmented:
    """`each` variations of every task. A variation has the conversation and the tools of its parent.

    With `answers` the model writes the answers too, to tasks that have one: they are a model's and may be wrong, and
    `provenance` says `answer_by`. Raises JudgeAway where the model is not there.
    """
    if each < 1:
        raise ValueError("each: must be at least 1")
    counts = AugmentCounts()
    found: list[ImportedTask] = []
    for parent in tasks:
        counts.asked += each
        wanted = answers and parent.answer is not None
        shape = {**_QUESTION, "required": ["question", "answer"] if wanted else ["question"]}
        schema = {"type": "object", "properties": {"tasks": {"type": "array", "items": shape}}, "required": ["tasks"]}
        prompt = variation_prompt(parent.question, parent.answer if wanted else None, each)
        try:
            rows = object_in(endpoint.ask(prompt, schema).text, "tasks")["tasks"]
            if not isinstance(rows, list):
                raise JudgeFailed("the model wrote no list of tasks", str(rows))
        except JudgeFailed:
            counts.failed += 1
            counts.missing += each
            continue
        del rows[each:]
        counts.missing += each - len(rows)
        for row in rows:
            made = _variation(parent, row, endpoint.model, answers=wanted)
            if made is None:
                counts.invalid += 1
            else:
                found.append(made)
    once = deduplicate(found, near=near, against=tasks)
    counts.duplicates, counts.made = len(found) - len(once.kept), len(once.kept)
    return Augmented(once.kept, counts)


def _variation(parent: ImportedTask, row: object, model: str, *, answers: bool) -> ImportedTask | None:
    """The task that a model wrote; None if it is none."""
    question = row.get("question") if isinstance(row, Mapping) else None
    if not isinstance(row, Mapping) or not isinstance(question, str) or not question.strip():
        return None
    if len(question) > max(1000, _LONGEST * len(parent.question)):
        return None
    answer = row.get("answer") if answers else None
    if answers and (not isinstance(answer, str) or not answer.strip()):
        return None
    origin = {"source": "augmentation", "parent": parent.task_id, "model": model}
    return ImportedTask(
        task_id=f"{parent.task_id}-{hashlib.sha256(question.strip().encode()).hexdigest()[:8]}",
        question=question.strip(),
        messages=(*parent.messages[:-1], {**parent.messages[-1], "content": question.strip()}),
        answer=answer.strip() if isinstance(answer, str) else None,
        tools=parent.tools,
        provenance=origin | ({"answer_by": model} if answers else {}),
    )


_WANTED = "Show a request of a user that an assistant should be trained on."


@dataclass(frozen=True, slots=True)
class Screened:
    """What the judge kept, with its scores, what it did not, and how many it gave no usable verdict on."""

    kept: tuple[ImportedTask, ...]
    rejected: tuple[ImportedTask, ...]
    unjudged: tuple[ImportedTask, ...]


def learn_task_rubric(good: Sequence[str], bad: Sequence[str], endpoint: Endpoint, *, criteria: int = 4) -> Rubric:
    """Criteria that a model writes from tasks worth training on and others. Raises JudgeError, ValueError."""
    if not good or not bad:
        raise ValueError("a rubric needs good tasks and bad ones")
    count = max(len(good), len(bad))
    pairs = [Example(prompt=_WANTED, good=good[at % len(good)], bad=bad[at % len(bad)]) for at in range(count)]
    return Rubric.generate(pairs, endpoint, criteria=criteria)


def screen_tasks(tasks: Iterable[ImportedTask], judge: Judge, *, least: float = 0.5) -> Screened:
    """The tasks that a judge gives `least` or more, of 0 to 1, with their scores. Raises JudgeAway."""
    found: tuple[list[ImportedTask], list[ImportedTask], list[ImportedTask]] = ([], [], [])
    for each in tasks:
        # A task as a reply to the wish for one: so the judge's marks stand around it.
        turns = [f"[{turn['role']}] {turn.get('content')}" for turn in each.messages[:-1]]
        shown = "\n\n".join([*turns, f"[user] {each.question}"]) if turns else each.question
        try:
            verdict = judge.score(
                Reply(text=shown, messages=({"role": "user", "content": _WANTED},), expected=each.answer)
            )
        except JudgeFailed:
            found[2].append(each)
            continue
        judged = with_scores(each, {**verdict.shares, "judge": verdict.normalised})
        found[0 if verdict.normalised >= least else 1].append(judged)
    return Screened(*map(tuple, found))
