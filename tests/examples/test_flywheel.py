"""The flywheel turns: what users were not content with is trained on in the next turn."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from examples.flywheel.main import main
from tests.doubles.serving import serving
from tests.runner.tuning.service_double import MODEL, Json, ServiceDouble


class StoringDouble(ServiceDouble):
    """A service that lists its stored completions, too."""

    async def _answer(self, path: str, query: dict[str, str], body: Json) -> tuple[int, Any]:
        if not path.startswith("/v1/chat/completions") or "limit" not in query:
            return await super()._answer(path, query, body)
        listed = [(run, call) for run, calls in self.calls.items() for call in calls]
        if path.endswith("/messages"):
            call = next(call for _, call in listed if call["id"] == path.split("/")[4])
            return 200, {"data": [{"id": "0", **each} for each in call["messages"]], "has_more": False}
        return 200, {"data": [self._stored(call) for _, call in listed], "has_more": False}

    async def _reply(self, labels: Json, body: Json) -> tuple[int, Any]:
        status, reply = await super()._reply(labels, body)
        if status == 200:
            call = self.calls[labels["task_id"], labels["run_id"]][-1]
            call |= {"id": reply["id"], "said": reply["choices"]}
        return status, reply

    def _stored(self, call: Json) -> Json:
        return {"id": call["id"], "model": MODEL, "choices": call["said"], "metadata": {}, "created": 1}


def test_it_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    random.seed(0)
    double = StoringDouble()
    with serving(double) as url:
        main(["--service", url, "--turns", "2", "--tasks", "16"])
    tasks = [json.loads(line) for line in Path("flywheel.jsonl").read_text().splitlines()]
    users = [each for each in tasks if each.get("provenance", {}).get("source") == "tuneloop"]
    assert users
    assert all(re.fullmatch(r"\d+\+\d+", each["question"]) for each in tasks)
    assert len((Path(__file__).parents[2] / "examples" / "flywheel" / "main.py").read_text().splitlines()) <= 100
    trained = {call["messages"][-1]["content"] for calls in double.calls.values() for call in calls if call["train"]}
    second_turn = [task for task, _ in double.rewards if "turn-1" in task]
    assert len(second_turn) == 16 * 4
    assert trained & {each["question"] for each in users}, "what users asked is trained on"
    assert sum(metric == "thumb" for _, _, metric in double.events) == 32
    printed = capsys.readouterr().out
    assert re.search(r"turn 1: held out .*; \d+ thumbs down, \d+ tasks now", printed)
