"""The peer's recorder as it is shipped: HistoryRecorder of trinity-rft 0.6.0, which its proxy awaits before it answers.

Its class, its schema and its `record_history` run unchanged, in this process, from a folder outside of ours:

    .venv/bin/pip install --no-deps --target FOLDER trinity-rft==0.6.0 \
        aiosqlite asyncpg greenlet omegaconf antlr4-python3-runtime==4.9.3

What is left out is what its recorder does not use: the `__init__` of three of its packages, which would import Ray and
vLLM, and the module `ray`, which its log asks only inside an actor. It keeps neither text nor request. What it writes
here is the first of the three copies that it makes of an experience; the other two, at a commit, are not counted.
"""

import os
import sys
import uuid
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from sqlalchemy.exc import SAWarning

from benchmarks.ledger.load import Reply

TABLES = ("proxy_history", "proxy_history_blob")

_WITHOUT_INIT = ("trinity.explorer", "trinity.explorer.proxy", "trinity.buffer")


def open_folder(folder: Path) -> None:
    """Make the folder importable, after all installed packages."""
    sys.path.append(str(folder.resolve()))
    # Its retries would print their tracebacks between the lines of the table.
    os.environ["TRINITY_LOG_LEVEL"] = "CRITICAL"
    sys.modules.setdefault("ray", ModuleType("ray"))
    for name in _WITHOUT_INIT:
        package = ModuleType(name)
        package.__path__ = [str(folder.resolve().joinpath(*name.split(".")))]
        sys.modules[name] = package


class Peer:
    """One recorder on one database."""

    name = "trinity-rft 0.6.0"

    def __init__(self, url: str, replies: list[Reply]) -> None:
        torch = import_module("torch")
        self._experience = import_module("trinity.common.experience").Experience
        self._recorder = import_module("trinity.explorer.proxy.recorder").HistoryRecorder(url, TABLES[0])
        self._tensors = [
            (
                torch.tensor([*reply.prompt_ids, *reply.completion_ids], dtype=torch.int32),
                torch.tensor(reply.logprobs, dtype=torch.float32),
                len(reply.prompt_ids),
            )
            for reply in replies
        ]

    async def open(self) -> None:
        """Connect and make the tables, as it does at its first record."""
        with warnings.catch_warnings():
            # each recorder makes its table classes again; a proxy makes them once
            warnings.simplefilter("ignore", SAWarning)
            await self._recorder.prepare()

    async def record(self, number: int) -> None:
        """Return when the exchange is in the database."""
        await self._recorder.record_history([self._entry(number)])

    async def record_many(self, count: int) -> None:
        """Record that many exchanges in one transaction."""
        await self._recorder.record_history([self._entry(number) for number in range(count)])

    async def wait_until_stored(self) -> None:
        """Nothing: it is in the database when it is acknowledged."""

    async def close(self) -> None:
        """Close the connections."""
        await self._recorder.session.kw["bind"].dispose()

    def _entry(self, number: int) -> Any:
        tokens, logprobs, prompt_length = self._tensors[number % len(self._tensors)]
        experience = self._experience(tokens=tokens, logprobs=logprobs, prompt_length=prompt_length)
        experience.eid.suffix = f"chatcmpl-{uuid.uuid4().hex}"
        experience.info["model_version"] = 0
        return experience
