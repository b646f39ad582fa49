"""Real client packages, as their users use them, against a running explorer."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.clients.packages import EXAMPLES, PACKAGES, PLACES, Driver, Package, node_folder
from tests.doubles.engine import EngineDouble, EnginePlace, engine_place, recorded
from tests.explorer.running import RunningExplorer, eventually, explorer_running, settings_for
from tests.outboxes import exchanges_in
from tuneloop.shared.experience import Exchange, State

pytestmark = [pytest.mark.xdist_group("clients"), pytest.mark.contract]

TEXT = json.loads(recorded("whole_plain.json"))["choices"][0]["message"]["content"]
BY_NAME = {each.name: each for each in PACKAGES}
STOPS = [(each.name, stop) for each in PACKAGES for stop in ("end", *each.stops)]

#: Pieces of the engine's stream until the client has read enough; it says no more, so no client is too slow to leave.
STALLS = {"end": None, "done": None, "middle": 12, "finish": 13}


class Party:
    """An explorer, its engine, and all client packages beside it."""

    def __init__(self, explorer: RunningExplorer, double: EngineDouble, drivers: dict[str, Driver]) -> None:
        self.explorer = explorer
        self.double = double
        self.drivers = drivers
        self._kept: dict[str, Exchange] = {}
        self._seen: set[str] = set()

    def news(self) -> dict[str, Exchange]:
        """The exchanges that were kept since somebody last asked."""
        self.kept_since()
        found, self._kept = self._kept, {}
        return found

    def kept_since(self) -> int:
        """How many were kept since then."""
        for record in exchanges_in(self.explorer.settings.outbox_dir):
            if record.msg_id not in self._seen:
                self._seen.add(record.msg_id)
                self._kept[record.msg_id] = record
        return len(self._kept)

    @contextmanager
    def engine(self, **fault: Any) -> Iterator[None]:
        """Have the engine fail in some way until the block ends."""
        before = {key: getattr(self.double, key) for key in fault}
        self._set(fault)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, values: dict[str, Any]) -> None:
        for key, value in values.items():
            setattr(self.double, key, value)

    def refusals(self) -> int:
        """How often clients were told to come again later."""
        counts = re.findall(r'^tuneloop_requests_total\{.*status="503".*\} (\S+)', self._metrics(), re.MULTILINE)
        return sum(int(float(count)) for count in counts)

    def _metrics(self) -> str:
        return self.explorer.http.get("/metrics").text


@pytest.fixture(scope="module")
def party(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Party]:
    folder = tmp_path_factory.mktemp("clients")
    node_folder(folder)
    place: EnginePlace
    with engine_place() as place:
        double = place.fresh()
        with explorer_running(settings_for(folder, [double.url], max_waiting=200)) as explorer:
            drivers = {each.name: Driver(each, folder, explorer.url) for each in PACKAGES}
            yield Party(explorer, double, drivers)
            for each in drivers.values():
                each.stop()


@pytest.fixture(params=PACKAGES, ids=lambda each: each.name)
def package(request: pytest.FixtureRequest) -> Package:
    found: Package = request.param
    return found


@pytest.fixture
def driver(party: Party, package: Package) -> Driver:
    party.news()
    return party.drivers[package.name]


@pytest.mark.parametrize("way", ["whole", "streamed"])
def test_a_reply_is_read_and_kept_under_its_id(party: Party, driver: Driver, package: Package, way: str) -> None:
    told = driver.do(way)
    assert told["text"] == TEXT
    assert told["id"].startswith(package.prefix)
    kept = party.news()
    assert list(kept) == [told["id"]]
    assert kept[told["id"]].experiences[0].drop_reason is None


@pytest.mark.parametrize("way", ["called", "called_in_stream"])
def test_a_tool_is_called(party: Party, driver: Driver, way: str) -> None:
    told = driver.do(way)
    assert (told["name"], json.loads(told["arguments"])) == ("add", {"a": 3, "b": 4})
    [call] = json.loads(party.news()[told["id"]].experiences[0].tool_calls or b"")
    assert call["function"]["name"] == "add"


def test_an_unknown_model_is_the_packages_own_not_found(party: Party, driver: Driver, package: Package) -> None:
    told = driver.do("unknown_model")
    assert told["kind"] == package.not_found
    assert "The model `nope` does not exist" in told["message"]
    assert told["request_id"].startswith(package.prefix)
    assert party.news() == {}


def test_a_package_that_waits_no_longer_lets_go_of_the_engine(party: Party, driver: Driver, package: Package) -> None:
    left = party.double.left
    with party.engine(hangs=True):
        assert driver.do("hurried")["kind"] == package.late
        eventually(lambda: party.double.left == left + 1)


@pytest.mark.parametrize("count", [16, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("name", "until"), STOPS)
def test_all_streams_are_kept(party: Party, name: str, until: str, count: int) -> None:
    party.news()
    with party.engine(stalls_after=STALLS[until]):
        ids = party.drivers[name].do("streams", count=count, until=until)
        eventually(lambda: party.kept_since() >= count)
    kept = party.news()
    assert len(ids) == count
    assert sorted(kept) == sorted(ids)
    [ended] = {each.experiences[0].finish_reason for each in kept.values()}
    assert ended == (None if until == "middle" else "length")
    reasons = {each.experiences[0].drop_reason for each in kept.values()}
    assert reasons == {"cut_off" if until == "middle" else None}


def test_packages_come_again_when_the_engine_is_back(party: Party) -> None:
    party.news()
    before = party.refusals()
    drivers = [each for each in party.drivers.values() if each.package.retries]
    with party.engine(dead=True):
        eventually(lambda: party.explorer.http.get("/health/ready").status_code == 503)
        for each in drivers:
            each.ask("whole")
        eventually(lambda: party.refusals() >= before + len(drivers))
    ids = [each.answer()["id"] for each in drivers]
    assert sorted(party.news()) == sorted(ids)


def test_the_example_labels_its_request_and_gives_feedback(party: Party, package: Package, driver: Driver) -> None:
    said = driver.example() if package.example else _shell(party)
    [(msg_id, kept)] = party.news().items()
    assert msg_id in said
    assert re.search(r"""['"]accepted['"]: ?1\b""", said)
    assert (kept.task_id, kept.run_id) == ("task-1", "0")
    [(state, reward)] = party.explorer.rows(f"SELECT state, reward FROM experiences WHERE msg_id = '{msg_id}'")
    assert (state, reward) == (State.REWARDED, 1.0)


@pytest.mark.parametrize(
    ("place", "example"), [("litellm", "with_litellm_responses.py"), ("agents", "with_openai_agents.py")]
)
def test_feedback_names_the_run_where_a_package_makes_ids_of_its_own(party: Party, place: str, example: str) -> None:
    party.news()
    said = _run(party, str(PLACES / place / "bin" / "python"), str(EXAMPLES / example))
    [(msg_id, kept)] = party.news().items()
    assert msg_id not in said.partition("{")[0]  # the answer to the feedback names it
    assert (kept.task_id, kept.run_id) == ("task-1", said.split()[0])
    assert re.search(r"""['"]accepted['"]: ?1\b""", said)
    [(state, reward)] = party.explorer.rows(f"SELECT state, reward FROM experiences WHERE msg_id = '{msg_id}'")
    assert (state, reward) == (State.REWARDED, 1.0)


def test_a_header_names_the_reply_where_a_package_makes_ids_of_its_own(party: Party) -> None:
    party.news()
    told = party.drivers["LiteLLM"].do("responded")
    [(msg_id, _)] = party.news().items()
    assert (told["header"], told["id"] == msg_id) == (msg_id, False)


def test_a_url_below_a_run_labels_what_is_asked_there(party: Party) -> None:
    party.news()
    said = _run(party, str(EXAMPLES / "with_curl_run.sh"))
    [(msg_id, kept)] = party.news().items()
    assert (kept.task_id, kept.run_id, msg_id in said) == ("task-1", "run-1", True)
    [(state, reward)] = party.explorer.rows(f"SELECT state, reward FROM experiences WHERE msg_id = '{msg_id}'")
    assert (state, reward) == (State.REWARDED, 1.0)


def _shell(party: Party) -> str:
    return _run(party, str(EXAMPLES / "with_curl.sh"))


def _run(party: Party, *command: str) -> str:
    environment = {"PATH": "/usr/bin:/bin", "TUNELOOP_URL": party.explorer.url, "TUNELOOP_MODEL": "t"}
    return subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout
