import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from tests.conftest import Place
from tests.factories import committed, feedback, ids, published, rewarded
from tuneloop.cli.main import app
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.settings.settings import Settings


@pytest.fixture
def file(tmp_path: Path, place: Place) -> Path:
    buffer = {"name": place.schema or "exp_buffer", "path": place.url}
    values = {
        "checkpoint_root_dir": str(tmp_path),
        "model": {"model_path": "some/model"},
        "buffer": {"trainer_input": {"experience_buffer": buffer}},
    }
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def ledger(file: Path, migrated_place: Place) -> Iterator[Ledger]:
    ledger = Ledger.of(Settings.model_validate(yaml.safe_load(file.read_text())))
    ledger.versions.ensure_base(Path("/base"))
    yield ledger
    ledger.close()


def recompute(file: Path, *arguments: str) -> list[str]:
    found = CliRunner().invoke(app, ["rewards", "recompute", "-c", str(file), *arguments], catch_exceptions=False)
    assert found.exit_code == 0
    return found.output.splitlines()


def test_rewards_are_reckoned_anew_and_first_only_told(file: Path, ledger: Ledger) -> None:
    rewarded(ledger, 3)
    tripled = ("--set", "reward.weights={reward: 3.0}", "--set", "reward.clip=[-3.0, 3.0]")
    rule, told = recompute(file, *tripled, "--dry-run")
    assert '"weights":{"reward":3.0}' in rule
    assert told == "3 replies examined, 3 rewards would change"
    assert recompute(file, *tripled)[1] == "3 replies examined, 3 rewards changed"
    assert recompute(file, *tripled, "--dry-run")[1] == "3 replies examined, 0 rewards would change"
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    assert [sample.reward for sample in ledger.training.lease(epoch, 3, BatchRules())] == [3.0] * 3


def test_a_ledger_of_the_settings_does_with_late_feedback_what_they_say(file: Path, ledger: Ledger) -> None:
    values = yaml.safe_load(file.read_text())
    for compensate, rows in ((False, 1), (True, 3)):
        of_settings = Ledger.of(Settings.model_validate(values | {"feedback": {"compensate_late": compensate}}))
        with closing(of_settings):
            [said] = committed(of_settings)
            epoch = of_settings.training.take_epoch("trainer")
            samples = of_settings.training.lease(epoch, 1, BatchRules())
            of_settings.training.register(epoch, ids(samples), step=1, publish=published)
            of_settings.recording.record([feedback(msg_id=said.msg_id, value=-0.5)])
            assert sum(of_settings.reports.counts().values()) == rows


@pytest.mark.contract
def test_explain_tells_of_one_reply_and_ends_with_1_without_it(file: Path, ledger: Ledger) -> None:
    [said] = rewarded(ledger)

    def explained(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["explain", *arguments, "-c", str(file)], catch_exceptions=False)

    found = explained(said.msg_id)
    assert found.exit_code == 0
    assert "choice 0: it waits (not_committed): it is not committed: POST /commit" in found.output.splitlines()
    [reply] = json.loads(explained(said.msg_id, "--json").output)["replies"]
    assert (reply["state"], reply["reward"], reply["feedback"][0]["fate"]) == ("rewarded", 1.0, "counts")
    unknown = explained("chatcmpl-none")
    assert unknown.exit_code == 1
    assert "the ledger has no reply 'chatcmpl-none'" in unknown.output
