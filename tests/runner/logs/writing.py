"""Files as others write them, for the tests of importing."""

import json
from collections.abc import Iterable
from pathlib import Path

USER = {"role": "user", "content": "Where is my parcel?"}
ANSWER = {"role": "assistant", "content": "On its way."}
CALL = {"id": "c1", "type": "function", "function": {"name": "track", "arguments": '{"number": 7}'}}
TOOLS = [{"type": "function", "function": {"name": "track", "parameters": {"type": "object"}}}]


def write_lines(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
