"""The folder in which an app leaves its selected calls for a process of shadow runs: a file of JSON for each call."""

import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from tuneloop.runner.private_files import make_private_folder, write_private_text
from tuneloop.runner.shadow.executor import ShadowCounts, ShadowJob, log
from tuneloop.runner.shadow.production_calls import ProductionCall, RecordedToolCall

#: A call that was begun so often and never ended, as of an agent that ends its process, is not begun again.
MOST_ATTEMPTS = 3


class NotJson(Exception):
    """A call has a part that JSON does not have."""


class ToolFailed(Exception):
    """What a tool's recorded error is in another process: its words."""


class CallQueue:
    """Calls by age, of apps that write them and of one process that runs them.

    A file's name ends in the number of times that its call was begun. The file goes when the call's rewards are in the
    outbox: so no call is lost, and one that was cut off is begun again.
    """

    def __init__(self, folder: Path, counts: ShadowCounts) -> None:
        """Raises OSError for a folder that cannot be made."""
        make_private_folder(folder, exist_ok=True)
        self.folder, self._counts = folder, counts

    def waiting(self) -> list[Path]:
        """The files of the calls, the oldest first."""
        return sorted(self.folder.glob("*.json"))

    def write(self, text: str) -> None:
        """Leave a call, as `call_as_json` wrote it. The file is whole as soon as it is there."""
        name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}-0"
        beside = self.folder / f"{name}.part"
        write_private_text(beside, text)
        os.replace(beside, beside.with_suffix(".json"))
        self._counts.add("queued")

    def begin(self, path: Path) -> tuple[Path, ShadowJob] | None:
        """Note that a call is begun; its file's new name, and the call. None: it is set aside."""
        try:
            stem, _, attempts = path.stem.rpartition("-")
            if int(attempts) >= MOST_ATTEMPTS:
                raise ValueError(f"it was begun {attempts} times and never ended")
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
    """A call as a file has it. Raises NotJson, which says which part is none."""
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
        # What is read back must be what was written: a tuple would be a list, and a number as a key a text.
        try:
            same = json.loads(json.dumps(part, allow_nan=False)) == part
        except (TypeError, ValueError, RecursionError) as error:
            raise NotJson(
                f"the call's {name} are no JSON: {error}; wrap a function of plain data, or give capture="
            ) from None
        if not same:
            raise NotJson(f"the call's {name}: JSON changes tuples, and keys that are no texts: {str(part)[:200]}")
    return json.dumps({"name": call.name, "marks": call.marks, **parts})
