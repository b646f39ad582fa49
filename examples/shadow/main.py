"""Production answers its users; a share of its calls runs again with our model, which learns the same answers.

tuneloop run --config examples/production_feedback/tuneloop.yaml
python -m examples.shadow.main --service http://localhost:8010

Production is a script here, which knows every question; an app would use a large foreign model.
"""

import argparse
import asyncio
import random
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from openai import AsyncOpenAI

from examples.email_search.world import MOST_CALLS, PROMPT, TOOLS, questions, search
from examples.worlds.react import react
from tuneloop.runner import Run, SamplingRateStrategy, ShadowResult, ShadowRun, TrainingRunner

MODEL = "email_search"
KNOWN = {task["question"]: task for held_out in (False, True) for task in questions(held_out=held_out)}


async def production(question: str) -> str:
    """The users' answer."""
    return f"Mails {search(KNOWN[question]['tool'], KNOWN[question]['arguments'])}."


async def ask(run: Run, question: str) -> str:
    """Our model's answer in a run; its tools only read a mailbox."""
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": question}]
    async with AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client:
        said = await react(client, messages, model=MODEL, tools=TOOLS, run_tool=search, most_calls=MOST_CALLS)
    return str(said[-1].get("content") or "")


def shadow_agent(run: ShadowRun) -> Any:
    """The agent of one shadow run, with production's arguments."""
    return lambda question: ask(run, question)


def same_answer(result: ShadowResult) -> float:
    """The reward of a shadow run."""
    return float(result.result == result.production_result)


async def measure(service: str) -> float:
    """The share of held-out questions with production's answer, without training."""
    held_out, name = questions(held_out=True), uuid.uuid4().hex
    runs = [Run(service=service, task_id=f"{name}-{i}", run_id="0", train=False) for i in range(len(held_out))]
    answers = await asyncio.gather(*(ask(run, task["question"]) for run, task in zip(runs, held_out, strict=True)))
    alike = [answer == await production(task["question"]) for answer, task in zip(answers, held_out, strict=True)]
    return sum(alike) / len(alike)


async def serve(runner: TrainingRunner, calls: int) -> None:
    """Serve users one by one."""
    answer = runner.wrap(production)
    for task in random.Random(0).choices(questions(held_out=False), k=calls):
        await answer(task["question"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, serve users while our model learns, measure again."""
    parser = argparse.ArgumentParser(prog="python -m examples.shadow.main")
    parser.add_argument("--service", default="http://localhost:8010")
    parser.add_argument("--calls", type=int, default=4096, help="of users")
    parser.add_argument("--rate", type=float, default=0.5, help="share of the calls that is run again")
    options = parser.parse_args(arguments)
    before = asyncio.run(measure(options.service))
    runner = TrainingRunner(
        service=options.service,
        model=MODEL,
        agent=shadow_agent,
        reward_calculator=same_answer,
        selection_strategy=SamplingRateStrategy.of(options.rate),
        commit_interval_seconds=5,
        concurrency=16,
        queue_size=options.calls,  # these users ask faster than people do
    )
    with runner:
        asyncio.run(serve(runner, options.calls))
        runner.stop(600)
    print(f"answers like production's, held out: {before:.3f} -> {asyncio.run(measure(options.service)):.3f}")
    print(f"counters: {runner.counters()}")


if __name__ == "__main__":
    sys.exit(main())
