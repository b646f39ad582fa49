"""No process of the service is stopped by the collection of garbage."""

import os
from pathlib import Path

import pytest

from tests.doubles.engine import CHAT, EngineDouble
from tests.explorer.running import HELLO, eventually
from tests.hostile.bed import bed_with

#: Has each process of the service write, when it is asked to, at how many objects a full collection would look.
_COUNTER = """
import gc, os, threading, time
from pathlib import Path

folder = Path({folder!r})

def count():
    while not (folder / "asked").exists():
        time.sleep(0.05)
    draft = folder / f"draft.{{os.getpid()}}"
    draft.write_text(str(len(gc.get_objects())))
    draft.rename(folder / str(os.getpid()))

threading.Thread(target=count, daemon=True).start()
"""

#: A process that looks through all has above a hundred thousand, and takes 0.2 s and more for it.
_FEW = 60_000


def test_a_full_collection_looks_at_little(
    tmp_path: Path, double: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = tmp_path / "counts"
    counts.mkdir()
    (counts / "sitecustomize.py").write_text(_COUNTER.format(folder=str(counts)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(counts), *os.environ.get("PYTHONPATH", "").split()]))
    with bed_with(tmp_path, [double.url]) as bed:
        reply = bed.http.post(CHAT, json=HELLO)
        assert bed.http.post("/feedback", json={"msg_ids": [reply.json()["id"]], "reward": 1}).status_code == 200
        pids = [bed.process.pid, *bed.workers()]
        (counts / "asked").touch()
        eventually(lambda: all((counts / str(pid)).exists() for pid in pids))
        found = [int((counts / str(pid)).read_text()) for pid in pids]
    assert len(found) == 2
    assert max(found) < _FEW, found
