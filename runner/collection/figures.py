"""Measures A/B tests and tool use, with confidence intervals."""

import hashlib
import logging
import math
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import NormalDist, fmean, variance
from typing import Any, Literal

from tuneloop.runner.collection.run_records import AgentLike, DataCollector, RunRecord, run_in_own_loop
from tuneloop.runner.rewards.components import same_json
from tuneloop.runner.rewards.reply import Reply, ToolCall

_LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimated:
    """An estimate of `count` units with its 95 % interval; None for too few units."""

    value: float
    low: float | None
    high: float | None
    count: int

    @property
    def distinct(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def share_of(hits: int, count: int) -> Estimated | None:
    """A share with Wilson's interval; None if `count` is 0.

    >>> share_of(8, 10)
    Estimated(value=0.8, low=0.49016, high=0.94332, count=10)
    """
    if count == 0:
        return None
    z = NormalDist().inv_cdf((1 + _LEVEL) / 2)
    share = hits / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return Estimated(share, round(max(0.0, centre - half), 5), round(min(1.0, centre + half), 5), count)


def mean_of(values: Sequence[float], *, shares: bool = False) -> Estimated | None:
    """A mean with Student's interval; None if empty. `shares`: values in [0, 1], all 0 or 1 give Wilson's interval."""
    if not values:
        return None
    if shares and all(value in (0.0, 1.0) for value in values):
        return share_of(sum(value == 1.0 for value in values), len(values))
    if len(values) < 2:
        return Estimated(values[0], None, None, 1)
    half = student_quantile(len(values) - 1) * math.sqrt(variance(values) / len(values))
    low, high = fmean(values) - half, fmean(values) + half
    return Estimated(fmean(values), max(0.0, low) if shares else low, min(1.0, high) if shares else high, len(values))


def difference_of(a: Sequence[float], b: Sequence[float], *, shares: bool = False) -> Estimated | None:
    """Mean of `b` less mean of `a`, with Welch's interval; None if either is empty. `shares`: as in `mean_of`."""
    if not a or not b:
        return None
    difference, count = fmean(b) - fmean(a), min(len(a), len(b))
    if count < 2:
        return Estimated(difference, None, None, count)
    first, second = variance(a) / len(a), variance(b) / len(b)
    if first + second == 0:
        return Estimated(difference, difference, difference, count)
    freedom = (first + second) ** 2 / (first**2 / (len(a) - 1) + second**2 / (len(b) - 1))
    half = student_quantile(freedom) * math.sqrt(first + second)
    low, high = difference - half, difference + half
    return Estimated(difference, max(-1.0, low) if shares else low, min(1.0, high) if shares else high, count)


def student_quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's t by bisection; `freedom` is 1 or more.

    >>> round(student_quantile(10), 3), round(student_quantile(1000), 3)
    (2.228, 1.962)
    """
    # P(|t| < sqrt(freedom) tan(angle)) is the integral of cos^(freedom-1) to the angle, over that to a right angle.
    wanted = math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)) * math.sqrt(math.pi) / 2 * _LEVEL
    low, high = 0.0, math.atan(13 / math.sqrt(freedom))
    for _ in range(60):
        middle = (low + high) / 2
        step = middle / 400  # Simpson's rule
        inner = sum((4 if at % 2 else 2) * math.cos(at * step) ** (freedom - 1) for at in range(1, 400))
        within = (1 + inner + math.cos(middle) ** (freedom - 1)) * step / 3
        low, high = (middle, high) if within < wanted else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


AB = Literal["a", "b"]

_REWARD, _LATENCY = "reward", "latency_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class ABFigure:
    """A metric of both versions; `difference` is b's mean less a's, significant if `distinct`."""

    a: Estimated | None
    b: Estimated | None
    difference: Estimated | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ABReport:
    """An A/B test's result: `figures` by metric, `failures` by version; all measurements of one key are one unit."""

    figures: Mapping[str, ABFigure]
    keys: Mapping[AB, int]
    failures: Mapping[AB, int]

    def better(self, metric: str = _REWARD) -> AB | None:
        """The version with the significantly larger metric, or None."""
        figure = self.figures.get(metric)
        if figure is None or figure.difference is None or not figure.difference.distinct:
            return None
        return "b" if figure.difference.value > 0 else "a"


@dataclass(kw_only=True)
class ABTest:
    """Sends `share_b` of the keys to version `b`, the others to `a`; a key always gets the same version.

    A side is a version number of `model`, the name of the served model, or the name of a policy. Version numbers need
    pins (`explorer.version_pins`) and both versions served. Raises ValueError for an invalid share or equal versions.

    >>> test = ABTest(model="tiny", a=3, b=4, share_b=0.2)
    >>> test.model_for("ann") in ("tiny@3", "tiny@4")
    True
    """

    model: str
    a: int | str
    b: int | str
    share_b: float = 0.5
    seed: int = 0
    _seen: dict[AB, dict[str, dict[str, list[float]]]] = field(init=False, repr=False)
    _failures: dict[AB, int] = field(init=False, repr=False)
    _is_over: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        if not 0 < self.share_b < 1:
            raise ValueError(f"share_b: {self.share_b} must be between 0 and 1")
        if self.a == self.b:
            raise ValueError("a and b are one version")
        self._seen = {"a": {}, "b": {}}
        self._failures = {"a": 0, "b": 0}
        self._lock = threading.Lock()

    def side_of(self, key: str) -> AB:
        """The version of a key; another seed distributes the keys differently."""
        digest = hashlib.blake2b(f"{self.seed}/{self.a}/{self.b}/{key}".encode(), digest_size=8).digest()
        return "b" if int.from_bytes(digest) < self.share_b * 2**64 else "a"

    def model_for(self, key: str) -> str:
        side = self.a if self.side_of(key) == "a" else self.b
        return side if isinstance(side, str) else f"{self.model}@{side}"

    def switch_traffic(self, side: AB, share: float) -> None:
        """End the test with its report as it is, and send a share of the keys, from 0 to 1, to a side."""
        if not 0 <= share <= 1:
            raise ValueError(f"share: {share} must be from 0 to 1")
        with self._lock:
            self._is_over, self.share_b = True, share if side == "b" else 1 - share

    def record(self, key: str, **metrics: float) -> None:
        """Add measurements of a key, such as reward=1.0; repeated ones are averaged. Raises ValueError for NaN."""
        if wrong := [name for name, value in metrics.items() if value != value]:
            raise ValueError(f"{wrong[0]} is not a number")
        with self._lock:
            if self._is_over:
                return
            of_key = self._seen[self.side_of(key)].setdefault(key, defaultdict(list))
            for name, value in metrics.items():
                of_key[name].append(float(value))

    @contextmanager
    def time_call(self, key: str) -> Iterator[str]:
        """Yield the model of a key and record the block's duration as `latency_s`; an exception is a failure."""
        began = time.perf_counter()
        try:
            yield self.model_for(key)
        except BaseException:
            with self._lock:
                self._failures[self.side_of(key)] += not self._is_over
            raise
        self.record(key, **{_LATENCY: time.perf_counter() - began})

    def run(
        self, tasks: Mapping[str, Any], measure: Callable[[str, Any], float | Mapping[str, float]], *, at_once: int = 4
    ) -> ABReport:
        """Measure tasks by key: `measure(model, task)` returns the reward or metrics; an exception is a failure."""

        def run_one(item: tuple[str, Any]) -> None:
            key, task = item
            try:
                with self.time_call(key) as model:
                    figures = measure(model, task)
            except Exception:  # noqa: BLE001 - counted; `measure` is the user's
                return
            self.record(key, **(figures if isinstance(figures, Mapping) else {_REWARD: figures}))

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(run_one, tasks.items()))
        return self.report()

    def report(self) -> ABReport:
        with self._lock:
            seen = [name for side in self._seen.values() for of_key in side.values() for name in of_key]
            figures = {}
            for name in dict.fromkeys([_REWARD, _LATENCY, *seen]):
                a, b = (
                    [of_key[name] for of_key in self._seen[side].values() if of_key.get(name)] for side in ("a", "b")
                )
                thumbs = all(value in (0.0, 1.0) for of_key in a + b for value in of_key)
                means = [[fmean(of_key) for of_key in side] for side in (a, b)]
                first, second = (mean_of(side, shares=thumbs) for side in means)
                figures[name] = ABFigure(a=first, b=second, difference=difference_of(*means, shares=thumbs))
            keys: dict[AB, int] = {"a": len(self._seen["a"]), "b": len(self._seen["b"])}
            return ABReport(figures=figures, keys=keys, failures=dict(self._failures))


log = logging.getLogger("tuneloop.runner.collection")

_FORMAT = r"(?i)\banswer\b\s*[:=]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUseCase:
    """A run and its expected calls; `relevant` names what the run should find."""

    record: RunRecord
    expected_calls: Sequence[ToolCall]
    relevant: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUseReport:
    """The figures of tool use; None without data.

    `tool_accuracy`: share of the expected calls whose tool was called; `arg_accuracy`: of these, with exactly the
    expected arguments. `invalid_rate`: share of calls to unknown tools or with invalid JSON. `recall`: mean share found
    of what is relevant. `mean_steps`: assistant turns per run. `format_rate`: share of runs whose last text has the
    form. `failures`: cases whose run raised, by exception name; they count in no other figure.
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
        """A figure by name, shares in per cent. Raises KeyError."""
        found = getattr(self, name, None)
        if not isinstance(found, Estimated):
            raise KeyError(name)
        return found.value * 100 if name.endswith(("_accuracy", "_rate")) else found.value


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUseEvaluator:
    """Measures tool use. `form` is the regular expression of the answer format; `found` extracts what a run found.

    Without `found`, a relevant item is found if a tool's result has it as a word.
    """

    form: str = _FORMAT
    found: Callable[[RunRecord], Iterable[str]] | None = field(default=None)

    def evaluate(self, agent: AgentLike, test_cases: Iterable[Mapping[str, Any]]) -> ToolUseReport:
        """Run an agent on test cases in order, and measure. In an event loop use `evaluate_async`.

        A case is {"input", "expected_calls": [{"name", "arguments"}], "relevant": [...]}; the last two are optional. A
        run that raises is counted; the first of each kind is logged. Raises ValueError for an invalid case, before any
        run.
        """
        return run_in_own_loop(self.evaluate_async(agent, test_cases))

    async def evaluate_async(self, agent: AgentLike, test_cases: Iterable[Mapping[str, Any]]) -> ToolUseReport:
        """As `evaluate`, in an event loop; a plain function runs in a thread."""
        collector, failures = DataCollector(), Counter[str]()
        cases = []
        read = [_read_case(number, each) for number, each in enumerate(test_cases, start=1)]
        for number, (input_, expected_calls, relevant) in enumerate(read, start=1):
            try:
                record = await collector.collect_async(agent, input_)
            except Exception as error:
                kind = type(error).__name__
                if kind not in failures:
                    log.warning("test case %d: %r; further ones are counted, not logged", number, error, exc_info=error)
                failures[kind] += 1
            else:
                cases.append(ToolUseCase(record=record, expected_calls=expected_calls, relevant=relevant))
        return replace(self.measure(cases), failures=dict(failures))

    def measure(self, cases: Sequence[ToolUseCase]) -> ToolUseReport:
        """The figures of runs; each call and each run is a unit."""
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
            recall=mean_of([self._recall(each) for each in cases if each.relevant], shares=True),
            mean_steps=mean_of([float(reply.turns) for reply in replies]),
            format_rate=share_of(sum(form.search(reply.text) is not None for reply in replies), len(replies)),
        )

    def _recall(self, case: ToolUseCase) -> float:
        if self.found is not None:
            return len(case.relevant & set(self.found(case.record))) / len(case.relevant)
        results = "\n".join(str(each["result"] or "") for each in case.record.tool_calls)
        seen = [name for name in case.relevant if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", results)]
        return len(seen) / len(case.relevant)


def _read_case(number: int, case: Mapping[str, Any]) -> tuple[Any, tuple[ToolCall, ...], frozenset[str]]:
    """Input, expected calls and relevant items. Raises ValueError."""
    try:
        calls = tuple(ToolCall(call["name"], call.get("arguments")) for call in case.get("expected_calls") or ())
        return case["input"], calls, frozenset(case.get("relevant") or ())
    except KeyError as error:
        raise ValueError(f"test case {number}: there is no {error}") from None
    except (AttributeError, TypeError) as error:
        raise ValueError(f"test case {number}: {error}") from None


def _match(reply: Reply, expected: Sequence[ToolCall]) -> tuple[int, int]:
    """Numbers of expected calls with the right tool, and with the right arguments too."""
    names = Counter(call.name for call in reply.tool_calls)
    named = sum((Counter(call.name for call in expected) & names).values())
    left = list(reply.tool_calls)
    right = 0
    for wanted in expected:
        arguments = dict(wanted.arguments or {})
        if same := [each for each in left if each.name == wanted.name and same_json(each.arguments, arguments)]:
            left.remove(same[0])
            right += 1
    return named, right
