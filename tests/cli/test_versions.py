"""`tuneloop versions`: what there is, and what an administrator decides."""

import getpass
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from tests.conftest import Place
from tests.databases import put_file
from tests.explorer.checkpoints import register, write_model
from tests.factories import exchange, experience, feedback, rewarded, trained
from tuneloop.cli.main import app
from tuneloop.shared.errors import VersionRefused
from tuneloop.shared.evaluation.samples import SampleStatistics
from tuneloop.shared.experience import Evaluator
from tuneloop.shared.ledger.ledger import Alarm, Ledger
from tuneloop.shared.ledger.storage.schema import evaluations
from tuneloop.shared.ledger.versions.versions import Versions
from tuneloop.shared.operations.version_report import welch
from tuneloop.shared.settings.loader import load_settings

pytestmark = pytest.mark.contract


@pytest.fixture
def file(tmp_path: Path, sqlite_place: Place) -> Path:
    put_file(sqlite_place.url, "migrated")
    values = {
        "checkpoint_root_dir": str(tmp_path),
        "model": {"model_path": str(tmp_path / "model")},
        "explorer": {"service_status_check_interval": 7},
        "buffer": {"trainer_input": {"experience_buffer": {"path": sqlite_place.url}}},
    }
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def ledger(file: Path, tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger.of(load_settings(file))
    ledger.versions.ensure_base(write_model(tmp_path / "model"))
    for number in (1, 2, 3):
        register(ledger, tmp_path)
        if number < 3:
            ledger.versions.promote(number)
    yield ledger
    ledger.close()


def versions(file: Path, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["versions", *map(str, arguments), "-c", str(file)], catch_exceptions=True)


def refusal(told: Result) -> str:
    assert told.exit_code == 1
    assert isinstance(told.exception, VersionRefused)
    return str(told.exception)


def states(ledger: Ledger) -> list[str]:
    return [f"{each.state}{' pinned' if each.pinned else ''}" for each in ledger.versions.all()]


def say(ledger: Ledger, version: int, *rewards: float) -> None:
    for reward in (*rewards, None):
        said = (experience(version_min=version, version_max=version),)
        told = exchange(experiences=said, received_at=time.time())
        about = [feedback(msg_id=told.msg_id, tenant=told.tenant, value=reward)] if reward is not None else []
        ledger.recording.record([told, *about])


def evaluate(ledger: Ledger, version: int, value: float, part: str = "", metric: str = "score") -> None:
    row = {"version": version, "evaluator": Evaluator.ENGINE, "metric": metric, "slice": part, "value": value}
    with ledger.transactions.write() as connection:
        connection.execute(evaluations.insert().values(row | {"deviation": 0.5, "samples": 20, "evaluated_at": 1.0}))


def test_the_list_tells_what_each_is_and_how_it_was_rewarded(file: Path, ledger: Ledger) -> None:
    say(ledger, 2, 1.0, 0.5)
    ledger.versions.pin(2, instead_of=2, by="admin:ann", reason="a demo")
    ledger.versions.reject(3, "it is not finite")
    lines = versions(file, "list").output.splitlines()
    assert lines[0].split() == ["version", "state", "step", "trained", "on", "rewarded", "mean", "age", "reason"]
    assert lines[1].split()[:8] == ["3", "rejected", "1", "1", "0", "of", "0", "-"]
    assert lines[1].endswith("s  it is not finite")
    assert lines[2].split()[:9] == ["2", "champion,", "pinned", "1", "1", "2", "of", "3", "0.75"]
    assert [line.split()[0] for line in lines[3:]] == ["1", "0"]


def test_nothing_that_somebody_wrote_commands_the_terminal_or_adds_a_line(file: Path, ledger: Ledger) -> None:
    evil = "fine\x1b[2J\n      9  champion\u202e"
    ledger.versions.roll_back(2, by=f"admin:{evil}", reason=evil)
    ledger.alarms.raise_alarm(Alarm("length", evil, holds=True))
    shown = [versions(file, "list").output, versions(file, "show", 2).output, versions(file, "list", "--json").output]
    for output in (*shown, CliRunner().invoke(app, ["alarms", "list", "--config", str(file)]).output):
        assert not set(output) & set("\x1b\u202e")
        assert not any(line.split()[:2] == ["9", "champion"] for line in output.splitlines())
    assert json.loads(shown[2])[1]["reason"] == evil


def test_the_list_for_programs(file: Path, ledger: Ledger) -> None:
    say(ledger, 2, 1.0, 0.5)
    rows = json.loads(versions(file, "list", "--json").stdout)
    assert [row["version"] for row in rows] == [3, 2, 1, 0]
    assert rows[1] | {"created_at": 0, "served_at": 0} == {
        "version": 2,
        "state": "champion",
        "pinned": False,
        "step": 1,
        "trained_on": 1,
        "replies": 3,
        "rewarded": 2,
        "mean_reward": 0.75,
        "created_at": 0,
        "served_at": 0,
        "reason": None,
    }


def test_a_version_is_shown_with_what_it_was_made_of_and_all_that_happened_to_it(file: Path, ledger: Ledger) -> None:
    rewarded(ledger)
    ledger.versions.begin_canary(3, by="explorer", reason="a tenth", details={"share": 0.1})
    ledger.versions.roll_back(3, by="admin:ann", reason="it swears")
    evaluate(ledger, 3, 0.25, "sums")
    lines = versions(file, "show", 3).output.splitlines()
    assert lines[0] == "version 3"
    told = {line[2:14].strip(): line[15:] for line in lines[1 : lines.index("evaluations")]}
    assert told["state"] == "rolled_back: it swears"
    assert told["trained on"] == "1 row: 1 of version 0's"
    assert (told["parent"], told["path"]) == ("version 2", str(ledger.versions.all()[3].path))
    assert told["manifest"] == f"sha256 {ledger.versions.all()[3].manifest_sha256}"
    assert " ".join(lines[lines.index("evaluations") + 1].split()) == "score [sums] by engine 0.25 ± 0.5 of 20"
    events = lines[lines.index("events") + 1 :]
    assert [line.partition("UTC  ")[2] for line in events if "UTC" in line] == [
        "published by trainer",
        "canary by explorer: a tenth",
        "rolled_back by admin:ann: it swears",
    ]
    assert '    {"share":0.1}' in events
    shown = json.loads(versions(file, "show", 3, "--json").stdout)
    assert shown["trained_on_replies_of"] == {"0": 1}
    assert (shown["parent"], shown["version"]["state"]) == (2, "rolled_back")
    assert [event["actor"] for event in shown["events"]] == ["trainer", "explorer", "admin:ann"]
    assert refusal(versions(file, "show", 9)) == "there is no version 9"


def test_two_are_compared(file: Path, ledger: Ledger) -> None:
    say(ledger, 1, *[0.0, 0.2] * 8)
    say(ledger, 2, *[0.8, 1.0] * 8)
    evaluate(ledger, 1, 0.25)
    evaluate(ledger, 2, 0.5)
    evaluate(ledger, 2, 0.5, "sums")
    lines = [line.split() for line in versions(file, "compare", 1, 2).output.splitlines()]
    assert lines == [
        ["version", "1", "version", "2"],
        ["state", "retired", "champion"],
        ["replies", "17", "17"],
        ["tokens", "2", "±", "0", "2", "±", "0"],
        ["seconds", "per", "token", "0.25", "±", "0", "0.25", "±", "0"],
        ["reward", "0.1", "±", "0.02582", "0.9", "±", "0.02582"],
        ["rewarded", "16", "from", "16", "sources", "16", "from", "16", "sources"],
        ["difference", "+0.8,", "95", "%", "interval", "+0.7254", "to", "+0.8746"],
        ["score", "by", "engine", "0.25", "±", "0.5", "of", "20", "0.5", "±", "0.5", "of", "20"],
        ["score", "[sums]", "by", "engine", "-", "0.5", "±", "0.5", "of", "20"],
    ]
    told = json.loads(versions(file, "compare", 1, 2, "--json").stdout)
    assert told["difference"] == pytest.approx(0.8)
    assert told["interval"] == [pytest.approx(0.7254, abs=1e-4), pytest.approx(0.8746, abs=1e-4)]
    assert (told["evaluations"][1]["a"], told["evaluations"][1]["b"]["value"]) == (None, 0.5)
    assert refusal(versions(file, "compare", 1, 8)) == "there is no version 8"


def test_figures_of_different_tasks_are_not_passed_off_as_comparable(file: Path, ledger: Ledger) -> None:
    for version, fingerprint in ((1, 11.0), (2, 11.0), (3, 12.0)):
        evaluate(ledger, version, fingerprint, metric="tasks")
        evaluate(ledger, version, 0.5)
    same, other = (versions(file, "compare", 1, version).output for version in (2, 3))
    assert "different tasks" not in same
    assert "by engine the tasks differ" in other
    assert "tasks" not in versions(file, "show", 1).output


def test_of_few_rewards_only_the_difference_is_told(file: Path, ledger: Ledger) -> None:
    say(ledger, 1, 0.0)
    assert versions(file, "compare", 1, 2).output.splitlines()[-1].split() == ["difference", "-"]
    say(ledger, 2, 1.0)
    assert "+1, from too few sources for an interval (4 of each)" in versions(file, "compare", 1, 2).output


@pytest.mark.parametrize(
    ("counts", "deviations", "half"),
    # Half the width: the quantile of Student's t by integrating its density, times the error of the difference.
    [((4, 4), (1.0, 1.0), 1.730228), ((5, 40), (0.5, 2.0), 0.796821), ((200, 300), (1.0, 1.0), 0.179428)],
)
def test_the_interval_is_welchs(counts: tuple[int, int], deviations: tuple[float, float], half: float) -> None:
    a, b = (SampleStatistics(count, count, 0.0, width**2) for count, width in zip(counts, deviations, strict=True))
    assert welch(a, b) == (pytest.approx(-half, rel=1e-5), pytest.approx(half, rel=1e-5))
    assert welch(a._replace(units=3), b) is None


def test_a_candidate_or_an_older_version_is_promoted(file: Path, ledger: Ledger) -> None:
    told = versions(file, "promote", 3)
    assert (told.exit_code, told.output) == (0, "version 3 is the champion; the explorer loads it within 7 s\n")
    assert versions(file, "promote", 1, "--reason", " as it was ", "--by", "ann").exit_code == 0
    assert states(ledger) == ["retired", "champion", "retired", "retired"]
    first, second = (
        next(
            event for event in ledger.versions.events(version) if event.action == "promoted" and "admin" in event.actor
        )
        for version in (3, 1)
    )
    assert (first.actor, second.actor, second.reason) == (f"admin:{getpass.getuser()}", "admin:ann", "as it was")


def test_without_a_number_the_canary_is_rolled_back_and_then_the_champion(file: Path, ledger: Ledger) -> None:
    ledger.versions.begin_canary(3, by="explorer", reason="a tenth")
    assert versions(file, "rollback").exit_code == 2, "a reason is required"
    assert "give a reason" in refusal(versions(file, "rollback", "--reason", " "))
    told = versions(file, "rollback", "--reason", "it swears")
    assert told.output.startswith("version 3 is rolled back; version 2 is the champion; the explorer loads it within")
    told = versions(file, "rollback", "--reason", "so does it", "--expect", 2)
    assert told.output.startswith("version 2 is rolled back; version 1 is the champion;")
    assert states(ledger) == ["retired", "champion", "rolled_back", "rolled_back"]
    assert ledger.versions.all()[2].reason == "so does it"


def test_a_candidate_or_a_retired_version_is_rejected_and_nothing_else_is(file: Path, ledger: Ledger) -> None:
    assert versions(file, "reject", 3).exit_code == 2, "a reason is required"
    assert "give a reason" in refusal(versions(file, "reject", 3, "--reason", " "))
    assert versions(file, "reject", 3, "--reason", "wrong data", "--by", "ann").output == (
        "version 3 is rejected; version 2 is the champion\n"
    )
    assert states(ledger) == ["retired", "retired", "champion", "rejected"]
    assert (ledger.versions.events(3)[-1].actor, ledger.versions.all()[3].reason) == ("admin:ann", "wrong data")
    assert versions(file, "reject", 1, "--reason", "damaged").exit_code == 0
    for version, state in ((3, "rejected"), (2, "champion"), (1, "rejected")):
        found = refusal(versions(file, "reject", version, "--reason", "x"))
        assert found.startswith(f"version {version} is {state}: only a candidate, or a retired version, can be")
    assert refusal(versions(file, "reject", 9, "--reason", "x")) == "there is no version 9"
    assert refusal(versions(file, "reject", 0, "--reason", "x")).startswith("version 0 is the base model, which is")
    assert states(ledger) == ["retired", "rejected", "champion", "rejected"]


def test_a_pinned_version_stays_until_it_is_unpinned(file: Path, ledger: Ledger) -> None:
    assert versions(file, "pin", 1, "--reason", "a demo").output.startswith(
        "version 1 is pinned, and the champion until"
    )
    assert states(ledger) == ["retired", "champion pinned", "retired", "candidate"]
    for refused in (("promote", 3), ("pin", 2), ("rollback", 1, "--reason", "no")):
        assert refusal(versions(file, *refused)) == "version 1 is pinned; unpin it first"
    assert versions(file, "unpin", "--by", "ann").output.startswith("version 1 is unpinned; the explorer loads")
    assert ledger.versions.events(1)[-1].actor == "admin:ann"
    assert refusal(versions(file, "unpin")) == "no version is pinned"


def test_what_cannot_be_is_refused_and_changes_nothing(file: Path, ledger: Ledger) -> None:
    trained(ledger)
    ledger.versions.reject(4, "it is not finite")
    before, told = states(ledger), ledger.versions.events()
    for arguments, why in {
        ("promote", 9): "there is no version 9",
        ("rollback", 9, "--reason", "x"): "there is no version 9",
        ("pin", 9): "there is no version 9",
        ("promote", 4): "version 4 is rejected: it is not finite",
        ("pin", 4): "version 4 is rejected: it is not finite",
        ("rollback", 1, "--reason", "x"): "version 1 is retired: only what serves can be rolled back",
        ("promote", 3, "--expect", 1): "version 2 is the champion, not version 1: look again, then decide",
        ("pin", 3, "--expect", 1): "version 2 is the champion, not version 1: look again, then decide",
        ("rollback", "--expect", 1, "--reason", "x"): (
            "version 2 is the champion, not version 1: look again, then decide"
        ),
    }.items():
        assert refusal(versions(file, *arguments)) == why
    assert (states(ledger), ledger.versions.events()) == (before, told)


def test_a_checkpoint_that_is_damaged_or_gone_is_not_promoted(file: Path, ledger: Ledger) -> None:
    before = states(ledger)
    weights = ledger.versions.all()[3].path / "actor" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    shutil.rmtree(ledger.versions.all()[1].path)
    for command in ("promote", "pin"):
        told = refusal(versions(file, command, 3))
        assert told.startswith("version 3 cannot be served: global_step_3/actor/model.safetensors: ")
        assert "manifest cannot be read" in refusal(versions(file, command, 1))
    assert states(ledger) == before


def test_of_two_at_once_the_second_is_told_so(file: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    champion = Versions.champion

    def seen_too_early(self: Versions) -> object:
        """What the second sees, before the first one's decision."""
        monkeypatch.setattr(Versions, "champion", champion)
        found = champion(self)
        ledger.versions.appoint(1, instead_of=2, by="admin:bob", reason="I was first")
        return found

    monkeypatch.setattr(Versions, "champion", seen_too_early)
    told = refusal(versions(file, "promote", 3))
    assert told == "version 1 is the champion, not version 2: look again, then decide"
    assert states(ledger) == ["retired", "champion", "retired", "candidate"]
