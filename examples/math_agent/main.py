"""Tune a ReAct agent that solves word problems: AgentScope's, if that is installed, else one on the `openai` client.

python -m examples.math_agent.main                                      # a tiny model, made here; minutes on a CPU
python -m examples.math_agent.main --model Qwen/Qwen3-0.6B --gpu --gpu-share 0.4 --rate 1e-6 --batch 32
"""

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from examples.math_agent.agentscope_agents import with_agentscope
from examples.math_agent.world import CALCULATE, MOST_CALLS, PROMPT, Problems, calculate, judge, problems
from examples.worlds.experiment import Experiment, options_of, write_tasks
from examples.worlds.react import MAX_TOKENS, react
from examples.worlds.schooling import Schooling
from examples.worlds.start import Beginner
from tuneloop.runner import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune

NAME = "math_agent"
#: 0.7 M parameters: about a fifth right, in half as many steps again as it will take.
BEGINNER = Beginner(hidden=128, layers=3, schooling=Schooling(early_steps=1200, late_steps=120, batch=24, goal=0.48))


async def with_openai(task: Mapping[str, Any], model: Any) -> WorkflowOutput:
    """The same agent on an AsyncOpenAI `model`."""
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": task["question"]}]

    def run_tool(name: str, arguments: Mapping[str, Any] | None) -> str:
        return calculate((arguments or {}).get("expression"))

    said = await react(model, messages, model=NAME, tools=[CALCULATE], run_tool=run_tool, most_calls=MOST_CALLS)
    spoken = [each for each in said if each["role"] == "assistant"]
    text = "" if spoken[-1].get("tool_calls") else spoken[-1].get("content") or ""
    return WorkflowOutput(response={"text": text, "turns": len(spoken)})


run_react_agent = with_agentscope if find_spec("agentscope") else with_openai


def judge_function(task: Mapping[str, Any], response: Mapping[str, Any]) -> JudgeOutput:
    """A right answer 3, each step -0.1, its format 0.5."""
    verdict = judge(task, response["text"], response["turns"])
    return JudgeOutput(reward=verdict.reward, metrics=verdict.metrics)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the tasks, tune, and print the result."""
    options = options_of(NAME, steps=50, rate=2e-4, arguments=arguments)
    experiment = Experiment(NAME, options)
    most = 4 if options.model else 3  # operations
    train, test = problems(1, 4096, most=most), problems(2, options.held_out, most=most)
    tasks = write_tasks(options.dir / "tasks", train=train, test=test)
    result = tune(
        workflow_func=run_react_agent,
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
        experiment_name=f"{NAME}-{options.seed}",
        checkpoint_root_dir=options.dir / "checkpoints",
        seed=options.seed,
    )
    experiment.report(result)


if __name__ == "__main__":
    sys.exit(main())
