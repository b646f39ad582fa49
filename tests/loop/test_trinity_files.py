"""The two YAML files that Trinity users have, with nothing but the paths filled in, run here and mean the same."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from examples.sums.model import LONGEST
from tests.loop.harness.agent import Agent
from tests.loop.harness.services import Service, ledger_of, make_model, wait_for
from tuneloop.shared.ledger.storage.database import connect
from tuneloop.shared.ledger.storage.schema import experiences

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("two-engines"), pytest.mark.contract]

FILES = Path(__file__).parents[1] / "fixtures" / "trinity"


def filled_in(name: str, folder: Path, model: Path, *, compiled: bool = True) -> Path:
    text = (FILES / name).read_text()
    if not compiled:
        section = "  rollout_model:\n"
        text = text.replace(section, f"{section}    enforce_eager: true\n    single_process: true\n")
    path = folder / name
    path.write_text(text.replace("CHECKPOINT_ROOT_DIR", str(folder), 1).replace("/path/to/your/model", str(model)))
    return path


@pytest.mark.parametrize(
    "compiled",
    # What the files ask for by default takes two engines minutes on two cores.
    [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=pytest.mark.soak)],
)
def test_both_files_run_and_the_versions_trained_on_512_rewards_are_served(tmp_path: Path, compiled: bool) -> None:
    model = make_model(tmp_path / "model")
    explorer = Service(filled_in("explorer.yaml", tmp_path, model, compiled=compiled), "explorer")
    trainer = Service(filled_in("trainer.yaml", tmp_path, model), "trainer")
    try:
        explorer.wait_until_ready()
        assert explorer.url.endswith(":8010")
        assert httpx.get(f"{explorer.url}/v1/models", timeout=60).json()["data"][0]["id"] == str(model)
        long = Agent(explorer.url, str(model), lanes=2)
        agent = Agent(explorer.url, str(model), lanes=32, asked={"max_tokens": 4})
        with ThreadPoolExecutor() as pool:
            asking = pool.submit(long.work, 2)  # as long as the files let them be
            agent.work(18 * 32)  # a few more than 16 steps need: a reply may be dropped
            asking.result()
        ledger = ledger_of(explorer.settings)
        wait_for(lambda: ledger.versions.champion().version >= 16, timeout_s=180, why=trainer.log.read_text())
        [base, *made] = ledger.versions.all()
        # `sync_interval: 1` publishes each step, and `save_interval: 16` keeps the sixteenth.
        assert [each.step for each in made[:16]] == [*range(1, 17)]
        assert (sum(each.consumed for each in made[:16]), base.consumed) == (512, 0)
        assert made[15].path == tmp_path / "test" / "test" / "global_step_16"
        assert agent.failures + long.failures == []
        engine = connect(f"sqlite:///{tmp_path}/test/test/buffer/exp_buffer.db")
        with engine.connect() as connection:
            temperatures = connection.execute(select(experiences.c.temperature).distinct()).scalars().all()
        engine.dispose()
        assert temperatures == [0.7]
        assert ledger.reports.imbalance() == []
        ledger.close()
    finally:
        assert (explorer.stop(), trainer.stop()) == (0, 0)


def test_the_tiny_model_is_long_enough_for_the_files() -> None:
    assert LONGEST >= 8192
