"""The ledger of a service that serves on while its database is away: served.json says what it served last."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
import structlog
from sqlalchemy import Connection, Engine, Executable

from tuneloop.shared.errors import DatabaseAway, EnvironmentRefused, LedgerUnavailable, TuneloopError
from tuneloop.shared.experience import steady_clock
from tuneloop.shared.job_marks import SERVED, write_mark
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.ledger.storage.clock import LedgerClock
from tuneloop.shared.ledger.storage.database import Transactions, connect, upgrade
from tuneloop.shared.ledger.versions.versions import Versions
from tuneloop.shared.operations.job_folder import claim_folder, require_one_host
from tuneloop.shared.operations.policy_report import make_configured
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: How long a verb waits for another that is opening the database.
_PATIENCE_S = 5.0


class ServedVersions(msgspec.Struct, frozen=True):
    base: str
    champion: Version
    newest: Version


class LazyTransactions(Transactions):
    """Transactions that bring the database up to date before the first of them; until then it is unavailable."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float], prepare: Callable[[Engine], None]) -> None:
        super().__init__(engine, clock=clock)
        self._prepare = prepare
        self._opening = threading.Lock()
        self._opened, self._failures = False, 0

    def open(self) -> None:
        """Bring the schema up to date and the base model in. Raises LedgerUnavailable if that may go well later."""
        if self._opened:
            return
        self.file.check()
        before = self._failures
        if not self._opening.acquire(timeout=_PATIENCE_S):
            raise LedgerUnavailable("the database is still being opened")
        try:
            if self._opened:
                return
            if self._failures != before:  # each who waited would find the same, one after the other
                raise LedgerUnavailable("the database could not be opened just now")
            try:
                self._prepare(self.engine)
            except TuneloopError:
                self._failures += 1
                raise
            self._opened = True
            steady_clock.follow(super().time())
        finally:
            self._opening.release()

    def time(self) -> float:
        self.open()
        return super().time()

    def keep_time(self) -> None:
        self.open()
        super().keep_time()
        steady_clock.follow(super().time())

    def read(self, query: Executable, values: Mapping[str, Any] | None = None) -> Sequence[Any]:
        self.open()
        return super().read(query, values)

    def read_together(self, *queries: Executable) -> list[Sequence[Any]]:
        self.open()
        return super().read_together(*queries)

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        self.open()
        with super().write() as connection:
            yield connection


class CachedVersions(Versions):
    def __init__(self, transactions: Transactions, *, path: Path, base: Path) -> None:
        super().__init__(transactions)
        self._path, self._base = path, base
        self._served = read_served_versions(path, base)
        self._remembering = threading.Lock()

    @property
    def remembers(self) -> bool:
        return self._served is not None

    def champion(self) -> Version:
        try:
            champion = super().champion()
        except (LedgerUnavailable, EnvironmentRefused):
            if self._served is None:
                raise
            return self._served.champion
        self._remember(champion, champion)
        return champion

    def candidate(self) -> Version | None:
        candidate = super().candidate()
        if candidate is not None and self._served is not None:
            self._remember(self._served.champion, candidate)
        return candidate

    def promote(self, version: int, **how: Any) -> None:
        super().promote(version, **how)
        self.champion()

    def all(self) -> list[Version]:
        try:
            versions = super().all()
        except LedgerUnavailable:
            if self._served is None:
                raise
            known = {each.version: each for each in (self._served.champion, self._served.newest)}
            return [known[version] for version in sorted(known)]
        if self._served is not None:
            self._remember(self._served.champion, versions[-1])
        return versions

    def _remember(self, champion: Version, newest: Version) -> None:
        with self._remembering:
            if self._served is not None:
                newest = max(newest, self._served.newest, key=lambda each: each.version)
            served = ServedVersions(str(self._base), champion, newest)
            if self._served is None or _numbers(served) != _numbers(self._served):
                self._served = served
                remember(self._path, served)


class LazyLedger(Ledger):
    transactions: LazyTransactions
    versions: CachedVersions

    def __init__(self, engine: Engine, settings: Settings) -> None:
        super().__init__(
            engine,
            rule=settings.reward,
            compensate_late=settings.feedback.compensate_late,
            clock=LedgerClock(engine),
            transactions=partial(LazyTransactions, prepare=partial(_prepare, settings)),
        )
        path, base = settings.job_dir / SERVED, _base_of(settings)
        self.versions = CachedVersions(self.transactions, path=path, base=base)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        schema = settings.buffer.trainer_input.experience_buffer.name
        return cls(connect(settings.database_url, schema=schema), settings)


def _base_of(settings: Settings) -> Path:
    return settings.model.model_path.absolute()


def _prepare(settings: Settings, engine: Engine) -> None:
    schema = settings.buffer.trainer_input.experience_buffer.name
    try:
        upgrade(settings.database_url, schema=schema)
    except DatabaseAway as error:
        raise LedgerUnavailable(str(error)) from None
    ledger = Ledger(engine, clock=LedgerClock(engine))
    ledger.own(settings.project, settings.name)
    claim_folder(settings.job_dir, ledger)
    require_one_host(settings, ledger)
    ledger.versions.ensure_base(_base_of(settings))
    make_configured(settings, ledger)


def open_ledger(settings: Settings) -> LazyLedger:
    """The ledger, its schema up to date. A first start is refused without a database, a later one waits for it."""
    ledger = LazyLedger.of(settings)
    try:
        ledger.transactions.open()
        ledger.versions.champion()
    except LedgerUnavailable as error:
        if not ledger.versions.remembers:
            raise EnvironmentRefused(str(error)) from None
        log.warning(
            "started_without_the_database",
            serving=ledger.versions.champion().version,
            sentence="what was served last is served again, and exchanges and feedback wait in the outbox",
            reason=str(error),
        )
    return ledger


def _numbers(served: ServedVersions) -> tuple[int, int]:
    return served.champion.version, served.newest.version


def read_served_versions(path: Path, base: Path) -> ServedVersions | None:
    """What was served last; None if that is not known, or was trained from another base model."""
    try:
        served = msgspec.json.decode(path.read_bytes(), type=ServedVersions, dec_hook=lambda kind, value: kind(value))
    except (OSError, msgspec.MsgspecError):
        return None
    return served if served.base == str(base) else None


def remember(path: Path, served: ServedVersions) -> None:
    """Note what is served. A disk that refuses it costs no more than the next start without a database."""
    try:
        write_mark(path, served)
    except OSError as error:
        log.error("served_not_remembered", path=str(path), reason=error.strerror)
