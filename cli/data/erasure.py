"""Deletes a person from the ledger and the exported files, and lists what a deletion cannot undo."""

from collections import Counter
from typing import NamedTuple

from tuneloop.cli.data.export_erasure import FileErasure, Person, erase_rows
from tuneloop.cli.data.progress import counting
from tuneloop.shared.experience import person_name
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.recording.retention import NOTHING_ERASED
from tuneloop.shared.privacy.redactor import Redactor

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


def erase(
    ledger: Ledger, tenant: str, user: str, *, redactor: Redactor | None = None, dry_run: bool = False
) -> Erasure:
    """Delete the person from the ledger and from the exported files. The spools follow at the explorers' next look.

    With a `redactor`, by the name that it writes in the place of theirs too.
    """
    user = person_name(user)
    names = (user,) if redactor is None else (user, redactor.hidden_name(user))
    deleted = []
    with counting("looking through the ledger") as count:
        for name in _stored_names(ledger, tenant, names, redactor):
            deleted.append(ledger.retention.erase(tenant, name, dry_run=dry_run))
            count(len(deleted[-1].msg_ids))
    person = Person(tenant, names, frozenset().union(*(each.msg_ids for each in deleted)))
    files = tuple(erase_rows(export.path, person, dry_run=dry_run) for export in ledger.retention.exported_files())
    problems = [f"{file.path}: {file.problem}" for file in files if file.problem]
    if not dry_run:
        for file in files:
            if file.removed:
                ledger.retention.exported_rows(file.path, file.left)
        problems += [] if ledger.retention.empty_log() else [_LOG_NOT_EMPTIED]
    trained: Counter[int] = sum((Counter(each.trained) for each in deleted), Counter())
    states = {each.version: each.state.value for each in ledger.versions.all()}
    return Erasure(
        tenant,
        user,
        dry_run,
        exchanges=len(person.msg_ids),
        experiences=sum(each.experiences for each in deleted),
        feedback=sum(each.feedback for each in deleted),
        versions=tuple(TrainedOn(each, states[each], count) for each, count in sorted(trained.items())),
        files=tuple(file for file in files if file.removed or file.problem),
        problems=tuple(problems),
    )


def _stored_names(ledger: Ledger, tenant: str, names: tuple[str, ...], redactor: Redactor | None) -> tuple[str, ...]:
    """What a person is called in the ledger: by the pseudonym, and by the name if that was once written.

    By the pseudonym whatever is redacted now: other kinds may have been when they were recorded.
    """
    user, *hidden = names
    if redactor is None or redactor.name(user) == user:
        return names
    if ledger.retention.erase(tenant, user, dry_run=True) != NOTHING_ERASED:
        return names
    return tuple(hidden)  # the name would stand among those that were erased
