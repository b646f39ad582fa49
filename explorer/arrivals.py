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
        ours = self._signer.parse(reply_id, tenant) if found is None else None
        if ours is not None and minted_at(ours.msg_id) > steady_clock() - _FRESH_S:
            several = len(await asyncio.to_thread(self._explorers.running)) > 1
            while several and found is None and time.monotonic() < ends:
                await asyncio.sleep(_LOOK_S)
                found = await asyncio.to_thread(read)
        return found
