"""Queues an app's selected calls for a process of shadow runs: a folder with a JSON file per call."""

import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from tuneloop.runner.private_files import make_private_folder, write_private_text
from tuneloop.runner.shadow.executor import ShadowCounts, ShadowJob, log
from tuneloop.runner.shadow.production_calls import ProductionCall, RecordedToolCall

MOST_ATTEMPTS = 3  # a call that ended its process so often is not tried again


class NotJson(Exception):
    """A part of a call has no JSON form."""


class ToolFailed(Exception):
    """A recorded tool error, in another process."""


class CallQueue:
    """Calls ordered by age; apps write them, one process runs them.

    A file's name ends in its number of attempts. The file is removed when the call's rewards are in the outbox, so no
    call is lost, and an interrupted one is repeated.
    """

    def __init__(self, folder: Path, counts: ShadowCounts) -> None:
        """Raises OSError."""
        make_private_folder(folder, exist_ok=True)
        self.folder, self._counts = folder, counts

    def waiting(self) -> list[Path]:
        return sorted(self.folder.glob("*.json"))

    def write(self, text: str) -> None:
        """Add a call from `call_as_json`, atomically."""
        name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}-0"
        beside = self.folder / f"{name}.part"
        write_private_text(beside, text)
        os.replace(beside, beside.with_suffix(".json"))
        self._counts.add("queued")

    def begin(self, path: Path) -> tuple[Path, ShadowJob] | None:
        """Count an attempt; the file's new path and the call. None: the file was set aside."""
        try:
            stem, _, attempts = path.stem.rpartition("-")
            if int(attempts) >= MOST_ATTEMPTS:
                raise ValueError(f"it was started {attempts} times and never ended")
            read = json.loads(path.read_text(encoding="utf-8"))
            recorded: Iterator[RecordedToolCall] = (
                RecordedToolCall(
                    each["name"],
                    each["arguments"],
                    each["result"],
                    None if each["error"] is None else ToolFailed(each["error"]),
                )
                for each in read["tool_calls"]
            )
            call = ProductionCall(
                name=read["name"],
                args=tuple(read["args"]),
                kwargs=dict(read["kwargs"]),
                marks=tuple(read["marks"]),
                result=read["result"],
            )
            job = ShadowJob(call=call, recorded=tuple(recorded))
            begun = path.with_name(f"{stem}-{int(attempts) + 1}.json")
            path.rename(begun)
        except (ValueError, TypeError, LookupError) as error:
            aside = path.with_suffix(".aside")
            path.rename(aside)
            self._counts.add("set_aside")
            log.error("a call of the queue is set aside as %s: %s", aside, error)
            return None
        return begun, job


def call_as_json(job: ShadowJob) -> str:
    """A call as JSON. Raises NotJson with the name of the part."""
    tools = [
        {
            "name": each.name,
            "arguments": each.arguments,
            "result": each.result,
            "error": None if each.error is None else f"{type(each.error).__name__}: {each.error}",
        }
        for each in job.recorded
    ]
    call = job.call
    parts = {"args": list(call.args), "kwargs": dict(call.kwargs), "result": call.result, "tool_calls": tools}
    for name, part in parts.items():
        # JSON changes tuples to lists and number keys to texts: refuse both.
        try:
            same = json.loads(json.dumps(part, allow_nan=False)) == part
        except (TypeError, ValueError, RecursionError) as error:
            raise NotJson(
                f"the call's {name} are no JSON: {error}; wrap a function of plain data, or give capture="
            ) from None
        if not same:
            raise NotJson(f"the call's {name}: JSON changes tuples and keys that are no texts: {str(part)[:200]}")
    return json.dumps({"name": call.name, "marks": call.marks, **parts})
