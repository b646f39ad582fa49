"""What an administrator may decide about versions, by the command line and by the admin API alike.

Each says which champion was seen, or takes that of now: of two who decide at once, the second is told so. What is to
serve is first read by the verifier, like all that engines read: it may have been damaged or deleted since it served.
"""

import subprocess
import sys
from typing import NamedTuple

from tuneloop.shared.errors import VersionRefused
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.ledger.versions.versions import SERVABLE
from tuneloop.shared.operations.version_report import existing


class Decided(NamedTuple):
    """Who decides, why, and which champion he has seen; None: that of now."""

    by: str
    reason: str
    expect: int | None = None


class Ruling(NamedTuple):
    """What a decision has come to: about which version, and which is the champion now."""

    version: int
    champion: int


def promote(ledger: Ledger, version: int, decided: Decided) -> Ruling:
    """Make it the champion. Raises VersionRefused."""
    seen = _seen(ledger, decided)
    _verify(ledger, existing(ledger, version), seen)
    ledger.versions.appoint(version, instead_of=seen, by=_admin(decided), reason=decided.reason)
    return Ruling(version, version)


def roll_back(ledger: Ledger, version: int | None, decided: Decided) -> Ruling:
    """Take it out of service for good; without a version the canary, or the champion if there is none.

    Raises VersionRefused.
    """
    if version is not None:
        existing(ledger, version)
    if not decided.reason:
        raise VersionRefused("say why: a version that is rolled back is never served again")
    champion = ledger.versions.champion().version
    if decided.expect is not None and champion != decided.expect:
        raise VersionRefused(
            f"version {champion} is the champion, not version {decided.expect}: look again, then decide"
        )
    if version is None:
        canary = ledger.versions.canary()
        version = canary.version if canary else champion
    return Ruling(version, ledger.versions.roll_back(version, by=_admin(decided), reason=decided.reason))


def pin(ledger: Ledger, version: int, decided: Decided) -> Ruling:
    """Serve this version and no other. Raises VersionRefused."""
    seen = _seen(ledger, decided)
    _verify(ledger, existing(ledger, version), seen)
    ledger.versions.pin(version, instead_of=seen, by=_admin(decided), reason=decided.reason)
    return Ruling(version, version)


def unpin(ledger: Ledger, decided: Decided) -> Ruling:
    """Let newer versions be served again. Raises VersionRefused if none is pinned."""
    version = ledger.versions.unpin(by=_admin(decided), reason=decided.reason)
    return Ruling(version, ledger.versions.champion().version)


def _verify(ledger: Ledger, version: Version, champion: int) -> None:
    """Raise VersionRefused if the checkpoint of a version that does not serve yet is not fit to."""
    if version.version in {0, champion} or version.state not in SERVABLE:  # the ledger refuses the others
        return
    base, sha256 = existing(ledger, 0).path, version.manifest_sha256 or ""
    verifier = [
        sys.executable,
        "-P",
        "-m",
        "tuneloop.explorer.versions.verifier",
        str(version.path),
        sha256,
        str(version.version),
    ]
    said = subprocess.run([*verifier, str(base)], stdout=subprocess.PIPE, text=True, errors="replace", check=False)
    if said.returncode:
        reason = said.stdout.strip() or f"its verifier died ({said.returncode})"
        raise VersionRefused(f"version {version.version} cannot be served: {reason}")


def _seen(ledger: Ledger, decided: Decided) -> int:
    return ledger.versions.champion().version if decided.expect is None else decided.expect


def _admin(decided: Decided) -> str:
    return f"admin:{decided.by}"
