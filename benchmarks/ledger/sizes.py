"""Measures the bytes of an exchange with one experience in the database, relative to its bare numbers."""

import os
from typing import Any

from benchmarks.databases import Databases, payload
from benchmarks.ledger import peer_recorder
from benchmarks.ledger.load import PROMPT_TOKENS, Reply, replies
from benchmarks.ledger.peer_recorder import Peer
from benchmarks.ledger.recording import DIFFERENT, exchange, with_reply_id
from tuneloop.explorer.transcript import ReplyIdSigner
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database

ROWS = 2000

_GROUP = 500
_TABLES = ("exchanges", "experiences")


async def measure(databases: Databases, completion_tokens: int, *, peer: bool) -> list[dict[str, Any]]:
    """One line for us, one for the peer. It keeps the numbers alone; we keep the request and the text too."""
    answers = replies(DIFFERENT, completion_tokens)
    raw = 4 * (PROMPT_TOKENS + 2 * completion_tokens)
    found = [_ours(databases, answers)]
    if peer:
        found.append(await _peers(databases, answers))
    return [
        {
            "database": databases.name,
            "completion_tokens": completion_tokens,
            "side": side,
            "raw": raw,
            "payload": values,
            "payload_to_raw": values / raw,
            "on_disk": grown,
            "on_disk_to_raw": grown / raw,
        }
        for side, values, grown in found
    ]


def _ours(databases: Databases, answers: list[Reply]) -> tuple[str, float, float]:
    signer = ReplyIdSigner(os.urandom(32))
    pool = [exchange(answer) for answer in answers]
    with databases.fresh() as url:
        database.upgrade(url)
        ledger = Ledger(database.connect(url))
        empty = databases.grown(url)
        for start in range(0, ROWS, _GROUP):
            ledger.recording.record(
                [with_reply_id(pool[number % len(pool)], signer) for number in range(start, start + _GROUP)]
            )
        ledger.close()
        return "tuneloop", payload(url, _TABLES) / ROWS, (databases.grown(url) - empty) / ROWS


async def _peers(databases: Databases, answers: list[Reply]) -> tuple[str, float, float]:
    with databases.fresh() as url:
        peer = Peer(url, answers)
        await peer.open()
        empty = databases.grown(url)
        await peer.record_many(ROWS)
        await peer.close()
        return peer.name, payload(url, peer_recorder.TABLES) / ROWS, (databases.grown(url) - empty) / ROWS
