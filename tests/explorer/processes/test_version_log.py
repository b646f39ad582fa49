"""What was decided about versions is told by the log and counted, whoever decided."""

from pathlib import Path

from structlog.testing import capture_logs

from tests.factories import trained
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.processes.services import VersionLog
from tuneloop.shared.ledger.ledger import Ledger


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
