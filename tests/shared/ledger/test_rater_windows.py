"""What raters are compared by: the newest feedback of their tenant and of each key, whatever others say meanwhile."""

from collections import Counter

import pytest
from sqlalchemy import Engine

from tests.factories import exchange, feedback
from tests.shared.ledger.test_assessment import OPTIONS, judged, states
from tuneloop.shared.experience import Kind
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


def test_comments_do_not_hide_what_a_key_rated(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assessment, "WINDOW", 240)
    said = judged(ledger, liar=False)
    lies = [
        feedback(msg_id=each.msg_id, source="key:eve", key="eve", value=float((n + 1) % 2))
        for n, each in enumerate(said)
    ]
    talk = [
        feedback(
            msg_id=each.msg_id, source="key:eve", key="eve", kind=Kind.COMMENT, value=None, text="so", metric=f"{n}"
        )
        for n in range(30)
        for each in said
    ]
    ledger.recording.record([*lies, *talk])
    assert [each.name for each in ledger.raters.assess(OPTIONS)] == ["key:eve"]


def test_many_keys_do_not_crowd_out_what_has_none(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge has no key, and who is judged must not be able to make it silent."""
    monkeypatch.setattr(assessment, "_MOST_KEYS", 5)
    judged(ledger)
    said = exchange()
    crowd = [feedback(msg_id=said.msg_id, source=f"key:k{n}", key=f"k{n}") for n in range(20)]
    ledger.recording.record([said, *crowd])
    assert [each.name for each in ledger.raters.assess(OPTIONS)] == ["liar"]


def test_a_turn_ends_where_there_are_many_keys_that_say_little(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assessment, "AT_ONCE", 100)
    for tenant in ("a", "b"):
        said = exchange(tenant=tenant)
        by = [feedback(tenant=tenant, msg_id=said.msg_id, source=f"key:k{n}", key=f"k{n}") for n in range(12)]
        ledger.recording.record([said, *by])
    for compared in (12, 24, 24):
        ledger.raters.assess(OPTIONS)
        assert len(ledger.raters.all()) == compared


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
