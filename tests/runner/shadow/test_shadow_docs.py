"""The examples of docs/shadow.md run as they stand, against a real explorer."""

import asyncio
from typing import Any

from openai import AsyncOpenAI

from tests.doubles.engine import MODEL
from tests.explorer.running import RunningExplorer, eventually
from tests.house.documents.page_files import DOCS, python_of
from tuneloop.runner import TrainingRunner
from tuneloop.runner.shadow.executor import KINDS


def test_the_runner_does_what_the_page_says(explorer: RunningExplorer) -> None:
    client = AsyncOpenAI(base_url=f"{explorer.url}/v1", api_key="none")
    names: dict[str, Any] = {"MODEL": MODEL, "client": client}
    for block in python_of("shadow.md"):
        here = block.replace("http://localhost:8010", explorer.url).replace("of(0.1)", "of(1)")
        exec(here.replace('AsyncOpenAI(), "gpt-4"', "client, MODEL"), names)  # noqa: S102 - our own page

    async def production() -> None:
        async with client:
            assert await names["ask"]("3+4=")

    asyncio.run(production())
    runner: TrainingRunner = names["runner"]
    eventually(lambda: runner.counters()["rewarded"] == 1)
    assert names["search_orders"]("ann") == ["an order of ann"]
    assert names["cancel_order"](7) == "order 7 is cancelled"
    assert runner.stop(60)


def test_every_counter_is_on_the_page() -> None:
    page = (DOCS / "shadow.md").read_text()
    assert [kind for kind in KINDS if f"`{kind}`" not in page] == []
