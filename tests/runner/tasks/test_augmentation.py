"""Tasks that a model writes and a model chooses."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.doubles.judge import JudgeDouble, judge_place, shown, verdict
from tuneloop.runner import Endpoint, Judge
from tuneloop.runner.tasks.augmentation import augment_tasks, learn_task_rubric, screen_tasks
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


def wrote(*questions: Any) -> dict[str, Any]:
    return {"tasks": [{"question": each} if isinstance(each, str) else each for each in questions]}


def test_a_variation_names_its_parent(double: JudgeDouble, endpoint: Endpoint) -> None:
    double.says = [wrote("What is 8+9?", "How much is 20 minus 5?")]
    found = augment_tasks([task(answer="7")], endpoint, each=2)
    assert [each.question for each in found.tasks] == ["What is 8+9?", "How much is 20 minus 5?"]
    assert found.tasks[0].messages == (BEFORE, {"role": "user", "content": "What is 8+9?"})
    assert found.tasks[0].provenance == {"source": "augmentation", "parent": "t", "model": "writer"}
    assert [each.answer for each in found.tasks] == [None, None], "no answer is made up"
    assert "What is 3+4?" in shown(double.requests[0])


def test_answers_of_a_model_say_so(double: JudgeDouble, endpoint: Endpoint) -> None:
    double.says = [wrote({"question": "What is 8+9?", "answer": "17"}, {"question": "What is 1+1?"})]
    found = augment_tasks([task(answer="7")], endpoint, each=2, answers=True)
    assert [(each.answer, each.provenance["answer_by"]) for each in found.tasks] == [("17", "writer")]
    assert found.counts.invalid == 1


def test_what_is_no_task_is_counted(double: JudgeDouble, endpoint: Endpoint) -> None:
    double.says = [
        wrote("what is  3+4?", "What is 5+5?", "What is 5+5?", "", 5, "x" * 5000),
        "I would rather not.",
        {"tasks": "none"},
        wrote("What is 6+6?"),
    ]
    tasks = [task(), task("A?", task_id="u"), task("B?", task_id="v"), task("C?", task_id="w")]
    found = augment_tasks(tasks, endpoint, each=6)
    assert [each.question for each in found.tasks] == ["What is 5+5?", "What is 6+6?"]
    counts = found.counts
    assert (counts.asked, counts.made, counts.invalid, counts.duplicates) == (24, 2, 3, 2)
    assert (counts.failed, counts.missing) == (2, 17)
    assert counts.asked == counts.made + counts.invalid + counts.duplicates + counts.missing


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
