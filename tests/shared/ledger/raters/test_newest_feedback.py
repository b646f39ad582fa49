"""Whose feedback there is, and at what cost that is found."""

from typing import Any

from sqlalchemy import Engine, event, true

from tests.factories import exchange, feedback, fill
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.versions.drift import keys_with_feedback, newest_of_key


def test_each_key_is_there_with_its_newest_event(ledger: Ledger, engine: Engine) -> None:
    def read(query: Any) -> Any:
        with engine.connect() as connection:
            return connection.execute(query).all()

    assert keys_with_feedback(read) == []
    keys = [("b", ""), ("a", "web"), ("a", "app"), ("b", ""), ("c", "web"), ("a", "app")]
    said = [exchange(tenant=tenant) for tenant, _ in keys]
    events = [
        feedback(tenant=tenant, msg_id=each.msg_id, key=key) for each, (tenant, key) in zip(said, keys, strict=True)
    ]
    ledger.recording.record([*said, *events])
    with engine.connect() as connection:
        numbers = [*connection.exec_driver_sql("SELECT id FROM feedback ORDER BY id").scalars()]
    found = sorted(keys_with_feedback(read))
    expected = [("a", "app", 5), ("a", "web", 1), ("b", None, 3), ("c", "web", 4)]
    assert found == [(tenant, key, numbers[place]) for tenant, key, place in expected]
    newest = [read(newest_of_key(each, true(), 1))[0].id for each in found]
    assert newest == [each.newest for each in found]


def test_the_feedback_of_small_tenants_is_found_by_the_index(ledger: Ledger, engine: Engine) -> None:
    """Where most feedback has no key, and is older, PostgreSQL would read all that is newer to find it."""
    fill(engine, 5000)
    with engine.begin() as connection:
        for tenant, key, count in (("flood", "NULL", 5000), ("flood", "'app'", 5000), ("small", "'app'", 1)):
            connection.exec_driver_sql(
                "INSERT INTO feedback"
                " (event_id, call_id, tenant, msg_id, kind, metric, value, source, received_at, outcome, key)"
                f" SELECT '{tenant}{count}{key != 'NULL'}' || msg_id, 'c', '{tenant}', msg_id,"
                f" 'number', 'reward', 1, 's', 1, 'accepted', {key} FROM exchanges LIMIT {count}"
            )
        connection.exec_driver_sql("ANALYZE")
    asked: list[tuple[str, Any]] = []
    event.listen(engine, "before_cursor_execute", lambda *heard: asked.append((heard[2], heard[3])))
    ledger.drift.quarantined_share(10)
    others = ("feedback.id IN",)  # when each key spoke last
    of_feedback = [each for each in asked if "FROM feedback" in each[0] and not any(part in each[0] for part in others)]
    queries = [each for each in of_feedback if "flood" not in str(each[1])]
    assert len(queries) == 2  # who there is, and the window of the small one
    explain = "EXPLAIN" if engine.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN"
    for query, values in queries:
        with engine.connect() as connection:
            plan = str(connection.exec_driver_sql(f"{explain} {query}", values).all())
        assert "ix_feedback_" in plan, plan
        assert "Seq Scan on feedback" not in plan, plan
        assert "Backward using pk_feedback" not in plan, plan
        assert "SCAN feedback'" not in plan, plan
