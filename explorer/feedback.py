"""Takes feedback and commits, on Trinity's wire: its bodies are understood and its answers' keys kept."""

import asyncio
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from fastapi import Request

from explorer.body import finite, read_object, text_or_number, wrong_type
from explorer.chat import TENANT
from explorer.flusher import Flusher
from explorer.msg_id import Mint, ReplyName
from explorer.recorder import Recorder
from shared.errors import LedgerUnavailable, RequestRefused
from shared.experience import Feedback
from shared.ledger import Ledger

#: Ids in one call. More get a 413, and nothing of the call is stored.
MAX_IDS = 10_000
#: Rewards beyond it are refused.
MAX_REWARD = 1e6

_MAX_BODY_BYTES = 4 << 20
_FLUSH_PATIENCE_S = 5.0  # the clients of Trinity give up after ten


class FeedbackDesk:
    """The feedback and commit routes."""

    def __init__(self, *, mint: Mint, recorder: Recorder, flusher: Flusher, ledger: Ledger) -> None:
        self._mint = mint
        self._recorder = recorder
        self._flusher = flusher
        self._ledger = ledger

    async def feedback(self, request: Request) -> dict[str, object]:
        """Store one reward for the replies named; an id that we never minted refuses them all."""
        body = await read_object(request, max_bytes=_MAX_BODY_BYTES)
        names = self._names(body)
        reward = self._reward(body)
        task_id, run_id = text_or_number(body, "task_id"), text_or_number(body, "run_id")
        now = time.time()
        await self._recorder.take(
            [
                Feedback(
                    event_id=uuid.uuid4().hex,
                    msg_id=name.msg_id,
                    choice=name.choice,
                    tenant=TENANT,
                    reward=reward,
                    received_at=now,
                    task_id=task_id,
                    run_id=run_id,
                )
                for name in names
            ]
        )
        return {"status": "success", "accepted": len(names)}

    async def commit(self, request: Request) -> dict[str, object]:
        """Release what has been rewarded until now to the trainer, and say how much that was."""
        body = await read_object(request, max_bytes=_MAX_BODY_BYTES, empty_is={})
        task_id, run_id = text_or_number(body, "task_id"), text_or_number(body, "run_id")
        until = _time(body.get("time_threshold"))
        if not await self._flusher.caught_up(self._recorder.end, _FLUSH_PATIENCE_S):
            raise LedgerUnavailable("the database is away; what was acknowledged is safe on disk: commit again later")
        committed = await asyncio.to_thread(self._ledger.commit, TENANT, task_id=task_id, run_id=run_id, until=until)
        return {"status": "success", "committed": committed}

    def _names(self, body: dict[str, Any]) -> list[ReplyName]:
        ids = body.get("msg_ids")
        if ids is None:
            raise RequestRefused("msg_ids and reward are required", code="missing", param="msg_ids")
        if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
            raise wrong_type("msg_ids", "a list of strings")
        if not ids:
            raise RequestRefused("msg_ids must name at least one reply", code="missing", param="msg_ids")
        if len(ids) > MAX_IDS:
            raise RequestRefused(
                f"msg_ids has {len(ids)} ids, {MAX_IDS} are allowed in one call",
                status=413,
                code="too_many_ids",
                param="msg_ids",
            )
        read = {each: self._mint.read(each, TENANT) for each in ids}
        unknown = [each for each, name in read.items() if name is None]
        if unknown:
            raise RequestRefused(
                f"{len(unknown)} of {len(read)} msg_ids are not ids of our replies; nothing was stored",
                status=404,
                code="unknown_msg_id",
                param="msg_ids",
                extra={"unknown": unknown[:100]},
            )
        return list(dict.fromkeys(name for name in read.values() if name is not None))

    def _reward(self, body: dict[str, Any]) -> float:
        if body.get("reward") is None:
            raise RequestRefused("msg_ids and reward are required", code="missing", param="reward")
        return finite(body["reward"], "reward", bound=MAX_REWARD)


def _time(value: object) -> float | None:
    """Seconds since 1970 of a time threshold: that number, or ISO 8601 (UTC unless it says otherwise)."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise wrong_type("time_threshold", "seconds since 1970 or ISO 8601") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return finite(value, "time_threshold", bound=1e12)
