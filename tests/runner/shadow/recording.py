"""Runners whose shadow agents repeat what they are asked, and what came of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from tuneloop.runner import EveryCall, ShadowResult, TrainingRunner


@contextmanager
def runner_of(
    url: str, strategy: Any = None, *, patience_s: float = 30, **settings: Any
) -> Iterator[tuple[TrainingRunner, list[ShadowResult]]]:
    """A runner, stopped at the end, and what its calculator was given: each is worth 0.5."""
    results: list[ShadowResult] = []

    def calculate(result: ShadowResult) -> float:
        results.append(result)
        return 0.5

    defaults: dict[str, Any] = {"agent": lambda run: lambda *args, **kwargs: (args, kwargs)}
    defaults |= {"reward_calculator": calculate, "commit_interval_seconds": 0}
    runner = TrainingRunner(service=url, model="t", selection_strategy=strategy or EveryCall(), **(defaults | settings))
    runner.start()
    try:
        yield runner, results
    finally:
        runner.stop(patience_s)


class Seen:
    """An agent of production's that is wrapped, sync and async, and which calls of it were run again."""

    def __init__(self, url: str, strategy: Any) -> None:
        self._making = runner_of(url, strategy)

    def __enter__(self) -> Self:
        self.runner, self.results = self._making.__enter__()
        self.ask = self.runner.wrap(lambda text: text.upper())

        async def answer(text: str) -> str:
            return text.upper()

        self.ask_async = self.runner.wrap(answer)
        return self

    def __exit__(self, *error: object) -> None:
        self._making.__exit__(None, None, None)

    def marks(self) -> dict[str, tuple[str, ...]]:
        return {each.call.args[0]: each.call.marks for each in self.results}
