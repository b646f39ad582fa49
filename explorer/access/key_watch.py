"""Keeps the workers' keys fresh, and what the database holds of them: the control process looks twice a second.

{job_dir}/keys.json    the hashes of the keys, for a start while the database is away; never the truth
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec
import structlog

from tuneloop.explorer.access.rate_limits import KeyUsage
from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.errors import EnvironmentRefused, LedgerUnavailable
from tuneloop.shared.held_files import read_unlinked
from tuneloop.shared.job_marks import KEYS
from tuneloop.shared.ledger.keys import Keys, KeyTable
from tuneloop.shared.ledger.stored_bytes import NO_KEY
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: A key that is revoked is refused so much later, at most, while the database answers.
_LOOK_S = 0.5

#: Workers hear of what a key has stored by steps of this part of what it may.
_STEP = 1024

Publish = Callable[[KeyTable], Awaitable[None]]


class KeyWatch:
    """The keys as the control process knows them. Told first `publish` of all workers."""

    def __init__(self, settings: Settings, keys: Keys) -> None:
        self._keys = keys
        self._path = settings.job_dir / KEYS
        self._max_stored_bytes = settings.explorer.max_stored_bytes_per_key
        self._publish: list[Publish] = []
        self.table = KeyTable()

    def open(self) -> None:
        """Read the keys; while the database is away, those that were known last."""
        try:
            self.table = self._with_bound(self._keys.table())
        except LedgerUnavailable:
            self.table = _recall(self._path)
        else:
            _remember(self._path, self.table)

    def subscribe(self, publish: Publish) -> None:
        """Have `publish` called with every new table."""
        self._publish.append(publish)

    async def run(self, metrics: Metrics) -> None:
        """Look for changes for ever."""
        await every(_LOOK_S, self._turn, task="keys", metrics=metrics)

    async def _turn(self) -> None:
        same = await asyncio.to_thread(self._keys.revision) == self.table.revision
        if same and not await self._is_stored_news():
            return
        self.table = table = self._with_bound(await asyncio.to_thread(self._keys.table))
        for publish in self._publish:
            await publish(table)
        if not same:
            await asyncio.to_thread(_remember, self._path, table)

    async def _is_stored_news(self) -> bool:
        """Whether a key, or who needs none, has so much more or less in the database that the workers must know."""
        of_no_key = None if self.table.in_force else self._max_stored_bytes
        known = [(each.key_id, each.stored_bytes, each.limits.max_stored_bytes) for each in self.table.keys]
        known.append((NO_KEY, self.table.stored_without_key, of_no_key))
        bound = [(name, before, most) for name, before, most in known if most is not None]
        if not bound:
            return False
        stored = await asyncio.to_thread(self._keys.stored_bytes)
        return any(_is_news(stored.get(name, 0), before, most) for name, before, most in bound)

    def _with_bound(self, table: KeyTable) -> KeyTable:
        """The keys with the bound of the settings, where they have none of their own."""
        if (most := self._max_stored_bytes) is None:
            return table
        bounded = [
            msgspec.structs.replace(each, limits=msgspec.structs.replace(each.limits, max_stored_bytes=most))
            if each.limits.max_stored_bytes is None
            else each
            for each in table.keys
        ]
        return msgspec.structs.replace(table, keys=tuple(bounded))


def _is_news(stored: int, before: int, most: int) -> bool:
    return (stored >= most) != (before >= most) or abs(stored - before) > most // _STEP


class SharedUsage:
    """What each worker's keys have taken, so that several workers hold a key to one limit."""

    def __init__(self) -> None:
        self._by_worker: dict[int, Mapping[str, KeyUsage]] = {}

    def exchange(self, worker: int, usage: Mapping[str, KeyUsage]) -> dict[str, KeyUsage]:
        """Note what a worker's keys have taken; the answer is what they have taken of all others."""
        self._by_worker[worker] = usage
        others: dict[str, KeyUsage] = {}
        for number, each in self._by_worker.items():
            if number != worker:
                for key_id, taken in each.items():
                    others[key_id] = _sum(others.get(key_id, KeyUsage()), taken)
        return others

    def retire(self, worker: int) -> None:
        """A worker is no more."""
        self._by_worker.pop(worker, None)


def _sum(one: KeyUsage, other: KeyUsage) -> KeyUsage:
    return KeyUsage(*(getattr(one, name) + getattr(other, name) for name in KeyUsage.__struct_fields__))


def require_keys(settings: Settings, table: KeyTable) -> None:
    """Raise EnvironmentRefused where strangers could come in without a key."""
    if (problem := settings.explorer.why_exposed(has_keys=bool(table.keys))) is not None:
        raise EnvironmentRefused(problem)


def _recall(path: Path) -> KeyTable:
    try:
        return msgspec.json.decode(read_unlinked(path), type=KeyTable)
    except (OSError, msgspec.MsgspecError):
        return KeyTable(in_force=True)  # nobody knows: so nobody comes in


def _remember(path: Path, table: KeyTable) -> None:
    """A disk that refuses it costs no more than the next start without a database."""
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(table))
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except OSError as error:
        log.error("keys_not_recall", path=str(path), reason=error.strerror)
