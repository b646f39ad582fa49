"""Takes commits, on Trinity's wire: its bodies are understood and its answers' keys kept."""

import asyncio
import time
from functools import partial

import msgspec
import structlog
from fastapi import Request

from tuneloop.explorer.auth import Caller, caller_of
from tuneloop.explorer.capture.control_client import ControlClient, Flushed, FlushTarget
from tuneloop.explorer.capture.recorder import Recorder
from tuneloop.explorer.feedback.routes import read_body
from tuneloop.explorer.http.bodies import id_of, optional_id, optional_time, wrong_type
from tuneloop.shared.errors import LedgerUnavailable, RequestRefused
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.recording.recording import CommitLimits, Recording

log = structlog.get_logger()

#: Tasks in one commit.
MAX_TASKS = 10_000

#: How long a commit waits: for all of the tenant's, where there is something of the caller's own, and at all.
_PATIENCE_S = 2.0
_LONGEST_S = 8.0  # the clients of Trinity give up after ten


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
            committed, complete = await self._release(caller, limits)
        except LedgerUnavailable as error:
            log.warning("commit_put_off", reason=str(error))
            raise
        return {"status": "success", "committed": committed} | ({} if complete else {"complete": False})

    async def _release(self, caller: Caller, limits: CommitLimits) -> tuple[int, bool]:
        """How many were released, and whether the database had all that the commit is about. Raises LedgerUnavailable.

        That is the tenant's, or at least what the caller itself said. Who may only commit has said nothing: all that
        others did is meant. Others' replies that can have no reward yet are not waited for: they may come all the time.
        """
        has_own, wait = bool(caller.name) and Scope.FEEDBACK in caller.scopes, self._control_client.wait_until_flushed
        began, everybodys = time.monotonic(), FlushTarget(caller.tenant, asker=caller.name)
        all_by = began + (_PATIENCE_S if has_own else _LONGEST_S)
        flushed = await wait(_left_s(all_by), msgspec.structs.replace(everybodys, rewards_only=True))
        if flushed is Flushed.ASKED:
            without_some = partial(self._recording.commit_recorded, caller.tenant, **limits)
            committed = await asyncio.to_thread(without_some)
            if committed is not None:
                return committed, True
            flushed = await wait(_left_s(all_by), everybodys)
        complete = bool(flushed)
        if not flushed and has_own:
            flushed = await wait(_left_s(began + _LONGEST_S), FlushTarget(caller.tenant, caller.name))
            complete = flushed is Flushed.ALL
        if not flushed:
            raise LedgerUnavailable(
                "the database is away, or still behind; what was acknowledged is safe on disk: commit again later"
            )
        with_all = partial(self._recording.commit, caller.tenant, **limits)
        return await asyncio.to_thread(with_all), complete


def _left_s(until: float) -> float:
    return max(0.0, until - time.monotonic())
