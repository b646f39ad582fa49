"""How replies are judged by functions of users, and what an evaluation comes to."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.constants import section_of
from tuneloop.shared.errors import EnvironmentRefused, NotEvaluated
from tuneloop.shared.evaluation.scores import Figure, TaskReply, figures_of
from tuneloop.shared.evaluation.tasks import Judge, Task, fingerprint, judge_of
from tuneloop.shared.settings.feedback import JudgeSettings
from tuneloop.shared.settings.versions import EvaluationSettings

TASK = Task(1, "7+5=", "12", None)
SUM = TASK._replace(slice="sums")


@pytest.fixture
def by_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., Judge]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    module = f"judge_{abs(hash(request.node.name))}"

    def make(body: str, name: str = "f") -> Judge:
        (tmp_path / f"{module}.py").write_text(f"def f(question, answer, reply):\n    {body}\n\n\ng = 3\n")
        judge = judge_of(EvaluationSettings(judge="function", function=f"{module}:{name}"))
        assert judge is not None
        return judge

    return make


@pytest.mark.parametrize(("body", "score"), [("return reply == answer", 1.0), ("return 0.25", 0.25)])
def test_a_function_says_how_right_a_reply_is(by_function: Callable[..., Judge], body: str, score: float) -> None:
    assert by_function(body)(TASK, "<think>?</think>12") == score


@pytest.mark.parametrize("body", ["return 1.5", "return float('nan')", "return None", "raise KeyError('x')"])
def test_a_function_that_says_no_score_makes_no_wrong_answer(by_function: Callable[..., Judge], body: str) -> None:
    judge = by_function(body)
    with pytest.raises(NotEvaluated, match=r"^monitor\.evaluation\.function: judge_"):
        judge(TASK, "12")


@pytest.mark.parametrize(("body", "name", "reason"), [("return 1", "h", "cannot be"), ("return 1", "g", "is int, not")])
def test_a_function_that_is_not_there_is_refused(
    by_function: Callable[..., Judge], body: str, name: str, reason: str
) -> None:
    with pytest.raises(EnvironmentRefused, match=rf"^monitor\.evaluation\.function: .*{reason}"):
        by_function(body, name)
    with pytest.raises(EnvironmentRefused, match="cannot be imported"):
        judge_of(EvaluationSettings(judge="function", function="no_such_module_here:f"))


def test_an_evaluation_comes_to_means_of_all_and_of_each_slice() -> None:
    answered = [
        TaskReply(TASK, "12", 2, 1.0),
        TaskReply(SUM, "I cannot", 4, 0.0),
        TaskReply(SUM, "12", 6, 1.0),
        TaskReply(SUM, "12", 8, 0.5),
    ]
    found = figures_of(answered, fingerprint=5, refusals=[re.compile("cannot")])
    assert [each._replace(deviation=0.0) for each in found] == [
        Figure("tasks", "", 5.0, 0.0, 4),
        Figure("score", "", 0.625, 0.0, 4),
        Figure("score", "sums", 0.5, 0.0, 3),
        Figure("reply_length", "", 5.0, 0.0, 4),
        Figure("refusals", "", 0.25, 0.0, 4),
    ]


def test_a_few_replies_may_be_without_a_verdict_but_not_many() -> None:
    judged, not_judged = TaskReply(TASK, "12", 1, 1.0), TaskReply(TASK, "12", 1, None)
    found = figures_of([judged] * 9 + [not_judged], fingerprint=1, refusals=[])
    assert next(each for each in found if each.metric == "score").samples == 9
    with pytest.raises(NotEvaluated, match="no verdict on 2 of 10"):
        figures_of([judged] * 8 + [not_judged] * 2, fingerprint=1, refusals=[])


def test_the_share_of_replies_without_the_form_that_is_demanded_is_of_those_tasks_alone() -> None:
    data, letter = TASK._replace(form="json"), TASK._replace(form="[A-D]")
    answered = [
        TaskReply(TASK, "anything", 1, 1.0),
        TaskReply(data, '<think>{</think> {"a": [1]}\n', 1, 0.0),
        TaskReply(data, '{"a": NaN}', 1, 1.0),
        TaskReply(data, "12", 1, 1.0, whole=False),
        TaskReply(letter, "B", 1, 1.0),
    ]
    found = figures_of(answered, fingerprint=1, refusals=[])
    assert found[-1]._replace(deviation=0.0) == Figure("malformed", "", 0.5, 0.0, 4)
    assert "malformed" not in {each.metric for each in figures_of(answered[:1], fingerprint=1, refusals=[])}


def test_a_model_that_judges_otherwise_has_another_fingerprint(tmp_path: Path) -> None:
    options, rubric = EvaluationSettings(judge="model"), tmp_path / "rubric.json"
    rubric.write_text("{}")
    judges: list[dict[str, Any]] = [
        {},
        {"model": "another"},
        {"criteria": {"tone": "Is it friendly?"}},
        {"weights": {"accuracy": 2.0}},
        {"scale": (1, 10)},
        {"samples": 3},
        {"temperature": 0.5},
        {"rubric": rubric},
    ]
    found = [fingerprint([TASK], options, section_of(JudgeSettings, {"model": "critic"} | each)) for each in judges]
    rubric.write_text('{"scale": [1, 3]}')
    by_rubric = fingerprint([TASK], options, JudgeSettings(model="critic", rubric=rubric))
    assert len({*found, by_rubric}) == len(judges) + 1
    elsewhere = JudgeSettings(model="critic", url="http://elsewhere/v1", key="k")
    assert fingerprint([TASK], options, elsewhere) == found[0]
    inline = section_of(JudgeSettings, {"model": "critic", "rubric": rubric, "scale": (1, 10)})
    assert fingerprint([TASK], options, inline) == by_rubric
    rubric.unlink()
    with pytest.raises(EnvironmentRefused, match=r"^judge\.rubric: .*rubric\.json cannot be read"):
        fingerprint([TASK], options, inline)
    assert fingerprint([], options, inline) == fingerprint([], options, judge=JudgeSettings())
