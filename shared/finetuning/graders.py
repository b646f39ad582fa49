"""Grades a reply to a prompt of a file, as OpenAI's reinforcement fine-tuning specifies; runs no client code.

Texts are templates: `{{item.x}}` is a field of the prompt's line, `{{sample.output_text}}` the reply.
"""

import ast
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import orjson

from tuneloop.shared.errors import JobRefused, RequestRefused

_OPERATIONS: Mapping[str, Callable[[str, str], bool]] = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.lower() in text.lower(),
}

_REFUSED = {
    "python": "python: the service runs no code of clients; use string_check, text_similarity, score_model or multi",
    "endpoint": "endpoint: the service sends replies to no address of clients; grade with another type",
    "label_model": "label_model is for evaluations; use score_model",
}
_METRICS_REFUSED = {
    "cosine": "cosine needs a model of embeddings, which the service has not",
    "meteor": "meteor needs WordNet, which the service has not",
}

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "string_check": ("input", "reference", "operation"),
    "text_similarity": ("input", "reference", "evaluation_metric"),
    "score_model": ("model", "input", "range", "sampling_params"),
    "multi": ("graders", "calculate_output"),
}
_MAY_LACK = {"range", "sampling_params"}

_SAMPLING = {"temperature", "top_p", "seed", "reasoning_effort", "max_completions_tokens"}

_VARIABLE = re.compile(r"\{\{\s*(item|sample)((?:\.[\w-]+|\[\d+\])*)\s*\}\}")

_MAX_FORMULA, _MAX_GRADERS = 1000, 20

_SCORE = {
    "type": "json_schema",
    "json_schema": {
        "name": "score",
        "schema": {"type": "object", "properties": {"result": {"type": "number"}}, "required": ["result"]},
    },
}

#: Asks a model of the service: a body of chat completions, and the text of the reply. It raises RequestRefused for a
#: body that no model answers, and other errors of ours.
AskModel = Callable[[dict[str, Any]], Awaitable[str]]


class ModelSample(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    item: dict[str, Any]
    tools: list[dict[str, Any]] = []

    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {"output_text": self.text, "output_tools": self.tools}
        with suppress(orjson.JSONDecodeError):
            found["output_json"] = orjson.loads(self.text)
        return {"item": self.item, "sample": found}


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply is worth. With an `error`, OpenAI's name of what went wrong, it is worth 0."""

    reward: float
    error: str | None = None
    details: str = ""
    scores: dict[str, float] = {}


class _Failure(Exception):
    """A sample that cannot be graded: OpenAI's name of the error, and what it is about."""


def check_grader(grader: object, *, place: str = "grader") -> dict[str, Any]:
    """The grader, if it is valid. Raises JobRefused with the place of the mistake."""
    if not isinstance(grader, dict):
        raise JobRefused(f"{place} must be an object")
    kind = grader.get("type")
    if isinstance(kind, str) and kind in _REFUSED:
        raise JobRefused(f"{place}.type: {_REFUSED[kind]}")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise JobRefused(f"{place}.type must be one of {', '.join(_FIELDS)}")
    for field in _FIELDS[kind]:
        if grader.get(field) is None and field not in _MAY_LACK:
            raise JobRefused(f"{place}.{field} is missing")
    if unknown := sorted(grader.keys() - {"type", "name", *_FIELDS[kind]}):
        raise JobRefused(f"{place}.{unknown[0][:64]} is no field of {kind}")
    for field in ("name", "reference", "model", "operation", "evaluation_metric", "calculate_output"):
        if not isinstance(grader.get(field), str | None):
            raise JobRefused(f"{place}.{field} must be a string")
    check: Callable[[Mapping[str, Any], str], None] = _check_text
    if kind in {"multi", "score_model"}:
        check = _check_multi if kind == "multi" else _check_score_model
    check(grader, place)
    return grader


def _check_text(grader: Mapping[str, Any], place: str) -> None:
    metric = grader.get("evaluation_metric")
    if not isinstance(grader["input"], str):
        raise JobRefused(f"{place}.input must be a string")
    if grader["type"] == "string_check" and grader["operation"] not in _OPERATIONS:
        raise JobRefused(f"{place}.operation must be one of {', '.join(_OPERATIONS)}")
    if metric in _METRICS_REFUSED:
        raise JobRefused(f"{place}.evaluation_metric: {_METRICS_REFUSED[metric]}")
    if grader["type"] == "text_similarity" and metric not in _METRICS:
        raise JobRefused(f"{place}.evaluation_metric must be one of {', '.join(_METRICS)}")


def _check_multi(grader: Mapping[str, Any], place: str) -> None:
    graders = grader["graders"]
    if place != "grader" or not isinstance(graders, dict) or not 1 <= len(graders) <= _MAX_GRADERS:
        raise JobRefused(f"{place}.graders must be 1 to {_MAX_GRADERS} graders by their names, none of them multi")
    for name, each in graders.items():
        check_grader(each, place=f"{place}.graders.{name[:64]}")
    try:
        with suppress(ArithmeticError, ValueError):  # of these numbers
            evaluate(grader["calculate_output"], dict.fromkeys(graders, 1.0))
    except SyntaxError as error:
        raise JobRefused(f"{place}.calculate_output: {error.msg}") from None


def _check_score_model(grader: Mapping[str, Any], place: str) -> None:
    inputs, within, sampling = grader["input"], grader.get("range"), grader.get("sampling_params")
    if not isinstance(inputs, list) or not inputs or not all(isinstance(each, dict) for each in inputs):
        raise JobRefused(f"{place}.input must be a list of messages")
    for message in inputs:
        if message.get("role") not in ("system", "developer", "user", "assistant") or _text_of(message) is None:
            raise JobRefused(f"{place}.input: each message must have a role and a text as its content")
    if within is not None and not (
        isinstance(within, list)
        and len(within) == 2
        and all(isinstance(each, int | float) and not isinstance(each, bool) for each in within)
        and within[0] < within[1]
    ):
        raise JobRefused(f"{place}.range must be two numbers, the lower one first")
    if not isinstance(sampling, dict | None) or (sampling or {}).keys() - _SAMPLING:
        raise JobRefused(f"{place}.sampling_params may have {', '.join(sorted(_SAMPLING))}")


async def grade(grader: Mapping[str, Any], sample: ModelSample, ask: AskModel) -> Grade:
    """What a sample is worth by a grader that was checked. Raises what `ask` raises."""
    fields = sample.fields()
    if grader["type"] != "multi":
        try:
            return Grade(reward=await _score(grader, fields, ask))
        except _Failure as failure:
            return Grade(reward=0.0, error=failure.args[0], details=failure.args[1])
    scores = {}
    for name, each in grader["graders"].items():
        try:
            scores[name] = await _score(each, fields, ask)
        except _Failure as failure:
            return Grade(reward=0.0, error=failure.args[0], details=failure.args[1], scores=scores)
    try:
        return Grade(reward=evaluate(grader["calculate_output"], scores), scores=scores)
    except (ArithmeticError, ValueError, SyntaxError) as error:
        return Grade(reward=0.0, error="formula_parse_error", details=str(error), scores=scores)


async def _score(grader: Mapping[str, Any], fields: Mapping[str, Any], ask: AskModel) -> float:
    if grader["type"] == "score_model":
        messages = [{"role": each["role"], "content": fill(_text_of(each) or "", fields)} for each in grader["input"]]
        sampling = dict(grader.get("sampling_params") or {})
        if (most := sampling.pop("max_completions_tokens", None)) is not None:
            sampling["max_completion_tokens"] = most
        try:
            text = await ask({"model": grader["model"], "messages": messages, "response_format": _SCORE, **sampling})
        except RequestRefused as error:
            raise _Failure("model_grader_server_error", str(error)) from None
        try:
            score = float(orjson.loads(text)["result"])
        except (ValueError, TypeError, KeyError):
            raise _Failure("model_grader_parse_error", f"the model answered no score: {text[:200]}") from None
        lowest, highest = grader.get("range") or (0.0, 1.0)
        return min(max(score, float(lowest)), float(highest))
    text, reference = fill(grader["input"], fields), fill(grader["reference"], fields)
    if grader["type"] == "string_check":
        return float(_OPERATIONS[grader["operation"]](text, reference))
    return _METRICS[grader["evaluation_metric"]](text, reference)


def fill(template: str, fields: Mapping[str, Any]) -> str:
    """The template with its variables; what is no text is written as JSON. Raises _Failure for one that is not there.

    >>> fill("{{ item.a[1].b }} is {{item.c}}", {"item": {"a": [0, {"b": "x"}], "c": [1]}})
    'x is [1]'
    """

    def value_of(found: re.Match[str]) -> str:
        value = fields[found[1]]
        for name in re.findall(r"[\w-]+", found[2]):
            try:
                value = value[int(name)] if isinstance(value, list) else value[name]
            except (LookupError, TypeError, ValueError):
                raise _Failure("invalid_variable_error", f"{found[0]} is not there") from None
        return value if isinstance(value, str) else orjson.dumps(value).decode()

    return _VARIABLE.sub(value_of, template)


def _text_of(message: Mapping[str, Any]) -> str | None:
    """The text of a message of a grader, which may be a part of its own; None if it has none."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [each.get("text") if isinstance(each, dict) else each for each in parts]
    found = [each for each in texts if isinstance(each, str)]
    return "\n".join(found) if found and len(found) == len(texts) else None


_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    **{"min": min, "max": max, "abs": abs},
    **{name: getattr(math, name) for name in ("floor", "ceil", "exp", "sqrt", "log")},
}
_OPERATORS: Mapping[type[ast.AST], Callable[..., float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Mod: math.fmod,
    ast.Pow: math.pow,
    ast.USub: lambda a: -a,
    ast.UAdd: lambda a: a,
}


def evaluate(formula: str, values: Mapping[str, float]) -> float:
    """The number that a formula gives.

    Raises SyntaxError for what is no formula, ArithmeticError and ValueError for numbers that it has no value for.

    >>> evaluate("max(a, 0.5) * 2 ^ 3 - b", {"a": 1.0, "b": 1.0})
    7.0
    """
    if len(formula) > _MAX_FORMULA or not formula.isprintable():
        raise SyntaxError(f"it must be one line of at most {_MAX_FORMULA} characters")
    try:
        body = ast.parse(formula.strip().replace("^", "**"), mode="eval").body
        called = {id(each.func) for each in ast.walk(body) if isinstance(each, ast.Call) and not each.keywords}
        for node in ast.walk(body):
            number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
            name = isinstance(node, ast.Name) and node.id in (_FUNCTIONS if id(node) in called else values)
            if isinstance(node, ast.Name) and not name:
                raise SyntaxError(f"there is no {'function' if id(node) in called else 'grader'} {node.id[:64]!r}")
            if not (number or name or isinstance(node, _PARTS) or type(node) in _OPERATORS):
                raise SyntaxError(f"it may have names of graders, numbers, + - * / % ^ and {', '.join(_FUNCTIONS)}")
        found = _number_of(body, values)
    except (RecursionError, MemoryError):
        raise SyntaxError("it is nested too deeply") from None
    except TypeError:
        raise SyntaxError("a function has too few or too many arguments") from None
    if not math.isfinite(found):
        raise ArithmeticError("it gives no finite number")
    return found


_PARTS = (ast.BinOp, ast.UnaryOp, ast.Call, ast.Load)


def _number_of(node: ast.AST, values: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name):
            return values[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_number_of(left, values), _number_of(right, values))
        case ast.UnaryOp(op=op, operand=operand):
            return _OPERATORS[type(op)](_number_of(operand, values))
        case ast.Call(func=ast.Name(id=name), args=args):
            return float(_FUNCTIONS[name](*(_number_of(each, values) for each in args)))
    raise SyntaxError("only functions are called by their names")


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the longest common subsequence, by Hyyrö's bits: one addition for each item of the second."""
    places: dict[str, int] = {}
    for index, item in enumerate(first):
        places[item] = places.get(item, 0) | 1 << index
    every = state = (1 << len(first)) - 1
    for item in second:
        matched = state & places.get(item, 0)
        state = ((state + matched) | (state - matched)) & every
    return len(first) - state.bit_count()


def _f1(common: int, first: int, second: int) -> float:
    return 2 * common / (first + second) if first + second else 1.0


def _grams(words: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[at : at + size]) for at in range(len(words) - size + 1))


def _rouge(text: str, reference: str, size: int | None) -> float:
    """F1 of the n-grams or, without a size, of the longest common subsequence, over words in small letters."""
    words, wanted = (re.findall(r"[a-z0-9]+", each.lower()) for each in (text, reference))
    if size is None:
        return _f1(_common(words, wanted), len(words), len(wanted))
    found, there = _grams(words, size), _grams(wanted, size)
    return _f1((found & there).total(), found.total(), there.total()) if found and there else 0.0


def _gleu(text: str, reference: str) -> float:
    """Google's: the lower of precision and recall of all n-grams up to four words."""
    found, there = (
        sum((_grams(each.split(), size) for size in range(1, 5)), Counter[tuple[str, ...]]())
        for each in (text, reference)
    )
    most = max(found.total(), there.total())
    return (found & there).total() / most if most else 1.0


def _bleu(text: str, reference: str) -> float:
    """BLEU-4 of one sentence; one is added to the counts of n-grams above one word (Lin and Och, 2004)."""
    words, wanted, logarithm = text.split(), reference.split(), 0.0
    for size in range(1, 5):
        found, there = _grams(words, size), _grams(wanted, size)
        hits, more = (found & there).total(), int(size > 1)
        if not hits + more:
            return float(not words and not wanted)
        logarithm += math.log((hits + more) / (found.total() + more)) / 4
    return math.exp(logarithm + min(0.0, 1 - len(wanted) / len(words)))


_METRICS: Mapping[str, Callable[[str, str], float]] = {
    "fuzzy_match": lambda text, reference: _f1(_common(text, reference), len(text), len(reference)),
    "bleu": _bleu,
    "gleu": _gleu,
    **{f"rouge_{size}": partial(_rouge, size=size) for size in range(1, 6)},
    "rouge_l": partial(_rouge, size=None),
}
