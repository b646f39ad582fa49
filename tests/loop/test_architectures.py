"""Which architectures can be served, and how they take up versions: docs/architectures.md is true of real vLLM."""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import yaml

from tests.loop.harness.architectures import ARCHITECTURES, examine, make_architecture
from tests.loop.harness.oracle import Oracle
from tests.loop.harness.services import (
    Service,
    ledger_of,
    sockets,
    stage_by_hand,
    wait_for,
    wait_until_served,
    write_settings,
)
from tuneloop.shared.ledger.ledger import Ledger

pytestmark = pytest.mark.vllm

MOE = "Qwen3-MoE"
_PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
_ROW = re.compile(
    r"^\|([^|]+?)\|" + r"(yes|refused)\|" * 2 + r"(yes|no|–)\|" * 3 + r"(in place|fresh engine|–)\|",
    re.MULTILINE,
)


def documented() -> dict[str, tuple[str, ...]]:
    """By architecture: whether all its weights are trained, and adapters; then how it is served, – where not tried."""
    return {row[0]: tuple(row[1:]) for row in _ROW.findall(_PAGE.read_text())}


def test_the_page_names_all_architectures() -> None:
    assert set(documented()) == set(ARCHITECTURES)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if documented()[name][-1] != "–"])
def test_an_architecture_is_served_as_the_page_says(name: str, tmp_path: Path) -> None:
    found = examine(name, tmp_path)
    cells = [cell.split(" (")[0] for cell in found.row().split("|")[2:6]]
    assert tuple(cells) == documented()[name][2:], found


@contextmanager
def under_load(service: Service) -> Iterator[Counter[str]]:
    """Two clients who ask five times a second; what became of their requests, by the version that answered.

    Without pauses they would take the cores from the engine that is started meanwhile: it would take minutes.
    """
    outcomes: Counter[str] = Counter()
    over = threading.Event()
    body = {"model": service.settings.served_model_name, "messages": [{"role": "user", "content": "3+4="}]}

    def ask() -> None:
        with httpx.Client(base_url=service.url, timeout=600) as client:
            while not over.is_set():
                reply = client.post("/v1/chat/completions", json=body | {"max_tokens": 8})
                outcomes[reply.headers["x-tuneloop-version"] if reply.status_code == 200 else reply.text] += 1
                over.wait(0.2)

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for each in asking:
        each.start()
    try:
        yield outcomes
    finally:
        over.set()
        for each in asking:
            each.join()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """An explorer of a model of experts, which vLLM does not reload exactly, with room for a second engine."""
    config = write_settings(tmp_path, make_architecture(MOE, tmp_path / "model", 0), mode="serve")
    values = yaml.safe_load(config.read_text())
    values["explorer"]["rollout_model"]["spare_place"] = True
    config.write_text(yaml.safe_dump(values))
    service = Service(config, "explorer")
    yield service
    assert service.stop() == 0


def assert_serves(service: Service, version: int, ledger: Ledger) -> None:
    """What is served has the log-probabilities that transformers gives the version."""
    reply = httpx.post(
        f"{service.url}/v1/completions",
        json={"model": service.settings.served_model_name, "prompt": [65, 66, 67], "max_tokens": 8, "logprobs": 0}
        | {"return_token_ids": True},
        timeout=600,
    )
    assert reply.headers["x-tuneloop-version"] == str(version)
    [choice] = reply.json()["choices"]
    path = next(each.path for each in ledger.versions.all() if each.version == version)
    exact = Oracle(path / "actor").logprobs([65, 66, 67], choice["token_ids"])
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(exact, abs=1e-3)


@pytest.mark.parametrize("versions", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_a_model_that_vllm_does_not_reload_exactly_is_served_by_fresh_engines_and_no_request_fails(
    service: Service, versions: int
) -> None:
    service.wait_until_ready()
    assert "reload_is_not_exact" in service.log.read_text()
    ledger = ledger_of(service.settings)
    with under_load(service) as outcomes:
        for version in range(1, versions + 1):
            publish = stage_by_hand(service.settings, ledger, version, partial(make_architecture, MOE))
            wait_for(lambda: sum(outcomes.values()) > 0, why="nobody is answered")
            assert publish() == version
            wait_until_served(ledger, version, timeout_s=240)
            assert_serves(service, version, ledger)
    assert set(outcomes) == {str(version) for version in range(versions + 1)}
    wait_for(lambda: len(sockets(service)) == 1, why="the engine before is not ended")
    assert "engine_down" not in service.log.read_text()
    ledger.close()
