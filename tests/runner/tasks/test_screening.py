"""Tasks that a model chooses."""

import pytest

from tests.doubles.judge import judge_place, shown, verdict
from tuneloop.runner import Endpoint, Judge
from tuneloop.runner.tasks.task_set import ImportedTask, learn_task_rubric, screen_tasks


def task(name: str, question: str) -> ImportedTask:
    asked = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": question})
    return ImportedTask(task_id=name, question=question, messages=asked)


def test_a_judge_keeps_what_is_good_enough() -> None:
    with judge_place() as double:
        double.says = [verdict(5), verdict(2), "No."]
        judge = Judge(base_url=double.base_url, model="judge")
        found = screen_tasks([task("t", "What is 3+4?"), task("u", "What?"), task("v", "Hm?")], judge, least=0.5)
        judge.close()
        parts = (found.kept, found.rejected, found.unjudged)
        assert [[each.task_id for each in part] for part in parts] == [["t"], ["u"], ["v"]]
        assert found.kept[0].scores == {"relevance": 1.0, "accuracy": 1.0, "completeness": 1.0, "judge": 1.0}
        assert "Be brief." in shown(double.requests[0])


def test_a_rubric_is_learnt_from_good_and_bad_tasks() -> None:
    with judge_place() as double, Endpoint(base_url=double.base_url, model="writer", retries=0).open() as endpoint:
        double.says = [{"criteria": [{"name": "clear", "description": "Is it clear?", "weight": 2}]}]
        rubric = learn_task_rubric(["Cancel order 7.", "Where is order 8?"], ["hi"], endpoint)
        assert (rubric.criteria, rubric.weights) == ({"clear": "Is it clear?"}, {"clear": 2})
        assert all(words in shown(double.requests[0]) for words in ("Cancel order 7.", "Where is order 8?", "hi"))
        with pytest.raises(ValueError, match="good tasks and bad"):
            learn_task_rubric([], ["hi"], endpoint)
