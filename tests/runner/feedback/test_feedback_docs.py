"""The examples of docs/giving_feedback.md, From an app, run as they stand, against a real explorer."""

import asyncio
from pathlib import Path
from typing import Any

import openai

from tests.explorer.running import HELLO, RunningExplorer
from tests.house.documents.page_files import python_of


def test_the_client_does_what_the_page_says(explorer: RunningExplorer, tmp_path: Path) -> None:
    client = openai.OpenAI(base_url=f"{explorer.url}/v1", api_key="none")
    reply, another = (client.chat.completions.create(**HELLO) for _ in range(2))  # type: ignore[call-overload]
    several = client.chat.completions.create(**HELLO, n=2)  # type: ignore[call-overload]
    client.close()
    names: dict[str, Any] = {"reply": reply, "another": another, "several": several}
    for block in python_of("giving_feedback.md", "From an app"):
        here = block.replace("http://localhost:8010", explorer.url).replace("/var/lib/app", str(tmp_path))
        exec(here, names)  # noqa: S102 - our own page
    asyncio.run(names["rate"](another, False))
    kinds = [kind for (kind,) in explorer.rows("SELECT kind FROM feedback ORDER BY id")]
    assert sorted(set(kinds)) == sorted(
        ["boolean", "number", "label", "comment", "demonstration", "preference", "retraction"]
    )
    assert len(kinds) == 13
