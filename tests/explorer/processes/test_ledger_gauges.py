"""The gauges that say what waits where, and why no step is happening."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from tests.doubles.engine import EngineDouble
from tests.explorer.running import RunningExplorer, eventually, explorer_running, open_ledger, settings_for
from tests.factories import committed, exchange, experience, feedback, rewarded, trained
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.processes.ledger_gauges import LedgerGauges
from tuneloop.explorer.processes.services import VersionLog
from tuneloop.shared.capacity.pace import VersionPace, note_version
from tuneloop.shared.errors import LedgerUnavailable
from tuneloop.shared.job_marks import KEY
from tuneloop.shared.ledger.facts import ExplorerFacts, LedgerFacts
from tuneloop.shared.ledger.ledger import Alarm, BatchRules, Ledger
from tuneloop.shared.ledger.reports import Reports, VersionReward
from tuneloop.shared.operations.diagnosis import WAITING, Code, find_stops
from tuneloop.shared.outbox_status import OutboxStatus


class AwayReports(Reports):
    """Its database cannot be reached."""

    def facts(self, policy: BatchRules, *, drops: int = 0, batch: int | None = None) -> LedgerFacts:
        raise LedgerUnavailable("connection refused")


def by_label(explorer: RunningExplorer, name: str) -> dict[str, float]:
    """The samples of one gauge, by their only label."""
    text = explorer.http.get("/metrics").text
    [family] = [each for each in text_string_to_metric_families(text) if each.name == name]
    return {next(iter(sample.labels.values())): sample.value for sample in family.samples}


def holding(explorer: RunningExplorer) -> set[str]:
    found = by_label(explorer, "tuneloop_no_step")
    assert set(found) == {code.value for code in Code}
    assert set(found.values()) <= {0, 1}
    return {code for code, holds in found.items() if holds}


def test_reasons_are_gauges_and_go_when_they_are_cured(explorer: RunningExplorer) -> None:
    eventually(lambda: holding(explorer) == {"no_trainer", "nothing_recorded"})
    said = explorer.chat().json()["id"]
    eventually(lambda: holding(explorer) == {"no_trainer", "no_feedback"})
    explorer.feedback(said)
    eventually(lambda: holding(explorer) == {"no_trainer", "not_committed"})
    explorer.commit()
    explorer.ledger.training.take_epoch("host:1")
    eventually(lambda: holding(explorer) == {"batch_not_full"})
    committed(explorer.ledger, 31)
    explorer.commit()
    explorer.ledger.recording.commit("acme")
    eventually(lambda: holding(explorer) == {"none"})


def test_a_trainer_is_up_until_it_stops(explorer: RunningExplorer) -> None:
    eventually(lambda: explorer.metrics()["tuneloop_trainer_up"] == 0)
    epoch = explorer.ledger.training.take_epoch("host:1")
    eventually(lambda: explorer.metrics()["tuneloop_trainer_up"] == 1)
    explorer.ledger.training.end(epoch)
    eventually(lambda: explorer.metrics()["tuneloop_trainer_up"] == 0)


def test_a_trainer_that_was_not_seen_for_a_minute_is_not_up(explorer: RunningExplorer) -> None:
    Ledger(explorer.ledger.transactions.engine, clock=lambda: time.time() - 61).training.take_epoch("host:1")
    eventually(lambda: holding(explorer) == {"no_trainer", "nothing_recorded"})
    assert explorer.metrics()["tuneloop_trainer_up"] == 0


def test_what_waits_has_an_age_by_state(explorer: RunningExplorer) -> None:
    now = time.time()
    explorer.ledger.recording.record([exchange(received_at=now - 100), exchange(received_at=now - 50)])
    eventually(lambda: by_label(explorer, "tuneloop_waiting_seconds").get("recorded", 0) > 99)
    found = by_label(explorer, "tuneloop_waiting_seconds")
    assert set(found) == {state.value for state in WAITING}
    assert 100 <= found["recorded"] < 160
    assert found["committed"] == 0


@pytest.mark.parametrize("lost", [None, "deleted", "damaged"])
def test_a_key_of_reply_ids_that_was_lost_is_an_alarm(tmp_path: Path, double: EngineDouble, lost: str | None) -> None:
    settings = settings_for(tmp_path, [double.url])
    key = settings.job_dir / KEY
    with explorer_running(settings) as explorer:
        said = explorer.chat().json()["id"]
        eventually(lambda: explorer.exchanges())
    if lost == "deleted":
        key.unlink()
    elif lost == "damaged":
        key.write_bytes(bytes(32))
    ledger = open_ledger(settings)
    ledger.recording.record([exchange() for _ in range(100)])  # imported: named elsewhere
    ledger.close()
    with explorer_running(settings) as explorer:
        assert explorer.feedback(said).status_code == (404 if lost else 200)
        eventually(lambda: explorer.metrics().get("tuneloop_no_step", 0) > 0)
        if lost:
            eventually(lambda: by_label(explorer, "tuneloop_alarm").get("reply_key_changed") == 1)
        reasons = [each.reason for each in explorer.ledger.alarms.all()]
        assert [str(key) in each for each in reasons] == ([True] if lost else [])


def test_what_is_committed_waits_since_its_commit(tmp_path: Path) -> None:
    """However late its feedback came."""
    settings, metrics = settings_for(tmp_path), Metrics()
    ledger = open_ledger(settings)
    rewarded(ledger, 3, received_at=time.time() - 90_000)
    gauges = LedgerGauges(ledger, metrics, settings, outbox=OutboxStatus, interval_s=60)

    def waits(state: str) -> float | None:
        gauges.update()
        return metrics.registry.get_sample_value("tuneloop_waiting_seconds", {"state": state})

    assert (waits("rewarded") or 0) > 89_000
    ledger.recording.commit("acme")
    assert (waits("committed") or 0) < 1000
    ledger.training.lease(ledger.training.take_epoch("host:1"), 3, BatchRules())
    assert (waits("leased") or 0) < 1000
    gauges.close()
    ledger.close()


def test_that_nearly_nothing_is_trainable_is_logged_once_with_the_reason(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    ledger = open_ledger(settings)
    gauges = LedgerGauges(ledger, Metrics(), settings, outbox=OutboxStatus, interval_s=60)
    marked = experience(unsampled="sampling:presence_penalty")
    ledger.recording.record([exchange(experiences=(marked,)) for _ in range(3)])
    with capture_logs() as said:
        gauges.update()
        gauges.update()
    [told] = [each["sentence"] for each in said if each["event"] == "not_trainable"]
    assert told.startswith("3 of the last 3 experiences cannot be trained on (3 are not samples of the policy), most")
    assert "often: sampling:presence_penalty: see what the clients ask for" in told
    gauges.close()
    ledger.close()


def test_feedback_without_its_reply_is_pending(explorer: RunningExplorer) -> None:
    explorer.ledger.recording.record([feedback(msg_id="chatcmpl-unknown")])
    eventually(lambda: explorer.metrics()["tuneloop_feedback_pending"] == 1)
    explorer.ledger.recording.record([exchange(msg_id="chatcmpl-unknown")])
    eventually(lambda: explorer.metrics()["tuneloop_feedback_pending"] == 0)


def test_a_database_that_is_away_is_the_reason(tmp_path: Path) -> None:
    settings, metrics = settings_for(tmp_path), Metrics()
    ledger = open_ledger(settings)
    ledger.reports = AwayReports(ledger.transactions)
    gauges = LedgerGauges(ledger, metrics, settings, outbox=OutboxStatus, interval_s=60)
    with pytest.raises(LedgerUnavailable):
        gauges.update()
    assert not gauges.reached
    assert metrics.registry.get_sample_value("tuneloop_no_step", {"reason": "database_away"}) == 1
    assert metrics.registry.get_sample_value("tuneloop_no_step", {"reason": "no_trainer"}) == 0
    gauges.close()
    ledger.close()


def test_an_alarm_is_a_gauge_until_it_is_cleared(explorer: RunningExplorer) -> None:
    assert by_label(explorer, "tuneloop_alarm") == {}
    explorer.ledger.alarms.raise_alarm(Alarm("length", "replies got long"))
    eventually(lambda: by_label(explorer, "tuneloop_alarm") == {"length": 1})
    explorer.ledger.alarms.raise_alarm(Alarm("entropy", "it fell"))
    explorer.ledger.alarms.clear("length")
    eventually(lambda: by_label(explorer, "tuneloop_alarm") == {"length": 0, "entropy": 1})


def test_each_machine_has_its_own_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_for(tmp_path)
    ledger = open_ledger(settings)
    well, ill = OutboxStatus(), OutboxStatus(refusal="permission denied")

    def machine(name: str) -> Callable[[OutboxStatus], list[str]]:
        def turn(outbox: OutboxStatus) -> list[str]:
            monkeypatch.setattr("socket.gethostname", lambda: name)
            monkeypatch.setattr(ledger.recording, "refused_records", lambda: [""] * outbox.refused_records)
            stops = find_stops(ExplorerFacts(refusal=outbox.refusal))
            gauges = LedgerGauges(ledger, Metrics(), settings, outbox=lambda: outbox, interval_s=1, stops=lambda: stops)
            gauges.update()
            gauges.close()
            return [each.reason.split(":")[0] for each in ledger.alarms.all()]

        return turn

    one, other = machine("one"), machine("other")
    assert (one(ill), other(well)) == (["one"], ["one"])
    assert (other(ill), one(well)) == (["one"], [])
    assert (other(ill), one(well)) == (["other"], ["other"])
    assert other(well) == []
    assert one(well._replace(refused_records=2)) == ["one"]
    [alarm] = ledger.alarms.all()
    assert alarm.name == "records_refused"
    assert alarm.reason == "one: 2 records that the database refused: `tuneloop outbox list`"
    ledger.close()


def test_the_newest_versions_that_were_rewarded_say_what_they_earn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tmp_path)
    metrics, ledger = Metrics(), open_ledger(settings)
    gauges = LedgerGauges(ledger, metrics, settings, outbox=OutboxStatus, interval_s=1)
    rewarded = [VersionReward(version, 4, 2, version / 2) for version in range(10)]
    for rewards in ([*rewarded[:9], VersionReward(9, 1, 0, 0)], rewarded):
        monkeypatch.setattr(ledger.reports, "rewards", lambda rewards=rewards: rewards)
        gauges.update()
    gauges.close()
    ledger.close()
    [family] = [each for each in metrics.registry.collect() if each.name == "tuneloop_version_reward"]
    assert {int(each.labels["version"]): each.value for each in family.samples} == {
        version: version / 4 for version in range(2, 10)
    }


def test_the_lag_of_the_trainer_is_a_gauge(explorer: RunningExplorer) -> None:
    assert explorer.metrics()["tuneloop_training_lag"] == 0
    now = explorer.ledger.transactions.time()
    for at in (now - 10, now):
        version = VersionPace(at=at, consumed=10, waiting=0, set_aside=90, step_s=1.0, publish_s=8.0)
        note_version(explorer.settings.job_dir, version)
    eventually(lambda: explorer.metrics()["tuneloop_training_lag"] == 10)


# What was decided about versions is told by the log and counted, whoever decided.


def test_each_decision_is_one_line_and_one_count(ledger: Ledger, tmp_path: Path) -> None:
    ledger.versions.ensure_base(tmp_path)
    assert [trained(ledger) for _ in range(4)] == [1, 2, 3, 4]
    ledger.versions.promote(1)
    metrics = Metrics()
    told = VersionLog(ledger, metrics, interval_s=1.0)
    told.update()
    ledger.versions.begin_canary(2, by="explorer", reason="rollout.mode: canary")
    ledger.versions.promote(2, by="rollout", reason="it earns 0.1 more")
    ledger.versions.reject(3, "its probe differs")
    ledger.versions.roll_back(2, by="admin:ann", reason="rude")
    ledger.versions.pin(1, instead_of=1, by="admin:ann", reason="holidays")
    ledger.versions.unpin(by="admin:ann", reason="back")
    with capture_logs() as logs:
        told.update()
        told.update()
    assert [(each["event"], each["version"], each["from_version"], each["by"], each["reason"]) for each in logs] == [
        ("version_canary", 2, 1, "explorer", "rollout.mode: canary"),
        ("version_promoted", 2, 1, "rollout", "it earns 0.1 more"),
        ("version_rejected", 3, 2, "explorer", "its probe differs"),
        ("version_rolled_back", 2, 2, "admin:ann", "rude"),
        ("version_rejected", 4, 2, "admin:ann", "descends from version 2, which was rolled back"),
        ("version_promoted", 1, 2, "admin:ann", "version 2 was rolled back"),
        ("version_pinned", 1, 1, "admin:ann", "holidays"),
        ("version_unpinned", 1, 1, "admin:ann", "back"),
    ]
    assert {each["log_level"] for each in logs if each["event"] in {"version_rejected", "version_rolled_back"}} == {
        "warning"
    }
    count = metrics.registry.get_sample_value
    for labels, expected in (
        ({"action": "promoted", "by": "rollout"}, 1),
        ({"action": "promoted", "by": "admin"}, 1),
        ({"action": "rejected", "by": "explorer"}, 1),
        ({"action": "rolled_back", "by": "admin"}, 1),
    ):
        assert count("tuneloop_version_decisions_total", labels) == expected
    assert [each["event_id"] for each in logs] == [
        event.id for event in ledger.versions.events() if f"version_{event.action}" in {one["event"] for one in logs}
    ][-len(logs) :]


def log_of(ledger: Ledger) -> tuple[VersionLog, Metrics]:
    metrics = Metrics()
    return VersionLog(ledger, metrics, interval_s=1.0), metrics


def told_by(*logs: VersionLog) -> list[tuple[str, int, int]]:
    with capture_logs() as lines:
        for each in logs:
            each.update()
    return [(each["event"], each["version"], each["from_version"]) for each in lines]


def test_what_was_decided_while_no_explorer_ran_is_told_by_the_next_once(ledger: Ledger, tmp_path: Path) -> None:
    ledger.versions.ensure_base(tmp_path)
    assert [trained(ledger) for _ in range(3)] == [1, 2, 3]
    ledger.versions.promote(1)
    assert told_by(log_of(ledger)[0]) == []  # the first of all tells nothing old
    ledger.versions.promote(2)
    ledger.versions.roll_back(2, by="admin:ann", reason="rude")
    next_one, metrics = log_of(ledger)
    assert told_by(next_one, next_one) == [
        ("version_promoted", 2, 1),
        ("version_rolled_back", 2, 2),
        ("version_rejected", 3, 2),
        ("version_promoted", 1, 2),
    ]
    counted = {"action": "rolled_back", "by": "admin"}
    assert metrics.registry.get_sample_value("tuneloop_version_decisions_total", counted) == 1
    assert told_by(log_of(ledger)[0]) == []


def test_of_several_explorers_one_tells_and_all_know_what_serves(ledger: Ledger, tmp_path: Path) -> None:
    ledger.versions.ensure_base(tmp_path)
    assert [trained(ledger) for _ in range(3)] == [1, 2, 3]
    one, other = log_of(ledger)[0], log_of(ledger)[0]
    told_by(one, other)
    ledger.versions.promote(1)
    assert told_by(one, other) == [("version_promoted", 1, 0)]
    ledger.versions.promote(2)
    assert told_by(other, one) == [("version_promoted", 2, 1)]
