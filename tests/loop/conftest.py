"""One explorer with a real vLLM engine for all tests of this folder: it takes half a minute to start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.ledger import Ledger
from tests.loop.services import Service, ledger_of, make_model, write_settings


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return write_settings(tmp_path_factory.mktemp("experiment"), model)


@pytest.fixture(scope="session")
def explorer(config: Path) -> Iterator[Service]:
    service = Service(config, "explorer")
    service.wait_until_ready()
    yield service
    assert service.stop() == 0


@pytest.fixture(scope="session")
def ledger(explorer: Service) -> Iterator[Ledger]:
    ledger = ledger_of(explorer.settings)
    yield ledger
    assert ledger.imbalance() == []
    ledger.close()
