"""Tune a LangChain agent: its chat model needs `run.base_url` only.

python -m examples.langchain_agent.main                                 # a tiny model, made here; minutes on a CPU
python -m examples.langchain_agent.main --model Qwen/Qwen3-0.6B --gpu --gpu-share 0.4 --rate 1e-6 --batch 32
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from examples.math_agent.main import BEGINNER, judge_function
from examples.math_agent.world import MOST_CALLS, PROMPT, Problems, calculate, problems
from examples.worlds.experiment import Experiment, options_of, write_tasks
from examples.worlds.react import MAX_TOKENS
from tuneloop.runner import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from tuneloop.runner.models.run import Run

NAME = "math_agent"


async def solve(task: Mapping[str, Any], run: Run) -> WorkflowOutput:
    """Ask, run the model's calculations, and ask again."""
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI

    def work_out(expression: str) -> str:
        return calculate(expression)

    tool = StructuredTool.from_function(work_out, name="calculate")
    chat = ChatOpenAI(base_url=run.base_url, api_key=run.api_key, model=NAME, max_tokens=MAX_TOKENS).bind_tools([tool])
    messages: list[Any] = [SystemMessage(PROMPT), HumanMessage(task["question"])]
    for turns in range(1, MOST_CALLS + 1):
        reply = await chat.ainvoke(messages)
        if not reply.tool_calls:
            return WorkflowOutput(response={"text": str(reply.content), "turns": turns})
        messages.append(reply)
        for call in reply.tool_calls:
            result = calculate(call["args"].get("expression"))
            messages.append(ToolMessage(result, tool_call_id=call["id"]))
    return WorkflowOutput(response={"text": "", "turns": MOST_CALLS})


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the tasks, tune, and print the result."""
    options = options_of("langchain_agent", steps=50, rate=2e-4, arguments=arguments)
    experiment = Experiment(NAME, options)
    tasks = write_tasks(options.dir / "tasks", train=problems(1, 4096), test=problems(2, options.held_out))
    result = tune(
        workflow_func=solve,
        judge_func=lambda task, response: experiment.record_verdict(judge_function(task, response)),
        model=TunerModelConfig(
            model_path=experiment.model_path(Problems(), BEGINNER), max_model_len=2048, max_tokens=MAX_TOKENS
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
        experiment_name="langchain_agent",
        checkpoint_root_dir=options.dir / "checkpoints",
        seed=options.seed,
    )
    experiment.report(result)


if __name__ == "__main__":
    sys.exit(main())
