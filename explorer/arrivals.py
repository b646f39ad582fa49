"""Waits for a reply that another explorer has just served and not yet written to the ledger."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from tuneloop.explorer.transcript import ReplyIdSigner
from tuneloop.shared.experience import minted_at, steady_clock
from tuneloop.shared.ledger.explorers import Explorers

#: Longest wait for a reply, interval between two reads, and largest age of a reply that is waited for, in seconds.
_PATIENCE_S, _LOOK_S, _FRESH_S = 2.0, 0.1, 30.0

_T = TypeVar("_T")


class Arrivals:
    """Finds replies in the ledger; waits for a recent reply that is not there yet."""

    def __init__(self, signer: ReplyIdSigner, explorers: Explorers) -> None:
        self._signer, self._explorers = signer, explorers

    async def find(self, reply_id: str, tenant: str, read: Callable[[], _T | None]) -> _T | None:
        """Return what `read` finds in a thread. With several explorers, wait for a recent reply of this service."""
        ends, found = time.monotonic() + _PATIENCE_S, await asyncio.to_thread(read)
        ours = self._signer.parse(reply_id, tenant) if found is None else None
        if ours is not None and minted_at(ours.msg_id) > steady_clock() - _FRESH_S:
            several = len(await asyncio.to_thread(self._explorers.running)) > 1
            while several and found is None and time.monotonic() < ends:
                await asyncio.sleep(_LOOK_S)
                found = await asyncio.to_thread(read)
        return found
