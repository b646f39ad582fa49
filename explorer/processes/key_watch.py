"""Keeps the workers' keys fresh; keys.json has their hashes for a start while the database is away."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.errors import EnvironmentRefused, LedgerUnavailable
from tuneloop.shared.job_marks import KEYS, write_mark
from tuneloop.shared.ledger.keys import Keys, KeyTable
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: A key that is revoked is refused so much later, at most, while the database answers.
_LOOK_S = 0.5

Publish = Callable[[KeyTable], Awaitable[None]]


class KeyWatch:
    """The keys as the control process knows them. Told first `publish` of all workers."""

    def __init__(self, settings: Settings, keys: Keys) -> None:
        self._keys = keys
        self._path = settings.job_dir / KEYS
        self._publish: list[Publish] = []
        self.table = KeyTable()

    def open(self) -> None:
        """Read the keys; while the database is away, those that were known last."""
        try:
            self.table = self._keys.table()
        except LedgerUnavailable:
            try:
                self.table = msgspec.json.decode(self._path.read_bytes(), type=KeyTable)
            except (OSError, msgspec.MsgspecError):
                self.table = KeyTable(in_force=True)  # unknown, so access is refused
        else:
            _remember(self._path, self.table)

    def subscribe(self, publish: Publish) -> None:
        """Have `publish` called with every new table."""
        self._publish.append(publish)

    async def run(self, metrics: Metrics) -> None:
        async def look() -> None:
            if await asyncio.to_thread(self._keys.revision) == self.table.revision:
                return
            self.table = table = await asyncio.to_thread(self._keys.table)
            for publish in self._publish:
                await publish(table)
            await asyncio.to_thread(_remember, self._path, table)

        await every(_LOOK_S, look, task="keys", metrics=metrics)


def require_keys(settings: Settings, table: KeyTable) -> None:
    """Raise EnvironmentRefused where strangers could come in without a key."""
    if (problem := settings.explorer.why_exposed(has_keys=bool(table.keys))) is not None:
        raise EnvironmentRefused(problem)


def _remember(path: Path, table: KeyTable) -> None:
    """A disk that refuses it costs no more than the next start without a database."""
    try:
        write_mark(path, table, mode=0o600)
    except OSError as error:
        log.error("keys_not_kept", path=str(path), reason=error.strerror)
