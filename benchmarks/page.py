"""How long the page at /ui takes to answer over a large ledger, on SQLite and PostgreSQL.

    .venv/bin/python -m benchmarks.page [--rows 1000000] [--kinds sqlite postgresql] [--rounds 5]

Each page is asked over HTTP of the routes under a real server, once cold and then `--rounds` times; printed are, in
milliseconds, the first time, the median and the fastest of the others, and the processor time of the server (not of
PostgreSQL). The rows are put there in bulk, over 40 versions, 5000 people and 2000 tasks.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import httpx
from fastapi import FastAPI
from sqlalchemy import Engine, insert, text

from benchmarks.databases import Databases, PostgresDatabases, SqliteFiles
from tests.doubles import postgres
from tests.doubles.serving import serving
from tests.explorer.running import settings_for
from tests.factories import experience
from tuneloop.explorer.auth import Gatekeeper
from tuneloop.explorer.tokens import TokenSigner
from tuneloop.explorer.ui.page import add_routes
from tuneloop.shared.experience import DEFAULT_TENANT
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.recording.reward_rule import definition
from tuneloop.shared.ledger.storage.codec import pack_text, to_blob
from tuneloop.shared.ledger.storage.database import connect, upgrade
from tuneloop.shared.ledger.storage.schema import reward_rules
from tuneloop.shared.operations.doctor import MAX_DROP_REASONS
from tuneloop.shared.settings.feedback import RewardRule
from tuneloop.shared.settings.settings import Settings

VERSIONS = 40
_REQUEST = b'{"model": "t", "messages": [{"role": "user", "content": "Where is my parcel? It should have been here."}]}'
_STATES = "CASE WHEN i % 10 < 3 THEN 'recorded' WHEN i % 10 < 4 THEN 'rewarded' ELSE 'trained' END"


def put_rows(engine: Engine, rows: int) -> None:
    """Exchanges of the last ten days, the newest with the highest number."""
    began = time.time() - 10 * 86400
    step = 10 * 86400 / rows
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})"
    if engine.dialect.name == "postgresql":
        numbers = f"WITH n AS (SELECT i FROM generate_series(1, {rows}) AS i)"
    version = f"(i * {VERSIONS} / {rows + 1})"
    name, at = "'chatcmpl-' || i", f"({began} + i * {step})"
    rewarded = "i % 10 >= 3"
    with engine.begin() as connection:
        connection.execute(insert(reward_rules).values(id=1, definition=definition(RewardRule()), created_at=0))
        connection.execute(text("INSERT INTO epochs VALUES (1, 'trainer', 1, 1, NULL)"))
        connection.execute(text(f"UPDATE versions SET state = 'retired', served_at = {began} WHERE version = 0"))
        for number in range(1, VERSIONS + 1):
            state = "champion" if number == VERSIONS else "retired"
            connection.execute(
                text(
                    "INSERT INTO versions (version, state, step, epoch, path, manifest_sha256, consumed, created_at, "
                    f"served_at) VALUES ({number}, '{state}', {number}, 1, '/', 'x', 0, {began}, {began + number})"
                )
            )
        connection.execute(
            text(
                "INSERT INTO exchanges (msg_id, tenant, endpoint, user_id, request, received_at, latency_s) "
                f"{numbers} SELECT {name}, '{DEFAULT_TENANT}', '/v1/chat/completions', 'user-' || (i % 5000), "
                f":request, {at}, 0.5 FROM n"
            ),
            {"request": pack_text(_REQUEST)},
        )
        connection.execute(
            text(
                "INSERT INTO experiences (id, msg_id, choice, correction, tenant, task_id, priority, state, reward, "
                "reward_rule, version_min, version_max, temperature, text, completion_tokens, blob, sampled_at, "
                f"rewarded_at, committed_at, trained_version) {numbers} SELECT i, {name}, 0, 0, '{DEFAULT_TENANT}', "
                f"'task-' || (i % 2000), 0, {_STATES}, CASE WHEN {rewarded} THEN (i * 7 % 100) / 100.0 END, "
                f"CASE WHEN {rewarded} THEN 1 END, {version}, {version}, 1, 'Your parcel ' || i || ' left the depot "
                f"this morning and should reach you tomorrow by noon.', 2, :blob, {at}, "
                f"CASE WHEN {rewarded} THEN {at} END, CASE WHEN i % 10 >= 4 THEN {at} END, "
                f"CASE WHEN i % 10 >= 4 THEN {version} + 1 END FROM n"
            ),
            {"blob": to_blob(experience())},
        )
        # What is trained must balance.
        connection.execute(
            text(
                "UPDATE versions SET consumed = "
                "(SELECT count(*) FROM experiences WHERE trained_version = versions.version)"
            )
        )
    connection = engine.raw_connection()  # in no transaction
    connection.cursor().execute("ANALYZE" if engine.dialect.name == "sqlite" else "VACUUM ANALYZE")
    connection.close()


def pages(rows: int) -> dict[str, str]:
    """What is asked, by what it is."""
    middle = rows // 2

    def search(**query: object) -> str:
        return f"/ui/exchanges?{urlencode(query)}"

    since = time.strftime("%Y-%m-%dT%H:%M", time.gmtime(time.time() - 5 * 86400))
    return {
        "overview": "/ui",
        "what waits": "/ui/waiting",
        "exchanges, newest": "/ui/exchanges",
        "a deep page": search(after=f"{time.time() - 5 * 86400!r}_{middle}"),
        "state recorded": search(state="recorded"),
        "state dropped (none)": search(state="dropped"),
        "version 3": search(version=3),
        "version 3 and state rewarded": search(version=3, state="rewarded"),
        "reward from 0.99": search(reward_from=0.99),
        "reward from 2 (none)": search(reward_from=2),
        "a user": search(user="user-77"),
        "a task": search(task="task-77"),
        "a run (none)": search(run="nobody"),
        "until five days ago": search(until=since),
        "text, often": search(text="parcel"),
        "text, nowhere": search(text="zebra"),
        "text of one version, nowhere": search(text="zebra", version=3),
        "versions": "/ui/versions",
        "two versions side by side": "/ui/versions/compare?a=3&b=4",
        "preferences": "/ui/preferences",
        "trainer": "/ui/trainer",
        "one exchange": f"/ui/exchanges/chatcmpl-{middle}",
    }


def measure(databases: Databases, rows: int, rounds: int) -> Iterator[tuple[str, list[float]]]:
    """What was asked, and the milliseconds that it took."""
    with tempfile.TemporaryDirectory() as folder, databases.fresh() as url:
        settings = settings_for(Path(folder))
        upgrade(url)
        engine = connect(url)
        ledger = Ledger(engine, rule=settings.reward)
        ledger.versions.ensure_base(settings.model.model_path.absolute())
        began = time.monotonic()
        put_rows(engine, rows)
        print(f"\n{databases.name}: {rows} rows in {time.monotonic() - began:.0f} s", flush=True)
        with serving(page_app(settings, ledger)) as server, httpx.Client(base_url=server, timeout=120) as http:
            for what, path in pages(rows).items():
                yield what, _ask(http, path, rounds)
                if path == "/ui/waiting":
                    yield "(the count itself, which no page waits for)", [_count(settings, ledger)]
        ledger.close()


def page_app(settings: Settings, ledger: Ledger) -> FastAPI:
    """The routes of the page, without the rest of an explorer."""
    app = FastAPI()
    app.state.services = SimpleNamespace(
        fleet=SimpleNamespace(engines=[]),
        recorder=SimpleNamespace(name_as_stored=str),
    )
    add_routes(app, settings, ledger, Gatekeeper(settings, TokenSigner(load_key(settings.job_dir / KEY))))
    return app


def _count(settings: Settings, ledger: Ledger) -> float:
    """The milliseconds that it takes."""
    began = time.perf_counter()
    ledger.reports.facts(BatchRules.of(settings), drops=MAX_DROP_REASONS)
    return 1000 * (time.perf_counter() - began)


def _ask(http: httpx.Client, path: str, rounds: int) -> list[float]:
    times, used = [], []
    for _ in range(rounds + 1):
        began, before = time.perf_counter(), time.process_time()
        answer = http.get(path)
        times.append(1000 * (time.perf_counter() - began))
        used.append(1000 * (time.process_time() - before))
        assert answer.status_code == 200, (path, answer.text[:2000])
    return [times[0], statistics.median(times[1:]), min(times[1:]), statistics.median(used[1:])]


@contextmanager
def _databases(kind: str, folder: Path) -> Iterator[Databases]:
    if kind == "sqlite":
        yield SqliteFiles(folder)
        return
    server = postgres.started(durable=True)
    try:
        yield PostgresDatabases(server.url)
    finally:
        server.close()


def main() -> None:
    """Print a table for each database."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--kinds", nargs="+", choices=("sqlite", "postgresql"), default=("sqlite", "postgresql"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder, _databases(kind, Path(folder)) as databases:
            for what, figures in measure(databases, options.rows, options.rounds):
                print(f"| {what} | {' | '.join(f'{each:.0f}' for each in figures)} |", flush=True)


if __name__ == "__main__":
    main()
