"""Tune an agent of OpenAI's Agents SDK: its client needs `run.base_url` only.

python -m examples.openai_agents.main                                   # a tiny model, made here; minutes on a CPU
python -m examples.openai_agents.main --model Qwen/Qwen3-0.6B --gpu --gpu-share 0.4 --rate 1e-6 --batch 32
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI

from examples.email_search.main import BEGINNER
from examples.email_search.world import MOST_CALLS, PROMPT, TOOLS, Mailbox, judge, questions, search
from examples.worlds.experiment import Experiment, options_of, write_tasks
from examples.worlds.react import MAX_TOKENS
from tuneloop.runner import (
    AlgorithmConfig,
    DatasetConfig,
    JudgeOutput,
    ToolCall,
    TunerModelConfig,
    WorkflowOutput,
    tune,
)
from tuneloop.runner.models.run import Run

NAME = "email_search"


async def search_mails(task: Mapping[str, Any], run: Run) -> WorkflowOutput:
    """Run the agent; the SDK executes tools until the model calls none."""
    from agents import Agent, FunctionTool, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
    from agents.exceptions import AgentsException

    set_tracing_disabled(True)  # traces would go to OpenAI
    calls: list[ToolCall] = []

    def tool_of(function: Mapping[str, Any]) -> FunctionTool:
        async def invoke(_context: Any, written: str) -> str:
            calls.append(ToolCall(function["name"], json.loads(written)))
            return search(function["name"], calls[-1].arguments)

        schema = dict(function["parameters"])
        return FunctionTool(function["name"], function["description"], schema, invoke, strict_json_schema=False)

    async with AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client:
        model = OpenAIChatCompletionsModel(NAME, client)
        tools = [tool_of(each["function"]) for each in TOOLS]
        limits = ModelSettings(max_tokens=MAX_TOKENS)
        agent = Agent(name="assistant", instructions=PROMPT, model=model, tools=tools, model_settings=limits)
        try:
            text = str((await Runner.run(agent, task["question"], max_turns=MOST_CALLS)).final_output)
        except AgentsException:  # too many turns, or an unknown tool
            text = ""
            calls = calls or [ToolCall("none")]
    return WorkflowOutput(response={"text": text, "calls": calls})


def judge_function(task: Mapping[str, Any], response: Mapping[str, Any]) -> JudgeOutput:
    """The right tool 1, its argument 0.5, its success 1, an unknown tool -2."""
    verdict = judge(task, response["text"], response["calls"])
    return JudgeOutput(reward=verdict.reward, metrics=verdict.metrics)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the tasks, tune, and print the result."""
    options = options_of("openai_agents", steps=60, rate=3e-4, arguments=arguments)
    experiment = Experiment(NAME, options)
    test = questions(held_out=True)[: options.held_out]
    tasks = write_tasks(options.dir / "tasks", train=questions(held_out=False), test=test)
    result = tune(
        workflow_func=search_mails,
        judge_func=lambda task, response: experiment.record_verdict(judge_function(task, response)),
        model=TunerModelConfig(
            model_path=experiment.model_path(Mailbox(), BEGINNER), max_model_len=1024, max_tokens=MAX_TOKENS
        ),
        train_dataset=DatasetConfig(path=str(tasks), split="train", total_steps=options.steps),
        eval_dataset=DatasetConfig(path=str(tasks), split="test"),
        algorithm=AlgorithmConfig(
            algorithm_type="multi_step_grpo",
            group_size=options.group,
            batch_size=options.batch,
            learning_rate=options.rate,
            eval_interval_steps=options.evaluate_every,
        ),
        settings=experiment.settings(),
        experiment_name="openai_agents",
        checkpoint_root_dir=options.dir / "checkpoints",
        seed=options.seed,
    )
    experiment.report(result)


if __name__ == "__main__":
    sys.exit(main())
