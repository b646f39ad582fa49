"""What a release before the outbox left on disk is appended to the outbox."""

import random
import struct
import subprocess
import sys
import time
import zlib
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import select
from structlog.testing import capture_logs

from tests.doubles.engine import EngineDouble
from tests.doubles.warm.process import WarmProcess
from tests.explorer.running import eventually
from tests.explorer.test_main import attached_to, job, service, write_settings
from tests.factories import exchange, feedback
from tuneloop.explorer.older_spool import convert
from tuneloop.runner.outbox import OutboxReader, Record
from tuneloop.shared.experience import encode
from tuneloop.shared.ledger.storage.database import connect
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.shared.ledger.storage.schema import feedback as events


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
    with capture_logs() as logs:
        convert([tmp_path / "spool", tmp_path / "nowhere"], tmp_path / "outbox")
    assert records_in(tmp_path / "outbox") == [said[number] for number in (0, 1, 3, 5)]
    damaged = [each for each in logs if each["event"] == "older_spool_damaged"]
    assert sum(each["bytes"] for each in damaged) == len(frames[2]) + len(frames[4]) + 8 + len(torn)
    assert [path.name for path in (tmp_path / "spool").iterdir()] == ["notes"]


def test_an_outbox_may_have_the_folder_of_the_older_spool(tmp_path: Path) -> None:
    write_slot(tmp_path / "3", n1__seg=frame(said := encode(exchange())))
    convert([tmp_path], tmp_path)
    convert([tmp_path], tmp_path)
    assert records_in(tmp_path) == [said]
    assert not (tmp_path / "3").exists()


@pytest.mark.contract
def test_a_service_that_is_killed_while_it_converts_takes_each_record_once(
    tmp_path: Path, double: EngineDouble
) -> None:
    settings, chance = write_settings(tmp_path, **attached_to(double)), random.Random(0)
    said = [exchange(tenant="default") for _ in range(4000)]
    heard = [feedback(tenant="default", msg_id=each.msg_id, value=0.5) for each in said]
    frames = [frame(encode(each)) for pair in zip(said, heard, strict=True) for each in pair]
    spool = job(tmp_path) / "spool"
    for slot in range(4):
        of_slot = frames[2000 * slot : 2000 * (slot + 1)]
        files = {f"n{number:08d}__seg": b"".join(of_slot[100 * number : 100 * (number + 1)]) for number in range(20)}
        write_slot(spool / str(slot), **files)
    command, left = [sys.executable, "-m", "tuneloop.explorer", "--config", str(settings)], list[int]()
    outbox = job(tmp_path) / "outbox"
    for _ in range(4):
        before = len(list(outbox.glob("*.records")))
        with WarmProcess(command, stderr=subprocess.DEVNULL) as running:
            eventually(lambda: len(list(outbox.glob("*.records"))) > before)  # noqa: B023
            time.sleep(chance.uniform(0, 0.05))
            running.kill()
        left.append(len(list(spool.glob("*"))))
        if not left[-1]:
            break
    with service(settings) as (_, http):
        assert not list(spool.glob("*"))
        eventually(lambda: http.post("/commit").status_code == 200)
    engine = connect(f"sqlite:///{job(tmp_path)}/buffer/exp_buffer.db")
    with engine.connect() as connection:
        rows = connection.execute(select(experiences.c.msg_id, experiences.c.reward)).all()
        assert sorted(row.msg_id for row in rows) == sorted(each.msg_id for each in said)
        assert {row.reward for row in rows} == {0.5}
        assert len(connection.execute(select(events.c.id)).all()) == len(heard)
    engine.dispose()
    assert max(left) > 0, "it was never killed before the end"
