"""Graders give what OpenAI's descriptions say, and refuse what cannot be."""

import asyncio
import math
from typing import Any

import pytest

from tuneloop.shared.errors import JobRefused, RequestRefused
from tuneloop.shared.finetuning.graders import Grade, ModelSample, check_grader, evaluate, grade

ITEM = {"answer": "7", "deep": {"list": [1, {"x": "y"}]}, "number": 7}


def check(operation: str, reference: str = "{{item.answer}}", text: str = "{{sample.output_text}}") -> dict[str, Any]:
    return {"type": "string_check", "name": "c", "input": text, "reference": reference, "operation": operation}


def similarity(metric: str) -> dict[str, Any]:
    inputs = {"input": "{{sample.output_text}}", "reference": "{{item.answer}}"}
    return {"type": "text_similarity", "name": "s", "evaluation_metric": metric, **inputs}


MODEL = {
    "type": "score_model",
    "name": "m",
    "model": "judge",
    "input": [
        {"role": "system", "content": "Score."},
        {"role": "user", "content": {"type": "input_text", "text": "{{sample.output_text}} for {{item.answer}}"}},
    ],
    "range": [0, 10],
    "sampling_params": {"temperature": 0, "max_completions_tokens": 50},
}


def graded(
    grader: dict[str, Any], text: str = "7", answer: str = "7", says: str = '{"result": 8}', **more: Any
) -> Grade:
    asked: list[dict[str, Any]] = []

    async def ask(body: dict[str, Any]) -> str:
        asked.append(body)
        return says

    found = asyncio.run(
        grade(check_grader(grader), ModelSample(text=text, item=ITEM | {"answer": answer}, **more), ask)
    )
    graded.asked = asked  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    ("operation", "text", "reward"),
    [("eq", "7", 1), ("eq", "7 ", 0), ("ne", "8", 1), ("ne", "7", 0), ("like", "it is 7", 1), ("like", "it is 8", 0)],
)
def test_strings_are_compared(operation: str, text: str, reward: float) -> None:
    assert graded(check(operation), text).reward == reward


def test_ilike_takes_no_heed_of_case() -> None:
    assert [graded(check(each), "SEVEN", "even").reward for each in ("like", "ilike")] == [0, 1]


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{{ sample.output_json.a }}", "b"),
        ("{{sample.output_json}}", '{"a":"b"}'),
        ("{{item.deep.list[1].x}} {{item.deep.list.0}}", "y 1"),
        ("{{item.number}}", "7"),
        ("{{sample.output_tools[0].function.name}}", "add"),
        ("{{other.x}} {item}", "{{other.x}} {item}"),
    ],
)
def test_templates_name_fields_of_item_and_sample(template: str, value: str) -> None:
    tools = [{"function": {"name": "add"}}]
    assert graded(check("eq", value, template), '{"a": "b"}', tools=tools).reward == 1


def test_what_a_reply_says_is_no_template() -> None:
    assert graded(check("eq", "{{sample.output_text}}"), "{{item.answer}}").reward == 1
    assert graded(check("eq"), "{{item.answer}}").reward == 0


@pytest.mark.parametrize("template", ["{{item.none}}", "{{sample.output_json.a}}", "{{item.deep.list[9]}}"])
def test_a_variable_that_is_not_there_is_an_error_of_the_sample(template: str) -> None:
    found = graded(check("eq", "7", template), "no json")
    assert (found.reward, found.error) == (0, "invalid_variable_error")


@pytest.mark.parametrize(
    ("metric", "text", "reference", "score"),
    [
        ("fuzzy_match", "kitten", "sitting", 2 * 4 / 13),
        ("fuzzy_match", "", "", 1.0),
        ("rouge_1", "The cat sat", "the cat lay down", 2 * 2 / 7),
        ("rouge_2", "the cat sat", "the cat lay down", 2 * 1 / 5),
        ("rouge_l", "the big cat sat", "the cat sat down", 2 * 3 / 8),
        ("rouge_5", "a b", "a b", 0.0),
        # nltk.translate.gleu_score gives this.
        ("gleu", "the cat sat on the mat", "the cat is on the mat", 9 / 18),
        ("bleu", "the cat sat on the mat", "the cat is on the mat", (5 / 6 * 4 / 6 * 2 / 5 * 1 / 4) ** 0.25),
        ("bleu", "the cat sat", "the cat sat down now", math.exp(1 - 5 / 3)),
        ("bleu", "", "a", 0.0),
    ],
)
def test_texts_are_alike(metric: str, text: str, reference: str, score: float) -> None:
    assert graded(similarity(metric), text, reference).reward == pytest.approx(score)


@pytest.mark.parametrize("metric", ["fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_l"])
def test_the_same_text_scores_one(metric: str) -> None:
    assert graded(similarity(metric), "one two three four five", "one two three four five").reward == pytest.approx(1)


@pytest.mark.parametrize(
    ("says", "reward", "error"),
    [
        ('{"result": 8}', 8, None),
        ('{"result": 80}', 10, None),
        ('{"result": -1}', 0, None),
        ("eight", 0, "model_grader_parse_error"),
        ('{"score": 8}', 0, "model_grader_parse_error"),
        ("[]", 0, "model_grader_parse_error"),
    ],
)
def test_a_model_scores_within_its_range(says: str, reward: float, error: str | None) -> None:
    found = graded(MODEL, "eight", says=says)
    assert (found.reward, found.error) == (reward, error)
    [body] = graded.asked  # type: ignore[attr-defined]
    assert body["messages"] == [{"role": "system", "content": "Score."}, {"role": "user", "content": "eight for 7"}]
    assert (body["model"], body["temperature"], body["max_completion_tokens"]) == ("judge", 0, 50)


def test_a_model_that_refuses_to_score_is_an_error_of_the_sample() -> None:
    async def ask(body: dict[str, Any]) -> str:
        raise RequestRefused("too long")

    found = asyncio.run(grade(check_grader(MODEL), ModelSample(text="x", item=ITEM), ask))
    assert (found.reward, found.error, found.details) == (0.0, "model_grader_server_error", "too long")


def test_several_graders_are_one_by_a_formula() -> None:
    both = {"type": "multi", "graders": {"a": check("eq"), "m": MODEL}, "calculate_output": "0.5 * a + m / 20"}
    found = graded(both)
    assert (found.reward, found.scores) == (pytest.approx(0.9), {"a": 1.0, "m": 8.0})
    assert graded({**both, "calculate_output": "1 / (a - 1)"}).error == "formula_parse_error"


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("min(a, b) + max(a, b, 9)", 10),
        ("abs(-a) ^ 2 + 7 % 4", 4),
        ("floor(2.5) + ceil(2.5) + exp(0) + sqrt(4) + log(1)", 8),
        ("-a + (b - 1)", 0),
        ("2 ** 3", 8),
    ],
)
def test_formulas(formula: str, value: float) -> None:
    assert evaluate(formula, {"a": 1.0, "b": 2.0}) == pytest.approx(value)


@pytest.mark.parametrize("formula", ["1/0", "9^9^9", "log(0)", "sqrt(-1)", "exp(9999)", "0 * exp(700) ^ 2"])
def test_formulas_without_a_value(formula: str) -> None:
    with pytest.raises((ArithmeticError, ValueError)):
        evaluate(formula, {})


@pytest.mark.parametrize(
    "formula",
    [
        *("", "a.b", "a[0]", "lambda: 1", "__import__('os')", "open('/etc/passwd')", "'a' * 9", "True", "min", "log()"),
        *(
            "min(a)(1)",
            "max(a, key=1)",
            "[a for a in a]",
            "a if a else a",
            "a == a",
            "a := 1",
            "1; 2",
            "c",
            "1j",
            "a\0",
        ),
        *("(" * 400 + "a" + ")" * 400, "-" * 990 + "a", "a" * 1001, "sqrt(1, 2)", "max(*a)", "a @ a", "a // a", "~a"),
    ],
)
def test_what_is_no_formula_is_refused(formula: str) -> None:
    with pytest.raises(SyntaxError):
        evaluate(formula, {"a": 1.0})


@pytest.mark.parametrize(
    ("grader", "words"),
    [
        (None, "grader must be an object"),
        ({"type": "python", "source": "def grade(): ..."}, "runs no code of clients"),
        ({"type": "endpoint"}, "no address of clients"),
        ({"type": "label_model"}, "score_model"),
        ({"type": "magic"}, "must be one of string_check"),
        ({"type": ["eq"]}, "must be one of"),
        (check("equals"), "operation must be one of eq"),
        ({**check("eq"), "colour": 1}, "grader.colour is no field"),
        ({**check("eq"), "input": 3}, "input must be a string"),
        ({"type": "string_check"}, "grader.input is missing"),
        (similarity("cosine"), "needs a model of embeddings"),
        (similarity("meteor"), "WordNet"),
        (similarity("levenshtein"), "must be one of fuzzy_match"),
        ({**MODEL, "input": []}, "list of messages"),
        ({**MODEL, "input": [{"role": "user", "content": 3}]}, "must have a role and a text"),
        ({**MODEL, "range": [1, 0]}, "lower one first"),
        ({**MODEL, "sampling_params": {"n": 3}}, "sampling_params may have"),
        ({"type": "multi", "graders": {}, "calculate_output": "1"}, "1 to 20 graders"),
        ({"type": "multi", "graders": {"a": check("eq")}, "calculate_output": "a + b"}, "no grader 'b'"),
        ({"type": "multi", "graders": {"a": check("eq")}, "calculate_output": "log(a - 1) + b"}, "no grader 'b'"),
        ({"type": "multi", "graders": {"a": {"type": "python"}}, "calculate_output": "a"}, "graders.a.type: python"),
        (
            {"type": "multi", "calculate_output": "a"}
            | {"graders": {"a": {"type": "multi", "graders": {"b": check("eq")}, "calculate_output": "b"}}},
            "none of them multi",
        ),
    ],
)
def test_what_cannot_grade_is_refused_with_its_place(grader: Any, words: str) -> None:
    with pytest.raises(JobRefused) as refused:
        check_grader(grader)
    assert words in str(refused.value)
