"""Takes commits, on Trinity's wire: its bodies are understood and its answers' keys kept."""

import asyncio
from functools import partial

import structlog
from fastapi import Request

from tuneloop.explorer.auth import caller_of
from tuneloop.explorer.capture.control_client import ControlClient
from tuneloop.explorer.capture.recorder import Recorder
from tuneloop.explorer.feedback.routes import read_body
from tuneloop.explorer.http.bodies import id_of, optional_id, optional_time, wrong_type
from tuneloop.shared.errors import LedgerUnavailable, RequestRefused
from tuneloop.shared.ledger.recording.recording import CommitLimits, Recording

log = structlog.get_logger()

#: Tasks in one commit.
MAX_TASKS = 10_000

#: How long a commit waits for what was acknowledged before it: the clients of Trinity give up after ten seconds.
_PATIENCE_S = 8.0


class CommitRoute:
    """The commit route."""

    def __init__(self, *, recorder: Recorder, control_client: ControlClient, recording: Recording) -> None:
        self._recorder, self._control_client, self._recording = recorder, control_client, recording

    async def commit(self, request: Request) -> dict[str, object]:
        """Release what has been rewarded until now to the trainer, and say how much that was."""
        body = await read_body(request, may_be_empty=True)
        as_stored, task_ids = self._recorder.name_as_stored, body.get("task_ids")
        task_id, run_id = (optional_id(body, name) for name in ("task_id", "run_id"))
        if not isinstance(task_ids, list | None):
            raise wrong_type("task_ids", "a list of strings or integers")
        if task_ids and len(task_ids) > MAX_TASKS:
            message = f"task_ids has {len(task_ids)} ids, {MAX_TASKS} are allowed in one call"
            raise RequestRefused(message, status=413, code="too_many_ids", param="task_ids")
        caller = caller_of(request.scope)
        limits: CommitLimits = {
            "task_id": task_id and as_stored(task_id),
            "run_id": run_id and as_stored(run_id),
            "task_ids": task_ids and [as_stored(id_of(each, "task_ids")) for each in task_ids],
            "until": optional_time(body, "time_threshold"),
        }
        try:
            if not await self._control_client.wait_until_flushed(_PATIENCE_S):
                raise LedgerUnavailable(
                    "the database is away, or still behind; what was acknowledged is safe on disk: commit again later"
                )
            release = partial(self._recording.commit, caller.tenant, **limits)
            committed = await asyncio.to_thread(release)
        except LedgerUnavailable as error:
            log.warning("commit_put_off", reason=str(error))
            raise
        return {"status": "success", "committed": committed}
