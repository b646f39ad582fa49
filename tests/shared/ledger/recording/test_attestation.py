"""What an engine sampled with other weights than it should have had is never trained on, whenever it comes in."""

from typing import Any

import pytest

from tests.factories import committed, exchange, experience, feedback, ids, leased, published, rewarded, trained
from tuneloop.shared.errors import LeaseLost
from tuneloop.shared.experience import Exchange, State, VersionAction
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.recording.attestation import REASON, Mismatch

FOUND = Mismatch(engine=1, version=0, since=1000.0, until=2000.0, reason="4 nats off", figures={"nats": 4.0})


@pytest.fixture(autouse=True)
def base(ledger: Ledger, tmp_path: Any) -> None:
    ledger.versions.ensure_base(tmp_path)


def in_doubt(**but: Any) -> dict[str, Any]:
    return {"engine": 1, "received_at": 1500.0, "latency_s": 1.0, **but}


def reasons(ledger: Ledger) -> dict[str, tuple[str, str | None]]:
    with ledger.transactions.write() as connection:
        rows = connection.exec_driver_sql("SELECT msg_id, state, reason FROM experiences").all()
    return {msg_id: (state, reason) for msg_id, state, reason in rows}


def all_dropped(ledger: Ledger, said: list[Exchange]) -> bool:
    found = reasons(ledger)
    return {found[each.msg_id] for each in said} == {(State.DROPPED, REASON)}


def test_rows_of_every_state_that_is_not_trained_go(ledger: Ledger) -> None:
    recorded = [exchange(**in_doubt(experiences=(experience(), experience(choice=1))))]
    ledger.recording.record(recorded)
    sent = committed(ledger, **in_doubt())
    epoch = ledger.training.take_epoch("trainer")
    held = ledger.training.lease(epoch, 1, BatchRules())
    waiting = committed(ledger, **in_doubt())
    praised = rewarded(ledger, **in_doubt(experiences=(experience(unsampled="mixed_version"),)))

    assert ledger.attestations.distrust(FOUND) == (5, {})

    assert all_dropped(ledger, [*recorded, *sent, *waiting, *praised])
    with pytest.raises(LeaseLost):
        ledger.training.register(epoch, ids(held), step=1, publish=published)
    ledger.recording.commit("acme")
    assert ledger.training.lease(epoch, 1, BatchRules()) == []
    assert ledger.reports.imbalance() == []


def test_what_goes_takes_the_correction_that_came_while_it_was_leased(ledger: Ledger) -> None:
    (said,) = committed(ledger, **in_doubt())
    ledger.training.lease(ledger.training.take_epoch("trainer"), 1, BatchRules())
    ledger.recording.record([feedback(msg_id=said.msg_id, value=0.25)])
    ledger.attestations.distrust(FOUND)
    with ledger.transactions.write() as connection:
        rows = connection.exec_driver_sql("SELECT state, reason, reward FROM experiences").all()
        outcomes = connection.exec_driver_sql("SELECT outcome FROM feedback").scalars().all()
    assert [tuple(row) for row in rows] == [(State.DROPPED, REASON, 0.25)]
    assert outcomes == ["accepted", "accepted"]
    assert ledger.reports.imbalance() == []


@pytest.mark.parametrize(
    "other",
    [
        {"engine": 0},
        {"engine": None},
        {"received_at": 900.0, "latency_s": 99.0},  # had ended before
        {"received_at": 2000.0},  # came when it was out of rotation
    ],
)
def test_what_others_said_or_it_said_at_another_time_stays(ledger: Ledger, other: dict[str, Any]) -> None:
    before = committed(ledger, **in_doubt(**other))
    assert ledger.attestations.distrust(FOUND) == (0, {})
    after = committed(ledger, **in_doubt(**other))
    found = reasons(ledger)
    assert [found[each.msg_id] for each in (*before, *after)] == [(State.COMMITTED, None)] * 2


@pytest.mark.parametrize("times", [{"received_at": 900.0, "latency_s": 100.0}, {"received_at": 1999.0}])
def test_what_comes_in_afterwards_is_not_trained_on_either(ledger: Ledger, times: dict[str, float]) -> None:
    ledger.attestations.distrust(FOUND)
    late = [
        exchange(**in_doubt(**times)),
        exchange(**in_doubt(latency_s=90_000.0)),  # in flight for longer than any look into the past
    ]
    ledger.recording.record([*late, *(feedback(msg_id=each.msg_id) for each in late)])
    ledger.recording.commit("acme")
    assert all_dropped(ledger, late)
    cut_off = exchange(**in_doubt(experiences=(experience(drop_reason="cut_off"),)))
    ledger.recording.record([cut_off])
    assert reasons(ledger)[cut_off.msg_id] == (State.DROPPED, "cut_off")


def test_what_is_trained_already_is_said_in_the_event(ledger: Ledger) -> None:
    ledger.recording.record([exchange(**in_doubt())])
    epoch, samples = leased(ledger)
    with ledger.transactions.write() as connection:
        connection.exec_driver_sql("UPDATE exchanges SET engine = 1, received_at = 1500 WHERE engine IS NULL")
        connection.exec_driver_sql("UPDATE experiences SET sampled_at = 1500 WHERE state = 'leased'")
    version = ledger.training.register(epoch, ids(samples), step=1, publish=published)
    trained(ledger)

    assert ledger.attestations.distrust(FOUND) == (1, {version: 1})

    [event] = [each for each in ledger.versions.events() if each.action == VersionAction.MISMATCH]
    assert (event.version, event.actor, event.reason) == (0, "explorer", "4 nats off")
    assert event.details == {
        "nats": 4.0,
        "engine": 1,
        "since": 1000.0,
        "until": 2000.0,
        "explorer": None,
        "version": None,
        "dropped": 1,
        "trained": {str(version): 1},
    }
    assert ledger.reports.imbalance() == []
