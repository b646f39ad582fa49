"""OpenAI's own packages, of Python and JavaScript, fine-tune: they make jobs, follow them, and ask what came out."""

from collections.abc import Iterator

import pytest

from tests.clients.packages import PACKAGES, Driver, node_folder
from tests.clients.test_clients import TEXT
from tests.doubles.engine import MODEL, engine_place
from tests.explorer import adapters
from tests.explorer.finetuning.job_service import TrainerDouble, job_service, put
from tests.explorer.running import RunningExplorer, eventually

pytestmark = [pytest.mark.xdist_group("clients"), pytest.mark.contract]

NAMES = ("openai-python 1.x", "openai-python 3.x", "openai-node")


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningExplorer]:
    with (
        engine_place() as place,
        job_service(adapters.adapted(tmp_path_factory.mktemp("jobs"), place.fresh())) as found,
    ):
        yield found


@pytest.fixture(params=[each for each in PACKAGES if each.name in NAMES], ids=lambda each: each.name)
def driver(
    request: pytest.FixtureRequest, explorer: RunningExplorer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    found = Driver(request.param, node_folder(tmp_path_factory.mktemp("driver")), explorer.url)
    yield found
    found.stop()


def test_a_package_fine_tunes_and_asks_the_model(driver: Driver, explorer: RunningExplorer) -> None:
    made = driver.do("fine_tune", file=put(explorer))
    assert (made["status"], made["beta"]) == ("validating_files", 0.2)
    job = made["id"]
    eventually(lambda: driver.do("act", job=job, verb="retrieve") == "queued")
    assert driver.do("act", job=job, verb="pause") == "paused"
    assert driver.do("act", job=job, verb="resume") == "queued"
    TrainerDouble(explorer.ledger, explorer.settings).train(job)
    told = driver.do("fine_tuned", job=job)
    assert told.pop("gone").startswith(("Error code: 404", "404"))
    events = len(explorer.ledger.jobs.events(job, limit=100))
    assert told == {
        "model": f"ft:{MODEL}:own:{job.removeprefix('ftjob-')}",
        "status": "succeeded",
        "steps": [2, 1],
        "events": events,
        "listed": True,
        "known": True,
        "text": TEXT,
        "deleted": True,
    }
    cancelled = driver.do("fine_tune", file=put(explorer))["id"]
    assert driver.do("act", job=cancelled, verb="cancel") == "cancelled"
