"""From a reply to a durable experience, and on into the database: our recorder and the peer's under the same load.

Ours acknowledges when the outbox has it, as the explorer awaits it, while the drain moves the outbox into the ledger
in a thread of the same process. The peer's acknowledges when its transaction is committed. No HTTP is in it.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.databases import Databases
from benchmarks.ledger import load
from benchmarks.ledger.load import Plan, Reply, Round, Side, percentile_ms, replies
from benchmarks.ledger.peer_recorder import Peer
from tuneloop.explorer.drain import Drain
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.recorder import FILE_BYTES, OutboxLimits, Recorder
from tuneloop.explorer.transcript import ReplyIdSigner
from tuneloop.runner.outbox import Outbox
from tuneloop.shared.errors import TuneloopError
from tuneloop.shared.experience import Exchange, Experience, pack_ids, pack_logprobs
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database

#: Different replies in the load; then they come again under another name.
DIFFERENT = 64

_OUTBOX_BYTES = 8 << 30
_DRAINED_S = 600.0
_PROBES = 300
_PROBE_BYTES = 8192
_TENANT = "acme"


class Ours:
    """Outbox, recorder and drain on one database, put together as the explorer does it."""

    name = "tuneloop"

    def __init__(self, url: str, pool: Sequence[Exchange], *, folder: Path) -> None:
        database.upgrade(url)
        self._ledger = Ledger(database.connect(url))
        self._outbox = Outbox(folder, FILE_BYTES)
        limits = OutboxLimits(self._outbox, max_bytes=_OUTBOX_BYTES, max_age_s=_DRAINED_S)
        self._drain = Drain(
            folder,
            self._ledger.recording,
            taken=lambda owner, results: None,
            tell=lambda status, away: limits.note(status),
            refused=_refuse,
            failed=_fail,
        )
        self._drain.owners.add(self._outbox.owner)
        self._recorder = Recorder(self._outbox, limits, Metrics(), wake_drain=self._drain.wake)
        self._pool = pool
        self._signer = ReplyIdSigner(os.urandom(32))
        self._drain.start()

    async def record(self, number: int) -> None:
        """Return when the exchange is in the outbox."""
        await self._recorder.record(with_reply_id(self._pool[number % len(self._pool)], self._signer))

    async def wait_until_stored(self) -> None:
        """Return when the drain has caught up."""
        if not await self._drain.wait_until_taken(_DRAINED_S):
            raise TimeoutError("the ledger has not caught up with the outbox")

    def close(self) -> None:
        """Drain the outbox and close it."""
        self._drain.stop()
        self._outbox.close()
        self._ledger.close()


def exchange(reply: Reply) -> Exchange:
    """The explorer's record of a reply."""
    experience = Experience(
        choice=0,
        prompt_ids=pack_ids(reply.prompt_ids),
        completion_ids=pack_ids(reply.completion_ids),
        logprobs=pack_logprobs(reply.logprobs),
        version_min=0,
        version_max=0,
        temperature=0.7,
        finish_reason="stop",
        text=reply.text,
    )
    return Exchange(
        msg_id="",
        tenant=_TENANT,
        endpoint="/v1/chat/completions",
        request=reply.request,
        received_at=time.time(),
        latency_s=1.5,
        experiences=(experience,),
        task_id="task-0c7e8f6a",
        run_id="0",
    )


def with_reply_id(made: Exchange, signer: ReplyIdSigner) -> Exchange:
    """The exchange with its own id."""
    return msgspec.structs.replace(made, msg_id=signer.mint(_TENANT, 1))


async def measure(databases: Databases, completion_tokens: int, plan: Plan, *, peer: bool) -> list[dict[str, Any]]:
    """One line for each side and load. The sides take turns, each time in the other order, so that noise hits all."""
    answers = replies(DIFFERENT, completion_tokens)
    async with AsyncExitStack() as stack:
        sides = await _sides(databases, answers, stack, peer=peer)
        lines = []
        for per_s in (None, plan.paced):
            rounds: list[list[Round]] = [[] for _ in sides]
            for number in range(plan.rounds):
                turns = list(zip(sides, rounds, strict=True))
                for side, done in turns[:: -1 if number % 2 else 1]:
                    done.append(await load.run(side, plan, per_s=per_s))
            lines += [
                {"database": databases.name, "completion_tokens": completion_tokens, "offered_per_s": per_s}
                | _summary(side, done, rounds[-1] if peer else None)
                for side, done in zip(sides, rounds, strict=True)
            ]
    return lines


async def _sides(databases: Databases, answers: list[Reply], stack: AsyncExitStack, *, peer: bool) -> list[Side]:
    pool = [exchange(answer) for answer in answers]
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tl-outbox-", dir="/tmp")))
    ours = Ours(stack.enter_context(databases.fresh()), pool, folder=folder)
    stack.push_async_callback(asyncio.to_thread, ours.close)
    sides: list[Side] = [ours]
    if peer:
        theirs = Peer(stack.enter_context(databases.fresh()), answers)
        await theirs.open()
        stack.push_async_callback(theirs.close)
        sides.append(theirs)
    return sides


def _summary(side: Side, rounds: list[Round], peer: list[Round] | None) -> dict[str, Any]:
    seconds = [each for done in rounds for each in done.seconds]
    summary: dict[str, Any] = {
        "side": side.name,
        "acknowledged_per_s": median(done.acknowledged_per_s for done in rounds),
        "stored_per_s": median(done.stored_per_s for done in rounds),
        "p50_ms": percentile_ms(seconds, 50),
        "p99_ms": percentile_ms(seconds, 99),
        "recorded": len(seconds),
        "failed": sum(done.failed for done in rounds),
    }
    if peer is not None:
        theirs = [each for done in peer for each in done.seconds]
        pairs = list(zip(rounds, peer, strict=True))
        summary |= {
            "acknowledged_ratio": median(a.acknowledged_per_s / b.acknowledged_per_s for a, b in pairs),
            "stored_ratio": median(a.stored_per_s / b.stored_per_s for a, b in pairs),
            "p50_ratio": summary["p50_ms"] / percentile_ms(theirs, 50),
            "p99_ratio": summary["p99_ms"] / percentile_ms(theirs, 99),
        }
    return summary


def syncs_per_s() -> float:
    """How often a second this machine's disk takes a small append to its heart, one after the other."""
    with tempfile.TemporaryFile(dir="/tmp", buffering=0) as file:
        started = time.perf_counter()
        for _ in range(_PROBES):
            file.write(bytes(_PROBE_BYTES))
            os.fdatasync(file.fileno())
        return _PROBES / (time.perf_counter() - started)


def _refuse() -> None:
    raise AssertionError("the ledger refuses a record of the benchmark")


def _fail(error: TuneloopError) -> None:
    raise error
