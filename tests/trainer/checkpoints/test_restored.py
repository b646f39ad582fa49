"""Training goes on from a backup to the bit, under new numbers; on an older database it does not start."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest

from tests.trainer.factories import commit, sample
from tuneloop.shared.checkpoints import read_manifest
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import State
from tuneloop.shared.job_marks import Registered, registered_in
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.operations.backup import back_up, restore
from tuneloop.shared.operations.older_ledger import adopt
from tuneloop.trainer.loop import run

pytestmark = pytest.mark.contract


def weights(path: Path) -> dict[str, str]:
    """The sha256 of everything that is trained."""
    return {file.path: file.sha256 for file in read_manifest(path).files if file.path.endswith(".safetensors")}


@pytest.fixture
def backup(settings, ledger, tmp_path):
    """A backup after two versions of four rows each, with rows for two more; one was published since."""
    ledger.own(settings().project, settings().name)
    ledger.versions.ensure_base(settings().model.model_path.absolute())
    commit(ledger, [sample(i) for i in range(16)])
    run(settings(trainer={"total_steps": 2}), Event())
    back_up(settings(), tmp_path / "backup")
    run(settings(trainer={"total_steps": 3}), Event())
    return tmp_path / "backup"


def test_training_goes_on_to_the_bit_under_new_numbers(settings, ledger, backup, tmp_path):
    there = settings(trainer={"total_steps": 3}).model_copy(update={"checkpoint_root_dir": tmp_path / "there"})
    assert restore(there, backup).next_version == 2001
    run(there, Event())
    with closing(Ledger.of(there)) as restored:
        newest = restored.versions.newest()
        assert (newest.version, newest.step) == (2001, 3)
        assert restored.reports.audit() == []
        assert restored.reports.counts()[State.TRAINED] == 12
        assert read_manifest(newest.path).parent == 2
    assert weights(newest.path) == weights(ledger.versions.newest().path)
    assert registered_in(there.job_dir).version == 2001


def test_a_trainer_does_not_start_on_a_database_that_was_put_back_alone(settings, ledger, backup, tmp_path):
    chosen = settings(trainer={"total_steps": 4})
    assert registered_in(chosen.job_dir) == Registered(version=3, epoch=2)
    ledger.close()
    for path in Path(chosen.database_url.removeprefix("sqlite:///")).parent.glob("*.db*"):
        path.unlink()
    (backup / "ledger.db").rename(chosen.database_url.removeprefix("sqlite:///"))
    with pytest.raises(
        EnvironmentRefused, match=r"knows versions up to 2 and .* version 3 and epoch 2 were registered"
    ):
        run(chosen, Event())
    (chosen.job_dir / "registered.json").unlink()  # of a release that wrote none: the checkpoints tell, too
    with pytest.raises(EnvironmentRefused, match=r"version 2 and epoch 2 were registered.*tuneloop db adopt"):
        run(chosen, Event())
    with closing(Ledger.of(chosen)) as older:
        assert adopt(chosen.job_dir, older) == 2001
        run(chosen, Event())
        assert [each.version for each in older.versions.all()][-2:] == [2001, 2002]
        assert older.reports.audit() == []


def test_a_backup_beside_a_trainer_that_publishes_and_prunes_is_whole(settings, ledger, tmp_path):
    steps = 10
    chosen = settings(trainer={"total_steps": steps, "max_checkpoints_to_keep": 1})
    ledger.own(chosen.project, chosen.name)
    ledger.versions.ensure_base(chosen.model.model_path.absolute())
    commit(ledger, [sample(i) for i in range(4 * steps)])
    taken = []
    with ThreadPoolExecutor(1) as threads:
        trainer = threads.submit(run, chosen, Event())
        while not trainer.done():
            taken.append(back_up(chosen, tmp_path / f"backup-{len(taken)}"))
            for candidate in ledger.versions.all()[1:-1]:  # So that it may be pruned, as where versions are served.
                if candidate.state == "candidate":
                    ledger.versions.reject(candidate.version, "the next one is there")
        trainer.result()
    number, middle = next((n, each) for n, each in enumerate(taken) if 0 < each.newest < steps)
    assert not list(chosen.job_dir.glob(".*"))
    for each in taken:
        assert each.newest in {0, *each.versions}
    there = chosen.model_copy(update={"checkpoint_root_dir": tmp_path / "there"})
    restore(there, tmp_path / f"backup-{number}")
    with closing(Ledger.of(there)) as restored:
        assert restored.versions.all()[-2].version == middle.newest
        run(there, Event())
        assert restored.reports.audit() == []
        # Not to the bit: AdamW's memory of that version may have been written after the backup.
        assert restored.versions.newest().step == steps
