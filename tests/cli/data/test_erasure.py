"""A person's deletion from real exported files."""

from pathlib import Path

import pytest

from tests.cli.data.exporting import about, asked, erased_during, loaded
from tuneloop.cli.erasure import erase
from tuneloop.cli.exports import ExportRequest, Format, export
from tuneloop.shared.experience import MAX_NAME, Kind, person_name
from tuneloop.shared.ledger.export import Selection
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.recording.retention import PURGEABLE
from tuneloop.shared.privacy.detection import Detector
from tuneloop.shared.privacy.redactor import Redactor
from tuneloop.shared.settings.feedback import PrivacySettings

pytestmark = [pytest.mark.parametrize("place", ["sqlite"], indirect=True), pytest.mark.contract]

FORMATS = [(each, suffix) for each in Format for suffix in ("jsonl", "parquet")]


def say(ledger: Ledger, user: str, *, source: str | None = None) -> None:
    """A reply for the user, edited, rated and rewarded, so that it makes a row of every format."""
    said = asked(f"Said to {user}.", user=user)
    thumb = about(said, Kind.BOOLEAN, metric="thumb", source=source)
    edited = about(said, Kind.DEMONSTRATION, metric="edit", text=f"Better for {user}.", source=source)
    ledger.recording.record([said, about(said, source=source), thumb, edited])


def exported(ledger: Ledger, to: Path, format_: Format) -> None:
    assert export(ledger, ExportRequest(format_, Selection("acme")), to).rows == 3


@pytest.mark.parametrize(("format_", "suffix"), FORMATS)
@pytest.mark.parametrize("purged", [False, True], ids=["", "purged before"])
def test_their_rows_go_from_files_of_every_format(
    ledger: Ledger, tmp_path: Path, format_: Format, suffix: str, purged: bool
) -> None:
    for user, source in (("ann", None), ("bob", None), ("carol", "ann")):
        say(ledger, user, source=source)
    file = tmp_path / f"rows.{suffix}"
    exported(ledger, file, format_)
    if purged:
        ledger.retention.purge(dict.fromkeys(PURGEABLE, 1.0))
    assert [each.removed for each in erase(ledger, "acme", "ann", dry_run=True).files] == [2]
    assert len(loaded(file)) == 3
    done = erase(ledger, "acme", "ann")
    assert [(each.removed, each.left, each.problem) for each in done.files] == [(2, 1, None)]
    (tmp_path / "after").mkdir()
    [left] = loaded(file.rename(tmp_path / "after" / file.name))
    assert left["user"] == "bob"
    assert [each.rows for each in ledger.retention.exported_files()] == [1]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_name_that_is_redacted_since_goes_from_files_that_have_it(
    ledger: Ledger, tmp_path: Path, suffix: str
) -> None:
    """Though the ledger's rows are gone, and it is not to have the name again."""
    mail, file = "ann@example.org", tmp_path / f"rows.{suffix}"
    redactor = Redactor(Detector(PrivacySettings.model_validate({"redact": ["email"]})), key=b"k" * 32)
    for user in (mail, "bob", redactor.name(mail)):
        say(ledger, user)
    exported(ledger, file, Format.SFT)
    ledger.retention.purge(dict.fromkeys(PURGEABLE, 1.0))
    done = erase(ledger, "acme", mail, redactor=redactor)
    assert [(each.removed, each.left) for each in done.files] == [(2, 1)]
    assert mail.encode() not in file.read_bytes()
    assert list(ledger.retention.erasures()) == [("acme", redactor.name(mail))]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_pair_goes_with_either_of_its_people(ledger: Ledger, tmp_path: Path, suffix: str) -> None:
    better, worse = asked("Yes.", user="bob"), asked("No.", user="ann")
    ledger.recording.record([better, worse, about(better, Kind.PREFERENCE, worse=worse, source="bob")])
    export(ledger, ExportRequest(Format.DPO, Selection("acme")), tmp_path / f"pairs.{suffix}")
    assert [(each.removed, each.left) for each in erase(ledger, "acme", "ann").files] == [(1, 0)]


@pytest.mark.parametrize(("suffix", "stop_at"), [("jsonl", 3), ("parquet", 1)])
def test_what_is_exported_during_an_erasure_takes_the_place_of_what_that_leaves(
    ledger: Ledger, tmp_path: Path, suffix: str, stop_at: int
) -> None:
    ledger.recording.record([asked("Yes.", user="ann"), asked("No.", user="bob")])
    request, file = ExportRequest(Format.EXPERIENCES, Selection("acme")), tmp_path / f"rows.{suffix}"
    export(ledger, request, file)
    ledger.recording.record([asked("New.", user="carol")])
    done, again = erased_during(lambda: export(ledger, request, file), file, "ann", stop_at=stop_at)
    assert (done.removed, again.rows, len(loaded(file))) == (1, 3, 3)


def test_a_person_of_a_long_name_is_found_by_the_name_itself(ledger: Ledger) -> None:
    name = "x" * (MAX_NAME + 1)
    ledger.recording.record([asked("Said.", user=person_name(name)), asked("Said.", user="bob")])
    assert erase(ledger, "acme", name).exchanges == 1
