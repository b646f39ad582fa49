"""The Python of pages that only use the service runs against a real explorer: README.md and pages of docs/."""

from typing import Any

import pytest

from tests.doubles.engine import MODEL
from tests.explorer.running import RunningExplorer
from tests.house.documents.page_files import python_of

#: The pages, with the section whose Python is run here; none: all of it.
PAGES = {
    "README.md": (),
    "docs/quick_start.md": (),
    "docs/own_model.md": (),
    "docs/giving_feedback.md": ("Thumbs",),
    "docs/clients.md": ("Stored completions",),
    "docs/files.md": ("Files",),
    "docs/limits.md": (),
}
#: The kinds of the feedback that a page gives.
KINDS = {"README.md": ["number"], "docs/quick_start.md": ["boolean"], "docs/own_model.md": ["boolean"] * 4}

#: What stands in the pages, and what is there in its place.
HERE = {
    '"/models/Qwen3-0.6B"': f'"{MODEL}"',
    '"Qwen/Qwen3-0.6B"': f'"{MODEL}"',
    '"tiny"': f'"{MODEL}"',
    "100\nclient": "1\nclient",
    "pool.map(ask, range(64 * number, 64 * number + 64))": "pool.map(ask, range(4))",
}


@pytest.mark.parametrize("name", PAGES)
def test_its_python_runs(name: str, explorer: RunningExplorer) -> None:
    explorer.chat(metadata={"task_id": "task-1"})
    explorer.until_flushed()
    names: dict[str, Any] = {}
    blocks = python_of(f"../{name}", *PAGES[name])
    assert blocks
    for block in blocks:
        here = block.replace("http://localhost:8010", explorer.url)
        for theirs, ours in HERE.items():
            here = here.replace(theirs, ours)
        exec(here, names)  # noqa: S102 - our own page
    if name == "docs/giving_feedback.md":
        names["rate"](explorer.chat().json()["id"], up=True, user="ann")
    explorer.until_flushed()
    kinds = [kind for (kind,) in explorer.rows("SELECT kind FROM feedback ORDER BY id")]
    assert kinds == KINDS.get(name, ["boolean"] if name == "docs/giving_feedback.md" else [])
