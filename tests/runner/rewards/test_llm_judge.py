"""A judge that is asked with two texts."""

from collections.abc import Iterator

import pytest

from tests.doubles.judge import JudgeDouble, judge_place, shown, verdict
from tuneloop.runner import JudgeFailed, LLMJudge

CRITERIA = {"relevance": "Is it relevant?", "accuracy": "Is it right?", "completeness": "Is it all?"}


@pytest.fixture
def double() -> Iterator[JudgeDouble]:
    with judge_place() as place:
        yield place


def test_each_criterion_has_its_score(double: JudgeDouble) -> None:
    double.says = [verdict(5, 4, 3)]
    judge = LLMJudge("gpt-4", CRITERIA, base_url=double.base_url, api_key="k")
    evaluation = judge.evaluate(user_input="How do I read a CSV?", agent_response="pandas.read_csv()")
    judge.close()
    assert evaluation == {"relevance": 5.0, "accuracy": 4.0, "completeness": 3.0, "total": 4.0}
    assert "How do I read a CSV?" in shown(double.requests[0])
    assert "pandas.read_csv()" in shown(double.requests[0])


async def test_it_need_not_block(double: JudgeDouble) -> None:
    judge = LLMJudge("gpt-4", base_url=double.base_url)
    assert (await judge.evaluate_async("2+2?", "4"))["total"] == 4.0
    await judge.close_async()


def test_the_environment_may_say_where_it_is(double: JudgeDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", double.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    judge = LLMJudge("gpt-4", CRITERIA)
    judge.evaluate("2+2?", "4")
    judge.close()
    assert double.headers[0]["authorization"] == "Bearer secret"


def test_nothing_is_sent_to_whom_nobody_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ValueError, match="base_url"):
        LLMJudge("gpt-4")


def test_no_score_is_made_up(double: JudgeDouble) -> None:
    double.says = ["I would rather not."]
    judge = LLMJudge("gpt-4", CRITERIA, base_url=double.base_url)
    with pytest.raises(JudgeFailed):
        judge.evaluate("2+2?", "4")
    judge.close()


def test_a_criterion_may_not_be_called_total() -> None:
    with pytest.raises(ValueError, match="total"):
        LLMJudge("gpt-4", {"total": "all"}, base_url="http://localhost/v1")
