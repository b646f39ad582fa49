"""One explorer with a real vLLM engine for all tests of this folder: it takes half a minute to start."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.loop.harness.bare_engine import as_it_was as as_it_was
from tests.loop.harness.bare_engine import bare_engine as bare_engine
from tests.loop.harness.bare_engine import second_engine as second_engine
from tests.loop.harness.services import Service, client_of_engine, ledger_of, make_model, running, write_settings
from tuneloop.shared.ledger.ledger import Ledger

pytest.register_assert_rewrite("tests.loop.on_vllm.likeness")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return write_settings(tmp_path_factory.mktemp("experiment"), model)


@pytest.fixture(scope="session")
def explorer(config: Path) -> Iterator[Service]:
    with running(config) as service:
        yield service


@pytest.fixture(scope="session")
def ledger(explorer: Service) -> Iterator[Ledger]:
    ledger = ledger_of(explorer.settings)
    yield ledger
    assert ledger.reports.imbalance() == []
    ledger.close()


@pytest.fixture(scope="session")
def engine_http(explorer: Service) -> Iterator[httpx.Client]:
    """A client of the explorer's engine itself, on its private socket."""
    with client_of_engine(explorer) as client:
        yield client
