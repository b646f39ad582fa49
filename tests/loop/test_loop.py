"""Both services with every real component: requests, feedback, training, new weights, and SIGKILL."""

from pathlib import Path
from statistics import mean

import httpx
import pytest
import yaml
from sqlalchemy import Engine, make_url, select
from sqlalchemy import create_engine as engine_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.hostile.listening import ANYWHERE, LOOPBACK, listening
from tests.install.foreign import Foreign
from tests.install.foreign import foreign as foreign
from tests.loop.harness.agent import Agent
from tests.loop.harness.services import (
    Service,
    alive,
    descendants,
    in_several_processes,
    ledger_of,
    wait_for,
    write_settings,
)
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.database import connect
from tuneloop.shared.ledger.storage.schema import experiences

pytestmark = [pytest.mark.vllm, pytest.mark.contract]


def tags(folder: Path) -> set[str]:
    """The names of the curves in a TensorBoard folder."""
    curves = EventAccumulator(str(folder))
    curves.Reload()
    return set(curves.Tags()["scalars"])


def wait_until_idle(ledger: Ledger, batch: int) -> None:
    """Wait until less than a batch waits for the trainer."""
    wait_for(lambda: ledger.reports.counts()["committed"] + ledger.reports.counts()["leased"] < batch, timeout_s=60)


def stored_rewards(engine: Engine) -> dict[str, float]:
    with engine.connect() as connection:
        return {
            row.msg_id: row.reward for row in connection.execute(select(experiences.c.msg_id, experiences.c.reward))
        }


def settings_on_postgres(folder: Path, model: Path, postgres_url: str, database: str) -> tuple[Path, str]:
    """Settings of both services on a database of their own, and its URL."""
    admin = engine_of(make_url(postgres_url).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {database}")
    admin.dispose()
    url = make_url(postgres_url).set(database=database).render_as_string(hide_password=False)
    buffer = {"train_batch_size": 16, "trainer_input": {"experience_buffer": {"name": "ledger", "path": url}}}
    return in_several_processes(write_settings(folder, model, buffer=buffer)), url


def open_to_others(config: Path) -> None:
    """Have the explorer listen on every address of this machine, whose engines and trainer must not."""
    values = yaml.safe_load(config.read_text())
    values["explorer"] |= {"listen_address": "0.0.0.0", "insecure": True}
    config.write_text(yaml.safe_dump(values))


def test_one_command_runs_the_whole_loop_and_the_next_goes_on_after_sigkill(
    model: Path, tmp_path: Path, postgres_url: str, foreign: Foreign
) -> None:
    config, url = settings_on_postgres(tmp_path, model, postgres_url, "killed")
    both = Service(config, "both", cwd=foreign.folder)
    both.wait_until_ready()
    agent = Agent(both.url, both.settings.served_model_name)
    agent.work(48)
    ledger = ledger_of(both.settings)
    wait_for(lambda: ledger.versions.champion().version >= 1, timeout_s=60)
    delays = ledger.reports.feedback_to_served()
    assert delays
    assert all(0 < delay < 60 for delay in delays)
    brood = descendants(both.process.pid)
    assert len(brood) >= 4
    both.kill()
    wait_for(lambda: not any(alive(pid) for pid in brood), timeout_s=20, why=f"still alive: {brood}")

    open_to_others(config)
    again = Service(config, "both", cwd=foreign.folder)
    try:
        again.wait_until_ready()
        # Control process, worker, guard, engine, and the engine's own; trainer.
        family = [again.process.pid, *descendants(again.process.pid)]
        assert len(family) > 5
        found = listening(family)
        port = again.settings.explorer.proxy_port
        assert {each for each in found if not each[1].startswith(LOOPBACK)} == {("tcp", ANYWHERE, port)}
        champion = ledger.versions.champion().version
        reply = httpx.post(
            f"{again.url}/v1/chat/completions",
            json={"model": again.settings.served_model_name, "messages": [{"role": "user", "content": "hi"}]},
            timeout=60,
        )
        assert int(reply.headers["x-tuneloop-version"]) >= champion >= 1
        engine = connect(url, schema="ledger")
        assert agent.acknowledged.items() <= stored_rewards(engine).items()
        engine.dispose()
        before = ledger.versions.newest().version
        agent.work(48)
        wait_for(lambda: ledger.versions.champion().version > before, timeout_s=60)
        assert agent.failures == []
        assert ledger.reports.imbalance() == []
    finally:
        assert again.stop() == 0
        ledger.close()
    assert {"critic/rewards/mean", "actor/ppo_kl", "actor/pg_clipfrac", "actor/entropy", "critic/vf_loss"} <= tags(
        both.settings.tensorboard_dir / "trainer"
    )
    assert {"served/requests", "served/reward_mean"} <= tags(both.settings.tensorboard_dir / "explorer")
    assert foreign.imported() == []


@pytest.mark.soak
def test_the_reward_rises(model: Path, tmp_path: Path) -> None:
    both = Service(in_several_processes(write_settings(tmp_path, model)), "both")
    try:
        both.wait_until_ready()
        agent = Agent(both.url, both.settings.served_model_name)
        ledger = ledger_of(both.settings)
        for _ in range(12):  # how fast the trainer and the swaps are beside the agent is the machine's
            agent.work(80)
            wait_until_idle(ledger, 16)
            wait_for(lambda: ledger.versions.candidate() is None, timeout_s=60)
        assert agent.failures == []
        assert ledger.reports.imbalance() == []
        assert ledger.versions.champion().version >= 8
        assert mean(agent.rewards[-160:]) > mean(agent.rewards[:160]) + 0.1
        ledger.close()
    finally:
        assert both.stop() == 0


# While they start; above it is done while they work.
@pytest.mark.soak
def test_a_supervisor_that_is_killed_takes_everything_with_it(model: Path, tmp_path: Path) -> None:
    config = in_several_processes(write_settings(tmp_path, model))
    both = Service(config, "both")
    brood = wait_for(lambda: len(found := descendants(both.process.pid)) >= 4 and found, timeout_s=60)
    both.kill()
    wait_for(lambda: not any(alive(pid) for pid in brood), timeout_s=45, why=f"still alive: {brood}")
