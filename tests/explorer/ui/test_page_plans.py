"""What the pages ask of a large ledger, as both databases do it: more rows are not more to look at."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Connection, Engine, event, text

from benchmarks.page import page_app, pages, put_rows
from tests.doubles.serving import serving
from tests.explorer.running import settings_for
from tuneloop.explorer.ui import overview
from tuneloop.shared.ledger.browsing import reply_pages
from tuneloop.shared.ledger.ledger import Ledger

ROWS = 20_000

#: The bounds of what a page looks at, for so many rows a fiftieth of what they are.
BOUNDS = (
    (reply_pages, "MAX_EXAMINED", 400),
    (reply_pages, "MAX_READ", 40),
    (reply_pages, "_RARE", 40),
    (reply_pages, "AMONG_OF_VERSION", 20),
    (reply_pages, "AMONG_ALL", 40),
    (reply_pages, "_PORTION", 5),
    (overview, "AMONG", 40),
)

#: What one statement may look at in one table, and what it may cost, where only that can be counted.
MOST, MOST_INSTRUCTIONS = 1_000, 2 * ROWS

LARGE = ("experiences", "exchanges", "feedback")

Asked = list[tuple[str, str, Any]]


@contextmanager
def listening(engine: Engine, asked: Asked, page: list[str]) -> Iterator[None]:
    def hear(_: Connection, __: object, statement: str, parameters: Any, *___: object) -> None:
        if statement.lstrip().startswith("SELECT"):
            asked.append((page[0], statement, parameters))

    event.listen(engine, "before_cursor_execute", hear)
    yield
    event.remove(engine, "before_cursor_execute", hear)


@pytest.fixture
def asked(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Every question that a page asked of a ledger of many rows, with the page's name."""
    for module, name, bound in BOUNDS:
        monkeypatch.setattr(module, name, bound)
    settings, engine = settings_for(tmp_path), ledger.transactions.engine
    ledger.versions.ensure_base(settings.model.model_path.absolute())
    put_rows(engine, ROWS)
    with engine.begin() as connection:  # a third, and the oldest: a plan that takes it to be spread looks at all else
        old = f"state = 'dropped', reason = 'old', trained_version = NULL WHERE id < {ROWS // 3}"
        connection.execute(text(f"UPDATE experiences SET {old}"))
    with engine.begin() as connection:
        connection.execute(text("ANALYZE"))
    app = page_app(settings, ledger)
    found: Asked = []
    page = [""]
    shown = {name: path for name, path in pages(ROWS).items() if path != "/ui/waiting"}  # counted behind its back
    with listening(engine, found, page), serving(app) as server, httpx.Client(base_url=server, timeout=120) as http:
        for page[0], path in shown.items():
            assert http.get(path).status_code == 200, path
    assert {each[0] for each in found} == set(shown)
    return found


def test_no_page_goes_through_a_whole_table(ledger: Ledger, asked: Asked):
    engine = ledger.transactions.engine
    look = _looked_at_by_sqlite if engine.dialect.name == "sqlite" else _looked_at_by_postgres
    with engine.connect() as connection:
        wrong = [(name, found, statement) for name, statement, parameters in asked
                 if (found := look(connection, statement, parameters))]  # fmt: skip
        assert look(connection, "SELECT max(latency_s + 0) FROM exchanges", None)  # which would be found
    assert wrong == []


def _looked_at_by_sqlite(connection: Connection, statement: str, parameters: Any) -> list[str]:
    """The instructions of its machine, if they are more than a page may cost: to read every row takes as many."""
    ran = [0]
    driver: Any = connection.connection.driver_connection
    driver.set_progress_handler(lambda: ran.__setitem__(0, ran[0] + 100), 100)
    connection.exec_driver_sql(statement, parameters).all()
    driver.set_progress_handler(None, 100)
    return [f"{ran[0]} instructions"] if ran[0] > MOST_INSTRUCTIONS else []


def _looked_at_by_postgres(connection: Connection, statement: str, parameters: Any) -> list[str]:
    """Steps that really looked at more rows than a page may."""
    [[plan]] = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters)
    plans = json.loads(plan) if isinstance(plan, str) else plan
    return [
        f"{step['Node Type']} of {step['Relation Name']}: {looked:.0f}"
        for step in _steps(plans[0]["Plan"])
        if step.get("Relation Name") in LARGE
        and (looked := (step["Actual Rows"] + step.get("Rows Removed by Filter", 0)) * step["Actual Loops"]) > MOST
    ]


def _steps(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for each in plan.get("Plans", ()):
        yield from _steps(each)
