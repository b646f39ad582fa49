"""Shadow runs against a real explorer: their rows, their groups and their rewards are where the trainer looks."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.doubles.engine import MODEL
from tests.explorer.running import RunningExplorer
from tests.runner.shadow.recording import runner_of
from tuneloop.runner import SamplingRateStrategy, ShadowResult, ShadowRun, TrainingContext, TrainingRunner

pytestmark = pytest.mark.contract

ASKED: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0}


def say(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


def agent(run: ShadowRun) -> Any:
    """Asks twice, by a plain client that was given a URL."""
    client = OpenAI(base_url=run.base_url, api_key=run.api_key, max_retries=0)

    def answer(question: str) -> str:
        with client:
            first = client.chat.completions.create(model=run.model, messages=say(question), **ASKED)
            second = client.chat.completions.create(model=run.model, messages=say("Sure?"), **ASKED)
        return f"{first.choices[0].message.content}{second.choices[0].message.content}"

    return answer


def test_shadow_runs_are_rewarded_and_committed_in_their_groups(explorer: RunningExplorer) -> None:
    def calculate(result: ShadowResult) -> float:
        assert result.production_result == result.call.args[0].upper()
        assert isinstance(result.result, str)
        return float(result.run.run_id) / 2

    with runner_of(explorer.url, agent=agent, reward_calculator=calculate, repeat_time=3) as (runner, _):
        ask = runner.wrap(str.upper)
        TrainingContext.mark("hard")
        assert [ask("3+4="), ask("3+4?")] == ["3+4=", "3+4?"]
        assert runner.stop(60)
    assert runner.counters() | {"runs": 6, "completed": 6, "rewarded": 6, "commits": 1} == runner.counters()
    rows = explorer.rows("SELECT task_id, run_id, reward, state FROM experiences ORDER BY id")
    assert len(rows) == 12
    assert {row[3] for row in rows} == {"committed"}
    assert {(row[1], row[2]) for row in rows} == {("0", 0.0), ("1", 0.5), ("2", 1.0)}
    tasks = {row[0] for row in rows}
    assert len(tasks) == 2
    assert all(len([row for row in rows if row[0] == task]) == 6 for task in tasks)
    marks = explorer.rows("SELECT metric, text, source, msg_id FROM feedback WHERE kind = 'label'")
    assert [tuple(row) for row in marks] == [("mark:hard", "hard", None, None)] * 3


def test_lambdas_in_a_thread_of_the_app_are_enough(explorer: RunningExplorer) -> None:
    runner = (
        TrainingRunner.builder()
        .trinity_endpoint(explorer.url)
        .model_name(MODEL)
        .agent(lambda run: lambda text: agent(run)(text)[:1])
        .selection_strategy(SamplingRateStrategy.of(1.0))
        .reward_calculator(lambda result: 0.25)
        .commit_interval_seconds(300)
        .build()
    )
    runner.start()
    assert runner.wrap(lambda text: f"GPT-4 says {text}")("hello") == "GPT-4 says hello"
    assert runner.stop()
    assert [tuple(row) for row in explorer.rows("SELECT reward, state FROM experiences")] == [(0.25, "committed")] * 2


def test_the_builder_has_no_other_settings() -> None:
    with pytest.raises(AttributeError, match="no setting 'sampling'"):
        TrainingRunner.builder().sampling(0.1)


async def test_in_an_asyncio_app_with_a_model_of_ours(explorer: RunningExplorer) -> None:
    def made(run: ShadowRun) -> Any:
        model: AsyncOpenAI = run.chat_model("async_openai", **ASKED)

        async def answer(question: str) -> str:
            reply = await model.chat.completions.create(model=run.model, messages=say(question))
            return str(reply.choices[0].message.content)

        return answer

    async def production(question: str) -> str:
        await asyncio.sleep(0.01)
        return question

    with runner_of(explorer.url, agent=made) as (runner, results):
        ask = runner.wrap(production)
        answers = await asyncio.gather(*(ask(str(number)) for number in range(10)))
        assert answers == [str(number) for number in range(10)]
        assert await asyncio.to_thread(runner.stop, 60)
    assert [len(each.run.calls) for each in results] == [1] * 10
    rows = explorer.rows("SELECT task_id, msg_id, reward FROM experiences")
    assert {(row[0], row[1]) for row in rows} == {(each.run.task_id, each.run.calls.msg_ids[0]) for each in results}
    assert {row[2] for row in rows} == {0.5}
