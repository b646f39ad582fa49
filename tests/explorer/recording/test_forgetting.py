"""What the explorer deletes by itself."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.doubles.clock import Clock
from tests.doubles.engine import EngineDouble
from tests.explorer.running import RunningExplorer, eventually, explorer_running, open_ledger, settings_for
from tests.factories import exchange, feedback
from tuneloop.cli.erasure import erase
from tuneloop.explorer.capture import spool
from tuneloop.explorer.capture.flusher import Flusher
from tuneloop.explorer.capture.retention import SEGMENT_S, SpoolRetention, clear
from tuneloop.explorer.capture.spool import Spool
from tuneloop.explorer.capture.spool_slots import Slots
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared import quarantine
from tuneloop.shared.experience import Kind, State, encode
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.privacy.detection import Detector
from tuneloop.shared.privacy.redactor import Redactor
from tuneloop.shared.settings.feedback import PrivacySettings, RetentionSettings
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.spool_format import segments

ERASED = {("acme", "ann"): 1e9}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_for(tmp_path).model_copy(update={"retention": RetentionSettings(recorded=60.0)})


@pytest.fixture
def ledger(settings: Settings) -> Iterator[Ledger]:
    found = open_ledger(settings)
    yield found
    found.close()


@pytest.fixture
def own(settings: Settings) -> Iterator[Spool]:
    found = Spool.open(settings.spool_dir, sync=False)
    yield found
    found.close()


@pytest.fixture
def slots(own: Spool) -> Slots:
    found = Slots(own.folder.parent)
    found.add(own)
    return found


@pytest.fixture
def flusher(slots: Slots, ledger: Ledger) -> Iterator[Flusher]:
    found = Flusher(slots, ledger.recording, quarantined=lambda: None, failed=pytest.fail)  # type: ignore[arg-type]
    found.start()
    yield found
    found.stop()


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def forgetting(settings: Settings, ledger: Ledger, slots: Slots, clock: Clock) -> SpoolRetention:
    return SpoolRetention(settings, ledger.retention, slots, metrics=Metrics(), interval_s=0.1, clock=clock)


def holding(folder: Path, words: bytes = b"goldfinch") -> set[str]:
    """The files below a folder that hold the words."""
    found = set()
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # it has just been forgotten
            if path.is_file() and words in path.read_bytes():
                found.add(str(path.relative_to(folder)))
    return found


def test_nothing_of_a_person_is_left_in_the_job_folder(explorer: RunningExplorer) -> None:
    for user in ("ann", "bob"):
        said = explorer.chat(user=user, messages=[{"role": "user", "content": f"goldfinch of {user}"}]).json()["id"]
        explorer.feedback(said, comment=f"goldfinch of {user}")
    explorer.until_flushed()
    folder = explorer.settings.job_dir
    assert {"spool/0/00000001.seg"} < holding(folder, b"goldfinch of ann")
    commandline = open_ledger(explorer.settings)
    erase(commandline, "default", "ann")
    commandline.close()
    eventually(lambda: holding(folder, b"goldfinch of ann") == set())
    assert explorer.counts()[State.REWARDED] == 1
    assert explorer.rows("SELECT user_id FROM exchanges") == [("bob",)]
    explorer.chat(user="ann", messages=[{"role": "user", "content": "hello again"}])
    assert explorer.rows("SELECT count(*) FROM exchanges WHERE user_id = 'ann'") == [(1,)]


def test_what_was_spooled_by_a_person_who_was_erased_meanwhile_is_not_taken(explorer: RunningExplorer) -> None:
    explorer.ledger.recording.away = True
    explorer.chat(user="ann", messages=[{"role": "user", "content": "goldfinch"}])
    explorer.chat(user="bob")
    commandline = open_ledger(explorer.settings)
    erase(commandline, "default", "ann")
    commandline.close()
    explorer.ledger.recording.away = False
    eventually(lambda: holding(explorer.settings.job_dir) == set())
    eventually(lambda: explorer.rows("SELECT user_id FROM exchanges") == [("bob",)])


def test_retention_is_applied_by_the_explorer(tmp_path: Path, double: EngineDouble) -> None:
    settings = settings_for(tmp_path, [double.url])
    ledger = open_ledger(settings)
    ledger.recording.record([exchange(received_at=1.0), exchange(received_at=time.time())])
    ledger.close()
    with explorer_running(settings.model_copy(update={"retention": RetentionSettings(recorded=60.0)})) as explorer:
        eventually(lambda: explorer.metrics()["tuneloop_purged_total"] == 1)
        assert explorer.counts()[State.RECORDED] == 1


async def test_a_segment_that_the_database_has_is_left_after_a_while(
    forgetting: SpoolRetention, own: Spool, flusher: Flusher, clock: Clock
) -> None:
    forgetting.look()
    end = await own.append([encode(exchange())])
    assert await flusher.wait_until_taken(60)
    for clock.now in (1.0, SEGMENT_S - 1.0):
        forgetting.look()
    assert own.end.segment == end.segment
    clock.now = SEGMENT_S + 1
    forgetting.look()
    eventually(lambda: own.end.segment == end.segment + 1 and segments(own.folder) == [own.end.segment])
    clock.now += 10 * SEGMENT_S
    forgetting.look()
    await own.append([encode(exchange())])
    assert own.end.segment == end.segment + 1, "an empty one is not left"


def of_ann(**but: object) -> bytes:
    return encode(exchange(user="ann", request=b"goldfinch", **but))


def test_files_that_stay_are_cleared_once_and_again_when_they_grow(
    forgetting: SpoolRetention, own: Spool, ledger: Ledger
) -> None:
    bobs = encode(exchange(user="bob"))
    for payload in (of_ann(), bobs, b"goldfinch that is no record"):
        quarantine.set_aside(own.folder, payload)
    forgetting.look()
    assert holding(own.folder) == {"quarantine.seg"}, "nobody is erased yet"
    ledger.retention.erase("acme", "ann")
    forgetting.look()
    left = (own.folder / "quarantine.seg").read_bytes()
    assert (left.count(b"goldfinch"), b"goldfinch that is no record" in left, bobs in left) == (1, True, True)
    inode = (own.folder / "quarantine.seg").stat().st_ino
    forgetting.look()
    assert (own.folder / "quarantine.seg").stat().st_ino == inode
    quarantine.set_aside(own.folder, of_ann())
    forgetting.look()
    assert (own.folder / "quarantine.seg").read_bytes() == left


def test_files_that_stay_lose_a_person_whose_name_is_redacted_since(
    forgetting: SpoolRetention, own: Spool, ledger: Ledger, settings: Settings
) -> None:
    mail, bobs = "ann@example.org", encode(exchange(user="bob"))
    said = {"kind": Kind.COMMENT, "value": None, "text": "goldfinch", "source": f"key:web/{mail}"}
    for payload in (encode(exchange(user=mail, request=b"goldfinch")), encode(feedback(**said)), bobs):
        quarantine.set_aside(own.folder, payload)
    by_mail = PrivacySettings.model_validate({"redact": ["email"]})
    redactor = Redactor(Detector(by_mail), key=load_key(settings.job_dir / KEY))
    erase(ledger, "acme", mail, redactor=redactor)
    forgetting.look()
    assert (holding(own.folder), holding(own.folder, bobs)) == (set(), {"quarantine.seg"})


@pytest.mark.parametrize("name", ["quarantine.seg", "00000001.torn", "00000001.kept"])
def test_files_that_stay_lose_a_completion_that_is_deleted(
    forgetting: SpoolRetention, own: Spool, ledger: Ledger, name: str
) -> None:
    said, bobs = exchange(request=b"goldfinch", received_at=time.time()), encode(exchange(user="bob"))
    ledger.recording.record([said])
    for payload in (encode(said), encode(feedback(msg_id=said.msg_id, metric="goldfinch")), bobs):
        quarantine.set_aside(own.folder, payload)
    (own.folder / "quarantine.seg").rename(own.folder / name)
    forgetting.look()
    assert holding(own.folder) == {name}
    ledger.stored.delete("acme", said.msg_id)
    forgetting.look()
    assert (holding(own.folder), holding(own.folder, bobs)) == (set(), {name})


def test_slots_of_dead_processes_are_cleared_and_those_of_living_ones_left_to_them(
    forgetting: SpoolRetention, own: Spool, ledger: Ledger
) -> None:
    dead, alive = own.folder.parent / "1", own.folder.parent / "2"
    for folder in (dead, alive):
        folder.mkdir()
        quarantine.set_aside(folder, of_ann())
    ledger.retention.erase("acme", "ann")
    with spool.take_slot(alive):
        forgetting.look()
        assert (holding(dead), holding(alive)) == (set(), {"quarantine.seg"})
    forgetting.look()
    assert holding(alive) == set()


async def test_the_tail_of_a_torn_segment_is_cleared_too(tmp_path: Path) -> None:
    own = Spool.open(tmp_path, sync=False)
    ann, bob = exchange(user="ann", request=b"goldfinch"), exchange(user="bob")
    about, other = feedback(msg_id=ann.msg_id, text="goldfinch"), feedback(msg_id=bob.msg_id)
    await own.append([encode(each) for each in (bob, ann)])
    await own.append([b"damaged" * 20])
    await own.append([encode(each) for each in (ann, about, other)])
    own.close()
    path = tmp_path / "0" / "00000001.torn"
    (tmp_path / "0" / "00000001.seg").rename(path)
    path.write_bytes(path.read_bytes().replace(b"damaged", b"dAmaged"))
    assert clear(path, ERASED) == (3, 148)
    data = path.read_bytes()
    assert (data.count(b"goldfinch"), data.count(b"dAmaged"), encode(bob) in data, encode(other) in data) == (
        0,
        20,
        True,
        True,
    )
    assert clear(path, ERASED) == (0, 148)


def test_what_a_killed_process_left_half_written_goes_with_a_person(
    own: Spool, ledger: Ledger, forgetting: SpoolRetention
) -> None:
    draft = own.folder / "quarantine.partial"
    draft.write_bytes(of_ann())
    ledger.retention.erase("acme", "ann")
    forgetting.look()
    assert not draft.exists()


def test_a_file_is_written_anew_by_no_link_that_was_planted(tmp_path: Path) -> None:
    kept = of_ann(received_at=1e9 + 1)
    for each in (of_ann(), kept):
        quarantine.set_aside(tmp_path, each)
    path, precious = tmp_path / "quarantine.seg", tmp_path / "precious"
    path.chmod(0o640)
    precious.write_text("precious")
    (tmp_path / "quarantine.partial").symlink_to(precious)
    assert clear(path, ERASED) == (1, 0)
    assert (precious.read_text(), kept in path.read_bytes(), path.is_symlink()) == ("precious", True, False)
    assert path.stat().st_mode & 0o777 == 0o640
