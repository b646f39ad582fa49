"""A shadow run that its service did not answer is not rewarded, whatever its agent makes of that."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.doubles.serving import serving
from tests.runner.faulty_service import FAILURES, Failure, FaultyService, ask
from tests.runner.shadow.recording import runner_of
from tuneloop.runner import ShadowResult, ShadowRun


def catching(run: ShadowRun) -> Callable[[str, bool], Any]:
    """An agent that answers nothing where it has no reply."""

    async def answer(question: str, stream: bool) -> str:
        try:
            await ask("0+1", run.chat_model("async_openai"), stream=False)
            return await ask(question, run.chat_model("async_openai"), stream=stream)
        except Exception:  # noqa: BLE001 - as users' workflows do
            return ""

    return answer


def worth(result: ShadowResult) -> float:
    return 1.0 if result.result else -0.1


async def production(question: str, stream: bool) -> str:
    return question


@pytest.mark.contract
@pytest.mark.parametrize("failure", FAILURES)
async def test_it_is_counted_and_not_rewarded(failure: Failure) -> None:
    double = FaultyService(fails=lambda question, before: failure if question == "3+1" else None)
    with serving(double) as url:
        made = {"agent": catching, "reward_calculator": worth}
        with runner_of(url, **made) as (runner, _):
            ask_production = runner.wrap(production)
            for question in ("2+1", "3+1"):
                await ask_production(question, failure in {"cut stream", "error event"})
        counts = runner.counters()
    assert list(double.rewards.values()) == [1.0]
    assert (counts["runs"], counts["service_away"], counts["rewarded"]) == (2, 1, 1)
