"""The verbs of those who decide about versions: people, and rollouts that have come to their end."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, func, or_, select, update

from tuneloop.shared.errors import VersionRefused
from tuneloop.shared.experience import VersionAction, VersionState
from tuneloop.shared.ledger.storage.schema import version_events, versions
from tuneloop.shared.ledger.storage.transactions import alone
from tuneloop.shared.ledger.versions.events import Decision, Details, note
from tuneloop.shared.ledger.versions.versions import (
    PINNED,
    SERVABLE,
    Version,
    VersionStates,
    appoint,
    end,
    retire,
    state_of,
    version_of,
)


class VersionsNow(NamedTuple):
    """All versions, oldest first, and which would be served if the champion were rolled back, as of one moment."""

    versions: list[Version]
    champion_before: int | None

    @property
    def newest(self) -> int:
        """The newest version that was not rejected: where training goes on from."""
        return max((each.version for each in self.versions if each.state in SERVABLE), default=0)

    def newest_without(self, version: int) -> int:
        """The same, were that version rejected or rolled back."""
        return max((each.version for each in self.versions if _outlasts(each, version)), default=0)


class Versions(VersionStates):
    """The versions, and the decisions about them.

    Each decision names the champion that was seen, so that of two at once only one is taken.
    """

    def appoint(self, version: int, *, instead_of: int, by: str, reason: str, details: Details | None = None) -> None:
        """Make any servable version the champion, an older one too, in place of the champion `instead_of`.

        Raises VersionRefused, and changes nothing, if that is the champion no more, if `version` is unknown, rejected
        or rolled back, or if another one is pinned.
        """
        with self._write() as connection:
            alone(connection, "promote")
            _expect_champion(connection, instead_of)
            _require_servable(connection, version)
            if _pinned_version(connection) not in {None, version}:
                raise _other_pinned(connection)
            if version != instead_of:
                appoint(connection, version, Decision(by, self._clock(), reason, details))

    def roll_back(
        self,
        version: int,
        *,
        by: str,
        reason: str,
        details: Details | None = None,
        only_as: VersionState | None = None,
    ) -> int:
        """Take a canary or the champion out of service for good; returns the champion's number after that.

        In place of a champion comes the one before it. Newer versions that wait, or have retired unserved, descend from
        what is rolled back, so they are rejected. Raises VersionRefused, and changes nothing, if the version does not
        serve, or not as `only_as`, is pinned, or there is none to go back to.
        """
        with self._write() as connection:
            alone(connection, "promote")
            decision = Decision(by, self._clock(), reason, details)
            state = state_of(connection, version)
            if state not in {VersionState.CANARY, VersionState.CHAMPION}:
                raise VersionRefused(f"version {version} is {state or 'unknown'}: only what serves can be rolled back")
            if only_as not in {None, state}:
                raise VersionRefused(f"version {version} is {state} by now, not {only_as}")
            if _pinned_version(connection) == version:
                raise VersionRefused(f"version {version} is pinned; unpin it first")
            before = _champion_before(connection) if state == VersionState.CHAMPION else None
            if state == VersionState.CHAMPION and before is None:
                raise VersionRefused(f"there is no version to go back to from version {version}")
            end(connection, version, VersionState.ROLLED_BACK, decision)
            _end_descendants(connection, version, decision)
            if before is not None:
                appoint(connection, before, decision.because(f"version {version} was rolled back"))
            return _champion(connection)

    def stand_in(self, version: int, *, instead_of: int, reason: str) -> None:
        """Make a former champion the champion because the files of the champion `instead_of` are damaged.

        That one retires, for nothing is wrong with its training, and a pin goes over to the one in its place. Raises
        VersionRefused, and changes nothing, if `instead_of` is not the champion or `version` cannot be served.
        """
        with self._write() as connection:
            alone(connection, "promote")
            _expect_champion(connection, instead_of)
            _require_servable(connection, version)
            decision = Decision("explorer", self._clock(), reason)
            if _pinned_version(connection) == instead_of:
                for number, is_pinned, action in (
                    (instead_of, False, VersionAction.UNPINNED),
                    (version, True, VersionAction.PINNED),
                ):
                    connection.execute(update(versions).where(versions.c.version == number).values(pinned=is_pinned))
                    note(connection, number, action, decision)
            appoint(connection, version, decision)

    def champions_before(self) -> list[int]:
        """The versions that were the champion before and could be again, the last one first."""
        return [row.version for row in self._read(_champions_before())]

    def now(self) -> VersionsNow:
        """How all of them are."""
        return _versions_now(*self._read_together(_ALL, _champions_before()))

    @contextmanager
    def hold(self) -> Iterator[VersionsNow]:
        """How all of them are; inside, nobody decides about any, or registers one."""
        with self._write() as connection:
            alone(connection, "promote")
            yield _versions_now(*(connection.execute(query).all() for query in (_ALL, _champions_before())))

    def pin(self, version: int, *, instead_of: int, by: str, reason: str) -> None:
        """Serve this version and no other until it is unpinned; a canary retires.

        Raises VersionRefused, and changes nothing, if `instead_of` is not the champion, if `version` cannot be served,
        or if another one is pinned.
        """
        with self._write() as connection:
            alone(connection, "promote")
            _expect_champion(connection, instead_of)
            _require_servable(connection, version)
            if _pinned_version(connection) == version:
                return
            if _pinned_version(connection) is not None:
                raise _other_pinned(connection)
            decision = Decision(by, self._clock(), reason)
            connection.execute(update(versions).where(versions.c.version == version).values(pinned=True))
            note(connection, version, VersionAction.PINNED, decision)
            pinned = decision.because(f"version {version} was pinned")
            if version == instead_of:
                retire(connection, versions.c.state == VersionState.CANARY, pinned)
            else:
                appoint(connection, version, pinned)

    def unpin(self, *, by: str, reason: str = "") -> int:
        """Let newer versions be served again; returns the number of what was pinned. Raises VersionRefused if none."""
        with self._write() as connection:
            alone(connection, "promote")
            pinned = _pinned_version(connection)
            if pinned is None:
                raise VersionRefused("no version is pinned")
            connection.execute(update(versions).where(versions.c.version == pinned).values(pinned=False))
            note(connection, pinned, VersionAction.UNPINNED, Decision(by, self._clock(), reason))
            return pinned


_ALL = select(versions).order_by(versions.c.version)


def _versions_now(registered: Collection[Any], before: Collection[Any]) -> VersionsNow:
    return VersionsNow([version_of(row) for row in registered], next((row.version for row in before), None))


def _outlasts(each: Version, version: int) -> bool:
    """Whether it can be gone on from, or served, after that version was rolled back, as `_end_descendants` has it."""
    served = each.state == VersionState.RETIRED and each.served_at is not None
    return each.state in SERVABLE and (each.version < version or (each.version > version and served))


def _champion(connection: Connection) -> int:
    found: int = connection.execute(
        select(versions.c.version).where(versions.c.state == VersionState.CHAMPION)
    ).scalar_one()
    return found


def _pinned_version(connection: Connection) -> int | None:
    found: int | None = connection.execute(select(versions.c.version).where(PINNED)).scalar()
    return found


def _other_pinned(connection: Connection) -> VersionRefused:
    return VersionRefused(f"version {_pinned_version(connection)} is pinned; unpin it first")


def _expect_champion(connection: Connection, expected: int) -> None:
    champion = _champion(connection)
    if champion != expected:
        raise VersionRefused(f"version {champion} is the champion, not version {expected}: look again, then decide")


def _require_servable(connection: Connection, version: int) -> None:
    row = connection.execute(select(versions.c.state, versions.c.reason).where(versions.c.version == version)).first()
    if row is None:
        raise VersionRefused(f"there is no version {version}")
    if row.state not in SERVABLE:
        raise VersionRefused(f"version {version} is {row.state}: {row.reason}")


def _champion_before(connection: Connection) -> int | None:
    found: int | None = connection.execute(_champions_before()).scalar()
    return found


def _champions_before() -> Select[Any]:
    """The retired versions that were the champion, the last one first. A canary that retired never was one."""

    def last(action: VersionAction) -> Any:
        same = (version_events.c.version == versions.c.version, version_events.c.action == action)
        return select(func.max(version_events.c.at)).where(*same).scalar_subquery()

    # Champions from before there were events have only the time when they were first served.
    crowned = func.coalesce(last(VersionAction.PROMOTED), versions.c.served_at)
    never = last(VersionAction.CANARY).is_not(None) & last(VersionAction.PROMOTED).is_(None)
    retired = select(versions.c.version).where(
        versions.c.state == VersionState.RETIRED, versions.c.served_at.is_not(None), ~never
    )
    return retired.order_by(crowned.desc(), versions.c.version.desc())


def _end_descendants(connection: Connection, version: int, decision: Decision) -> None:
    because = decision.because(f"descends from version {version}, which was rolled back")
    waiting = {
        VersionState.CANDIDATE: VersionState.REJECTED,
        VersionState.CANARY: VersionState.ROLLED_BACK,
        VersionState.RETIRED: VersionState.REJECTED,  # Or training would go on from it.
    }
    unserved = or_(versions.c.state != VersionState.RETIRED, versions.c.served_at.is_(None))
    newer = select(versions.c.version, versions.c.state).where(
        versions.c.version > version, versions.c.state.in_(tuple(waiting)), unserved
    )
    for number, state in connection.execute(newer.order_by(versions.c.version)).all():
        end(connection, number, waiting[VersionState(state)], because)
