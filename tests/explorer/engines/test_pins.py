"""Clients that name the version they want: `model: "t@2"`."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import orjson
import pytest

from tests.doubles.engine import MODEL, PASSED, EngineDouble
from tests.explorer.checkpoints import register
from tests.explorer.running import RunningExplorer, eventually, explorer_running, settings_for


@pytest.fixture
def trying(tmp_path: Path, doubles: list[EngineDouble]) -> Iterator[RunningExplorer]:
    """Version 0 serves on one engine, and version 1 is tried on the other with hardly any traffic; pins are allowed."""
    urls = [each.url for each in doubles]
    rollout = {"mode": "canary", "share": 1e-9}
    with ExitStack() as stack:
        settings = settings_for(tmp_path, urls, rollout=rollout, version_pins=True)
        explorer = stack.enter_context(explorer_running(settings))
        register(explorer.ledger, settings.job_dir)
        eventually(lambda: sorted(each.version for each in explorer.services.fleet.engines) == [0, 1])
        eventually(lambda: explorer.chat(model=f"{MODEL}@1").status_code == 200)
        yield explorer


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    """The status, the code and the sentence."""
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


def test_the_version_that_is_named_answers(trying: RunningExplorer, doubles: list[EngineDouble]) -> None:
    for each in doubles:
        each.chats.clear()
    for version in (0, 1, 1, 0):
        for body in ({}, {"stream": True}):
            answer = trying.chat(model=f"{MODEL}@{version}", **body)
            assert (answer.status_code, answer.headers["x-tuneloop-version"]) == (200, str(version))
    assert trying.version() == 0, "who names none gets the champion"
    received = [chat.body for each in doubles for chat in each.chats]
    assert {body["model"] for body in received} == {MODEL}, "engines know their own name only"
    reply = [orjson.loads(exchange.request)["model"] for exchange in trying.exchanges()[-9:]]
    assert reply == ["t@0", "t@0", "t@1", "t@1", "t@1", "t@1", "t@0", "t@0", "t"]
    assert [each.experiences[0].version_max for each in trying.exchanges()[-9:]] == [0, 0, 1, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("path", PASSED)
def test_routes_that_sample_nothing_take_it_too(
    trying: RunningExplorer, doubles: list[EngineDouble], path: str
) -> None:
    for version in (0, 1, 1):
        assert trying.http.post(path, json={"model": f"{MODEL}@{version}", "prompt": "ab"}).status_code == 200
    of_version = {engine.version: doubles[engine.number] for engine in trying.services.fleet.engines}
    request = (path, b'{"model":"t","prompt":"ab"}')
    assert [of_version[version].passed.count(request) for version in (0, 1)] == [1, 2]
    for wrong in ("7", "x", "-1", ""):
        refused = trying.http.post(path, json={"model": f"{MODEL}@{wrong}", "prompt": "ab"})
        answer = refusal(trying.chat(model=f"{MODEL}@{wrong}"))
        assert (refused.status_code, refused.json()["error"]["message"]) == (answer[0], answer[2])
        assert (refused.json().get("type") == "error") == path.startswith("/v1/messages")
    assert [of_version[version].passed.count(request) for version in (0, 1)] == [1, 2], "no engine got those"


def test_a_version_that_is_not_served_is_no_model(trying: RunningExplorer) -> None:
    answer = "the model does not exist: version 7 is not served; these are: 0, 1"
    assert refusal(trying.chat(model=f"{MODEL}@7")) == (404, "model_not_found", answer)
    for wrong in ("", "x", "-1", "1.0", "9" * 40):
        answer = "the model does not exist: t@ must be followed by the number of a version"
        assert refusal(trying.chat(model=f"{MODEL}@{wrong}")) == (404, "model_not_found", answer)
    assert trying.chat(model="other@1").status_code == 404


def test_what_a_pinned_engine_fails_at_no_other_version_does(
    trying: RunningExplorer, doubles: list[EngineDouble]
) -> None:
    tried = next(each.number for each in trying.services.fleet.engines if each.version == 1)
    doubles[tried].status = 500
    assert trying.chat(model=f"{MODEL}@1").status_code == 500
    assert trying.chat(model=f"{MODEL}@0").status_code == 200


def test_the_models_that_may_be_named_are_listed(trying: RunningExplorer) -> None:
    listed = [each["id"] for each in trying.http.get("/v1/models").json()["data"]]
    assert listed == ["t", "t@0", "t@1"]
    assert trying.http.get("/v1/models/t@1").json()["id"] == "t@1"
    assert trying.http.get("/v1/models/t@7").status_code == 404
