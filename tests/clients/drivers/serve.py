"""Does what a test asks of a client package: a line of JSON in, `{"do": ..., ...}`, a line of JSON out.

Runs in the client's own environment, which knows nothing of tuneloop.
"""

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
from typing import Any

ASKED = [{"role": "user", "content": "3+4="}]
NUMBERS = {name: {"type": "integer"} for name in ("a", "b")}
PARAMETERS = {"type": "object", "properties": NUMBERS, "required": ["a", "b"], "additionalProperties": False}
ADD = {"name": "add", "description": "Adds.", "parameters": PARAMETERS, "strict": True}
TOOLS = [{"type": "function", "function": ADD}]
HURRY_S = 1.0


def refusal(error: Any, request_id: str | None) -> dict[str, Any]:
    """An exception of a client's, as a test looks at it."""
    return {"kind": type(error).__name__, "message": str(error), "request_id": request_id}


def _example(path: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(path, run_name="__main__")
    return said.getvalue()


def serve(client: object) -> None:
    """Answer until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # packages print
    for line in sys.stdin:
        asked = json.loads(line)
        do = asked.pop("do")
        try:
            told = {"told": _example(**asked) if do == "example" else getattr(client, do)(**asked)}
        except Exception:  # noqa: BLE001 - the test is told
            told = {"failed": traceback.format_exc()}
        print(json.dumps(told), file=answers, flush=True)
