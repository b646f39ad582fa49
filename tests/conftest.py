"""The resources that tests share: a PostgreSQL server, and an empty ledger on either database."""

import gc
import itertools
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings
from sqlalchemy import Engine

from tests.databases import Kind, Schemas, engine_of, put_file
from tests.doubles import postgres
from tests.doubles.clock import Clock
from tests.order import is_slow, seconds_of
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.feedback import RewardRule

_numbers = itertools.count()

# Whom the tests talk to is on this machine. To read all authorities of the world, of which a folder without any spares
# it, would take each HTTP client a twentieth of a second.
for _name in ("SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS"):
    os.environ.pop(_name, None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

# A token that some cluster left in the home folder is not asked of who connects to the tests' own by their address.
os.environ["RAY_AUTH_MODE"] = "disabled"

# How long an example takes says nothing on a machine that may stand still.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


class Place(NamedTuple):
    """Where a test's database is."""

    url: str
    schema: str | None


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The URL of a PostgreSQL server that lives as long as the session."""
    server = postgres.started()
    yield server.url
    server.close()


@pytest.fixture(scope="session")
def schemas(postgres_url: str) -> Iterator[Schemas]:
    """Schemas on that server."""
    found = Schemas(postgres_url)
    yield found
    found.close()


@pytest.fixture
def sqlite_place(tmp_path: Path) -> Place:
    return Place(f"sqlite:///{tmp_path}/ledger.db", None)


@pytest.fixture
def postgres_place(postgres_url: str, schemas: Schemas) -> Iterator[Place]:
    place = Place(postgres_url, f"test_{next(_numbers)}")
    yield place
    schemas.drop(str(place.schema))


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def place(request: pytest.FixtureRequest) -> Place:
    """Where a database of the test's own may be, empty yet: the test runs once on SQLite, once on PostgreSQL."""
    found: Place = request.getfixturevalue(f"{request.param}_place")
    return found


@pytest.fixture
def tables(place: Place, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Where a database of the test's own is, with our tables and no row."""
    with tables_at(place, request):
        yield place


@pytest.fixture
def migrated_place(place: Place, request: pytest.FixtureRequest) -> Iterator[Place]:
    """The same, as the migrations make it."""
    with tables_at(place, request, "migrated"):
        yield place


@contextmanager
def tables_at(place: Place, request: pytest.FixtureRequest, kind: Kind = "created") -> Iterator[None]:
    if place.schema is None:
        put_file(place.url, kind)
        yield
        return
    schemas: Schemas = request.getfixturevalue("schemas")
    with schemas.lent(place.schema, kind):
        yield


@pytest.fixture
def engine(tables: Place) -> Iterator[Engine]:
    """The way to a database with our tables, empty."""
    engine = engine_of(tables.url, tables.schema)
    yield engine
    engine.dispose()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(engine: Engine) -> Ledger:
    """An empty ledger, which takes rewards of any size: so a test can tell them apart."""
    return Ledger(engine, rule=RewardRule(clip=None))


@pytest.hookimpl(tryfirst=True)  # before xdist, which looks at the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file, and of a real engine, on one worker; the slowest begin first."""
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("xdist_group") is not None:
            continue  # xdist would make a third group of two
        engines = {"explorer", "bare_engine", "second_engine"}.intersection(getattr(item, "fixturenames", ()))
        shared = engines and "tests/loop" in str(item.path)
        item.add_marker(pytest.mark.xdist_group("engine" if shared else str(item.path)))
    items.sort(key=lambda item: -seconds_of(_group(item)))


def _group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    name: str = marker.args[0] if marker.args else marker.kwargs["name"]
    return name


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collection, which takes half of that time, and freeze what was collected."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist would begin with the groups of many tests


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Note whether all tests had their turn, and how those ended that failed, for scripts/again."""
    cache = getattr(session.config, "cache", None)  # absent with -p no:cacheprovider
    if hasattr(session.config, "workerinput") or cache is None:
        return
    cache.set("tuneloop/whole_run", exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED})
    stats = getattr(session.config.pluginmanager.get_plugin("terminalreporter"), "stats", {})
    failed = [*stats.get("failed", ()), *stats.get("error", ())]
    ends = {each.nodeid: each.longreprtext.splitlines()[-40:] for each in failed}
    cache.set("tuneloop/failures", ends)
