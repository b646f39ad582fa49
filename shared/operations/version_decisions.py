"""Applies an administrator's decisions about versions, for the command line and the admin API.

Each decision names the champion that it saw, or takes the present one: the second of two concurrent decisions is
refused. The verifier reads a version first, since its files may be damaged or deleted.
"""

import subprocess
import sys
from typing import NamedTuple

from tuneloop.shared.checkpoints import version_in
from tuneloop.shared.errors import VersionRefused
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.ledger.versions.versions import SERVABLE, Versions
from tuneloop.shared.operations.version_report import require_version


class DecisionRequest(NamedTuple):
    """Who decides, why, and which champion they expect; None: the present one."""

    by: str
    reason: str
    expect: int | None = None


class DecisionResult(NamedTuple):
    version: int
    champion: int


def promote(ledger: Ledger, version: int, request: DecisionRequest) -> DecisionResult:
    line, found = _line_of(ledger, version)
    expected = _expected_champion(line, request)
    _verify(ledger, found, expected)
    line.appoint(version, instead_of=expected, by=_admin(request), reason=request.reason)
    return DecisionResult(version, version)


def roll_back(ledger: Ledger, version: int | None, request: DecisionRequest) -> DecisionResult:
    """Take it out of service for good; by default the canary, or else the champion. Raises VersionRefused."""
    line = ledger.versions if version is None else _line_of(ledger, version)[0]
    if not request.reason:
        raise VersionRefused("give a reason: a version that is rolled back is never served again")
    champion = line.champion().version
    if request.expect is not None and champion != request.expect:
        raise VersionRefused(
            f"version {champion} is the champion, not version {request.expect}: look again, then decide"
        )
    if version is None:
        canary = ledger.versions.canary()
        version = canary.version if canary else champion
    return DecisionResult(version, line.roll_back(version, by=_admin(request), reason=request.reason))


def reject(ledger: Ledger, version: int, request: DecisionRequest) -> DecisionResult:
    line, found = _line_of(ledger, version)
    if not request.reason:
        raise VersionRefused("give a reason: a version that is rejected is never served")
    if version == 0:
        raise VersionRefused("version 0 is the base model, which is what is served where no other can be")
    if not line.reject(version, request.reason, by=_admin(request), also_retired=True):
        raise VersionRefused(
            f"version {version} is {found.state}: only a candidate, or a retired version, can be rejected; a version"
            " that serves can be rolled back"
        )
    return DecisionResult(version, line.champion().version)


def pin(ledger: Ledger, version: int, request: DecisionRequest) -> DecisionResult:
    line, found = _line_of(ledger, version)
    expected = _expected_champion(line, request)
    _verify(ledger, found, expected)
    line.pin(version, instead_of=expected, by=_admin(request), reason=request.reason)
    return DecisionResult(version, version)


def unpin(ledger: Ledger, version: int | None, request: DecisionRequest) -> DecisionResult:
    """Let newer versions of `version`'s policy, or the default one, be served again. Raises VersionRefused."""
    line = ledger.versions if version is None else _line_of(ledger, version)[0]
    version = line.unpin(by=_admin(request), reason=request.reason)
    return DecisionResult(version, line.champion().version)


def _line_of(ledger: Ledger, version: int) -> tuple[Versions, Version]:
    """The version, and the others of its policy. Raises VersionRefused if there is none."""
    found = require_version(ledger, version)
    return ledger.versions.of(found.policy), found


def _verify(ledger: Ledger, version: Version, champion: int) -> None:
    """Raise VersionRefused if the checkpoint of a version that does not serve yet is not fit to."""
    if version.is_base or version.version == champion or version.state not in SERVABLE:  # the ledger refuses the others
        return
    base, sha256 = require_version(ledger, 0).path, version.manifest_sha256 or ""
    verifier = [
        sys.executable,
        "-P",
        "-m",
        "tuneloop.explorer.versions.verifier",
        str(version.path),
        sha256,
        str(version_in(version.path.name)),
    ]
    done = subprocess.run([*verifier, str(base)], stdout=subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode:
        reason = done.stdout.strip() or f"its verifier died ({done.returncode})"
        raise VersionRefused(f"version {version.version} cannot be served: {reason}")


def _expected_champion(line: Versions, request: DecisionRequest) -> int:
    return line.champion().version if request.expect is None else request.expect


def _admin(request: DecisionRequest) -> str:
    return f"admin:{request.by}"
