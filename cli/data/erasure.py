"""Deletes a person wherever we keep what they said, and says what a deletion cannot undo."""

from typing import NamedTuple

from tuneloop.cli.data.export_erasure import Cleared, Theirs, clear
from tuneloop.shared.ledger.ledger import Ledger

_LOG_LEFT = (
    "the database's write-ahead log still holds what was deleted, because somebody has been reading for long: run it"
    " again later"
)


class TrainedOn(NamedTuple):
    """A version that was trained on experiences of theirs."""

    version: int
    state: str
    experiences: int


class Erasure(NamedTuple):
    """What was deleted, or would be; `problems` are sentences about what was not reached."""

    tenant: str
    user: str
    dry_run: bool
    exchanges: int
    experiences: int
    feedback: int
    versions: tuple[TrainedOn, ...]
    files: tuple[Cleared, ...]
    problems: tuple[str, ...]


def erase(ledger: Ledger, tenant: str, user: str, *, dry_run: bool = False) -> Erasure:
    """Delete the person from the ledger and from the exported files. The spools follow at the explorers' next look."""
    found = ledger.retention.erase(tenant, user, dry_run=dry_run)
    theirs = Theirs(tenant, user, found.msg_ids)
    files = tuple(clear(export.path, theirs, dry_run=dry_run) for export in ledger.retention.exported_files())
    problems = [f"{file.path}: {file.problem}" for file in files if file.problem]
    if not dry_run:
        for file in files:
            if file.removed:
                ledger.retention.exported_rows(file.path, file.left)
        problems += [] if ledger.retention.empty_log() else [_LOG_LEFT]
    states = {each.version: each.state.value for each in ledger.versions.all()}
    return Erasure(
        tenant,
        user,
        dry_run,
        exchanges=len(found.msg_ids),
        experiences=found.experiences,
        feedback=found.feedback,
        versions=tuple(TrainedOn(each, states[each], count) for each, count in found.trained.items()),
        files=tuple(file for file in files if file.removed or file.problem),
        problems=tuple(problems),
    )
