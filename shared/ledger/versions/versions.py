"""Changes the states of versions (candidate, canary, champion, rejected …), and stores each decision as an event."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    Select,
    and_,
    func,
    insert,
    or_,
    select,
    text,
    true,
    update,
)

from tuneloop.shared.errors import EnvironmentRefused, LedgerError, VersionRefused
from tuneloop.shared.experience import PolicyState, VersionAction, VersionState
from tuneloop.shared.ledger.explorers import Lead, require_lead
from tuneloop.shared.ledger.storage.database import LedgerPart, Transactions, alone, ignoring
from tuneloop.shared.ledger.storage.job_schema import jobs
from tuneloop.shared.ledger.storage.schema import policies, version_events, versions

Details = Mapping[str, Any]


class VersionEvent(NamedTuple):
    id: int
    version: int
    at: float
    action: VersionAction
    actor: str
    reason: str | None
    details: dict[str, Any]


class Decision(NamedTuple):
    by: str
    at: float
    reason: str = ""
    details: Details | None = None

    def because(self, reason: str) -> "Decision":
        return self._replace(reason=reason, details=None)


SERVABLE = (VersionState.CANDIDATE, VersionState.CANARY, VersionState.CHAMPION, VersionState.RETIRED)

PINNED: ColumnElement[bool] = text("pinned")  # type: ignore[assignment]


class Version(NamedTuple):
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
    policy: int = 0

    @property
    def is_base(self) -> bool:
        return self.manifest_sha256 is None

    @property
    def begins(self) -> bool:
        """Whether a policy begins with it: with its weights alone, which another's training made, or none's."""
        return self.is_base or (self.policy != 0 and self.step == 0)


class VersionsNow(NamedTuple):
    """All versions of a policy, oldest first, and what would take a champion's place, as of one moment."""

    versions: list[Version]
    champion_before: int | None

    @property
    def newest(self) -> int:
        """The newest version that was not rejected: training continues from it."""
        return max((each.version for each in self.versions if each.state in SERVABLE), default=0)

    def newest_without(self, version: int) -> int:
        """The same, were that version rejected or rolled back."""
        older = [each.version for each in self.versions if each.state in SERVABLE and each.version < version]
        # What descends from it ends with it, but for what has been served and retired.
        served = (each for each in self.versions if each.state == VersionState.RETIRED and each.served_at is not None)
        return max([*older, *(each.version for each in served if each.version > version)], default=0)


class RegisteredVersions(LedgerPart):
    """Those of one policy, as they are; `all`, `get` and what events say are of every policy."""

    def __init__(self, transactions: Transactions, policy: int = 0) -> None:
        super().__init__(transactions)
        self._transactions, self._line = transactions, versions.c.policy == policy

    def champion(self) -> Version:
        """The version that is served. Raises LedgerError before `ensure_base`."""
        return self._version(select(versions).where(self._line, versions.c.state == VersionState.CHAMPION))

    def newest(self) -> Version:
        servable = select(versions).where(self._line, versions.c.state.in_(SERVABLE))
        return self._version(servable.order_by(versions.c.version.desc()).limit(1))

    def candidate(self) -> Version | None:
        """The newest candidate that is newer than the champion and the canary, if any."""
        answering = and_(self._line, versions.c.state.in_((VersionState.CHAMPION, VersionState.CANARY)))
        newest = select(func.max(versions.c.version)).where(answering).scalar_subquery()
        waits = versions.c.state == VersionState.CANDIDATE
        found = select(versions).where(self._line, waits, versions.c.version > newest)
        return self._one_or_none(found.order_by(versions.c.version.desc()).limit(1))

    def canary(self) -> Version | None:
        """The version that answers a part of the traffic until it is decided about; if any."""
        return self._one_or_none(select(versions).where(self._line, versions.c.state == VersionState.CANARY))

    def pinned_version(self) -> Version | None:
        return self._one_or_none(select(versions).where(self._line, PINNED))

    def get(self, number: int) -> Version | None:
        return self._one_or_none(select(versions).where(versions.c.version == number))

    def all(self) -> list[Version]:
        return [_version_of(row) for row in self._read(_ALL)]

    def answering(self) -> dict[int, list[Version]]:
        """What answers, waits to, or is pinned, of every policy by its id, and what jobs have made, oldest first."""
        states = versions.c.state.in_((VersionState.CANDIDATE, VersionState.CANARY, VersionState.CHAMPION))
        of_jobs = and_(versions.c.policy.in_(select(jobs.c.policy)), versions.c.state == VersionState.RETIRED)
        found: dict[int, list[Version]] = {}
        for row in self._read(_ALL.where(or_(states, PINNED, of_jobs))):
            found.setdefault(row.policy, []).append(_version_of(row))
        return found

    def champions_before(self) -> list[int]:
        """The versions that were the champion before and could be again, the last one first."""
        return [row.version for row in self._read(_champions_before(self._line))]

    def now(self) -> VersionsNow:
        return _versions_now(*self._read_together(_ALL.where(self._line), _champions_before(self._line)))

    def lines(self) -> list[VersionsNow]:
        return _lines(*self._read_together(_ALL.where(_THERE), _champions_before(_THERE)))

    def events(self, version: int | None = None, *, last: int | None = None) -> list[VersionEvent]:
        """What happened to the versions, or to one, oldest first; only the `last` so many."""
        of_it = true() if version is None else version_events.c.version == version
        rows = self._read(select(version_events).where(of_it).order_by(version_events.c.id.desc()).limit(last))
        return [_event_of(row) for row in reversed(rows)]

    def last_event(self, actions: Sequence[VersionAction]) -> int:
        """The number of the newest event of these actions; 0 if there is none."""
        newest = select(func.max(version_events.c.id)).where(version_events.c.action.in_(actions))
        return int(self._read(newest)[0][0] or 0)

    def events_since(self, number: int, actions: Sequence[VersionAction]) -> list[VersionEvent]:
        """The events of these actions after that number, oldest first; decisions are serial, so none is missed."""
        newer = (version_events.c.id > number, version_events.c.action.in_(actions))
        return [
            _event_of(row) for row in self._read(select(version_events).where(*newer).order_by(version_events.c.id))
        ]

    def _version(self, query: Executable) -> Version:
        found = self._one_or_none(query)
        if found is None:
            raise LedgerError("no version is registered yet")
        return found

    def _one_or_none(self, query: Executable) -> Version | None:
        rows = self._read(query)
        return _version_of(rows[0]) if rows else None


class Versions(RegisteredVersions):
    """A policy's versions, and decisions: each names the champion that was seen, so of two at once one is taken."""

    def of(self, policy: int) -> "Versions":
        return Versions(self._transactions, policy)

    def ensure_base(self, path: Path) -> None:
        """Register the base model as version 0, served, once. Raises EnvironmentRefused if it is another one."""
        now = self._clock()
        base = {"version": 0, "state": VersionState.CHAMPION, "step": 0, "path": str(path)}
        default = {"id": 0, "tenant": "", "name": "default", "parent": 0, "settings": "{}", "created_by": ""}
        with self._write() as connection:
            active = default | {"state": PolicyState.ACTIVE, "created_at": now}
            connection.execute(ignoring(connection, policies), active)
            connection.execute(
                ignoring(connection, versions), base | {"consumed": 0, "created_at": now, "served_at": now}
            )
            began_with = connection.execute(select(versions.c.path).where(versions.c.version == 0)).scalar()
        if began_with != str(path):
            raise EnvironmentRefused(
                f"model.model_path: this experiment began with {began_with}, and its versions come from that model; "
                "keep that path, or give the new model an experiment of its own (another name)"
            )

    def promote(
        self,
        version: int,
        *,
        by: str = "explorer",
        reason: str = "",
        details: Details | None = None,
        lead: Lead | None = None,
    ) -> None:
        """Make the newest that is fit the champion; older candidates retire. Raises LedgerError, VersionRefused."""
        with self._write() as connection:
            alone(connection, "promote")
            require_lead(connection, lead, self._clock())
            self._require_unpinned(connection, version)
            state = self._state_of(connection, version)
            if state not in SERVABLE:
                raise LedgerError(f"version {version} is {state or 'unknown'}: it cannot be served")
            if state not in {VersionState.RETIRED, VersionState.CHAMPION}:
                self._appoint(connection, version, Decision(by, self._clock(), reason, details))

    def begin_canary(self, version: int, *, by: str, reason: str, details: Details | None = None) -> None:
        """Let a candidate answer a part of the traffic; older ones retire. Raises VersionRefused if it cannot be."""
        with self._write() as connection:
            alone(connection, "promote")
            self._require_unpinned(connection, version)
            decision = Decision(by, self._clock(), reason, details)
            state = self._state_of(connection, version)
            if state != VersionState.CANDIDATE:
                raise VersionRefused(f"version {version} is {state or 'unknown'}, not a candidate")
            other = connection.execute(
                select(versions.c.version).where(self._line, versions.c.state == VersionState.CANARY)
            ).scalar()
            if other is not None:
                raise VersionRefused(f"version {other} is the canary; it must be decided about first")
            retire(connection, and_(self._line, _older_candidates(version)), decision.because(_took_its_place(version)))
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
        """Record why a candidate, or a retired version, must not be served; False: it is none, or the base model."""
        states = {VersionState.CANDIDATE, VersionState.RETIRED} if also_retired else {VersionState.CANDIDATE}
        with self._write() as connection:
            alone(connection, "promote")
            if self._state_of(connection, version) not in states or version == 0:
                return False
            end(connection, version, VersionState.REJECTED, Decision(by, self._clock(), reason, details))
            return True

    def appoint(self, version: int, *, instead_of: int, by: str, reason: str, details: Details | None = None) -> None:
        """Make any servable version the champion in place of `instead_of`. Raises VersionRefused."""
        with self._write() as connection:
            alone(connection, "promote")
            self._expect_champion(connection, instead_of)
            self._require_servable(connection, version)
            self._require_unpinned(connection, version)
            if version != instead_of:
                self._appoint(connection, version, Decision(by, self._clock(), reason, details))

    def roll_back(
        self,
        version: int,
        *,
        by: str,
        reason: str,
        details: Details | None = None,
        only_as: VersionState | None = None,
        lead: Lead | None = None,
    ) -> int:
        """Take a canary or the champion out of service for good; returns the champion's number after that.

        The previous champion replaces a champion. Newer waiting or unserved versions descend from it and are rejected.
        Raises VersionRefused, and changes nothing, if the version is pinned, does not serve (as `only_as`), the `lead`
        is over, or no champion is left.
        """
        with self._write() as connection:
            alone(connection, "promote")
            require_lead(connection, lead, self._clock())
            decision = Decision(by, self._clock(), reason, details)
            state = self._state_of(connection, version)
            if state not in {VersionState.CANARY, VersionState.CHAMPION}:
                raise VersionRefused(f"version {version} is {state or 'unknown'}: only what serves can be rolled back")
            if only_as not in {None, state}:
                raise VersionRefused(f"version {version} is {state} by now, not {only_as}")
            if self._pinned_version(connection) == version:
                raise VersionRefused(f"version {version} is pinned; unpin it first")
            before: int | None = None
            if state == VersionState.CHAMPION:
                before = connection.execute(_champions_before(self._line)).scalar()
            if state == VersionState.CHAMPION and before is None:
                raise VersionRefused(f"there is no version to go back to from version {version}")
            end(connection, version, VersionState.ROLLED_BACK, decision)
            because = decision.because(f"descends from version {version}, which was rolled back")
            waiting = {
                VersionState.CANDIDATE: VersionState.REJECTED,
                VersionState.CANARY: VersionState.ROLLED_BACK,
                VersionState.RETIRED: VersionState.REJECTED,  # Or training would go on from it.
            }
            unserved = or_(versions.c.state != VersionState.RETIRED, versions.c.served_at.is_(None))
            newer = select(versions.c.version, versions.c.state).where(
                self._line, versions.c.version > version, versions.c.state.in_(tuple(waiting)), unserved
            )
            for number, state in connection.execute(newer.order_by(versions.c.version)).all():
                end(connection, number, waiting[VersionState(state)], because)
            if before is not None:
                self._appoint(connection, before, decision.because(f"version {version} was rolled back"))
            return self._champion(connection)

    def stand_in(self, version: int, *, instead_of: int, reason: str) -> None:
        """Make a former champion stand in for one whose files are damaged, with its pin. Raises VersionRefused."""
        with self._write() as connection:
            alone(connection, "promote")
            self._expect_champion(connection, instead_of)
            self._require_servable(connection, version)
            decision = Decision("explorer", self._clock(), reason)
            if self._pinned_version(connection) == instead_of:
                for number, is_pinned, action in (
                    (instead_of, False, VersionAction.UNPINNED),
                    (version, True, VersionAction.PINNED),
                ):
                    connection.execute(update(versions).where(versions.c.version == number).values(pinned=is_pinned))
                    note(connection, number, action, decision)
            self._appoint(connection, version, decision)

    @contextmanager
    def hold(self) -> Iterator[list[VersionsNow]]:
        """The same; inside, no other process decides about a version or registers one."""
        with self._write() as connection:
            alone(connection, "promote")
            yield _lines(
                *(connection.execute(query).all() for query in (_ALL.where(_THERE), _champions_before(_THERE)))
            )

    def pin(self, version: int, *, instead_of: int, by: str, reason: str) -> None:
        """Serve this version alone until it is unpinned; a canary retires. Raises VersionRefused."""
        with self._write() as connection:
            alone(connection, "promote")
            self._expect_champion(connection, instead_of)
            self._require_servable(connection, version)
            if self._pinned_version(connection) == version:
                return
            self._require_unpinned(connection, version)
            decision = Decision(by, self._clock(), reason)
            connection.execute(update(versions).where(versions.c.version == version).values(pinned=True))
            note(connection, version, VersionAction.PINNED, decision)
            pinned = decision.because(f"version {version} was pinned")
            if version == instead_of:
                retire(connection, and_(self._line, versions.c.state == VersionState.CANARY), pinned)
            else:
                self._appoint(connection, version, pinned)

    def unpin(self, *, by: str, reason: str = "") -> int:
        """Let newer versions be served again; returns the number of what was pinned. Raises VersionRefused if none."""
        with self._write() as connection:
            alone(connection, "promote")
            pinned = self._pinned_version(connection)
            if pinned is None:
                raise VersionRefused("no version is pinned")
            connection.execute(update(versions).where(versions.c.version == pinned).values(pinned=False))
            note(connection, pinned, VersionAction.UNPINNED, Decision(by, self._clock(), reason))
            return pinned

    def note(
        self, version: int, action: VersionAction, *, by: str, reason: str = "", details: Details | None = None
    ) -> None:
        with self._write() as connection:
            note(connection, version, action, Decision(by, self._clock(), reason, details))

    def _state_of(self, connection: Connection, version: int) -> str | None:
        found: str | None = connection.execute(
            select(versions.c.state).where(self._line, versions.c.version == version)
        ).scalar()
        return found

    def _pinned_version(self, connection: Connection) -> int | None:
        found: int | None = connection.execute(select(versions.c.version).where(self._line, PINNED)).scalar()
        return found

    def _require_unpinned(self, connection: Connection, version: int) -> None:
        pinned = self._pinned_version(connection)
        if pinned not in {None, version}:
            raise VersionRefused(f"version {pinned} is pinned; unpin it first")

    def _appoint(self, connection: Connection, version: int, decision: Decision) -> None:
        """Make it the champion; the champion, a canary and older candidates retire."""
        answering = versions.c.state.in_((VersionState.CHAMPION, VersionState.CANARY))
        others = and_(answering, versions.c.version != version)
        replaced = and_(self._line, or_(others, _older_candidates(version)))
        retire(connection, replaced, decision.because(_took_its_place(version)))
        _serve(connection, version, VersionState.CHAMPION, decision)
        note(connection, version, VersionAction.PROMOTED, decision)

    def _champion(self, connection: Connection) -> int:
        found: int = connection.execute(
            select(versions.c.version).where(self._line, versions.c.state == VersionState.CHAMPION)
        ).scalar_one()
        return found

    def _expect_champion(self, connection: Connection, expected: int) -> None:
        champion = self._champion(connection)
        if champion != expected:
            raise VersionRefused(f"version {champion} is the champion, not version {expected}: look again, then decide")

    def _require_servable(self, connection: Connection, version: int) -> None:
        found = select(versions.c.state, versions.c.reason).where(self._line, versions.c.version == version)
        row = connection.execute(found).first()
        if row is None:
            raise VersionRefused(f"there is no version {version}")
        if row.state not in SERVABLE:
            raise VersionRefused(f"version {version} is {row.state}: {row.reason}")


def _event_of(row: Any) -> VersionEvent:
    event = VersionEvent(*(getattr(row, name) for name in VersionEvent._fields))
    return event._replace(action=VersionAction(row.action), details=json.loads(row.details) if row.details else {})


def note(connection: Connection, version: int, action: VersionAction, decision: Decision) -> None:
    row = {
        "version": version,
        "at": decision.at,
        "action": action,
        "actor": decision.by,
        "reason": decision.reason or None,
        "details": json.dumps(decision.details, allow_nan=False) if decision.details else None,
    }
    connection.execute(insert(version_events).values(row))


def next_number(connection: Connection) -> int:
    return 1 + (connection.execute(select(func.max(versions.c.version))).scalar() or 0)


def retire(connection: Connection, which: ColumnElement[bool], decision: Decision) -> None:
    gone = connection.execute(select(versions.c.version).where(which)).scalars().all()
    connection.execute(update(versions).where(which).values(state=VersionState.RETIRED))
    for number in gone:
        note(connection, number, VersionAction.RETIRED, decision)


def end(connection: Connection, version: int, state: VersionState, decision: Decision) -> None:
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


def _version_of(row: Any) -> Version:
    version = Version(*(getattr(row, name) for name in Version._fields))
    return version._replace(state=VersionState(row.state), path=Path(row.path))


_ALL = select(versions).order_by(versions.c.version)

_THERE = versions.c.policy.not_in(select(policies.c.id).where(policies.c.state == PolicyState.DELETED))


def _versions_now(registered: Collection[Any], before: Collection[Any]) -> VersionsNow:
    return VersionsNow([_version_of(row) for row in registered], next((row.version for row in before), None))


def _lines(registered: Collection[Any], before: Collection[Any]) -> list[VersionsNow]:
    found = sorted({row.policy for row in registered})
    return [
        _versions_now(*([row for row in rows if row.policy == each] for rows in (registered, before))) for each in found
    ]


def _champions_before(line: ColumnElement[bool]) -> Select[Any]:
    """The retired versions that were the champion, the last one first. A canary that retired never was one."""

    def last(action: VersionAction) -> Any:
        same = (version_events.c.version == versions.c.version, version_events.c.action == action)
        return select(func.max(version_events.c.at)).where(*same).scalar_subquery()

    # Champions from before there were events have only the time when they were first served.
    crowned = func.coalesce(last(VersionAction.PROMOTED), versions.c.served_at)
    never = last(VersionAction.CANARY).is_not(None) & last(VersionAction.PROMOTED).is_(None)
    retired = select(versions.c.version, versions.c.policy).where(
        line, versions.c.state == VersionState.RETIRED, versions.c.served_at.is_not(None), ~never
    )
    return retired.order_by(crowned.desc(), versions.c.version.desc())
