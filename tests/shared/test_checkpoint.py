import hashlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tuneloop.shared.checkpoints import CheckpointStore, File, Manifest, Probe, check_files, read_manifest
from tuneloop.shared.errors import CheckpointRejected

PROBE = Probe(prompt_ids=(1, 2), logprobs=(-0.5,), tolerance=0.01)


def manifest(**but: Any) -> Manifest:
    fields: dict[str, Any] = {
        "version": 1,
        "parent": 0,
        "step": 10,
        "epoch": 1,
        "base_model": "/models/base",
        "created_at": 1000.0,
        "dtype": "bfloat16",
        "probe": PROBE,
    }
    return Manifest(**fields | but)


def write(staging: Path, weights: bytes = b"weights") -> None:
    for name in ("actor/model.safetensors", "actor/config.json", "trainer_state/optimiser.safetensors"):
        (staging / name).parent.mkdir(exist_ok=True)
        (staging / name).write_bytes(weights)


def publish(store: CheckpointStore, version: int = 1, weights: bytes = b"weights") -> tuple[Path, str]:
    staging = store.stage(1)
    write(staging, weights)
    return store.publish(staging, manifest(version=version, files=store.seal(staging)))


def pruned(store: CheckpointStore, spared: list[Path], *, newest: int) -> list[Path]:
    aside = dict(store.put_aside(spared, newest=newest))
    for garbage in aside.values():
        store.delete(garbage)
    return list(aside)


def rewrite(path: Path, **but: Any) -> None:
    found = msgspec.structs.replace(read_manifest(path), **but)
    (path / "manifest.json").write_bytes(msgspec.json.encode(found))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "job")


def test_what_was_published_is_found_as_it_was(store: CheckpointStore) -> None:
    path, sha256 = publish(store)
    assert path == store.path(1)
    found = read_manifest(path, sha256=sha256)
    check_files(path, found)
    assert [file.path for file in found.files] == [
        "actor/config.json",
        "actor/model.safetensors",
        "trainer_state/optimiser.safetensors",
    ]
    assert found.files[1] == File(path="actor/model.safetensors", size=7, sha256=hashlib.sha256(b"weights").hexdigest())
    assert msgspec.structs.replace(found, files=()) == manifest()


def test_a_name_that_is_taken_is_left_alone(store: CheckpointStore) -> None:
    """It may be of a trainer that died before registering it, or of one that has taken over."""
    paths = []
    for weights in (b"first", b"second", b"third"):
        path, sha256 = publish(store, weights=weights)
        paths.append(path)
        check_files(path, read_manifest(path, sha256=sha256))
    assert [path.name for path in paths] == ["global_step_1", "global_step_1-1", "global_step_1-2"]
    assert [(path / "actor" / "config.json").read_bytes() for path in paths] == [b"first", b"second", b"third"]
    assert sorted(paths[0].parent.iterdir()) == paths
    assert pruned(store, [paths[1]], newest=1) == [paths[0], paths[2]]


def test_staging_touches_nothing_of_another_epoch(store: CheckpointStore) -> None:
    for epoch in (1, 2, 3):
        write(store.stage(epoch))
    second = store.stage(2)
    assert list(second.iterdir()) == []
    for epoch in (1, 3):
        assert list((second.parent / f".staging-{epoch}").iterdir())


def test_a_new_epoch_takes_the_older_ones_their_way_to_a_name(store: CheckpointStore) -> None:
    stale = store.stage(1)
    write(stale)
    sealed = manifest(files=store.seal(stale))
    for epoch in (2, 3):
        store.stage(epoch)
    store.clear(2)
    with pytest.raises(FileNotFoundError):
        store.publish(stale, sealed)
    assert sorted(path.name for path in stale.parent.iterdir()) == [".staging-2", ".staging-3"]


@pytest.fixture(params=[0o000, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(("mode", "folder_mode"), [(0o600, 0o700), (0o640, 0o750), (0o644, 0o755), (0o660, 0o770)])
def test_files_folders_and_manifest_have_the_rights_that_were_asked_for(
    tmp_path: Path, mode: int, folder_mode: int
) -> None:
    store = CheckpointStore(tmp_path / "job", mode=mode)
    path, _ = publish(store)
    store.strip(path)
    rights = {each: each.stat().st_mode & 0o777 for each in (path, *path.rglob("*"))}
    assert rights == {each: folder_mode if each.is_dir() else mode for each in rights}
    assert len(rights) == 7
    assert path.parent.stat().st_mode & folder_mode == folder_mode


STEPS = ["staged", "half written", "written", "sealed", "rename", "published"]


def _live_until(folder: Path, last: int) -> None:
    """Publish version 1 anew and die, without any clean-up, after step `last` or in the midst of publishing."""
    steps = iter(range(len(STEPS)))

    def survive() -> None:
        if next(steps) == last:
            os._exit(9)

    store = CheckpointStore(folder)
    staging = store.stage(2)
    survive()
    (staging / "actor").mkdir()
    (staging / "actor" / "config.json").write_bytes(b"ha")
    survive()
    write(staging, b"new")
    survive()
    files = store.seal(staging)
    survive()
    if STEPS[last] == "rename":
        sys.addaudithook(lambda name, _: os._exit(9) if name == "os.rename" else None)
    store.publish(staging, manifest(files=files))
    os._exit(9)


@pytest.mark.parametrize("last", range(len(STEPS)), ids=STEPS)
@pytest.mark.parametrize("leftover", [False, True])
def test_a_publisher_killed_at_any_step_leaves_no_half_checkpoint(tmp_path: Path, last: int, leftover: bool) -> None:
    store = CheckpointStore(tmp_path)
    publish(store, version=7)
    if leftover:
        publish(store, version=1, weights=b"old")
    child = multiprocessing.get_context("spawn").Process(target=_live_until, args=(tmp_path, last))
    child.start()
    child.join()
    assert child.exitcode == 9
    for path in tmp_path.glob("global_step_*"):
        check_files(path, read_manifest(path))
    store.clear(3)
    path, found = _published_by_a_successor(store)
    check_files(path, found)
    pruned(store, [path, store.path(7)], newest=7)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([path.name, "global_step_7"])


def _published_by_a_successor(store: CheckpointStore) -> tuple[Path, Manifest]:
    staging = store.stage(3)
    write(staging, b"of the successor")
    path, sha256 = store.publish(staging, manifest(epoch=3, files=store.seal(staging)))
    return path, read_manifest(path, sha256=sha256)


def test_pruning_keeps_what_it_is_told_to_keep(store: CheckpointStore) -> None:
    for version in range(1, 6):
        publish(store, version)
    write(store.stage(1))
    (store.path(1).parent / "monitor").mkdir()
    (store.path(1).parent / "global_step_best").mkdir()
    gone = pruned(store, [store.path(2), Path("/mounted/elsewhere/global_step_5")], newest=5)
    assert gone == [store.path(version) for version in (1, 3, 4)]
    assert {path.name for path in store.path(1).parent.iterdir()} == {
        "global_step_2",
        "global_step_5",
        "global_step_best",
        "monitor",
        ".staging-1",
    }
    for version in (2, 5):
        check_files(store.path(version), read_manifest(store.path(version)))


def test_pruning_leaves_alone_what_comes_after_the_newest(store: CheckpointStore) -> None:
    """A newer trainer may be registering it just now."""
    publish(store, 1), publish(store, 2)
    assert pruned(store, [], newest=1) == [store.path(1)]
    assert store.path(2).exists()


def test_what_a_killed_prune_left_is_cleared(store: CheckpointStore) -> None:
    path, _ = publish(store)
    left = path.with_name(".garbage-killed") / "global_step_3"
    left.mkdir(parents=True)
    store.clear(2)
    assert list(path.parent.iterdir()) == [path]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link(path: Path) -> None:
    elsewhere = path.parents[2] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def link_folder(path: Path) -> None:
    elsewhere = path.parents[2] / "elsewhere"
    path.parent.rename(elsewhere)
    path.parent.symlink_to(elsewhere)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (flip, "its sha256 is not the manifest's"),
    (lambda path: path.write_bytes(b"wei"), "3 bytes, the manifest says 7"),
    (lambda path: path.write_bytes(b""), "0 bytes, the manifest says 7"),
    (lambda path: path.unlink(), "No such file"),
    (link, "a link or something else"),
    (link_folder, "a link or something else"),
    (pipe, "a link or something else"),
    (lambda path: (path.unlink(), path.mkdir()), "a link or something else"),
    (lambda path: path.with_name("more.safetensors").write_bytes(b""), "the manifest does not name it"),
    (lambda path: path.with_name("more").symlink_to("/etc"), "the manifest does not name it"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_damaged_files_are_rejected_with_the_reason(
    store: CheckpointStore, damage: Callable[[Path], object], reason: str
) -> None:
    path, sha256 = publish(store)
    damage(path / "actor" / "model.safetensors")
    found = read_manifest(path, sha256=sha256)
    for folder in (None, "actor"):
        with pytest.raises(CheckpointRejected, match=f"global_step_1/actor.*{reason}"):
            check_files(path, found, folder=folder)
    check_files(path, found, folder="trainer_state")


def test_a_folder_of_which_the_manifest_names_nothing_is_rejected(store: CheckpointStore) -> None:
    path, _ = publish(store)
    with pytest.raises(CheckpointRejected, match="names no file"):
        check_files(path, read_manifest(path), folder="critic")
    rewrite(path, files=())
    with pytest.raises(CheckpointRejected, match="names no file"):
        check_files(path, read_manifest(path))


def test_a_manifest_that_was_not_registered_is_rejected(store: CheckpointStore) -> None:
    path, sha256 = publish(store)
    rewrite(path, step=11)
    with pytest.raises(CheckpointRejected, match="not the one that was registered"):
        read_manifest(path, sha256=sha256)


@pytest.mark.parametrize("name", ["../x", "actor/../../x", "/etc/passwd", "", ".", "actor//x", "./x", "a\0b", "actor/"])
def test_a_manifest_that_names_a_path_outside_is_rejected(store: CheckpointStore, name: str) -> None:
    path, _ = publish(store)
    rewrite(path, files=(File(path=name, size=0, sha256=""),))
    with pytest.raises(CheckpointRejected, match="not a path below the folder"):
        read_manifest(path)
