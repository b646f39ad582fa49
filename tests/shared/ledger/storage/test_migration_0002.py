"""What 0002 makes of the rows of 0001, and what is left of new rows on the way back."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.schema import CreateSchema

from tests.conftest import Place
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.recording.reward_rule import definition, rule_of
from tuneloop.shared.ledger.storage import database

Rows = list[dict[str, Any]]

ALL = ("experiment", "epochs", "versions", "exchanges", "experiences", "feedback")
RULE = (
    '{"attribution_window":null,"boolean_values":[0.0,1.0],"clip":null,"default":null,"label_values":{},'
    '"weights":{"reward":1.0}}'
)
SHA256 = "5" * 64

TRAINED = {"state": "trained", "committed_at": 30.0}
LEASE = {"lease_epoch": 2, "lease_until": 99.0}

# By id: what a row of 0001 says besides its content. Ids have gaps, since rows are not just to be counted.
OLD_EXPERIENCES: dict[int, dict[str, Any]] = {
    1: {"msg_id": "two-choices", "reward": 0.5, "trained_version": 1, **TRAINED},
    2: {"msg_id": "two-choices", "choice": 1, "state": "recorded"},
    3: {"msg_id": "corrected", "state": "rewarded", "reward": -1.0},
    4: {"msg_id": "committed", "state": "committed", "reward": 2.0, "committed_at": 31.0},
    5: {"msg_id": "leased", "state": "leased", "reward": 3.0, "committed_at": 32.0, **LEASE},
    6: {"msg_id": "expired", "state": "expired", "reason": "old", "reward": 4.0, "committed_at": 33.0},
    7: {"msg_id": "dropped", "state": "dropped", "reason": "cut off"},
    41: {"msg_id": "trained", "reward": 0.0, "trained_version": 2, **TRAINED},
}
OLD_FEEDBACK: Rows = [
    {"id": 1, "event_id": "choice", "msg_id": "two-choices", "choice": 0, "reward": 0.5},
    {"id": 2, "event_id": "first", "msg_id": "corrected", "reward": 1.0},
    {"id": 5, "event_id": "second", "msg_id": "corrected", "reward": -1.0, "task_id": "t", "run_id": "r"},
    {"id": 9, "event_id": "parked", "msg_id": "not-here-yet", "reward": 7.0},
]
# Ids from 11 on.
NEW_FEEDBACK: Rows = [
    {"kind": "boolean", "msg_id": "dropped", "value": 1.0},
    {"kind": "number", "task_id": "task", "run_id": "run", "value": 1.0},
    {"kind": "label", "msg_id": "dropped", "text": "good"},
    {"kind": "comment", "msg_id": "dropped", "text": "why"},
    {"kind": "demonstration", "msg_id": "dropped", "text": "so"},
    {"kind": "preference", "msg_id": "dropped", "other_msg_id": "expired"},
    {"kind": "number", "msg_id": "leased", "source": "ann", "value": 2.0},
    {"kind": "number", "msg_id": "leased", "value": 3.0},
    {"kind": "number", "msg_id": "leased", "choice": 0, "value": 4.0},
    {"kind": "retraction", "msg_id": "leased"},
    {"kind": "number", "msg_id": "leased", "value": 5.0},
    {"kind": "number", "msg_id": "committed", "source": "bob", "value": 6.0},
    {"kind": "retraction", "msg_id": "committed", "source": "bob", "choice": 1},
]
KEPT = (1, 2, 5, 9, 11, 17, 21, 22)
VERSIONS: Rows = [
    {"version": 0, "state": "retired", "epoch": None, "manifest_sha256": None, "consumed": 0, "served_at": 1.0},
    {"version": 1, "state": "champion", "epoch": 1, "manifest_sha256": SHA256, "consumed": 1, "served_at": 2.0},
    {"version": 2, "state": "rejected", "epoch": 2, "manifest_sha256": SHA256, "consumed": 1, "reason": "bad file"},
]


def insert(connection: Connection, table: str, **row: Any) -> None:
    names, values = ", ".join(row), ", ".join(f":{name}" for name in row)
    connection.execute(text(f"INSERT INTO {table} ({names}) VALUES ({values})"), row)


def content(**but: Any) -> dict[str, Any]:
    """What both schemas want to know of an experience."""
    fields = {"choice": 0, "version_min": 0, "version_max": 1, "temperature": 0.7, "finish_reason": "stop"}
    return fields | {"text": "Grüße: 'x'", "completion_tokens": 3, "blob": b"\0\xff", "reward": None} | but


def fill_the_old_tables(connection: Connection) -> None:
    insert(connection, "experiment", id=1, project="shop", name="assistant")
    for epoch in (1, 2):
        insert(connection, "epochs", epoch=epoch, trainer=f"host-{epoch}", started_at=epoch + 0.25)
    for row in VERSIONS:
        insert(connection, "versions", **{"step": 8, "path": "/v", "created_at": 3.0} | row)
    tasks = {"two-choices": ("task", "run"), "corrected": ("task", None)}
    for number, msg_id in enumerate(dict.fromkeys(row["msg_id"] for row in OLD_EXPERIENCES.values())):
        task_id, run_id = tasks.get(msg_id, (None, None))
        said = {"msg_id": msg_id, "tenant": f"tenant-{number}", "endpoint": "/v1", "task_id": task_id, "run_id": run_id}
        insert(connection, "exchanges", **said, request=b"\0{}", received_at=10.5 + number, latency_s=0.1)
    for id_, row in OLD_EXPERIENCES.items():
        rewarded_at = 20.0 + id_ if "reward" in row else None
        insert(connection, "experiences", id=id_, **content(**row), recorded_at=19.0, rewarded_at=rewarded_at)
    for row in OLD_FEEDBACK:
        insert(connection, "feedback", **row, tenant="acme", received_at=20.0 + row["id"])


def rows(engine: Engine, table: str) -> Rows:
    with engine.connect() as connection:
        return [dict(row) for row in connection.execute(text(f"SELECT * FROM {table} ORDER BY 1")).mappings()]


def everything(engine: Engine) -> dict[str, Rows]:
    return {table: rows(engine, table) for table in ALL}


def go(engine: Engine, step: Callable[[Config, str], None], revision: str) -> None:
    config = database.migrations()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        step(config, revision)


def fresh_ids(engine: Engine, experience: dict[str, Any], event: dict[str, Any]) -> list[int]:
    """The ids that the next experience and the next feedback get; the arguments are what either schema wants."""
    with engine.begin() as connection:
        said = {"tenant": "acme", "endpoint": "/", "request": b"", "received_at": 1.0, "latency_s": 0.0}
        insert(connection, "exchanges", msg_id="fresh", **said)
        insert(connection, "experiences", msg_id="fresh", state="recorded", **content(), **experience)
        insert(connection, "feedback", event_id="e", msg_id="fresh", tenant="acme", received_at=1.0, **event)
        queries = (f"SELECT id FROM {table} WHERE msg_id = 'fresh'" for table in ("experiences", "feedback"))
        return [connection.execute(text(query)).scalar_one() for query in queries]


def next_ids(engine: Engine) -> list[int]:
    """The same, in the new tables."""
    experience = {"correction": 0, "tenant": "acme", "priority": 0.0, "sampled_at": 1.0}
    event = {"call_id": "c", "kind": "comment", "metric": "m", "text": "x", "outcome": "late"}
    return fresh_ids(engine, experience, event)


@pytest.fixture
def empty(place: Place) -> Iterator[Engine]:
    """A database of 0001 without rows."""
    engine = database.connect(place.url, schema=place.schema)
    if place.schema is not None:
        with engine.begin() as connection:
            connection.execute(CreateSchema(place.schema))
    go(engine, command.upgrade, "0001")
    yield engine
    engine.dispose()


@pytest.fixture
def old(empty: Engine) -> Engine:
    """A database of 0001 with experiences in every state."""
    with empty.begin() as connection:
        fill_the_old_tables(connection)
    return empty


@pytest.fixture
def new(old: Engine, place: Place) -> Engine:
    """The same after 0002."""
    database.upgrade(place.url, schema=place.schema)
    return old


@pytest.fixture
def full(new: Engine) -> Engine:
    """A database of 0002 with what 0001 cannot hold: corrections, a person, purged rows, feedback of every kind."""
    with new.begin() as connection:
        connection.execute(text("UPDATE exchanges SET user_id = 'ann' WHERE msg_id = 'dropped'"))
        connection.execute(text("UPDATE versions SET consumed = 9, purged = 7 WHERE version = 2"))
        insert(connection, "erasures", tenant="acme", user_id="bob", erased_at=50.0)
        insert(connection, "exports", path="/out.jsonl", format="jsonl", rows=3, created_at=51.0)
        late = {"tenant": "tenant-5", "priority": 1.0, "sampled_at": 15.5, "rewarded_at": 40.0, "reward_rule": 1}
        trained = {"correction": 1, "reward": 8.0, "trained_version": 2, **TRAINED}
        waiting = {"correction": 2, "reward": 9.0, "state": "committed", "committed_at": 45.0, "group_id": 43}
        insert(connection, "experiences", id=42, **content(msg_id="trained", **late, **trained))
        insert(connection, "experiences", id=43, **content(msg_id="trained", **late, **waiting))
        for id_, row in enumerate(NEW_FEEDBACK, start=11):
            event = {"event_id": f"new-{id_}", "call_id": "call", "tenant": "acme", "metric": "reward"}
            insert(connection, "feedback", id=id_, **event, **row, received_at=20.0 + id_, outcome="accepted")
    return new


def test_every_experience_is_kept(old: Engine, place: Place) -> None:
    before = everything(old)
    database.upgrade(place.url, schema=place.schema)
    said = {row["msg_id"]: row for row in before["exchanges"]}
    for row in before["experiences"]:
        exchange = said[row["msg_id"]]
        del row["recorded_at"]
        row |= {name: exchange[name] for name in ("tenant", "task_id", "run_id")}
        row |= {"correction": 0, "priority": 0.0, "sampled_at": exchange["received_at"]}
        row |= {"tool_calls": None, "group_id": None, "reward_rule": None if row["reward"] is None else 1}
        row |= {"unsampled": None, "grammar": None, "edit_similarity": None}
    assert rows(old, "experiences") == before["experiences"]
    assert {row["state"] for row in before["experiences"]} == set(State)


def test_every_exchange_epoch_and_version_is_kept(old: Engine, place: Place) -> None:
    before = everything(old)
    database.upgrade(place.url, schema=place.schema)
    for row in before["exchanges"]:
        del row["task_id"], row["run_id"]
    assert rows(old, "experiment") == before["experiment"]
    added = {"user_id": None, "engine": None, "key": None, "stored_bytes": 0}
    assert rows(old, "exchanges") == [row | added for row in before["exchanges"]]
    assert rows(old, "versions") == [{**row, "purged": 0, "pinned": False} for row in before["versions"]]
    seen = [{**row, "seen_at": row["started_at"], "ended_at": None} for row in before["epochs"]]
    assert rows(old, "epochs") == seen


def test_every_feedback_becomes_a_number(old: Engine, place: Place) -> None:
    before = everything(old)["feedback"]
    database.upgrade(place.url, schema=place.schema)
    nothing = dict.fromkeys(("text", "other_msg_id", "other_choice", "source", "occurred_at", "key"))
    nothing["stored_bytes"] = 0
    for row in before:
        row |= {"kind": "number", "metric": "reward", "value": row.pop("reward"), "call_id": row["event_id"]} | nothing
        row["outcome"] = "pending" if row["event_id"] == "parked" else "accepted"
    assert rows(old, "feedback") == before


def test_rewards_name_a_rule_that_can_be_read(new: Engine) -> None:
    assert rows(new, "reward_rules") == [{"id": 1, "definition": RULE, "created_at": 21.0}]
    assert definition(rule_of(RULE)) == RULE


def test_a_database_without_rewards_gets_no_rule(empty: Engine, place: Place) -> None:
    database.upgrade(place.url, schema=place.schema)
    assert rows(empty, "reward_rules") == []
    assert next_ids(empty) == [1, 1]


def test_new_rows_get_fresh_ids(new: Engine) -> None:
    assert next_ids(new) == [42, 10]
    with new.begin() as connection:
        insert(connection, "reward_rules", definition="{}", created_at=1.0)
    assert [row["id"] for row in rows(new, "reward_rules")] == [1, 2]


def test_every_reference_holds(new: Engine) -> None:
    if new.dialect.name == "sqlite":  # PostgreSQL has no way to store one that does not
        with new.connect() as connection:
            assert connection.execute(text("PRAGMA foreign_key_check")).all() == []
    with pytest.raises(IntegrityError), new.begin() as connection:
        connection.execute(text("DELETE FROM exchanges WHERE msg_id = 'trained'"))


def test_an_upgrade_that_fails_changes_nothing(old: Engine, place: Place) -> None:
    with old.begin() as connection:
        connection.execute(text("CREATE TABLE exports (somebody_elses INTEGER)"))
    before = everything(old)
    with pytest.raises(EnvironmentRefused, match="exports"):
        database.upgrade(place.url, schema=place.schema)
    assert everything(old) == before
    assert rows(old, "alembic_version") == [{"version_num": "0001"}]


def test_the_way_back_brings_the_old_rows(old: Engine, place: Place) -> None:
    before = everything(old)
    received = {row["msg_id"]: row["received_at"] for row in before["exchanges"]}
    database.upgrade(place.url, schema=place.schema)
    go(old, command.downgrade, "0001")
    # When a row was written is the one thing that is forgotten.
    before["experiences"] = [{**row, "recorded_at": received[row["msg_id"]]} for row in before["experiences"]]
    assert everything(old) == before
    assert fresh_ids(old, {"recorded_at": 1.0}, {"reward": 1.0}) == [42, 10]


def test_the_way_back_leaves_out_corrections(full: Engine) -> None:
    go(full, command.downgrade, "0001")
    assert [(row["id"], row["reward"]) for row in rows(full, "experiences") if row["msg_id"] == "trained"] == [
        (41, 0.0)
    ]
    assert [row["consumed"] for row in rows(full, "versions")] == [0, 1, 1]


def test_the_way_back_leaves_out_feedback_that_is_no_number_about_a_reply(full: Engine) -> None:
    before = {row["id"]: row["value"] for row in rows(full, "feedback")}
    go(full, command.downgrade, "0001")
    assert {row["id"]: row["reward"] for row in rows(full, "feedback")} == {id_: before[id_] for id_ in KEPT}


def test_up_again_is_as_after_the_first_time(old: Engine, place: Place) -> None:
    database.upgrade(place.url, schema=place.schema)
    before = everything(old)
    go(old, command.downgrade, "0001")
    database.upgrade(place.url, schema=place.schema)
    assert everything(old) == before
