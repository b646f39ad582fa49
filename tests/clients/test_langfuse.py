"""Langfuse's own client, whose scores are feedback here."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.packages import Driver, Package
from tests.doubles.engine import CHAT, engine_place
from tests.explorer.running import HELLO, RunningExplorer, explorer_running, settings_for

pytestmark = [pytest.mark.xdist_group("clients"), pytest.mark.contract]

PACKAGES = [Package(f"Langfuse {major}.x", f"langfuse{major}", "langfuse_scores.py", None) for major in (3, 5)]


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningExplorer]:
    folder = tmp_path_factory.mktemp("langfuse")
    with engine_place() as place, explorer_running(settings_for(folder, [place.fresh().url])) as running:
        yield running


@pytest.mark.parametrize("package", PACKAGES, ids=lambda each: each.name)
def test_its_scores_reach_replies_are_corrected_and_deleted(
    explorer: RunningExplorer, package: Package, tmp_path: Path
) -> None:
    driver = Driver(package, tmp_path, explorer.url)
    headers = {"x-request-id": f"message of {package.name}"}
    said: str = explorer.http.post(CHAT, json=HELLO, headers=headers).json()["id"]

    def reward() -> float | None:
        found: float | None = explorer.rows(f"SELECT reward FROM experiences WHERE msg_id = '{said}'")[0][0]
        return found

    thumb = {"name": "user-feedback", "score_id": f"thumb-{package.place}", "data_type": "BOOLEAN"}
    assert driver.do("score", trace_id=said, value=1, **thumb) == []
    assert reward() == 1.0
    trace = driver.do("trace_of", seed=headers["x-request-id"])
    assert driver.do("score", trace_id=trace, value=0, comment="no", **thumb) == []
    assert reward() == 0.0
    assert driver.do("delete", score_id=thumb["score_id"])
    assert reward() is None
    assert driver.do("score", trace_id=said, name="tone", value="kind", data_type="CATEGORICAL") == []
    assert explorer.rows(f"SELECT text FROM feedback WHERE msg_id = '{said}' AND metric = 'tone'") == [("kind",)]
    refused = driver.do("score", trace_id="0" * 32, value=1, **thumb)
    assert refused, "its user is told that nothing was kept"
    driver.stop()
