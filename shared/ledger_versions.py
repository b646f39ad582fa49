"""The verbs about versions: what is served, what might be, what must not."""

from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Executable, and_, func, or_, select, update

from shared.errors import EnvironmentRefused, LedgerError
from shared.experience import VersionState
from shared.ledger_transactions import Transactions, alone, ignoring
from shared.schema import versions

SERVABLE = (VersionState.CANDIDATE, VersionState.CHAMPION, VersionState.RETIRED)


class Version(NamedTuple):
    """A row of `versions`: a published set of weights."""

    version: int
    state: VersionState
    step: int
    path: Path
    manifest_sha256: str | None
    consumed: int
    created_at: float
    served_at: float | None
    reason: str | None


class VersionLedger(Transactions):
    """The states of the versions."""

    def ensure_base(self, path: Path) -> None:
        """Register the base model as version 0, served, if no version is registered.

        Raises EnvironmentRefused if the experiment began with another one.
        """
        now = self._clock()
        base = {"version": 0, "state": VersionState.CHAMPION, "step": 0, "path": str(path)}
        with self._write() as connection:
            connection.execute(
                ignoring(connection, versions), base | {"consumed": 0, "created_at": now, "served_at": now}
            )
            began_with = connection.execute(select(versions.c.path).where(versions.c.version == 0)).scalar()
        if began_with != str(path):
            raise EnvironmentRefused(
                f"model.model_path: this experiment began with {began_with}, and its versions come from that model; "
                "keep that path, or give the new model an experiment of its own (another name)"
            )

    def champion(self) -> Version:
        """The version that is served. Raises LedgerError before `ensure_base`."""
        return self._version(select(versions).where(versions.c.state == VersionState.CHAMPION))

    def newest(self) -> Version:
        """The newest version that was not rejected: where training goes on from."""
        return self._version(
            select(versions).where(versions.c.state.in_(SERVABLE)).order_by(versions.c.version.desc()).limit(1)
        )

    def candidate(self) -> Version | None:
        """The newest candidate that is newer than the champion, if any."""
        champion = select(versions.c.version).where(versions.c.state == VersionState.CHAMPION).scalar_subquery()
        rows = self._read(
            select(versions)
            .where(versions.c.state == VersionState.CANDIDATE, versions.c.version > champion)
            .order_by(versions.c.version.desc())
            .limit(1)
        )
        return _version_of(rows[0]) if rows else None

    def promote(self, version: int) -> None:
        """Make `version` the champion; the one before it and older candidates retire.

        A version that a newer champion has retired stays retired. Raises LedgerError for a rejected or unknown one.
        """
        with self._write() as connection:
            alone(connection, "promote")
            state = connection.execute(select(versions.c.state).where(versions.c.version == version)).scalar()
            if state not in SERVABLE:
                raise LedgerError(f"version {version} is {state or 'unknown'}: it cannot be served")
            if state == VersionState.RETIRED:
                return
            connection.execute(
                update(versions)
                .where(
                    or_(
                        and_(versions.c.state == VersionState.CHAMPION, versions.c.version != version),
                        and_(versions.c.state == VersionState.CANDIDATE, versions.c.version < version),
                    )
                )
                .values(state=VersionState.RETIRED)
            )
            connection.execute(
                update(versions)
                .where(versions.c.version == version)
                .values(state=VersionState.CHAMPION, served_at=func.coalesce(versions.c.served_at, self._clock()))
            )

    def reject(self, version: int, reason: str) -> None:
        """Say that a candidate must not be served, and why; any other version stays what it is."""
        with self._write() as connection:
            alone(connection, "promote")
            connection.execute(
                update(versions)
                .where(versions.c.version == version, versions.c.state == VersionState.CANDIDATE)
                .values(state=VersionState.REJECTED, reason=reason)
            )

    def versions(self) -> list[Version]:
        """All versions, oldest first."""
        return [_version_of(row) for row in self._read(select(versions).order_by(versions.c.version))]

    def _version(self, query: Executable) -> Version:
        rows = self._read(query)
        if not rows:
            raise LedgerError("no version is registered yet")
        return _version_of(rows[0])


def _version_of(row: Any) -> Version:
    return Version(
        version=row.version,
        state=VersionState(row.state),
        step=row.step,
        path=Path(row.path),
        manifest_sha256=row.manifest_sha256,
        consumed=row.consumed,
        created_at=row.created_at,
        served_at=row.served_at,
        reason=row.reason,
    )
