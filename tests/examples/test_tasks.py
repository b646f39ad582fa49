"""The tasks: what is asked, what the judges give, and that an agent's dialogue ends."""

import random

import pytest

from examples.tasks.calculator import Calculator, Sequel
from examples.tasks.dialogue import Dialogue, Reply, Verdict, call_of, forever
from examples.tasks.sums import Sums
from examples.tasks.tools import Shop

TASKS = (Sums(), Shop(), Calculator())


def played(dialogue: Dialogue, *replies: Reply) -> Verdict:
    """The verdict after just these replies."""
    next(dialogue)
    for reply in replies[:-1]:
        dialogue.send(reply)
    with pytest.raises(StopIteration) as end:
        dialogue.send(replies[-1])
    verdict: Verdict = end.value.value
    return verdict


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_teacher_is_right_without_slips_and_often_wrong_with_them(task: Sums | Shop | Calculator) -> None:
    chance = random.Random(0)
    for question in task.questions():
        verdict = played(task.dialogue(question), *task.replies(question, None))
        assert verdict == Verdict(task.reward_range[1], right=True)
    slips = [
        played(task.dialogue(question), *task.replies(question, chance))
        for question in chance.choices(task.questions(), k=300)
    ]
    assert 0.05 < sum(verdict.right for verdict in slips) / len(slips) < 0.6
    assert all(task.reward_range[0] <= verdict.reward <= task.reward_range[1] for verdict in slips)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_questions_differ_and_each_comes_once_in_a_round(task: Sums | Shop | Calculator) -> None:
    questions, asked = task.questions(), forever(task, 3)
    first = [next(asked) for _ in questions]
    assert sorted(map(str, first)) == sorted(map(str, set(questions)))
    assert [next(asked) for _ in questions] != first


def test_a_calculation_in_two_steps() -> None:
    dialogue = Calculator().dialogue(Sequel(3, "+", 4, "*", 5))
    assert next(dialogue) == [{"role": "user", "content": "(3+4)*5="}]
    first = dialogue.send(call_of("calc", expr="3+4"))
    assert first[-1] == {"role": "tool", "tool_call_id": "call_0", "content": "7"}
    assert dialogue.send(call_of("calc", expr="7*5"))[: len(first)] == first
    with pytest.raises(StopIteration) as end:
        dialogue.send(Reply(" 35"))
    assert end.value.value == Verdict(1.0, right=True)
