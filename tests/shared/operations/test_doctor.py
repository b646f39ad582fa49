"""`tuneloop doctor`: a page that an operator reads in one look, from a real database in each condition."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.conftest import Place
from tests.doubles.warm.commands import Ended, run_tuneloop
from tests.factories import committed, exchange, experience, feedback, leased, outboxed, refuse, rewarded, take, trained
from tuneloop.shared.capacity.pace import VersionPace, note_version
from tuneloop.shared.experience import Exchange, pack_ids, pack_logprobs
from tuneloop.shared.job_marks import StepRules, note_step_rules
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.operations.diagnosis import Code
from tuneloop.shared.operations.doctor import as_json, as_text, examine_experiment
from tuneloop.shared.outbox_status import OutboxStatus, files_of, path_of
from tuneloop.shared.settings.loader import load_settings
from tuneloop.shared.settings.settings import Settings


@pytest.fixture
def file(tmp_path: Path, place: Place) -> Path:
    buffer = {"path": place.url, "name": place.schema or "exp_buffer"}
    path = tmp_path / "x.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "checkpoint_root_dir": str(tmp_path / "checkpoints"),
                "model": {"model_path": "some/model"},
                "buffer": {"train_batch_size": 4, "trainer_input": {"experience_buffer": buffer}},
            }
        )
    )
    return path


@pytest.fixture
def settings(file: Path) -> Settings:
    return load_settings(file)


@pytest.fixture
def made(settings: Settings, migrated_place: Place) -> Iterator[Ledger]:
    ledger = Ledger.of(settings)
    yield ledger
    ledger.close()


def doctor(file: Path, *arguments: str) -> Ended:
    return run_tuneloop("doctor", "-c", file, *arguments)


def page(settings: Settings) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in as_text(examine_experiment(settings), settings):
        title = line[:10].strip() or list(found)[-1]
        found.setdefault(title, []).append(line[11:])
    return found


def test_before_anything_ran_nothing_is_made_and_nothing_wrong(file: Path, settings: Settings) -> None:
    code, out, error = doctor(file)
    assert (code, error) == (0, "")
    assert "no_trainer: no trainer has ever started" in out
    assert "nothing_recorded: no experience was recorded yet" in out
    schema = settings.buffer.trainer_input.experience_buffer.name
    assert revisions.current(settings.database_url, schema=schema) is None
    assert not settings.job_dir.exists()


def test_why_calls_of_runs_do_not_merge_is_told_in_one_line(settings: Settings, made: Ledger) -> None:
    def said(run_id: str | None, prompt: list[int], reply: list[int]) -> Exchange:
        numbers = {"completion_ids": pack_ids(reply), "logprobs": pack_logprobs([-0.5] * len(reply))}
        tokens = experience(prompt_ids=pack_ids(prompt), **numbers)
        return exchange(task_id=run_id and "t", run_id=run_id, request=b"{}", engine=0, experiences=(tokens,))

    made.recording.record([said("1", [1, 2], [3]), said("1", [1, 2, 3, 4], [5]), said(None, [7], [8])])
    assert as_json(examine_experiment(settings))["unmerged"] is None
    for run in "2345":
        other = [1, 2, 8, 4] if run == "5" else [9, 2, 3]
        made.recording.record([said(run, [1, 2], [3]), said(run, other, [5])])
    [told] = [line for line in page(settings)["Trainer"] if "do not continue" in line]
    assert told.startswith("4 of 5 later calls of runs do not continue those before; most often as here: turn 2 leaves")


def test_a_ledger_in_order_is_a_page(settings: Settings, made: Ledger) -> None:
    made.versions.ensure_base(Path("/base"))
    made.versions.promote(trained(made, 2))
    rewarded(made, 1)
    committed(made, 3)
    made.recording.record([exchange(), exchange(experiences=(experience(drop_reason="cut off"),))])
    made.recording.record([feedback(msg_id="chatcmpl-unknown")])
    found = page(settings)
    assert found["Ledger"] == [
        "8 experiences = 1 recorded + 0 rewarded + 4 committed + 0 leased + 2 trained + 0 expired + 1 dropped",
        "2 trained + 0 purged = 2 consumed by 1 version",
        "holds",
    ]
    waiting = [line.split(", ")[0].split(maxsplit=2) for line in found["Waiting"]]
    assert waiting == [
        ["recorded", "1", "for feedback"],
        ["rewarded", "0", "for a commit"],
        ["committed", "4", "for a batch of 4"],
        ["leased", "0", "for its version"],
        ["feedback", "1", "for the reply it is about"],
        ["dropped", "1", "cut off"],
    ]
    (trainer,) = found["Trainer"]
    assert re.fullmatch(r"trainer, epoch 1: up, last seen \d s ago", trainer)
    (versions,) = found["Versions"]
    assert re.fullmatch(r"newest 1, registered \d s ago; served 1; 1 step done", versions)
    assert found["Outbox"] == [f"{settings.outbox_dir}: 0 records, 0 bytes not in the database yet"]
    assert found["Diagnosis"] == ["none: a full batch waits, and a trainer that lives is about to take it"]


def test_a_ledger_that_does_not_add_up_ends_with_1(file: Path, made: Ledger) -> None:
    trained(made, 2)
    with made.transactions.write() as connection:
        connection.exec_driver_sql("UPDATE versions SET consumed = 7")
    code, out, _ = doctor(file)
    assert code == 1
    assert "does NOT hold: 2 experiences are trained, but the versions consumed 7" in out
    assert "does NOT hold: version 1 consumed 7, but 2 rows name it and 0 are purged" in out
    assert "holds\n" not in out


def test_programs_get_json(file: Path, made: Ledger) -> None:
    committed(made, 3)
    made.training.take_epoch("host:1")
    code, out, error = doctor(file, "--json")
    found = json.loads(out)
    assert (code, error) == (0, "")
    assert (found["holds"], found["imbalance"]) == (True, [])
    assert found["states"]["committed"]["rows"] == 3
    assert found["batch"] == {"size": 4, "claimable": 3, "too_old": 0}
    assert (found["trainer"]["name"], found["trainer"]["up"]) == ("host:1", True)
    assert [reason["code"] for reason in found["reasons"]] == ["batch_not_full"]


def test_a_trainer_that_has_stopped_and_one_that_died_are_told_apart(settings: Settings, made: Ledger) -> None:
    dead = Ledger(made.transactions.engine, clock=lambda: 1000.0)
    epoch = dead.training.take_epoch("host:1")
    assert "host:1, epoch 1: NOT up, last seen" in page(settings)["Trainer"][0]
    made.training.end(epoch)
    (trainer,) = page(settings)["Trainer"]
    assert re.fullmatch(r"host:1, epoch 1: stopped \d+ s ago", trainer)


def test_replies_that_the_method_will_not_take_are_told_while_they_wait(settings: Settings, made: Ledger) -> None:
    strict = experience(unsampled="sampling:tools")
    made.recording.record([exchange(), *(exchange(experiences=(strict,)) for _ in range(2))])
    line = "recorded          2 no samples of the policy, not to be trained on: sampling:tools"
    assert line in page(settings)["Waiting"]
    taking = settings.model_copy(update={"algorithm": settings.algorithm.model_copy(update={"algorithm_type": "raft"})})
    assert line not in page(taking)["Waiting"]


def test_what_truncation_costs_is_told_with_the_cure(settings: Settings, made: Ledger) -> None:
    for reason, rows in (("sampling:top_p", 3), ("sampling:mask_too_large", 2)):
        made.recording.record([exchange(experiences=(experience(unsampled=reason),)) for _ in range(rows)])
    waiting = page(settings)["Waiting"]
    [missing], [large] = ([line for line in waiting if reason in line] for reason in (":top_p", ":mask_too_large"))
    assert missing.split()[:2] == ["recorded", "3"]
    assert "load tuneloop's plug-in into it" in missing
    assert large.split()[:2] == ["recorded", "2"]
    assert "send `top_k`" in large


def test_what_the_outbox_holds_is_told_without_touching_it(settings: Settings, made: Ledger) -> None:
    file = outboxed(settings.outbox_dir, *(exchange(received_at=at, latency_s=0.5) for at in (10.0, 1000.0)))
    waiting = path_of(settings.outbox_dir, file).stat().st_size // 2
    take(made, file, 1)
    take(made, "1-gone-1", 3)
    refuse(made, file, b"refused")
    report = examine_experiment(settings, clock=lambda: 4600.5)
    text = "\n".join(as_text(report, settings))
    assert f"1 record, {waiting} bytes not in the database yet, the oldest for 60 min, since 1970-01-01" in text
    assert "; the database refused 1 record: `tuneloop outbox list`" in text
    assert "1-gone-1: the database knows this file, and no explorer holds it: `tuneloop outbox drain` its" in text
    assert Code.OUTBOX_NOT_DRAINED in [reason.code for reason in report.reasons]
    assert report.facts.outbox == OutboxStatus(1, 1, waiting, 1000.5, 1)
    assert report.unseen == ("1-gone-1",)
    assert files_of(settings.outbox_dir) == [file]


def test_while_the_database_is_away_the_outbox_is_told(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(f"checkpoint_root_dir: {tmp_path}\nmodel: {{model_path: some/model}}\n")
    url = "buffer.trainer_input.experience_buffer.path=postgresql://u:secret@127.0.0.1:1/d"
    outboxed(load_settings(file).outbox_dir, exchange(received_at=1000.0))
    code, out, error = doctor(file, "--set", url)
    assert code == 3
    assert "cannot use the database postgresql+psycopg://u:***@127.0.0.1:1/d" in error
    assert re.search(r"1 record, \d+ bytes on disk, the oldest for ", out)
    assert "database_away: the database cannot be read" in out
    assert "outbox_not_drained: " in out
    assert "secret" not in out + error


@pytest.mark.usefixtures("made")
def test_a_database_of_another_release_is_left_alone(settings: Settings, made: Ledger) -> None:
    with made.transactions.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0000'")
    report = examine_experiment(settings)
    assert report.facts.ledger is None
    assert report.facts.away.startswith("the database has the schema 0000, this release works with ")
    assert as_json(report)["holds"] is None


def test_how_far_the_trainer_lags_is_told(settings: Settings, made: Ledger) -> None:
    trained(made, 2)
    now = made.transactions.time()
    for at, set_aside in ((now - 20, 0), (now - 10, 90)):
        figures = {"consumed": 10, "waiting": 0, "set_aside": set_aside, "step_s": 1.0, "publish_s": 8.0}
        note_version(settings.job_dir, VersionPace(at=at, **figures))
    said = "10 replies a second are committed, 1 trained: the trainer lags 10 times behind"
    assert page(settings)["Trainer"][1] == f"{said}; publishing takes 80% of its time: raise trainer.save_interval"
    found = as_json(examine_experiment(settings))["pace"]
    assert found == {"committed": 10.0, "trained": 1.0, "steps": 0.1, "publishing": 0.8, "lag": 10.0}


@pytest.mark.contract
def test_whose_feedback_a_share_holds_back_is_told_by_name(settings: Settings, made: Ledger) -> None:
    flood, others = [exchange() for _ in range(8)], [exchange() for _ in range(10)]
    made.recording.record([*flood, *(feedback(msg_id=each.msg_id, source="flo\x1bod") for each in flood)])
    made.recording.commit("acme")
    made.recording.record([*others, *(feedback(msg_id=each.msg_id, source=each.msg_id) for each in others)])
    made.versions.ensure_base(Path("/base"))
    made.training.take_epoch("host:1")
    [line] = page(settings)["Diagnosis"]
    assert line.startswith("rater_share: feedback.max_rater_share keeps experiences of these raters out")
    assert "flo\\x1bod (acme) 7." in line
    assert as_json(examine_experiment(settings))["held_back"] == [{"tenant": "acme", "rater": "flo\x1bod", "rows": 7}]


@pytest.mark.contract
def test_what_is_missing_for_a_version_is_told_by_the_rules_of_the_trainer(settings: Settings, made: Ledger) -> None:
    """The explorer's file has another batch, and a version after every step."""
    made.versions.ensure_base(Path("/base"))
    note_step_rules(settings.job_dir, StepRules(8, None, save_interval=16, total_steps=None))
    leased(made, 16)
    [told] = page(settings)["Diagnosis"]
    assert re.sub(r"for \d+ s", "for some s", told) == (
        "leased: 16 experiences in training, for some s at most, 2 of the 16 steps to the next version: it takes 112"
        " more experiences, rewarded and committed, or a lower trainer.save_interval"
    )
    note_step_rules(settings.job_dir, StepRules(8, None, save_interval=16, total_steps=2))
    assert page(settings)["Diagnosis"][0].endswith(": wait, or see what the trainer logs")
    note_step_rules(settings.job_dir, StepRules(8, 1.0, save_interval=16, total_steps=None))
    assert "towards a version of 16 steps" in page(settings)["Diagnosis"][0]
