"""Tasks that a model chooses."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.doubles.judge import JudgeDouble, judge_place, shown, verdict
from tuneloop.runner import Endpoint, Judge
from tuneloop.runner.tasks.screening import learn_task_rubric, screen_tasks
from tuneloop.runner.tasks.task_set import ImportedTask

BEFORE = {"role": "system", "content": "Be brief."}


@pytest.fixture
def double() -> Iterator[JudgeDouble]:
    with judge_place() as place:
        yield place


@pytest.fixture
def endpoint(double: JudgeDouble) -> Iterator[Endpoint]:
    with Endpoint(base_url=double.base_url, model="writer", retries=0).open() as found:
        yield found


def task(question: str = "What is 3+4?", **but: Any) -> ImportedTask:
    asked = (BEFORE, {"role": "user", "content": question})
    return ImportedTask(**{"task_id": "t", "question": question, "messages": asked} | but)


def test_a_judge_keeps_what_is_good_enough(double: JudgeDouble) -> None:
    double.says = [verdict(5), verdict(2), "No."]
    judge = Judge(base_url=double.base_url, model="judge")
    found = screen_tasks([task(), task("What?", task_id="u"), task("Hm?", task_id="v")], judge, least=0.5)
    judge.close()
    kept, rejected, unjudged = (
        [each.task_id for each in part] for part in (found.kept, found.rejected, found.unjudged)
    )
    assert (kept, rejected, unjudged) == (["t"], ["u"], ["v"])
    assert found.kept[0].scores == {"relevance": 1.0, "accuracy": 1.0, "completeness": 1.0, "judge": 1.0}
    assert "Be brief." in shown(double.requests[0])


def test_a_rubric_is_learnt_from_good_and_bad_tasks(double: JudgeDouble, endpoint: Endpoint) -> None:
    double.says = [{"criteria": [{"name": "clear", "description": "Is it clear?", "weight": 2}]}]
    rubric = learn_task_rubric(["Cancel order 7.", "Where is order 8?"], ["hi"], endpoint)
    assert (rubric.criteria, rubric.weights) == ({"clear": "Is it clear?"}, {"clear": 2})
    assert all(words in shown(double.requests[0]) for words in ("Cancel order 7.", "Where is order 8?", "hi"))
    with pytest.raises(ValueError, match="good tasks and bad"):
        learn_task_rubric([], ["hi"], endpoint)
