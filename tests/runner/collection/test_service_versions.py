"""Versions and A/B tests, against a running explorer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.running import RunningExplorer, adapters_running
from tests.runner.collection.conftest import KEY
from tuneloop.runner import ABTest, ServiceRefused, VersionsClient


def test_versions_are_listed_promoted_pinned_and_rolled_back(trying: RunningExplorer) -> None:
    with VersionsClient(trying.url, KEY, by="ann") as versions:
        assert [(each["version"], each["state"]) for each in versions.list_versions()] == [
            (1, "canary"),
            (0, "champion"),
        ]
        assert (versions.champion(), versions.canary(), versions.canary_share()) == (0, 1, 0.25)
        assert versions.show(1)["version"]["version"] == 1
        assert versions.compare(0, 1)["difference"] is None
        decided = versions.promote(1, reason="looked through", expect=0)
        assert (decided["version"], decided["champion"]) == (1, 1)
        assert (versions.champion(), versions.canary(), versions.canary_share()) == (1, None, None)
        versions.pin(1, reason="the demo")
        with pytest.raises(ServiceRefused, match="pinned") as refused:
            versions.promote(0)
        assert (refused.value.status, refused.value.code) == (409, "version_refused")
        versions.unpin()
        versions.roll_back(1, reason="swears at people")
        assert [each["state"] for each in versions.list_versions()] == ["rolled_back", "champion"]
        event = versions.events(1)[-1]
        assert (event["action"], event["reason"], event["actor"]) == ("rolled_back", "swears at people", "admin:ann")


def test_a_refusal_is_the_services_sentence(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double, admin_key=KEY)
    with VersionsClient(explorer.url, "wrong") as versions, pytest.raises(ServiceRefused) as refused:
        versions.list_versions()
    assert refused.value.status == 401
    with VersionsClient(explorer.url, KEY) as versions, pytest.raises(ServiceRefused) as refused:
        versions.reject(7, reason="none")
    assert (refused.value.status, refused.value.code) == (404, "version_not_found")
    with VersionsClient("http://127.0.0.1:9", KEY) as versions, pytest.raises(ServiceRefused, match="does not answer"):
        versions.champion()


def test_two_versions_answer_their_shares(trying: RunningExplorer) -> None:
    test = ABTest(model=MODEL, a=0, b=1, share_b=0.3)

    def measure(model: str, task: dict[str, Any]) -> dict[str, float]:
        body = {"model": model, "messages": [task], "max_tokens": 12}
        answer = httpx.post(f"{trying.url}/v1/chat/completions", json=body)
        version = int(answer.raise_for_status().headers["x-tuneloop-version"])
        assert model == f"{MODEL}@{version}"
        return {"reward": float(version), "tokens": 5.0}

    tasks = {f"user-{at}": {"role": "user", "content": "3+4="} for at in range(20)}
    report = test.run(tasks, measure)
    assert report.keys["b"] == sum(test.side_of(key) == "b" for key in tasks) > 0
    assert report.failures == {"a": 0, "b": 0}
    assert report.figures["reward"].difference is not None
    assert (report.figures["reward"].difference.value, report.better()) == (1.0, "b")
    assert report.better("tokens") is None
    latency = report.figures["latency_s"]
    assert latency.a is not None
    assert latency.a.value > 0


@pytest.fixture
def adapting(tmp_path: Path, double: EngineDouble) -> Iterator[RunningExplorer]:
    """An explorer whose versions are adapters."""
    with adapters_running(tmp_path, double.url, admin_key=KEY) as running:
        yield running


def test_policies_are_made_changed_and_listed(adapting: RunningExplorer) -> None:
    with VersionsClient(adapting.url, KEY) as versions:
        versions.create_policy("side", options={"algorithm.gamma": 0.5})
        assert [each["name"] for each in versions.list_policies()] == ["default", "side"]
        versions.change_policy("side", "pause")
        assert versions.list_policies()[1]["state"] == "paused"
        with pytest.raises(ServiceRefused, match="not trained"):
            versions.change_policy("side", "promote", into="default")
        with pytest.raises(ServiceRefused, match="there is no version 9"):
            versions.create_ab_test(0, 9)


def test_chosen_versions_are_compared_and_the_traffic_is_changed_afterwards(adapting: RunningExplorer) -> None:
    with VersionsClient(adapting.url, KEY) as versions:
        test = versions.create_ab_test(0, "default", traffic_ratio={"a": 0.7, "b": 0.3})
        assert versions.create_ab_test(0, "default").a == test.a == "version-0"
        assert [each["state"] for each in versions.list_policies()] == ["active", "paused"]
        with pytest.raises(ValueError, match="traffic_ratio"):
            versions.create_ab_test(0, "default", traffic_ratio={"a": 0.7, "b": 0.7})
    asked = {f"user-{number}": test.model_for(f"user-{number}") for number in range(200)}
    assert 30 <= list(asked.values()).count("default") <= 90
    for number, (user, model) in enumerate(asked.items()):
        test.record(user, reward=float(model == "default") + number % 2 / 10)
    assert test.report().better() == "b"
    before = test.report()
    test.switch_traffic("b", 1.0)
    assert {test.model_for(user) for user in asked} == {"default"}
    test.record("user-1", reward=-9.0)
    assert test.report() == before
    assert test.report().better() == "b"
    assert sum(test.report().keys.values()) == 200
    with pytest.raises(ValueError, match="share"):
        test.switch_traffic("a", 1.5)
