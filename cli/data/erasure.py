"""Deletes a person from the ledger and the exported files, and lists what a deletion cannot undo."""

from typing import NamedTuple

from tuneloop.cli.data.export_erasure import FileErasure, Person, erase_rows
from tuneloop.shared.experience import person_name
from tuneloop.shared.ledger.ledger import Ledger

_LOG_NOT_EMPTIED = (
    "the database's write-ahead log still holds what was deleted, because a long read is in progress: run it again"
    " later"
)


class TrainedOn(NamedTuple):
    """A version that was trained on the person's experiences."""

    version: int
    state: str
    experiences: int


class Erasure(NamedTuple):
    """What was deleted, or would be; `problems` lists what could not be deleted."""

    tenant: str
    user: str
    dry_run: bool
    exchanges: int
    experiences: int
    feedback: int
    versions: tuple[TrainedOn, ...]
    files: tuple[FileErasure, ...]
    problems: tuple[str, ...]


def erase(ledger: Ledger, tenant: str, user: str, *, dry_run: bool = False) -> Erasure:
    """Delete the person from the ledger and from the exported files. The spools follow at the explorers' next look."""
    user = person_name(user)
    deleted = ledger.retention.erase(tenant, user, dry_run=dry_run)
    person = Person(tenant, user, deleted.msg_ids)
    files = tuple(erase_rows(export.path, person, dry_run=dry_run) for export in ledger.retention.exported_files())
    problems = [f"{file.path}: {file.problem}" for file in files if file.problem]
    if not dry_run:
        for file in files:
            if file.removed:
                ledger.retention.exported_rows(file.path, file.left)
        problems += [] if ledger.retention.empty_log() else [_LOG_NOT_EMPTIED]
    states = {each.version: each.state.value for each in ledger.versions.all()}
    return Erasure(
        tenant,
        user,
        dry_run,
        exchanges=len(deleted.msg_ids),
        experiences=deleted.experiences,
        feedback=deleted.feedback,
        versions=tuple(TrainedOn(each, states[each], count) for each, count in deleted.trained.items()),
        files=tuple(file for file in files if file.removed or file.problem),
        problems=tuple(problems),
    )
