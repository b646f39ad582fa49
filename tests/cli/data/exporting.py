"""What the tests of exporting and importing say and read."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

from tests.factories import exchange, experience, feedback
from tuneloop.cli.erasure import FileErasure, Person, erase_rows
from tuneloop.cli.exports import ExportRequest, Format, export
from tuneloop.shared.experience import Exchange, Feedback, Kind
from tuneloop.shared.ledger.export import Selection
from tuneloop.shared.ledger.ledger import Ledger

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is my parcel?"}]
TOOLS = [{"type": "function", "function": {"name": "track", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [{"id": "call_1", "type": "function", "function": {"name": "track", "arguments": '{"number": 7}'}}]
ANSWER = {"role": "assistant", "content": "Hello."}


def erased_during(other: Callable[[], Any], path: Path, user: str, *, stop_at: int) -> tuple[FileErasure, Any]:
    """Erase a person from a file, and begin other work once so many rows were read."""
    rows, reading, goes_on = count(1), Event(), Event()

    class Slow(Person):
        def owns(self, row: Mapping[str, Any]) -> bool:
            if next(rows) == stop_at:
                reading.set()
                assert goes_on.wait(5.0)
            return super().owns(row)

    with ThreadPoolExecutor(2) as pool:
        erasing = pool.submit(erase_rows, str(path), Slow("acme", (user,), frozenset()))
        assert reading.wait(5.0)
        working = pool.submit(other)
        wait([working], timeout=0.2)
        goes_on.set()
        return erasing.result(), working.result()


def asked(text: str = "Hello.", *, request: dict[str, Any] | None = None, **but: Any) -> Exchange:
    """An exchange with a real request; what else is said is of the exchange or of its one experience."""
    of_experience = {name: but.pop(name) for name in set(but) & set(experience().__struct_fields__)}
    body = json.dumps(request or {"messages": ASKED}).encode()
    said = {"experiences": (experience(text=text, **of_experience),)} | but
    return exchange(request=body, **said)


def about(said: Exchange, kind: Kind = Kind.NUMBER, **but: Any) -> Feedback:
    if kind not in (Kind.NUMBER, Kind.BOOLEAN):
        but = {"value": None} | but
    if "worse" in but:
        but["other_msg_id"] = but.pop("worse").msg_id
    return feedback(**{"msg_id": said.msg_id, "kind": kind} | but)


def exported(ledger: Ledger, to: Path, format_: Format, **but: Any) -> list[dict[str, Any]]:
    of_selection = {name: but.pop(name) for name in set(but) & set(Selection._fields)}
    done = export(ledger, ExportRequest(format_, Selection(**{"tenant": "acme"} | of_selection), **but), to)
    rows = loaded(to) if done.rows else []
    assert len(rows) == done.rows
    return rows


def loaded(file: Path) -> list[dict[str, Any]]:
    kind = "parquet" if file.suffix == ".parquet" else "json"
    import datasets  # takes seconds, of every run that collects these tests

    found = datasets.load_dataset(kind, data_files=str(file), split="train", cache_dir=str(file.parent / "cache"))
    return list(found)
