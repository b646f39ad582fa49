"""What requests read of the database is read when it is their caller's turn, not in the event loop's own threads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer.running import RunningExplorer, eventually, explorer_running, settings_for
from tuneloop.explorer.bulk_work import BulkWork
from tuneloop.shared.experience import DEFAULT_TENANT, Scope
from tuneloop.shared.ledger.keys import KeyGrant

RESPONSES = "/v1/responses"
READ = {
    f"{RESPONSES}/ID": "default/web",
    "/training": "pages of default/web",
    "/training/calls?task_id=t&run_id=r": "pages of default/web",
    "/ui/exchanges": "pages of default/web",
}

Client = tuple[httpx.Client, list[str]]


def ask(http: httpx.Client, **but: Any) -> str:
    answer = http.post(RESPONSES, json={"model": MODEL, "input": "3+4=", "max_output_tokens": 12} | but)
    found: str = answer.raise_for_status().json()["id"]
    return found


@pytest.fixture
def caller(tmp_path: Path, double: EngineDouble, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A key's client, and whose turns were taken since."""
    turns: list[str] = []
    run = BulkWork.run

    async def noting(work: BulkWork, owner: str, what: Callable[[], Any]) -> Any:
        turns.append(owner)
        return await run(work, owner, what)

    with explorer_running(settings_for(tmp_path, [double.url])) as explorer, key_of(explorer) as http:
        monkeypatch.setattr(BulkWork, "run", noting)
        yield http, turns


@contextmanager
def key_of(explorer: RunningExplorer) -> Iterator[httpx.Client]:
    grant = KeyGrant(name="web", tenant=DEFAULT_TENANT, scopes=tuple(Scope))
    secret = explorer.ledger.keys.create(grant, actor="test")[1]
    eventually(lambda: httpx.get(f"{explorer.url}/v1/models").status_code == 401)
    with httpx.Client(base_url=explorer.url, headers={"Authorization": f"Bearer {secret}"}, timeout=60) as http:
        assert http.post("/ui/login", data={"key": secret}).status_code == 303
        yield http


@pytest.mark.parametrize(("path", "owner"), READ.items())
def test_what_is_read_waits_for_its_callers_turn(caller: Client, path: str, owner: str) -> None:
    http, turns = caller
    path = path.replace("ID", ask(http))
    turns.clear()
    assert http.get(path).status_code == 200
    assert set(turns) == {owner}


def test_a_conversation_that_is_continued_is_read_in_turn(caller: Client) -> None:
    http, turns = caller
    first = ask(http)
    turns.clear()
    ask(http, previous_response_id=first)
    assert set(turns) == {"default/web"}
