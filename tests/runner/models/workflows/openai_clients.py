"""openai clients, asynchronous and not: whole, streamed, and by a copy. Runs in the package's own environment."""

import asyncio
import json
import sys
from typing import Any

from tuneloop.runner.models.bound_model import CallDefaults, make_model
from tuneloop.runner.models.run import Run

ASKED: dict[str, Any] = {"model": "t", "messages": [{"role": "user", "content": "3+4="}]}
DEFAULTS = CallDefaults(model_name="t", temperature=0.5, top_p=0.9, max_tokens=50, enable_thinking=False)


def run_of(number: int) -> Run:
    return Run(service=sys.argv[1], task_id="task", run_id=str(number))


def plain() -> Run:
    run = run_of(0)
    model = make_model(run, DEFAULTS, client="openai")
    model.chat.completions.create(**ASKED)
    for _ in model.with_options(timeout=60).chat.completions.create(**ASKED, stream=True, temperature=0.25):
        pass
    return run


async def asynchronous() -> Run:
    run = run_of(1)
    model = make_model(run, DEFAULTS, client="async_openai")
    await model.chat.completions.create(**ASKED)
    options = {"include_usage": True}
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    async for _ in await model.copy().chat.completions.create(
        **ASKED, stream=True, stream_options=options, max_completion_tokens=7, extra_body=extra
    ):
        pass
    return run


runs = [plain(), asyncio.run(asynchronous())]
told = [[[each.msg_id, each.status, each.prompt_tokens, each.completion_tokens] for each in run.calls] for run in runs]
print(json.dumps(told))
