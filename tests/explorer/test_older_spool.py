"""What a release before the outbox left on disk is appended to the outbox."""

import struct
import zlib
from contextlib import closing
from pathlib import Path

from structlog.testing import capture_logs

from tests.factories import exchange, feedback
from tuneloop.explorer.older_spool import convert
from tuneloop.runner.outbox import Outbox, OutboxReader, Record
from tuneloop.shared.experience import encode


def frame(payload: bytes) -> bytes:
    return struct.pack("<II", len(payload), zlib.crc32(payload)) + payload


def records_in(folder: Path) -> list[bytes]:
    found = []
    for path in sorted(folder.glob("*.records")):
        with closing(OutboxReader(path)) as reader:
            found += [each.payload for each in reader.read(0) if isinstance(each, Record)]
    return found


def write_slot(slot: Path, **files: bytes) -> None:
    slot.mkdir(parents=True)
    (slot / "lock").touch()
    (slot / "flushed").write_bytes(bytes(32))
    for name, data in files.items():
        (slot / name.replace("__", ".").removeprefix("n")).write_bytes(data)


def test_whole_records_come_in_their_order_and_damage_costs_itself_alone(tmp_path: Path) -> None:
    said = [encode(exchange()) if number % 2 else encode(feedback()) for number in range(7)]
    frames = [frame(each) for each in said]
    changed, torn = bytearray(frames[2]), frames[6][:-5]
    changed[20] ^= 1
    lengthened = b"\xff" + frames[4][1:]
    write_slot(
        tmp_path / "spool/0",
        n1__kept=frames[0],
        n2__seg=frames[1] + changed + frames[3] + lengthened,
        quarantine__seg=b"",
    )
    write_slot(tmp_path / "spool/1", n1__torn=b"nonsense" + frames[5] + torn)
    (tmp_path / "spool/notes").mkdir()
    with closing(Outbox(tmp_path / "outbox", 1 << 20)) as outbox, capture_logs() as logs:
        convert([tmp_path / "spool", tmp_path / "nowhere"], outbox)
    assert records_in(tmp_path / "outbox") == [said[number] for number in (0, 1, 3, 5)]
    damaged = [each for each in logs if each["event"] == "older_spool_damaged"]
    assert sum(each["bytes"] for each in damaged) == len(frames[2]) + len(frames[4]) + 8 + len(torn)
    assert [path.name for path in (tmp_path / "spool").iterdir()] == ["notes"]


def test_an_outbox_may_have_the_folder_of_the_older_spool(tmp_path: Path) -> None:
    write_slot(tmp_path / "3", n1__seg=frame(said := encode(exchange())))
    with closing(Outbox(tmp_path, 1 << 20)) as outbox:
        convert([tmp_path], outbox)
        convert([tmp_path], outbox)
    assert records_in(tmp_path) == [said]
    assert not (tmp_path / "3").exists()
