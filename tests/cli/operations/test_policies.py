"""`tuneloop policies`, and decisions about versions of another policy than the default one."""

import json
from pathlib import Path

import pytest
import yaml

from tests.cli.operations.conftest import Run
from tests.factories import committed, experience, published
from tuneloop.shared.errors import EnvironmentRefused, PolicyRefused
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.operations.policy_report import make_configured
from tuneloop.shared.settings.settings import Settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.yaml"
    model = {"model_path": "some/model", "lora": {"rank": 4}}
    path.write_text(yaml.safe_dump({"checkpoint_root_dir": str(tmp_path), "model": model}))
    return path


@pytest.fixture
def based(ledger: Ledger) -> Ledger:
    ledger.versions.ensure_base(Path("/base"))
    return ledger


def learn(ledger: Ledger, policy: int, reward: float = 1.0) -> int:
    line = ledger.versions.of(policy)
    version = line.champion().version
    committed(ledger, policy=policy, experiences=(experience(version_min=version, version_max=version),))
    epoch = ledger.training.take_epoch("trainer")
    [row] = ledger.training.lease(epoch, 1, BatchRules(policy=policy))
    made = ledger.training.register(epoch, [row.id], step=1, publish=published, parent=version, policy=policy)
    line.promote(made)
    return made


def test_a_policy_is_made_listed_and_shown(based: Ledger, run: Run) -> None:
    made = run("policies", "create", "acme/support", "--option", "algorithm.gamma=0.5")
    assert made.output == "support begins as version 1, with the weights of version 0\n"
    learn(based, 1)
    [default, support] = json.loads(run("policies", "list", "--json").output)
    assert (default["name"], default["served"], default["waiting"]) == ("default", 0, 0)
    assert (support["tenant"], support["served"], support["trained_on"]) == ("acme", 2, 1)
    assert support["options"] == {"algorithm.gamma": 0.5}
    assert "acme/support" in run("policies", "list").output
    assert "trained_on     1" in run("policies", "show", "support").output


def test_a_policy_begins_with_the_champion_of_another(based: Ledger, run: Run) -> None:
    run("policies", "create", "one")
    version = learn(based, 1)
    assert run("policies", "create", "two", "--parent", "one").output.endswith(f"the weights of version {version}\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["support", "--option", "explorer.proxy_port=1"], "explorer.proxy_port: a policy has no such option"),
        (["support", "--option", "algorithm.gamma"], "write KEY=VALUE"),
        (["support", "--option", "algorithm.gamma=[1"], "algorithm.gamma: not a value"),
        (["support", "--option", "algorithm.algorithm_type=magic"], "algorithm.algorithm_type"),
        (["support", "--parent", "7"], "there is no version 7"),
        (["support", "--parent", "none"], "there is no policy none; there are default"),
        (["default"], "there is a policy of that name"),
        (["a b"], "a policy's name has 1 to 64"),
        (["some/model", "--set", "model.lora.rank=0"], "all weights are trained"),
    ],
)
def test_what_cannot_be_made_is_refused(based: Ledger, run: Run, words: list[str], sentence: str) -> None:
    with pytest.raises(Exception, match=sentence):
        run("policies", "create", *words)
    assert len(based.policies.all()) == 1


def test_a_policy_is_paused_resumed_promoted_and_deleted(based: Ledger, run: Run) -> None:
    run("policies", "create", "side")
    assert run("policies", "pause", "side").output == "side is not trained any more\n"
    assert based.policies.get(1).state == "paused"
    run("policies", "resume", "side")
    learn(based, 1)
    assert run("policies", "promote", "side").output == "version 3 of default has the weights of the champion of side\n"
    assert run("policies", "delete", "side").output == "side is deleted\n"
    assert [each.name for each in based.policies.all()] == ["default"]
    assert based.reports.counts()[State.TRAINED] == 1
    with pytest.raises(PolicyRefused, match="the default policy cannot be deleted"):
        run("policies", "delete", "default")


def test_versions_of_a_policy_are_decided_about_within_it(based: Ledger, run: Run) -> None:
    run("policies", "create", "side")
    version = learn(based, 1)
    run("versions", "rollback", version, "--reason", "worse")
    assert [based.versions.of(each).champion().version for each in (0, 1)] == [0, 1]
    run("versions", "pin", 1, "--reason", "for now")
    assert based.versions.pinned_version() is None
    assert run("versions", "unpin", 1).output.startswith("version 1 is unpinned")


def test_the_settings_make_policies_once(based: Ledger, settings: Settings) -> None:
    wanted = {"a": {"options": {"algorithm.gamma": 0.5}}, "b": {"tenant": "acme", "parent": "a"}}
    settings = Settings.model_validate(settings.model_dump(exclude_unset=True) | {"policies": wanted})
    for _ in range(2):
        make_configured(settings, based)
    assert [(each.tenant, each.name, each.parent) for each in based.policies.all()[1:]] == [
        ("", "a", 0),
        ("acme", "b", 1),
    ]
    wanted["a"] = {"options": {"algorithm.gamma": 0.9}}
    make_configured(Settings.model_validate(settings.model_dump(exclude_unset=True) | {"policies": wanted}), based)
    assert based.policies.get(1).settings == {"algorithm.gamma": 0.9}
    wanted["b"]["parent"] = 2
    with pytest.raises(EnvironmentRefused, match=r"^policies\.b: it began with version 1"):
        make_configured(Settings.model_validate(settings.model_dump(exclude_unset=True) | {"policies": wanted}), based)


def test_policies_need_adapters(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="policies: all weights are trained"):
        Settings.model_validate({"model": {"model_path": tmp_path}, "policies": {"a": {}}})


def test_a_key_goes_to_its_policy(based: Ledger, run: Run) -> None:
    run("policies", "create", "acme/support")
    run("keys", "create", "--name", "acme/web", "--policy", "support")
    assert [each.policy for each in based.keys.all()] == [1]
    with pytest.raises(PolicyRefused, match="there is no policy support; there are default"):
        run("keys", "create", "--name", "umbra/web", "--policy", "support")
