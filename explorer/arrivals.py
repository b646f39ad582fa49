"""Replies that another explorer has given just now: they reach the ledger a moment later."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from tuneloop.explorer.transcript import ReplyIdSigner
from tuneloop.shared.experience import minted_at, steady_clock
from tuneloop.shared.ledger.explorers import Explorers

#: How long a reply is waited for, how often it is looked for, and how young it must be, in seconds.
_PATIENCE_S, _LOOK_S, _FRESH_S = 2.0, 0.1, 30.0

_T = TypeVar("_T")


class Arrivals:
    """Looks for replies in the ledger, and waits for those that may be on their way there."""

    def __init__(self, signer: ReplyIdSigner, explorers: Explorers) -> None:
        self._signer, self._explorers = signer, explorers

    async def find(self, reply_id: str, tenant: str, read: Callable[[], _T | None]) -> _T | None:
        """What `read` finds, in a thread; where there are several explorers, a new reply of ours is waited for."""
        ends, found = time.monotonic() + _PATIENCE_S, await asyncio.to_thread(read)
        if found is None and self._is_fresh(reply_id, tenant) and await asyncio.to_thread(self._explorers.are_several):
            while found is None and time.monotonic() < ends:
                await asyncio.sleep(_LOOK_S)
                found = await asyncio.to_thread(read)
        return found

    def _is_fresh(self, reply_id: str, tenant: str) -> bool:
        parsed = self._signer.parse(reply_id, tenant)
        return parsed is not None and minted_at(parsed.msg_id) > steady_clock() - _FRESH_S
