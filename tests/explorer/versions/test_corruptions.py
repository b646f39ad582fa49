"""No bad checkpoint gets past the verifier, and each is told what is wrong with it."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.explorer.checkpoints import seal
from tests.explorer.corruptions import Corruption, corruptions, write_full_model
from tests.explorer.running import eventually
from tuneloop.explorer.versions import loading
from tuneloop.explorer.versions.loading import (
    Verifier,
    VerifierProcess,
    start_verifier,
    start_verifier_ahead,
    verify_in_process,
)
from tuneloop.explorer.versions.verifier import verify
from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.errors import CheckpointRejected, CheckpointUnreadable
from tuneloop.shared.experience import VersionState
from tuneloop.shared.ledger.ledger import Version

pytestmark = pytest.mark.contract

ALL = corruptions()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_full_model(tmp_path_factory.mktemp("base"))


def published(job_dir: Path, corruption: Corruption | None) -> tuple[Path, str]:
    """Version 1, spoilt before or after it was sealed."""
    store = CheckpointStore(job_dir)
    staging = store.stage(1)
    write_full_model(staging / "actor", seed=1)
    if corruption and corruption.sealed:
        corruption.spoil(staging / "actor")
    path, sha256 = seal(store, staging, 1, dtype=corruption.dtype if corruption else "float32")
    if corruption and not corruption.sealed:
        corruption.spoil(path)
    return path, sha256


def test_there_are_many_of_them() -> None:
    assert len({each.name for each in ALL}) == len(ALL) >= 350


def test_the_good_one_is_accepted(tmp_path: Path, base: Path) -> None:
    path, sha256 = published(tmp_path / "job", None)
    verify(path, manifest_sha256=sha256, version=1, base=base)


@pytest.mark.parametrize("corruption", ALL, ids=[each.name for each in ALL])
def test_it_is_rejected_and_the_reason_names_it(tmp_path: Path, base: Path, corruption: Corruption) -> None:
    path, sha256 = published(tmp_path / "job", corruption)
    with pytest.raises(CheckpointRejected) as raised:
        verify(path, manifest_sha256=sha256, version=1, base=base)
    assert re.search(corruption.reason, str(raised.value)), str(raised.value)
    gone = corruption.name in {"no folder", "manifest.json deleted", "manifest.json a folder"}
    assert isinstance(raised.value, CheckpointUnreadable) is gone, "only contents that were read decide"


def version_at(path: Path, sha256: str) -> Version:
    return Version(
        version=1,
        state=VersionState.CANDIDATE,
        step=1,
        path=path,
        manifest_sha256=sha256,
        consumed=0,
        created_at=0.0,
        served_at=None,
        reason=None,
        pinned=False,
    )


@pytest.mark.parametrize("corruption", ALL[:: len(ALL) // 5], ids=lambda each: each.name)
def test_the_verifier_s_process_says_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, base: Path, corruption: Corruption
) -> None:
    monkeypatch.setattr(loading, "start_verifier", start_verifier)
    path, sha256 = published(tmp_path / "job", corruption)
    version = version_at(path, sha256)
    with pytest.raises(CheckpointRejected, match=corruption.reason):
        asyncio.run(verify_in_process(version, Verifier(base, tmp_path / "job")))


async def test_a_version_whose_verifier_cannot_be_started_is_not_rejected_for_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, base: Path
) -> None:
    monkeypatch.setattr(loading, "start_verifier", start_verifier)
    monkeypatch.setattr(loading, "_AHEAD", [])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    await start_verifier_ahead()
    version = version_at(*published(tmp_path / "job", None))
    with pytest.raises(CheckpointUnreadable, match="cannot be started"):
        await verify_in_process(version, Verifier(base, tmp_path / "job"))


async def test_the_verifier_that_was_started_ahead_is_taken_unless_it_has_died(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, base: Path
) -> None:
    ahead: list[VerifierProcess] = []
    monkeypatch.setattr(loading, "start_verifier", start_verifier)
    monkeypatch.setattr(loading, "_AHEAD", ahead)
    version = version_at(*published(tmp_path / "job", None))
    for dies in (False, True):
        await start_verifier_ahead()
        [process] = ahead
        await start_verifier_ahead()
        assert ahead == [process]
        if dies:
            process.kill()
            await process.wait()
        await verify_in_process(version, Verifier(base, tmp_path / "job"))
        assert (process.returncode, ahead) == (-9 if dies else 0, [])


def test_a_verifier_that_waits_ends_with_who_has_started_it(tmp_path: Path) -> None:
    start = (
        "import asyncio, sys; from tuneloop.explorer.versions import loading;"
        " asyncio.run(loading.start_verifier_ahead()); print(loading._AHEAD[0]._process.pid)"
    )
    pid = int(subprocess.run([sys.executable, "-P", "-c", start], check=True, stdout=subprocess.PIPE).stdout)
    eventually(lambda: not Path(f"/proc/{pid}").exists())
