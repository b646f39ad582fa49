"""This file is `tuneloop purge` and `tuneloop erase`: in the ledger, and in the exported files."""

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import orjson
import typer

from tuneloop.cli.files import DraftFile, clear_left_drafts, in_turn
from tuneloop.cli.options import (
    ConfigOption,
    JsonOption,
    SetOption,
    counting,
    existing_ledger,
    seconds,
    tell,
    with_progress,
)
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import State, person_behind, person_name
from tuneloop.shared.finetuning.lines import LineIndex
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.files import FILES
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.recording.retention import (
    NOTHING_ERASED,
    ErasureResult,
    bounds_of,
    bounds_of_tenants,
    stored_name,
)
from tuneloop.shared.operations.diagnosis import number
from tuneloop.shared.operations.engines import read_explorer
from tuneloop.shared.outbox_status import files_of, held_file
from tuneloop.shared.privacy.detection import Detector
from tuneloop.shared.privacy.redactor import Redactor
from tuneloop.shared.settings.settings import Settings

_NAMES = ("user", "other_user")
_REPLIES = ("msg_id", "other_msg_id")
_COLUMNS = (*_NAMES, *_REPLIES, "tenant", "feedback_sources", "feedback")

_LABELS_SHOWN = 20


class Person(NamedTuple):
    """Whose rows to erase: found by their replies, or by their names where the ledger no longer has those."""

    tenant: str
    users: tuple[str, ...]
    msg_ids: frozenset[str]

    def owns(self, row: Mapping[str, Any]) -> bool:
        """Whether the row holds their reply, or their feedback on one."""
        feedback = [each for each in row.get("feedback") or () if isinstance(each, dict)]
        if any(each.get(name) in self.msg_ids for each in (row, *feedback) for name in _REPLIES):
            return True
        if row.get("tenant") not in (None, self.tenant):
            return False
        names = [
            *(row.get(name) for name in _NAMES),
            *map(person_behind, row.get("feedback_sources") or ()),
            *(person_behind(each["source"]) for each in feedback if each.get("source")),
        ]
        return any(stored_name(user) in names for user in self.users)


class FileErasure(NamedTuple):
    path: str
    removed: int = 0
    left: int = 0
    problem: str | None = None


def erase_rows(path: str, person: Person, *, dry_run: bool = False) -> FileErasure:
    """Remove the person's rows from the file, and drafts of it that were left; with `dry_run`, only count them.

    Of a link, the file that it names is changed: by its own name it would keep the rows.
    """
    found = Path(os.path.realpath(path))
    erase_from = _erase_parquet if path.endswith(".parquet") else _erase_lines
    done = FileErasure(path)
    try:
        with in_turn(found):  # else what is read here would undo what another erasure, or an export, writes meanwhile
            done = erase_from(found, person, dry_run)
    except ImportError:
        done = done._replace(problem='Parquet files need pyarrow: in a clone, pip install ./runner ".[parquet]"')
    except OSError as error:
        done = done._replace(problem=error.strerror or str(error))
    except ValueError as error:  # pyarrow's: it is no Parquet file
        done = done._replace(problem=f"cannot be read: {str(error).splitlines()[0]}")
    left = [] if dry_run else [why for each in dict.fromkeys([Path(path), found]) for why in clear_left_drafts(each)]
    problems = [*([done.problem] if done.problem else []), *left]
    return done._replace(path=path, problem="; ".join(problems) or None)


def _erase_lines(path: Path, person: Person, dry_run: bool) -> FileErasure:
    removed = left = unreadable = 0
    for _, row in with_progress(_lines(path), f"looking through {path.name}"):
        is_theirs = row is not None and person.owns(row)
        removed, left, unreadable = removed + is_theirs, left + (not is_theirs), unreadable + (row is None)
    if removed and not dry_run:
        with _replacing(path) as file:
            rows = with_progress(_lines(path), f"writing {path.name}")
            file.writelines(line for line, row in rows if row is None or not person.owns(row))
    problem = f"{unreadable} lines are not exported rows and were left unchanged" if unreadable else None
    return FileErasure(str(path), removed, left, problem)


def _lines(path: Path) -> Iterator[tuple[bytes, Mapping[str, Any] | None]]:
    with path.open("rb") as file:
        for line in file:
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                row = None
            yield line, row if isinstance(row, dict) else None


def _erase_parquet(path: Path, person: Person, dry_run: bool) -> FileErasure:
    import pyarrow
    import pyarrow.parquet

    with path.open("rb") as source, pyarrow.parquet.ParquetFile(source) as file:
        columns = [name for name in file.schema_arrow.names if name in _COLUMNS]
        numbers = with_progress(range(file.num_row_groups), f"looking through {path.name}", step=1)
        groups = (file.read_row_group(number, columns=columns) for number in numbers)
        keep = [[not person.owns(row) for row in group.to_pylist()] for group in groups]
        removed = sum(row is False for group in keep for row in group)
        if removed and not dry_run:
            written = with_progress(keep, f"writing {path.name}", step=1)
            with (
                _replacing(path) as draft,
                pyarrow.parquet.ParquetWriter(draft, file.schema_arrow, compression="zstd") as writer,
            ):
                for number, rows in enumerate(written):
                    writer.write_table(file.read_row_group(number).filter(pyarrow.array(rows, pyarrow.bool_())))
    return FileErasure(str(path), removed, sum(map(len, keep)) - removed)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file beside it, which takes its place when all went well."""
    draft = DraftFile(path)
    try:
        yield draft.file
        os.fchmod(draft.file.fileno(), stat.S_IMODE(path.stat().st_mode))
        draft.publish()
    finally:
        draft.discard()


_LOG_NOT_EMPTIED = (
    "the database's write-ahead log still holds what was deleted, because a long read is in progress: run it again"
    " later"
)


class TrainedOn(NamedTuple):
    version: int
    state: str
    experiences: int


class Erasure(NamedTuple):
    """What was or would be deleted; `problems` lists failures, `policies` those trained on the person's data.

    `labels` are names of tasks and runs in exported traces, which no command reaches.
    """

    tenant: str
    user: str
    dry_run: bool
    exchanges: int
    experiences: int
    feedback: int
    versions: tuple[TrainedOn, ...]
    policies: tuple[str, ...]
    files: tuple[FileErasure, ...]
    labels: tuple[str, ...]
    problems: tuple[str, ...]


def erase(
    ledger: Ledger, tenant: str, user: str, *, redactor: Redactor | None = None, dry_run: bool = False
) -> Erasure:
    """Delete the person from the ledger and from the exported files. Running explorers clear their outboxes.

    With a `redactor`, also by the name that it writes in its place.
    """
    user = person_name(user)
    names: tuple[str, ...] = (user,) if redactor is None else (user, redactor.hidden_name(user))
    stored = names
    if redactor is not None and redactor.name(user) != user:
        # By the pseudonym whatever is redacted now, since other kinds may have been when they were recorded; by the
        # name only if that was once written: it would stand among those that were erased.
        was_written = ledger.retention.erase(tenant, user, dry_run=True) != NOTHING_ERASED
        stored = names if was_written else names[1:]
    deleted = []
    with counting("looking through the ledger") as count:
        for name in stored:
            deleted.append(ledger.retention.erase(tenant, name, dry_run=dry_run))
            count(len(deleted[-1].msg_ids))
    return _tell(ledger, tenant, user, names, deleted, dry_run=dry_run)


def erase_line(ledger: Ledger, job_dir: Path, file_id: str, line: int, *, dry_run: bool = False) -> Erasure:
    """Delete what was made of a line of an uploaded file, and write spaces in its place: no other line moves.

    Raises EnvironmentRefused where there is no such file, or no such line.
    """
    if (file := ledger.files.find(file_id, deleted=True)) is None:
        raise EnvironmentRefused(f"--file: there is no file {file_id}")
    problems = []
    try:
        index = LineIndex.of(job_dir / FILES / file.id)
        if line > index.lines:
            raise EnvironmentRefused(f"--line: {file_id} has no line {line}")
        if not dry_run:
            begin, end = map(int, index.places[line - 1 : line + 1])
            with index.file.open("r+b") as stored:
                stored.seek(end - 1)
                end -= stored.read(1) == b"\n"
                stored.seek(begin)
                stored.write(b" " * (end - begin))
                stored.flush()
                os.fsync(stored.fileno())
                stored.seek(0)
                ledger.files.set_digest(file.id, hashlib.file_digest(stored, "sha256").hexdigest())
    except FileNotFoundError:
        pass  # it was deleted, and no job needs it any more
    except OSError as error:
        problems.append(f"{job_dir / FILES / file.id}: {error.strerror}")
    deleted = [ledger.retention.erase_line(file.tenant, file.id, line, dry_run=dry_run)]
    found = _tell(ledger, file.tenant, f"{file.id}:{line}", (), deleted, dry_run=dry_run)
    return found._replace(problems=(*problems, *found.problems))


def _tell(
    ledger: Ledger, tenant: str, user: str, names: tuple[str, ...], deleted: list[ErasureResult], *, dry_run: bool
) -> Erasure:
    """Erase the exported files too, and print what was deleted."""
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
        policies=tuple(ledger.policies.learnt_from(trained)),
        files=tuple(file for file in files if file.removed or file.problem),
        labels=tuple(sorted(frozenset().union(*(each.labels for each in deleted)))),
        problems=tuple(problems),
    )


DryRun = Annotated[bool, typer.Option("--dry-run", help="Delete nothing, only report what would be deleted.")]


def purge(
    config: ConfigOption,
    state: Annotated[State | None, typer.Option(help="Only experiences in this state.")] = None,
    older_than: Annotated[
        float | None, typer.Option(parser=seconds, metavar="30d", help="Only what was sampled longer ago.")
    ] = None,
    dry_run: DryRun = False,
    as_json: JsonOption = False,
    set_: SetOption = None,
) -> None:
    """Delete what is older than the settings' retention allows, or than --older-than. Services may run."""
    if (state is None) != (older_than is None):
        raise typer.BadParameter("--state and --older-than go together; without both, the settings' retention holds")
    with existing_ledger(config, set_) as (settings, ledger):
        bounds, of_tenants = bounds_of(settings.retention), bounds_of_tenants(settings)
        if state is not None and older_than is not None:
            bounds, of_tenants = {state: older_than}, {}
        try:
            with counting("deleting") as count:
                result = ledger.retention.purge(bounds, of_tenants=of_tenants, dry_run=dry_run, deleted=count)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--state") from None
    lines = ["would delete" if dry_run else "deleted"]
    lines += [f"  {each:<10} {deleted} experiences" for each, deleted in result.experiences.items()]
    if State.RECORDED in result.experiences:
        lines.append(f"  {'feedback':<10} {result.parked} events for replies that were never recorded")
    if not result.experiences:
        lines = ["nothing is deleted: the settings' retention keeps everything; or give --state and --older-than"]
    found = {"dry_run": dry_run, "experiences": result.experiences, "parked_feedback": result.parked}
    tell(found, *lines, for_programs=as_json)


def erase_(
    config: ConfigOption,
    user: Annotated[
        str | None, typer.Option(help="The person, as requests name them in `user`, or feedback as its source.")
    ] = None,
    tenant: Annotated[str, typer.Option(help="Whose person.")] = "default",
    file: Annotated[str | None, typer.Option(help="In place of a person: an uploaded file, by its id.")] = None,
    line: Annotated[int | None, typer.Option(min=1, help="The number of a line of --file, from 1.")] = None,
    dry_run: DryRun = False,
    as_json: JsonOption = False,
    set_: SetOption = None,
) -> None:
    """Delete a person, or a line of a file, everywhere, and list the versions that learnt from it. Services may run.

    Running explorers clear their outboxes within ten minutes. Ends with 1 if something could not be reached.
    """
    if (user is None) == (file is None) or (file is None) != (line is None):
        raise typer.BadParameter("give --user, or --file and --line together")
    with existing_ledger(config, set_) as (settings, ledger):
        left = "" if dry_run else _left_outbox(settings)
        if file is not None and line is not None:
            result = erase_line(ledger, settings.job_dir, file, line, dry_run=dry_run)
        else:
            result = _erase_person(settings, ledger, user or "", tenant, dry_run=dry_run)
        result = result._replace(problems=(*result.problems, *filter(None, [left])))
    lists = {name: [each._asdict() for each in getattr(result, name)] for name in ("versions", "files")}
    tell(result._asdict() | lists, *_erasure_lines(result), for_programs=as_json)
    if result.problems:
        raise typer.Exit(1)


def _erase_person(settings: Settings, ledger: Ledger, user: str, tenant: str, *, dry_run: bool) -> Erasure:
    if not (key := settings.job_dir / KEY).exists():
        raise EnvironmentRefused(
            f"checkpoint_root_dir: {key} is missing, and with it people's pseudonyms: restore it from a copy;"
            " if it is lost, an explorer makes a new one when it starts, and who was redacted before is not found"
            " any more"
        )
    redactor = Redactor(Detector(settings.privacy), key=load_key(key))
    return erase(ledger, tenant, user, redactor=redactor, dry_run=dry_run)


def _left_outbox(settings: Settings) -> str:
    """What to do about an outbox that no explorer clears; "" where one does, or there is nothing in it."""
    folder = settings.outbox_dir
    if not (files := files_of(folder)) or held_file(folder) is not None or read_explorer(settings).engines is not None:
        return ""
    return (
        f"{number(len(files), 'file')} of {folder} may hold their text, and no explorer runs that removes them:"
        f" start it, or `tuneloop outbox drain {folder}`"
    )


def _erasure_lines(result: Erasure) -> Iterator[str]:
    yield f"{'would delete' if result.dry_run else 'deleted'} of {result.user!r} (tenant {result.tenant})"
    for name in ("exchanges", "experiences", "feedback"):
        yield f"  {name:<12} {getattr(result, name)}"
    if result.versions:
        yield "trained on them"
        for trained in result.versions:
            yield f"  version {trained.version} ({trained.state}): {trained.experiences} experiences"
        if set(result.policies) - {"default"}:
            yield f"  policies that learnt from them: {', '.join(result.policies)}"
        yield "  These weights and those of all later versions stay as they are: docs/privacy.md says what can be done."
    if result.files:
        yield "exported files"
        for file in result.files:
            yield f"  {file.path}: {file.removed} rows{'' if result.dry_run else ' taken out'}"
    if result.labels:
        shown, more = result.labels[:_LABELS_SHOWN], len(result.labels) - _LABELS_SHOWN
        yield "their tasks and runs, whose names traces still hold if you exported any"
        yield f"  {', '.join(shown)}{f' and {more} more: --json lists them' if more > 0 else ''}"
    for problem in result.problems:
        yield f"not reached: {problem}"
