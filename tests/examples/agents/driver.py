"""Runs the workflow of an example against a service, in the environment of an agent framework: writes what is judged.

python driver.py MODULE WORKFLOW URL < tasks.json
"""

import asyncio
import importlib
import json
import sys
from typing import Any

from tuneloop.runner import JudgeOutput
from tuneloop.runner.models.bound_model import CallDefaults, make_model
from tuneloop.runner.models.run import Run


async def main() -> None:
    """One run of each task."""
    module, workflow, url = sys.argv[1:]
    example = importlib.import_module(module)
    for number, task in enumerate(json.load(sys.stdin)):
        run = Run(service=url, task_id=f"task-{number}", run_id="0")
        output = await getattr(example, workflow)(task, MODELS.get(workflow, lambda run: run)(run))
        verdict: JudgeOutput = example.judge_function(task, output.response)
        sys.stdout.write(json.dumps([verdict.reward, dict(verdict.metrics or {})]) + "\n")


def _of_agentscope(run: Run) -> Any:
    return make_model(run, CallDefaults(model_name="math_agent"), client="agentscope")


def _of_openai(run: Run) -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=run.base_url, api_key=run.api_key)


#: What tune() would give the workflows that want a model, not a run.
MODELS = {"answer": _of_openai, "with_agentscope": _of_agentscope, "with_openai": _of_openai}

asyncio.run(main())
