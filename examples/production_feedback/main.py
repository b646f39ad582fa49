"""An app whose users search their mails, and whose thumbs train the model that answers them, while it answers.

tuneloop run --config examples/production_feedback/tuneloop.yaml
python -m examples.production_feedback.main --service http://localhost:8010
"""

import argparse
import asyncio
import itertools
import random
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from openai import AsyncOpenAI
from pydantic import BaseModel

from examples.email_search.world import MOST_CALLS, PROMPT, TOOLS, questions, search
from examples.worlds.react import react
from tuneloop.runner import Feedback, Run, WholeRun

MODEL = "email_search"
#: Thumbs before each commit.
COMMIT_EVERY = 64


class Question(BaseModel):
    """A user's question; without `train` the answer is not trained on."""

    text: str
    train: bool = True


class Thumb(BaseModel):
    """A user's rating of an answer."""

    answer: str
    up: bool


def make_app(service: str = "http://localhost:8010", outbox: Path = Path("outbox")) -> FastAPI:
    """The app. Thumbs are in a folder on disk: they survive the app's end and the service's absence."""
    app, feedback, thumbs = FastAPI(), Feedback(service, outbox=outbox, source="users"), itertools.count(1)

    @app.post("/ask")
    async def ask(question: Question) -> dict[str, str]:
        answer = uuid.uuid4().hex
        run = Run(service=service, task_id=answer, run_id="0", train=question.train)
        messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": question.text}]
        async with AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client:
            said = await react(client, messages, model=MODEL, tools=TOOLS, run_tool=search, most_calls=MOST_CALLS)
        return {"answer": answer, "text": str(said[-1].get("content") or "")}

    @app.post("/thumb")
    def thumb(given: Thumb) -> dict[str, str]:
        feedback.thumb(WholeRun(given.answer, "0"), given.up)
        if next(thumbs) % COMMIT_EVERY == 0:
            feedback.commit()
        return {"status": "thank you"}

    return app


async def use(app: FastAPI, asked: Sequence[dict[str, Any]], *, train: bool) -> float:
    """Let users ask, eight at a time, and with `train` give thumbs. The share of answers with the right mails."""
    waiting, right = iter(asked), list[bool]()

    async def user(client: httpx.AsyncClient) -> None:
        for task in waiting:
            answer = (await client.post("/ask", json={"text": task["question"], "train": train})).json()
            wanted = search(task["tool"], task["arguments"])
            right.append(answer["text"] == f"Mails {wanted}.")
            if train:
                await client.post("/thumb", json={"answer": answer["answer"], "up": right[-1]})

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app", timeout=300) as client:
        await asyncio.gather(*(user(client) for _ in range(8)))
    return sum(right) / len(right)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on held-out questions, give thumbs, measure again."""
    parser = argparse.ArgumentParser(prog="python -m examples.production_feedback.main")
    parser.add_argument("--service", default="http://localhost:8010")
    parser.add_argument("--thumbs", type=int, default=2048)
    options = parser.parse_args(arguments)
    app, held_out = make_app(options.service), questions(held_out=True)
    before = asyncio.run(use(app, held_out, train=False))
    asked = random.Random(0).choices(questions(held_out=False), k=options.thumbs)
    thumbs = asyncio.run(use(app, asked, train=True))
    print(f"right answers, held out: {before:.3f} -> {asyncio.run(use(app, held_out, train=False)):.3f}")
    print(f"thumbs up: {thumbs:.3f} of {options.thumbs}")


if __name__ == "__main__":
    sys.exit(main())
