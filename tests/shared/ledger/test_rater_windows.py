"""What raters are compared by: the newest feedback of their tenant and of each key, whatever others say meanwhile."""

from collections import Counter

import pytest
from sqlalchemy import Engine

from tests.factories import exchange, feedback
from tests.shared.ledger.test_assessment import OPTIONS, judged, states
from tuneloop.shared.ledger import assessment
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.feedback import RewardRule


@pytest.fixture
def ledger(engine: Engine) -> Ledger:
    return Ledger(engine, rule=RewardRule())


def test_a_tenant_that_floods_does_not_hide_the_outliers_of_others(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor those that it has: there is a window for each."""
    monkeypatch.setattr(assessment, "WINDOW", 240)
    judged(ledger)
    flooded = [exchange(tenant="globex") for _ in range(60)]
    flood = [feedback(tenant="globex", msg_id=each.msg_id, source=f"s{n}") for each in flooded for n in range(5)]
    ledger.recording.record([*flooded, *flood])
    assert [(each.tenant, each.name) for each in ledger.raters.assess(OPTIONS)] == [("acme", "liar")]
    events = Counter[str]()
    for each in ledger.raters.all():
        events[each.tenant] += each.events
    assert events == {"acme": 240, "globex": 240}


def test_a_key_that_floods_does_not_hide_the_others(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assessment, "WINDOW", 400)
    judged(ledger, liar=False)
    said = [exchange() for _ in range(150)]
    floods = [feedback(msg_id=each.msg_id, source="key:eve", key="eve", value=9.0) for each in said for _ in range(3)]
    ledger.recording.record([*said, *floods])
    assert [each.name for each in ledger.raters.assess(OPTIONS)] == ["key:eve"]


def test_tenants_take_turns_where_there_is_more_than_can_be_compared_at_once(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assessment, "AT_ONCE", 10)
    compared: list[str] = []
    real = ledger.raters._assess
    monkeypatch.setattr(ledger.raters, "_assess", lambda *given: compared.append(given[0]) or real(*given))

    def turn(*talking: str) -> list[str]:
        compared.clear()
        for tenant in talking:
            said = [exchange(tenant=tenant) for _ in range(10)]
            ledger.recording.record([*said, *(feedback(tenant=tenant, msg_id=each.msg_id) for each in said)])
        ledger.raters.assess(OPTIONS)
        return [*compared]

    assert turn("a", "flood", "z") == ["a"]
    assert turn("flood") == ["flood"]
    assert turn("a", "flood") == ["z"]
    assert turn("flood") == ["a"]
    assert turn() == ["flood"]
    assert turn() == []


def test_raters_of_a_tenant_that_has_no_feedback_any_more_are_forgotten(ledger: Ledger) -> None:
    said = exchange(tenant="globex")
    ledger.recording.record([said, feedback(tenant="globex", msg_id=said.msg_id, source="ann")])
    ledger.raters.assess(OPTIONS)
    assert set(states(ledger)) == {"ann"}
    ledger.stored.delete("globex", said.msg_id)
    ledger.raters.assess(OPTIONS)
    assert states(ledger) == {}
