"""The disk is too small: what is not needed goes first, and the trainer waits where that is not enough."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from tests.trainer.factories import commit, eventually, sample
from tuneloop.shared.checkpoints import DiskSpace, check_files, is_weights_only, measure_space, read_manifest
from tuneloop.shared.experience import State
from tuneloop.shared.operations.diagnosis import Code
from tuneloop.shared.operations.doctor import as_text, examine_experiment
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.loop import run

pytestmark = pytest.mark.contract


def _size(learner):
    return snapshot.size_of_weights(learner) + snapshot.size_of_state(learner)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MB, on which four whole checkpoints of the tiny model have no room, and of 1 000 inodes."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root may mount")
    disk = tmp_path / "disk"
    disk.mkdir()
    options = "size=6m,nr_inodes=1000"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("no mounts here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
def chosen(settings, ledger, small_disk):
    """Settings whose checkpoints are on the small disk, and their ledger elsewhere."""
    buffer = {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"path": settings().database_url}}}
    return settings(buffer=buffer, trainer={"total_steps": 8}).model_copy(update={"checkpoint_root_dir": small_disk})


def test_more_versions_than_the_disk_holds_whole_are_published_without_a_pause(chosen, ledger):
    commit(ledger, [sample(i) for i in range(32)])
    run(chosen, Event())
    assert ledger.alarms.all(cleared=True) == []
    kept = [each for each in ledger.versions.all() if each.version and each.path.exists()]
    sizes = [sum(file.stat().st_size for file in each.path.rglob("*") if file.is_file()) for each in kept]
    assert [each.version for each in kept][-5:] == [4, 5, 6, 7, 8]
    whole = [each.version for each in kept if not is_weights_only(each.path)]
    assert len(whole) == 2, "the newest, and the one before it that has its state, too"
    assert whole[-1] == 8
    assert sum(sizes) + sizes[-1] * (len(sizes) - 2) > 2 * sum(sizes), "whole, they would be twice as much"
    for each in kept:
        check_files(each.path, read_manifest(each.path, sha256=each.manifest_sha256))


def fill_bytes(hog):
    (hog / "file").write_bytes(bytes(os.statvfs(hog).f_bavail * 4096 - 500_000))


def fill_inodes(hog):
    for number in range(os.statvfs(hog).f_favail - 20):
        (hog / str(number)).touch()


@pytest.mark.parametrize(("fill", "words"), [(fill_bytes, "MB are missing"), (fill_inodes, "free inodes (`df -i`)")])
def test_a_trainer_without_room_waits_and_says_how_much_is_missing_and_goes_on_by_itself(
    chosen, ledger, small_disk, fill, words
):
    commit(ledger, [sample(i) for i in range(8)])
    hog = small_disk / "hog"
    hog.mkdir()
    fill(hog)
    stop = Event()
    with ThreadPoolExecutor(1) as threads:
        trainer = threads.submit(run, chosen, stop)
        try:
            eventually(lambda: trainer.done() or ledger.alarms.all())
            [alarm] = ledger.alarms.all()
            assert (alarm.name, alarm.holds) == ("disk_full", False)
            assert words in alarm.reason
            assert ledger.reports.counts()[State.LEASED] == 4
            assert not list(chosen.job_dir.glob(".*"))
            report = examine_experiment(chosen)
            assert words in next(reason.sentence for reason in report.reasons if reason.code == Code.DISK_FULL)
            shutil.rmtree(hog)
            eventually(lambda: trainer.done() or ledger.reports.counts()[State.TRAINED] == 8)
        finally:
            stop.set()
        trainer.result(30)
    assert ledger.alarms.all() == []
    assert ledger.reports.imbalance() == []
    assert [each.consumed for each in ledger.versions.all()] == [0, 4, 4]


def test_the_doctor_says_before_it_happens_that_the_next_checkpoint_has_no_room(chosen, ledger, small_disk):
    commit(ledger, [sample(i) for i in range(4)])
    run(chosen.model_copy(update={"trainer": chosen.trainer.model_copy(update={"total_steps": 1})}), Event())
    lines = list(as_text(examine_experiment(chosen), chosen))
    [disk] = [line for line in lines if line.startswith("Disk")]
    assert f"are free in {chosen.job_dir}" in disk
    assert "missing" not in disk
    (small_disk / "hog").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - 500_000))
    report = examine_experiment(chosen)
    [reason] = [each for each in report.reasons if each.code == Code.DISK_FULL]
    assert "MB are missing" in reason.sentence
    assert any(line.startswith("Disk") and "MB are missing" in line for line in as_text(report, chosen))


def test_what_is_reckoned_is_what_is_written(settings, base, tmp_path):
    for dtype in ("float32", "bfloat16"):
        learner = snapshot.load(settings(trainer={"dtype": dtype}), None)
        learner.step([sample(i) for i in range(8)])
        folder = tmp_path / dtype
        snapshot.save(learner, folder, base=base)
        written = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
        assert _size(learner) == pytest.approx(written, rel=0.1)


def test_a_reserve_stays_free(tmp_path):
    space = measure_space(tmp_path / "not" / "there" / "yet", needed=0)
    assert 0 < space.reserve <= 4 << 30
    assert DiskSpace(tmp_path, needed=70, reserve=40, free=100).missing == 10
    assert DiskSpace(tmp_path, needed=60, reserve=40, free=100).missing == 0


def test_going_on_from_a_version_that_keeps_its_weights_alone_begins_the_rest_anew(settings, ledger):
    commit(ledger, [sample(i) for i in range(16)])
    chosen = settings(trainer={"total_steps": 3})
    run(chosen, Event())
    first, second, third = (ledger.versions.get(version) for version in (1, 2, 3))
    assert [is_weights_only(each.path) for each in (first, second, third)] == [True, False, False]
    for each in (third, second):
        ledger.versions.reject(each.version, "its probe differs")
    learner = snapshot.load(chosen, first.path)
    assert learner.steps == 1
    assert {name: each.updates for name, each in learner.optimizers.items()} == {"actor": 0, "critic": 0}
    run(settings(trainer={"total_steps": 2}), Event())
    fourth = ledger.versions.newest()
    assert (fourth.version, fourth.step, read_manifest(fourth.path).parent) == (4, 2, 1)
    assert ledger.reports.imbalance() == []
