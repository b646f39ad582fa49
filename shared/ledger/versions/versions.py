"""The verbs about versions: what is served, what might be, what must not."""

from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Executable, and_, func, or_, select, text, update

from tuneloop.shared.errors import EnvironmentRefused, LedgerError, VersionRefused
from tuneloop.shared.experience import VersionAction, VersionState
from tuneloop.shared.ledger.storage.schema import versions
from tuneloop.shared.ledger.storage.transactions import alone, ignoring
from tuneloop.shared.ledger.versions.events import Decision, Details, VersionEvents, note

SERVABLE = (VersionState.CANDIDATE, VersionState.CANARY, VersionState.CHAMPION, VersionState.RETIRED)

#: Says the same as the partial index.
PINNED: ColumnElement[bool] = text("pinned")  # type: ignore[assignment]


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
    pinned: bool = False


class VersionStates(VersionEvents):
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
        """The newest candidate that is newer than the champion and the canary, if any."""
        answering = versions.c.state.in_((VersionState.CHAMPION, VersionState.CANARY))
        newest = select(func.max(versions.c.version)).where(answering).scalar_subquery()
        found = select(versions).where(versions.c.state == VersionState.CANDIDATE, versions.c.version > newest)
        return self._one_or_none(found.order_by(versions.c.version.desc()).limit(1))

    def canary(self) -> Version | None:
        """The version that answers a part of the traffic, or copies of it, until it is decided about; if any."""
        return self._one_or_none(select(versions).where(versions.c.state == VersionState.CANARY))

    def pinned_version(self) -> Version | None:
        """The version that is served whatever comes, if any."""
        return self._one_or_none(select(versions).where(PINNED))

    def get(self, number: int) -> Version | None:
        """That version, if there is one."""
        return self._one_or_none(select(versions).where(versions.c.version == number))

    def promote(self, version: int, *, by: str = "explorer", reason: str = "", details: Details | None = None) -> None:
        """Make `version` the champion, as the newest that is fit; the one before it and older candidates retire.

        A version that a newer champion has retired stays retired. Raises LedgerError for a rejected or unknown one, and
        VersionRefused if another one is pinned.
        """
        with self._write() as connection:
            alone(connection, "promote")
            _require_unpinned(connection, version)
            state = state_of(connection, version)
            if state not in SERVABLE:
                raise LedgerError(f"version {version} is {state or 'unknown'}: it cannot be served")
            if state not in {VersionState.RETIRED, VersionState.CHAMPION}:
                appoint(connection, version, Decision(by, self._clock(), reason, details))

    def begin_canary(self, version: int, *, by: str, reason: str, details: Details | None = None) -> None:
        """Let a candidate answer a part of the traffic, or copies of it; older candidates retire.

        Raises VersionRefused, and changes nothing, if it is no candidate, there is another canary, or one is pinned.
        """
        with self._write() as connection:
            alone(connection, "promote")
            _require_unpinned(connection, version)
            decision = Decision(by, self._clock(), reason, details)
            state = state_of(connection, version)
            if state != VersionState.CANDIDATE:
                raise VersionRefused(f"version {version} is {state or 'unknown'}, not a candidate")
            other = connection.execute(
                select(versions.c.version).where(versions.c.state == VersionState.CANARY)
            ).scalar()
            if other is not None:
                raise VersionRefused(f"version {other} is the canary; it must be decided about first")
            retire(connection, _older_candidates(version), decision.because(_took_its_place(version)))
            _serve(connection, version, VersionState.CANARY, decision)
            note(connection, version, VersionAction.CANARY, decision)

    def reject(
        self,
        version: int,
        reason: str,
        *,
        by: str = "explorer",
        details: Details | None = None,
        also_retired: bool = False,
    ) -> bool:
        """Record that a candidate must not be served, and why; or that a retired version must not be again.

        False: it is none, or the base model, which is what is served where no other can be; it stays what it is.
        """
        states = {VersionState.CANDIDATE, VersionState.RETIRED} if also_retired else {VersionState.CANDIDATE}
        with self._write() as connection:
            alone(connection, "promote")
            if state_of(connection, version) not in states or version == 0:
                return False
            end(connection, version, VersionState.REJECTED, Decision(by, self._clock(), reason, details))
            return True

    def all(self) -> list[Version]:
        """All versions, oldest first."""
        return [version_of(row) for row in self._read(select(versions).order_by(versions.c.version))]

    def _version(self, query: Executable) -> Version:
        found = self._one_or_none(query)
        if found is None:
            raise LedgerError("no version is registered yet")
        return found

    def _one_or_none(self, query: Executable) -> Version | None:
        rows = self._read(query)
        return version_of(rows[0]) if rows else None


def state_of(connection: Connection, version: int) -> str | None:
    """The state of a version, None if there is none of that number."""
    found: str | None = connection.execute(select(versions.c.state).where(versions.c.version == version)).scalar()
    return found


def _require_unpinned(connection: Connection, version: int) -> None:
    pinned = connection.execute(select(versions.c.version).where(PINNED)).scalar()
    if pinned not in {None, version}:
        raise VersionRefused(f"version {pinned} is pinned; unpin it first")


def appoint(connection: Connection, version: int, decision: Decision) -> None:
    """Make it the champion; the champion, a canary and older candidates retire."""
    answering = versions.c.state.in_((VersionState.CHAMPION, VersionState.CANARY))
    others = and_(answering, versions.c.version != version)
    retire(connection, or_(others, _older_candidates(version)), decision.because(_took_its_place(version)))
    _serve(connection, version, VersionState.CHAMPION, decision)
    note(connection, version, VersionAction.PROMOTED, decision)


def retire(connection: Connection, which: ColumnElement[bool], decision: Decision) -> None:
    """Take versions out of service that nothing is wrong with."""
    gone = connection.execute(select(versions.c.version).where(which)).scalars().all()
    connection.execute(update(versions).where(which).values(state=VersionState.RETIRED))
    for number in gone:
        note(connection, number, VersionAction.RETIRED, decision)


def end(connection: Connection, version: int, state: VersionState, decision: Decision) -> None:
    """Reject it, or roll it back."""
    ended = {"state": state, "reason": decision.reason}
    connection.execute(update(versions).where(versions.c.version == version).values(ended))
    note(connection, version, VersionAction(state), decision)


def _serve(connection: Connection, version: int, state: VersionState, decision: Decision) -> None:
    served = {"state": state, "served_at": func.coalesce(versions.c.served_at, decision.at)}
    connection.execute(update(versions).where(versions.c.version == version).values(served))


def _older_candidates(version: int) -> ColumnElement[bool]:
    return and_(versions.c.state == VersionState.CANDIDATE, versions.c.version < version)


def _took_its_place(version: int) -> str:
    return f"version {version} took its place"


def version_of(row: Any) -> Version:
    """What a row of the table says."""
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
        pinned=row.pinned,
    )
