"""The flywheel: train, let users ask, make tasks of their rejected answers, train again.

tuneloop run --config tuneloop.yaml
python -m examples.flywheel.main --service http://localhost:8010
"""

import argparse
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from tuneloop.runner import AlgorithmConfig, JudgeOutput, Run, WorkflowOutput, tune
from tuneloop.runner.logs.request_logs import read_stored_completions
from tuneloop.runner.tasks.task_set import ImportedTask, deduplicate, tasks_of, what_teaches_most, write_tasks

FEW = ["1+2", "2+3", "4+1", "3+3", "2+2", "5+1", "6+2", "1+7"]  # tasks that the agent's developers chose
HELD_OUT = [f"{a}+{b}" for a in (13, 28, 41) for b in (5, 17, 36)]  # tasks that users ask


def is_right(question: str, answer: str) -> bool:
    """Whether the answer is the sum."""
    numbers = re.findall(r"\d+", answer)
    return bool(numbers) and int(numbers[-1]) == sum(map(int, question.split("+")))


def workflow_of(model_name: str) -> Callable[..., Any]:
    """The agent, which calls the model of its run."""

    async def solve(task: dict[str, Any], model: AsyncOpenAI) -> WorkflowOutput:
        reply = await model.chat.completions.create(model=model_name, messages=task["messages"], max_tokens=16)
        return WorkflowOutput(response=reply.choices[0].message.content or "")

    return solve


def let_users_ask(service: str, model: str, questions: Sequence[str], turn: int) -> set[str]:
    """Users ask, and give thumbs; returns the ids of replies with a thumb down."""
    unhappy = set()
    for number, question in enumerate(questions):
        run = Run(service=service, task_id=f"users-{turn}-{number}", run_id="0")
        asked = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 16}
        reply = httpx.post(f"{run.base_url}/chat/completions", json=asked, timeout=60).raise_for_status().json()
        up = is_right(question, reply["choices"][0]["message"]["content"] or "")
        thumb = {"task_id": run.task_id, "run_id": "0", "value": up, "metric": "thumb", "idempotency_key": run.task_id}
        httpx.post(f"{service}/feedback", json={"feedback": [thumb]}, timeout=60).raise_for_status()
        unhappy |= set() if up else {reply["id"]}
    return unhappy


def main(arguments: Sequence[str] | None = None) -> None:
    """Repeat the cycle, and print each result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--service", default="http://localhost:8010")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=32, help="tasks of a turn")
    options = parser.parse_args(arguments)
    model = httpx.get(f"{options.service}/v1/models").json()["data"][0]["id"]
    outcomes: dict[str, list[float]] = {}

    async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
        outcomes.setdefault(task.get("task_id", ""), []).append(float(is_right(task["question"], response)))
        return JudgeOutput(reward=outcomes[task.get("task_id", "")][-1])

    tasks = [ImportedTask.from_dict({"question": each}) for each in FEW]
    for turn in range(options.turns):
        chosen = what_teaches_most(random.sample(tasks, len(tasks)), outcomes)[: options.tasks]
        result = tune(
            workflow_func=workflow_of(model),
            judge_func=judge,
            train_dataset=[each.to_dict() for each in chosen],
            eval_dataset=[ImportedTask.from_dict({"question": each}).to_dict() for each in HELD_OUT],
            algorithm=AlgorithmConfig(group_size=4, batch_size=4),
            service=options.service,
            project_name="flywheel",
            experiment_name=f"turn-{turn}",
        )
        asked = [f"{random.randrange(60)}+{random.randrange(40)}" for _ in range(options.tasks)]
        unhappy = let_users_ask(options.service, model, asked, turn)
        new, _ = tasks_of(each for each in read_stored_completions(options.service) if each.exchange_id in unhappy)
        tasks += deduplicate(new, against=tasks).kept
        print(f"turn {turn}: held out {result.after}; {len(unhappy)} thumbs down, {len(tasks)} tasks now")
    write_tasks(Path("flywheel.jsonl"), tasks)


if __name__ == "__main__":
    main()
