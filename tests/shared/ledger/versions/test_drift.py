"""What the monitors ask the ledger."""

from sqlalchemy import Engine, update

from tests.factories import exchange, experience, feedback
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.schema import exchanges
from tuneloop.shared.settings.feedback import RewardRule


def test_the_newest_replies_come_first_with_the_requests_of_those_that_call_tools(ledger: Ledger) -> None:
    ledger.recording.record([exchange(experiences=(experience(text=f"number {i}" + "." * 3000),)) for i in range(3)])
    ledger.recording.record([exchange(request=b"{}", experiences=(experience(text="", tool_calls=b"[]"),))])
    ledger.recording.record([exchange(request=b"[]", experiences=(experience(text="<tool_call>"),))])
    found = ledger.drift.newest_replies(4, marks=("<tool_call>",))
    assert [(each.text[:11], each.tool_calls, each.request) for each in found] == [
        ("<tool_call>", None, b"[]"),
        ("", b"[]", b"{}"),
        ("number 2...", None, None),
        ("number 1...", None, None),
    ]
    assert len(found[-1].text) == 2000


def test_a_damaged_request_is_none(ledger: Ledger, engine: Engine) -> None:
    ledger.recording.record([exchange(experiences=(experience(tool_calls=b"[]"),))])
    with engine.begin() as connection:
        connection.execute(update(exchanges).values(request=bytes.fromhex("28b52ffd") + b"no frame"))
    assert [each.request for each in ledger.drift.newest_replies(1)] == [None]


def test_the_largest_rater_is_told_where_there_are_several(ledger: Ledger) -> None:
    said = exchange()
    ledger.recording.record([said])

    def rated(*sources: str | None) -> None:
        for value, source in enumerate(sources):
            ledger.recording.record([feedback(msg_id=said.msg_id, source=source, value=float(value))])

    rated("ann", "ann", "ann")
    assert ledger.drift.largest_rater(4) is None  # three are too few
    rated(None, "ann", None)
    assert ledger.drift.largest_rater(4) is None  # a single judge is no drift
    rated("bob", "ann", "ann")
    assert ledger.drift.largest_rater(4) == 0.75
    assert ledger.drift.largest_rater(1) == 1.0


def test_the_same_name_at_two_tenants_is_two_raters(ledger: Ledger) -> None:
    said = [exchange(tenant=tenant) for tenant in ("acme", "other")]
    ledger.recording.record(said)
    ledger.recording.record([feedback(msg_id=each.msg_id, tenant=each.tenant, source="judge") for each in said])
    assert ledger.drift.largest_rater(2) == 0.5


def say(ledger: Ledger, count: int, *keys: str, value: float = 0.5, tenant: str = "acme") -> None:
    said = [exchange(tenant=tenant) for _ in range(count)]
    by = [
        feedback(tenant=tenant, msg_id=each.msg_id, source=f"key:{key}", key=key, value=value)
        for each in said
        for key in keys
    ]
    ledger.recording.record([*said, *by])


def test_a_key_that_floods_is_not_what_all_say(ledger: Ledger) -> None:
    rule = RewardRule()
    say(ledger, 8, "a", "b", "c")
    say(ledger, 250, "eve", value=9.0)
    assert ledger.drift.extreme_share(20, rule) == 0.0
    ledger.raters.quarantine("acme", "key:eve", by="ann", reason="it floods")
    assert ledger.drift.extreme_share(20, rule) == 0.0
    say(ledger, 8, "a", "b", "c", value=9.0)
    assert ledger.drift.extreme_share(20, rule) == 1.0


def test_the_keys_of_one_tenant_crowd_out_no_other(ledger: Ledger) -> None:
    for tenant in ("globex", "initech"):
        say(ledger, 12, "web", "app", tenant=tenant)
    say(ledger, 1, *(f"eve-{number}" for number in range(200)), value=9.0, tenant="mallory")
    assert ledger.drift.extreme_share(20, RewardRule()) == 0.0


def test_a_rater_in_quarantine_hides_no_other_of_its_key(ledger: Ledger) -> None:
    for user, count in (("ann", 30), ("eve", 300)):
        said = [exchange() for _ in range(count)]
        by = [feedback(msg_id=each.msg_id, source=f"key:web/{user}", key="web", value=9.0) for each in said]
        ledger.recording.record([*said, *by])
    ledger.raters.quarantine("acme", "key:web/eve", by="ann", reason="it floods")
    assert ledger.drift.extreme_share(20, RewardRule()) == 1.0
