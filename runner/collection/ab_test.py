"""An A/B test of two versions of one service: who gets which, and what differs, with its confidence interval."""

import hashlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from tuneloop.runner.collection.intervals import Estimated, difference_of, mean_of

AB = Literal["a", "b"]

_REWARD, _LATENCY = "reward", "latency_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class ABFigure:
    """A metric of both versions; `difference` is b's mean less a's, and tells something where it is `distinct`."""

    a: Estimated | None
    b: Estimated | None
    difference: Estimated | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ABReport:
    """What came of it. `figures` are by metric, `reward` and `latency_s` among them; `failures` by version.

    All that was measured of one key, such as a user, is one unit.
    """

    figures: Mapping[str, ABFigure]
    keys: Mapping[AB, int]
    failures: Mapping[AB, int]

    def better(self, metric: str = _REWARD) -> AB | None:
        """The version with more of it; None where that is not shown, or nothing is known of it."""
        figure = self.figures.get(metric)
        if figure is None or figure.difference is None or not figure.difference.distinct:
            return None
        return "b" if figure.difference.value > 0 else "a"


@dataclass(kw_only=True)
class ABTest:
    """Sends `share_b` of the keys to version `b`, the others to `a`, always the same key to the same one.

    `model` is the name of the served model. The service must allow pins (`explorer.version_pins`), and serve both
    versions. Raises ValueError for a share that is none, and for one version twice.

    >>> test = ABTest(model="tiny", a=3, b=4, share_b=0.2)
    >>> test.model_for("ann") in ("tiny@3", "tiny@4")
    True
    """

    model: str
    a: int
    b: int
    share_b: float = 0.5
    seed: int = 0
    _seen: dict[AB, dict[str, dict[str, list[float]]]] = field(init=False, repr=False)
    _failures: dict[AB, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.share_b < 1:
            raise ValueError(f"share_b: {self.share_b} must be between 0 and 1")
        if self.a == self.b:
            raise ValueError("a and b are one version")
        self._seen = {"a": {}, "b": {}}
        self._failures = {"a": 0, "b": 0}
        self._lock = threading.Lock()

    def side_of(self, key: str) -> AB:
        """Which version a key gets. Another seed shares the keys out anew."""
        digest = hashlib.blake2b(f"{self.seed}/{self.a}/{self.b}/{key}".encode(), digest_size=8).digest()
        return "b" if int.from_bytes(digest) < self.share_b * 2**64 else "a"

    def model_for(self, key: str) -> str:
        """What a client names as its `model` for this key."""
        return f"{self.model}@{self.a if self.side_of(key) == 'a' else self.b}"

    def record(self, key: str, **metrics: float) -> None:
        """What was measured of a key, such as reward=1.0; again, the mean counts. Raises ValueError for NaN."""
        if wrong := [name for name, value in metrics.items() if value != value]:
            raise ValueError(f"{wrong[0]} is not a number")
        with self._lock:
            of_key = self._seen[self.side_of(key)].setdefault(key, defaultdict(list))
            for name, value in metrics.items():
                of_key[name].append(float(value))

    @contextmanager
    def time_call(self, key: str) -> Iterator[str]:
        """The model for a key; how long the block takes is its `latency_s`. One that raises is a failure."""
        began = time.perf_counter()
        try:
            yield self.model_for(key)
        except BaseException:
            with self._lock:
                self._failures[self.side_of(key)] += 1
            raise
        self.record(key, **{_LATENCY: time.perf_counter() - began})

    def run(
        self, tasks: Mapping[str, Any], measure: Callable[[str, Any], float | Mapping[str, float]], *, at_once: int = 4
    ) -> ABReport:
        """Measure each task, by its key, with its version: `measure(model, task)` is its reward, or its metrics.

        A task that raises an Exception is counted as a failure of its version, and has no reward.
        """

        def run_one(item: tuple[str, Any]) -> None:
            key, task = item
            try:
                with self.time_call(key) as model:
                    figures = measure(model, task)
            except Exception:  # noqa: BLE001 - counted; what measure raises is the user's own
                return
            self.record(key, **(figures if isinstance(figures, Mapping) else {_REWARD: figures}))

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(run_one, tasks.items()))
        return self.report()

    def report(self) -> ABReport:
        """What came of it until now."""
        with self._lock:
            names = _in_order(each for side in self._seen.values() for of_key in side.values() for each in of_key)
            figures = {}
            for name in names:
                a, b = (
                    [fmean(of_key[name]) for of_key in self._seen[side].values() if of_key.get(name)]
                    for side in ("a", "b")
                )
                figures[name] = ABFigure(a=mean_of(a), b=mean_of(b), difference=difference_of(a, b))
            keys: dict[AB, int] = {"a": len(self._seen["a"]), "b": len(self._seen["b"])}
            return ABReport(figures=figures, keys=keys, failures=dict(self._failures))


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([_REWARD, _LATENCY, *names]))
