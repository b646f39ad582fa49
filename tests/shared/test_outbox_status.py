"""What the ledger does not have of an outbox, read from its files."""

from contextlib import closing
from pathlib import Path

import pytest

from tests.factories import exchange, feedback, outboxed
from tuneloop.runner.outbox import Outbox
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import encode
from tuneloop.shared.outbox_status import OutboxStatus, append_to, files_of, held_file, outbox_status, path_of


def test_what_follows_the_ledgers_numbers_waits(tmp_path: Path) -> None:
    assert outbox_status(tmp_path / "nowhere", {}) == OutboxStatus()
    first = outboxed(tmp_path, *(exchange(received_at=at, latency_s=0.5) for at in (1000.0, 2000.0)))
    second = outboxed(tmp_path, feedback(received_at=1500.0))
    sizes = [path_of(tmp_path, file).stat().st_size for file in (first, second)]
    assert files_of(tmp_path) == [first, second]
    assert outbox_status(tmp_path, {}) == OutboxStatus(2, 3, sum(sizes), 1000.5)
    assert outbox_status(tmp_path, {first: 1}) == OutboxStatus(2, 2, sizes[0] // 2 + sizes[1], 1500.0)
    assert outbox_status(tmp_path, {first: 2, second: 1}) == OutboxStatus()


@pytest.mark.parametrize(("damaged", "records"), [(1, 2), (0, 2)])
def test_damaged_bytes_wait_unless_a_record_behind_them_was_taken(tmp_path: Path, damaged: int, records: int) -> None:
    file = outboxed(tmp_path, *(feedback(received_at=1000.0 + number) for number in range(3)))
    path = path_of(tmp_path, file)
    data = bytearray(path.read_bytes())
    size = len(data) // 3
    data[size * damaged + size // 2] ^= 1
    path.write_bytes(data)
    assert outbox_status(tmp_path, {}) == OutboxStatus(1, records, len(data), 1001.0 - damaged)
    assert outbox_status(tmp_path, {file: damaged + 2}).bytes == size * (1 - damaged)


def test_bytes_that_are_no_record_of_this_release_have_no_age(tmp_path: Path) -> None:
    append_to(tmp_path, [b"nonsense", encode(feedback(received_at=1000.0))])
    found = outbox_status(tmp_path, {})
    assert (found.records, found.since) == (2, 1000.0)


def test_a_file_is_held_as_long_as_its_explorer_has_it_open(tmp_path: Path) -> None:
    outboxed(tmp_path, feedback())
    assert held_file(tmp_path) is None
    with closing(Outbox(tmp_path, 1 << 20)) as outbox:
        file = outbox.append([encode(feedback())]).file
        assert held_file(tmp_path) == path_of(tmp_path, file)
        assert outbox_status(tmp_path, {}).records == 2
    assert held_file(tmp_path) is None


def test_who_may_not_read_the_folder_is_told_who_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("tuneloop.shared.outbox_status.names_in", refuse)
    with pytest.raises(EnvironmentRefused, match="is its explorer's alone"):
        outbox_status(tmp_path, {})
