"""What the monitors ask the ledger."""

from typing import Any

from sqlalchemy import Engine, event, update

from tests.factories import exchange, experience, feedback, fill
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


def say(ledger: Ledger, count: int, *keys: str, value: float = 0.5, tenant: str = "acme") -> None:
    """Each key rates so many replies."""
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
    assert ledger.drift.quarantined_share(20) == 0.0
    assert ledger.drift.extreme_share(20, rule) == 0.0
    say(ledger, 8, "a", "b", "c", value=9.0)
    assert ledger.drift.extreme_share(20, rule) == 1.0
    for key in "abc":
        ledger.raters.quarantine("acme", f"key:{key}", by="ann", reason="it is extreme")
    assert ledger.drift.quarantined_share(20) == 1.0


def test_where_there_are_one_or_two_keys_either_can_say_that_something_is_amiss(ledger: Ledger) -> None:
    say(ledger, 10, "a")
    assert ledger.drift.extreme_share(20, RewardRule()) is None
    say(ledger, 10, "b", value=9.0)
    assert ledger.drift.extreme_share(20, RewardRule()) == 0.5


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


def test_what_is_asked_does_not_grow_with_the_ledger(ledger: Ledger, engine: Engine) -> None:
    fill(engine, 2000)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO feedback"
            " (event_id, call_id, tenant, msg_id, kind, metric, value, source, received_at, outcome)"
            " SELECT msg_id, 'c', 'acme', msg_id, 'number', 'reward', 1, 's', 1, 'accepted' FROM exchanges"
        )
        connection.exec_driver_sql("ANALYZE")
    asked: list[tuple[str, Any]] = []
    event.listen(engine, "before_cursor_execute", lambda *heard: asked.append((heard[2], heard[3])))
    ledger.drift.newest_replies(10)
    ledger.drift.largest_rater(10)
    queries = [each for each in asked if each[0].startswith("SELECT")]
    assert len(queries) == 2
    explain = "EXPLAIN" if engine.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN"
    for query, values in queries:
        with engine.connect() as connection:
            plan = str(connection.exec_driver_sql(f"{explain} {query}", values).all())
        table = "experiences" if "FROM experiences" in query else "feedback"
        if engine.dialect.name == "postgresql":
            assert f"Index Scan Backward using pk_{table} on {table}" in plan, plan
        else:  # along the rows, the newest first
            assert f"SCAN {table}" in plan
            assert f"SCAN {table} USING" not in plan
            assert "TEMP B-TREE" not in plan.partition(f"SCAN {table}")[0]
