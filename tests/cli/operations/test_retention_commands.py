import json
import time
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from tests.factories import committed, exchange, feedback, ids, published, rewarded
from tuneloop.cli.main import app
from tuneloop.cli.options import seconds
from tuneloop.runner.outbox import Outbox
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import State, encode
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage.schema import exports
from tuneloop.shared.privacy.detection import Detector
from tuneloop.shared.privacy.redactor import Redactor
from tuneloop.shared.settings.feedback import PrivacySettings
from tuneloop.shared.settings.settings import Settings

DAY = 86400.0


def ran(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)


def told(*arguments: object) -> list[str]:
    found = ran(*arguments)
    assert found.exit_code == 0, found.output
    return found.output.splitlines()


def days_ago(days: float) -> float:
    return time.time() - days * DAY


@pytest.mark.parametrize(
    ("text", "meant"), [("30d", 30 * DAY), ("12h", 43200), ("45m", 2700), ("90s", 90), ("90", 90), ("1.5h", 5400)]
)
def test_durations(text: str, meant: float) -> None:
    assert seconds(text) == meant


@pytest.mark.parametrize("text", ["", "d", "-1d", "1w", "1e3", "inf", "nan", "1 d"])
def test_what_is_no_duration(file: Path, ledger: Ledger, text: str) -> None:
    found = ran("purge", "-c", file, "--state", "trained", f"--older-than={text}")
    assert found.exit_code == 2
    assert "30d" in found.output


def test_purge_does_what_the_settings_say(file: Path, ledger: Ledger) -> None:
    rewarded(ledger, 2, received_at=days_ago(31))
    rewarded(ledger, 1, received_at=days_ago(29))
    ledger.recording.record([exchange(received_at=days_ago(31)), feedback(received_at=days_ago(31))])
    by_settings = ("purge", "-c", file, "--set", f"retention.rewarded={30 * DAY}")
    assert told("purge", "-c", file)[0].startswith("nothing is deleted: the settings' retention keeps everything")
    assert told(*by_settings, "--dry-run") == ["would delete", "  rewarded   2 experiences"]
    assert told(*by_settings) == ["deleted", "  rewarded   2 experiences"]
    assert told(*by_settings, "--set", f"retention.recorded={30 * DAY}") == [
        "deleted",
        "  recorded   1 experiences",
        "  rewarded   0 experiences",
        "  feedback   1 events for replies that were never recorded",
    ]
    assert ledger.reports.counts()[State.REWARDED] == 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--state", "trained"], "go together"),
        (["--older-than", "1d"], "go together"),
        (["--state", "leased", "--older-than", "1d"], "wait for the trainer"),
        (["--state", "committed", "--older-than", "1d"], "wait for the trainer"),
    ],
)
def test_what_purge_refuses(file: Path, ledger: Ledger, flags: list[str], reason: str) -> None:
    found = ran("purge", "-c", file, *flags)
    assert found.exit_code == 2
    assert reason in " ".join(found.output.replace("│", " ").split())


@pytest.mark.parametrize("arguments", [["purge"], ["erase", "--user", "ann"]])
def test_a_database_that_is_not_there_is_not_made(file: Path, arguments: list[str]) -> None:
    with pytest.raises(EnvironmentRefused, match="tuneloop db upgrade"):
        ran(*arguments, "-c", file)
    assert sorted(each.name for each in file.parent.iterdir()) == ["x.yaml"]


@pytest.fixture
def ann(ledger: Ledger, tmp_path: Path) -> None:
    [said] = committed(ledger, 1, tenant="default", user="ann")
    ledger.recording.commit("default")
    epoch = ledger.training.take_epoch("trainer")
    ledger.training.register(epoch, ids(ledger.training.lease(epoch, 1, BatchRules())), step=1, publish=published)
    ledger.recording.record([exchange(tenant="default", user="ann"), exchange(tenant="acme", user="ann")])
    lines = [{"msg_id": said.msg_id, "user": None}, {"msg_id": "of-bob", "user": "bob"}]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with ledger.transactions.write() as connection:
        for name in ("sft.jsonl", "gone.jsonl"):
            row = {"path": str(tmp_path / name), "format": "sft", "rows": 2, "created_at": 0}
            connection.execute(exports.insert().values(row))


def test_erase_tells_of_an_outbox_that_no_explorer_clears(file: Path, ledger: Ledger, settings: Settings) -> None:
    erase = ("erase", "-c", file, "--user", "ann")
    assert not any("outbox" in line for line in told(*erase))
    with closing(Outbox(settings.outbox_dir, 1 << 20)) as outbox:
        outbox.append([encode(exchange(user="ann"))])
        assert not any("outbox" in line for line in told(*erase))
    assert not any("outbox" in line for line in told(*erase, "--dry-run"))
    done = ran(*erase)
    assert done.exit_code == 1
    folder = settings.outbox_dir
    assert f"not reached: 1 file of {folder} may hold their text, and no explorer runs" in done.output
    assert f"`tuneloop outbox drain {folder}`" in done.output


@pytest.mark.usefixtures("ann")
def test_erase_tells_what_it_deleted_and_what_stays(file: Path, ledger: Ledger, tmp_path: Path) -> None:
    erase = ("erase", "-c", file, "--user", "ann")
    dry = ran(*erase, "--dry-run")
    assert dry.output.splitlines()[0] == "would delete of 'ann' (tenant default)"
    assert (sum(ledger.reports.counts().values()), len((tmp_path / "sft.jsonl").read_text().splitlines())) == (3, 2)
    found = ran(*erase)
    assert found.exit_code == dry.exit_code == 1, "one of the files could not be reached"
    assert found.output.splitlines() == [
        "deleted of 'ann' (tenant default)",
        "  exchanges    2",
        "  experiences  2",
        "  feedback     1",
        "trained on them",
        "  version 1 (candidate): 1 experiences",
        "  These weights and those of all later versions stay as they are: docs/privacy.md says what can be done.",
        "exported files",
        f"  {tmp_path}/sft.jsonl: 1 rows taken out",
        f"  {tmp_path}/gone.jsonl: 0 rows taken out",
        f"not reached: {tmp_path}/gone.jsonl: No such file or directory",
    ]
    assert [json.loads(line)["msg_id"] for line in (tmp_path / "sft.jsonl").read_text().splitlines()] == ["of-bob"]
    assert [each.rows for each in ledger.retention.exported_files()] == [1, 2]
    assert sum(ledger.reports.counts().values()) == 1


def test_erase_names_the_tasks_and_runs_that_traces_still_hold(file: Path, ledger: Ledger) -> None:
    theirs = [exchange(tenant="default", user="ann", task_id="ann's trip", run_id=f"{run:02}") for run in range(24)]
    ledger.recording.record([*theirs, exchange(tenant="default", user="bob", task_id="bob's", run_id="b")])
    names = [f"{run:02}" for run in range(24)] + ["ann's trip"]
    assert json.loads("".join(told("erase", "-c", file, "--user", "ann", "--dry-run", "--json")))["labels"] == names
    assert told("erase", "-c", file, "--user", "ann")[-2:] == [
        "their tasks and runs, whose names traces still hold if you exported any",
        f"  {', '.join(names[:20])} and 5 more: --json lists them",
    ]


@pytest.mark.parametrize("now", [[], ["email"]])
def test_erase_finds_whom_other_kinds_of_redaction_recorded(file: Path, ledger: Ledger, now: list[str]) -> None:
    settings = Settings.model_validate(yaml.safe_load(file.read_text()))
    by_mail = PrivacySettings.model_validate({"redact": ["email"]})
    redactor = Redactor(Detector(by_mail), key=load_key(settings.job_dir / KEY))
    mail = "ann@example.org"
    said, other = exchange(tenant="default", user=mail), exchange(tenant="default", user="bob")
    judged = feedback(tenant="default", msg_id=other.msg_id, source=f"key:web/{mail}")
    ledger.recording.record(redactor.records([said, other, judged]))
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"privacy": {"redact": now}}))
    lines = told("erase", "-c", file, "--user", mail)[1:]
    assert lines == ["  exchanges    1", "  experiences  1", "  feedback     1"]
    assert ("default", mail) not in ledger.retention.erasures() or not now


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_erase_refuses_without_the_key_of_pseudonyms(file: Path, ledger: Ledger, flags: list[str]) -> None:
    """A new one would find nobody, and say that all went well."""
    key = Settings.model_validate(yaml.safe_load(file.read_text())).job_dir / KEY
    key.unlink()
    with pytest.raises(EnvironmentRefused, match="restore it from a copy"):
        ran("erase", "-c", file, "--user", "ann", *flags)
    assert not key.exists()
    assert ledger.retention.erasures() == {}


def test_a_person_who_is_not_known_is_remembered_all_the_same(file: Path, ledger: Ledger) -> None:
    assert told("erase", "-c", file, "--user", "ann")[1:] == [
        "  exchanges    0",
        "  experiences  0",
        "  feedback     0",
    ]
    ledger.recording.record([exchange(tenant="default", user="ann")])
    assert sum(ledger.reports.counts().values()) == 0
