"""How well an agent uses tools: figures over records of its runs, each with its interval."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tuneloop.runner.collection.collector import AgentLike, DataCollector
from tuneloop.runner.collection.intervals import Estimated, mean_of, share_of
from tuneloop.runner.collection.run_record import RunRecord
from tuneloop.runner.collection.thread_loops import run_in_thread_loop
from tuneloop.runner.rewards.components import same_json
from tuneloop.runner.rewards.reply import Reply, ToolCall

log = logging.getLogger("tuneloop.runner.collection")

_FORMAT = r"(?i)\banswer\b\s*[:=]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUseCase:
    """A run, and the calls that would have been right; `relevant` are what should be found, `found` reads a run's."""

    record: RunRecord
    expected_calls: Sequence[ToolCall]
    relevant: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUseReport:
    """The figures; None where nothing was there to be measured.

    `tool_accuracy`: of the expected calls, those whose tool was called. `arg_accuracy`: of these, those with just the
    expected arguments. `invalid_rate`: of all calls, those of no offered tool, or whose arguments were no JSON object.
    `recall`: of what should be found, how many a run found, in the mean. `mean_steps`: the assistant's turns of a run.
    `format_rate`: the runs whose last words have the form.

    `failures`: the cases whose run raised, by the exception's name. They are no `runs`, and in no figure.
    """

    runs: int
    tool_accuracy: Estimated | None
    arg_accuracy: Estimated | None
    invalid_rate: Estimated | None
    recall: Estimated | None
    mean_steps: Estimated | None
    format_rate: Estimated | None
    failures: Mapping[str, int] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        """A figure by its name, of shares in per cent. Raises KeyError where there is none."""
        found = getattr(self, name, None)
        if not isinstance(found, Estimated):
            raise KeyError(name)
        return found.value * 100 if name.endswith(("_accuracy", "_rate")) else found.value


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUseEvaluator:
    """Measures tool use. `form` is the regular expression of the right form; `found` reads what a run has found.

    Without `found` it is what of the relevant stands in the results of the tools, as words.
    """

    form: str = _FORMAT
    found: Callable[[RunRecord], Iterable[str]] | None = field(default=None)

    def evaluate(self, agent: AgentLike, test_cases: Iterable[Mapping[str, Any]]) -> ToolUseReport:
        """Run an agent on test cases, one after another, and measure.

        A case is {"input", "expected_calls": [{"name", "arguments"}], "relevant": [...]}; the latter may be missing.
        A run that raises is counted, and the next one is made; the first of each kind is logged with its traceback.
        Raises ValueError for a case that is none, before any is run. In an event loop use `evaluate_async`.
        """
        return run_in_thread_loop(self.evaluate_async(agent, test_cases))

    async def evaluate_async(self, agent: AgentLike, test_cases: Iterable[Mapping[str, Any]]) -> ToolUseReport:
        """The same in an event loop; an agent that is no coroutine function blocks it."""
        collector, failures = DataCollector(), Counter[str]()
        cases = []
        for number, case in enumerate([_read_case(at, each) for at, each in enumerate(test_cases, start=1)], start=1):
            try:
                record = await collector.collect_async(agent, case.input)
            except Exception as error:
                kind = type(error).__name__
                if kind not in failures:
                    log.warning("test case %d: %r; further ones are counted, not logged", number, error, exc_info=error)
                failures[kind] += 1
            else:
                cases.append(ToolUseCase(record=record, expected_calls=case.expected_calls, relevant=case.relevant))
        return replace(self.measure(cases), failures=dict(failures))

    def measure(self, cases: Sequence[ToolUseCase]) -> ToolUseReport:
        """The figures of runs. Each call, and each run, is a unit of its own."""
        replies = [each.record.as_reply() for each in cases]
        matched = [_match(reply, case.expected_calls) for reply, case in zip(replies, cases, strict=True)]
        calls = [(reply, call) for reply in replies for call in reply.tool_calls]
        wrong = sum(
            call.arguments is None or (reply.tools != () and call.name not in reply.tools) for reply, call in calls
        )
        expected = sum(len(case.expected_calls) for case in cases)
        named, right = sum(each[0] for each in matched), sum(each[1] for each in matched)
        form = re.compile(self.form, re.MULTILINE)
        return ToolUseReport(
            runs=len(cases),
            tool_accuracy=share_of(named, expected),
            arg_accuracy=share_of(right, named),
            invalid_rate=share_of(wrong, len(calls)),
            recall=mean_of([self._recall(each) for each in cases if each.relevant]),
            mean_steps=mean_of([float(reply.turns) for reply in replies]),
            format_rate=share_of(sum(form.search(reply.text) is not None for reply in replies), len(replies)),
        )

    def _recall(self, case: ToolUseCase) -> float:
        if self.found is not None:
            return len(case.relevant & set(self.found(case.record))) / len(case.relevant)
        results = "\n".join(str(each["result"] or "") for each in case.record.tool_calls)
        seen = [name for name in case.relevant if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", results)]
        return len(seen) / len(case.relevant)


class _Case(NamedTuple):
    input: Any
    expected_calls: tuple[ToolCall, ...]
    relevant: frozenset[str]


def _read_case(number: int, case: Mapping[str, Any]) -> _Case:
    """Raises ValueError for what is no case."""
    try:
        calls = tuple(ToolCall(call["name"], call.get("arguments")) for call in case.get("expected_calls") or ())
        return _Case(case["input"], calls, frozenset(case.get("relevant") or ()))
    except KeyError as error:
        raise ValueError(f"test case {number}: there is no {error}") from None
    except (AttributeError, TypeError) as error:
        raise ValueError(f"test case {number}: {error}") from None


def _match(reply: Reply, expected: Sequence[ToolCall]) -> tuple[int, int]:
    """How many of the expected calls were made to the right tool, and how many with just the right arguments too."""
    names = Counter(call.name for call in reply.tool_calls)
    named = sum((Counter(call.name for call in expected) & names).values())
    left = list(reply.tool_calls)
    right = 0
    for wanted in expected:
        call = next((each for each in left if _same(each, wanted)), None)
        if call is not None:
            left.remove(call)
            right += 1
    return named, right


def _same(call: ToolCall, wanted: ToolCall) -> bool:
    return call.name == wanted.name and same_json(call.arguments, dict(wanted.arguments or {}))
