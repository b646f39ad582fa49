"""What is written down in an experiment's folder, beside the database, so that the two can be compared.

{job_dir}/experiment       whose folder it is: the database knows the same, and an empty mount point has no mark
{job_dir}/registered.json    the newest version and the newest epoch that a ledger of this experiment has had
{job_dir}/steps.json         of how many experiences the newest trainer makes a step, and of how many steps a version
{job_dir}/restoring.json     a restore is under way, or was interrupted: no service may start
{job_dir}/served.json        what the explorer served last: a copy, for the time while the database is away
{job_dir}/committed          touched whenever rows were committed, for a trainer that waits for some
{job_dir}/traffic        touched while requests are being answered, for a trainer that yields to them
{job_dir}/gpu.held           locked by whose memory is on the GPU, where trainer and engine have it by turns
{job_dir}/gpu.wanted_by_*    locked by the trainer, or the explorer for its engine, while it waits for its turn
{job_dir}/keys.json          the hashes of the clients' keys, for the same time
{job_dir}/ended_sessions     the page's sessions that users have logged out of, until they would have expired
{job_dir}/secrets/msg_id.key the key that the names of replies are signed with, and redacted names are digested with
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from tuneloop.shared.checkpoints import sync_folder
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.held_files import EXPERIMENT, make_below

#: Below a job folder: what the explorer served last, the clients' keys, and the key that replies are named with.
SERVED, KEYS, KEY = "served.json", "keys.json", "secrets/msg_id.key"

ENDED_SESSIONS = "ended_sessions"
_KEY_BYTES = 32
_REGISTERED, _RESTORING, _STEPS = "registered.json", "restoring.json", "steps.json"
_TRAFFIC, _COMMITTED = "traffic", "committed"
_Mark = TypeVar("_Mark", bound=msgspec.Struct)

#: Seconds between two touches of the mark of traffic while there is any.
TRAFFIC_S = 0.2


class Registered(msgspec.Struct, frozen=True):
    version: int = 0
    epoch: int = 0


class StepRules(msgspec.Struct, frozen=True):
    """Of how many experiences a trainer makes a step, and of how many steps a version."""

    batch_size: int
    batch_timeout: float | None
    save_interval: int
    total_steps: int | None


class Restoring(msgspec.Struct, frozen=True):
    backup: str
    since: float


def folder_mark(job_dir: Path) -> str | None:
    """The mark of the folder; None where it has none, or is away."""
    with suppress(OSError):
        return (job_dir / EXPERIMENT).read_bytes().decode(errors="replace").strip()
    return None


def mark_folder(job_dir: Path) -> None:
    """Make the folder, and give it a mark unless it has one. Raises OSError."""
    job_dir.mkdir(parents=True, exist_ok=True)
    _make_once(job_dir / EXPERIMENT, f"{secrets.token_hex(16)}\n".encode(), mode=0o666)


def registered_in(job_dir: Path) -> Registered:
    """What was registered by services that share this folder. A damaged file says nothing."""
    return _read(job_dir / _REGISTERED, Registered) or Registered()


def note_registered(job_dir: Path, version: int, epoch: int) -> None:
    before = registered_in(job_dir)
    after = Registered(max(version, before.version), max(epoch, before.epoch))
    if after != before:
        write_mark(job_dir / _REGISTERED, after)


def registration_stamp(job_dir: Path) -> tuple[int, int]:
    try:
        found = (job_dir / _REGISTERED).stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino


def step_rules_in(job_dir: Path) -> StepRules | None:
    """Those of the trainer that started last; None if there was none, or the file is damaged."""
    return _read(job_dir / _STEPS, StepRules)


def note_step_rules(job_dir: Path, rules: StepRules) -> None:
    write_mark(job_dir / _STEPS, rules)


def restoring_in(job_dir: Path) -> Restoring | None:
    try:
        return msgspec.json.decode((job_dir / _RESTORING).read_bytes(), type=Restoring)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError:
        return Restoring("", 0.0)


def begin_restoring(job_dir: Path, restoring: Restoring) -> None:
    """Keep services from starting here until `end_restoring`. Raises OSError."""
    write_mark(job_dir / _RESTORING, restoring)


def end_restoring(job_dir: Path) -> None:
    (job_dir / _RESTORING).unlink(missing_ok=True)
    sync_folder(job_dir)


def require_restored(job_dir: Path) -> None:
    if (restoring := restoring_in(job_dir)) is not None:
        raise EnvironmentRefused(
            f"checkpoint_root_dir: {job_dir} is half restored: let `tuneloop restore {restoring.backup}` end, or give "
            "it again if it was interrupted"
        )


def touch_traffic(job_dir: Path) -> None:
    (job_dir / _TRAFFIC).touch()


def traffic_stamp(job_dir: Path) -> int:
    return _stamp_of(job_dir / _TRAFFIC)


def touch_committed(job_dir: Path) -> None:
    (job_dir / _COMMITTED).touch()


def committed_stamp(job_dir: Path) -> int:
    return _stamp_of(job_dir / _COMMITTED)


def _stamp_of(mark: Path) -> int:
    try:
        return mark.lstat().st_mtime_ns
    except OSError:
        return 0


def load_key(path: Path) -> bytes:
    """The key at `path`, made by the process that comes first. Raises EnvironmentRefused for a file that is none."""
    make_below(path.parent)
    _make_once(path, secrets.token_bytes(_KEY_BYTES), mode=0o600)
    sync_folder(path.parent.parent)
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise EnvironmentRefused(
            f"checkpoint_root_dir: {path} is not a key of {_KEY_BYTES} bytes: restore it from a copy, or delete it and "
            "lose the feedback on replies given so far"
        )
    return key


def _make_once(path: Path, content: bytes, *, mode: int) -> None:
    """Make a file, durably, unless it is there. Raises OSError."""
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    try:
        with suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink()
    sync_folder(path.parent)


def _read(path: Path, kind: type[_Mark]) -> _Mark | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def write_mark(path: Path, mark: msgspec.Struct, *, mode: int = 0o666) -> None:
    make_below(path.parent)
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(msgspec.json.encode(mark, enc_hook=str))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)
