"""Intervals, A/B tests without a service, and how well an agent uses tools."""

import random
from typing import Any

import pytest
from scipy.special import stdtrit
from scipy.stats import ttest_ind

from tuneloop.runner import ABTest, RunRecord, ToolCall, ToolUseEvaluator
from tuneloop.runner.collection.figures import ToolUseCase, difference_of, student_quantile


@pytest.mark.parametrize("freedom", [1, 1.7, 3, 12, 250.5])
def test_students_quantile_is_that_of_scipy(freedom: float) -> None:
    assert student_quantile(freedom) == pytest.approx(float(stdtrit(freedom, 0.975)), rel=1e-6)


def test_the_interval_of_a_difference_is_welchs() -> None:
    chance = random.Random(0)
    a, b = [chance.gauss(0, 1) for _ in range(20)], [chance.gauss(1, 3) for _ in range(9)]
    found, expected = difference_of(a, b), ttest_ind(b, a, equal_var=False).confidence_interval()
    assert found is not None
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-5)


# A/B.


def test_a_key_always_gets_the_same_version() -> None:
    test = ABTest(model="m", a=3, b=4, share_b=0.3)
    keys = [str(at) for at in range(2000)]
    sides = [test.side_of(key) for key in keys]
    assert sides == [ABTest(model="m", a=3, b=4, share_b=0.3).side_of(key) for key in keys]
    assert 0.26 < sides.count("b") / 2000 < 0.34
    assert {test.model_for(key) for key in keys} == {"m@3", "m@4"}
    assert sides != [ABTest(model="m", a=3, b=4, share_b=0.3, seed=1).side_of(key) for key in keys]


def test_replies_to_one_user_are_one_unit() -> None:
    test = ABTest(model="m", a=0, b=1)
    for _ in range(100):
        test.record("ann", reward=1.0)
    test.record("ann", reward=0.0)
    [figure] = [each for each in (test.report().figures["reward"].a, test.report().figures["reward"].b) if each]
    assert (figure.count, figure.low) == (1, None)
    assert test.report().better() is None


def test_what_fails_is_counted_by_version() -> None:
    test = ABTest(model="m", a=0, b=1)

    def measure(model: str, task: int) -> float:
        if task % 5 == 0:
            raise RuntimeError("no")
        return 1.0

    report = test.run({str(at): at for at in range(50)}, measure)
    assert sum(report.failures.values()) == 10
    assert sum(report.keys.values()) == 40


# Tools.


def run_of(*calls: tuple[str, Any, str], end: str = "Answer: 1") -> RunRecord:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find the invoice."}]
    for name, arguments, result in calls:
        messages.append({"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]})
        messages[-1]["content"] = None
        messages.append({"role": "tool", "content": result})
    return RunRecord.of_messages("c", [*messages, {"role": "assistant", "content": end}], tools=("search", "read"))


def test_the_figures_of_tool_use() -> None:
    expected = [ToolCall("search", {"q": "invoice"}), ToolCall("read", {"id": 7})]
    cases = [
        ToolUseCase(
            record=run_of(("search", {"q": "invoice"}, "mail-7, mail-77"), ("read", {"id": 7}, "..."), end="Answer: 7"),
            expected_calls=expected,
            relevant=frozenset({"mail-7", "mail-8"}),
        ),
        ToolUseCase(
            record=run_of(("search", {"q": "bill"}, "nothing"), ("delete", "{", "no such tool"), end="It is 7."),
            expected_calls=expected,
        ),
    ]
    report = ToolUseEvaluator().measure(cases)
    assert {name: report[name] for name in ("tool_accuracy", "arg_accuracy", "invalid_rate", "format_rate")} == {
        "tool_accuracy": 75.0,
        "arg_accuracy": pytest.approx(200 / 3),
        "invalid_rate": 25.0,
        "format_rate": 50.0,
    }
    assert (report["recall"], report["mean_steps"], report.runs) == (0.5, 3.0, 2)
    assert report.tool_accuracy is not None
    assert report.tool_accuracy.low is not None
    assert report.tool_accuracy.low < 0.75 < (report.tool_accuracy.high or 0)


def test_an_agent_is_evaluated_on_cases() -> None:
    def agent(text: str) -> list[dict[str, Any]]:
        return list(run_of(("search", {"q": text}, "mail-1")).messages)

    cases = [
        {"input": "invoice", "expected_calls": [{"name": "search", "arguments": {"q": "invoice"}}]},
        {
            "input": "bill",
            "expected_calls": [{"name": "search", "arguments": {"q": "invoice"}}],
            "relevant": ["mail-1"],
        },
    ]
    results = ToolUseEvaluator().evaluate(agent=agent, test_cases=cases)
    assert (results["tool_accuracy"], results["arg_accuracy"], results["recall"]) == (100.0, 50.0, 1.0)


def test_an_agent_that_raises_does_not_end_its_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    def agent(text: str) -> Any:
        if text == "slow":
            raise TimeoutError("too slow")
        return None if text == "dumb" else list(run_of(("search", {"q": text}, "mail-1")).messages)

    cases = [
        {"input": each, "expected_calls": [{"name": "search", "arguments": {"q": "a"}}]}
        for each in ("slow", "a", "dumb", "slow", "b", "slow")
    ]
    report = ToolUseEvaluator().evaluate(agent, cases)
    assert report.failures == {"TimeoutError": 3, "ValueError": 1}
    assert (report.runs, report["tool_accuracy"], report["arg_accuracy"]) == (2, 100.0, 50.0)
    assert [each.message[:12] for each in caplog.records] == ["test case 1:", "test case 3:"]
