"""What only passes through an engine, without a reply being sampled."""

import threading
from collections.abc import Iterator

import pytest

from tests.doubles.engine import EngineDouble, EnginePlace
from tests.explorer.running import RunningExplorer, explorer_running, settings_for


@pytest.fixture(scope="module")
def engine(places: list[EnginePlace]) -> EngineDouble:
    return places[0].fresh()


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory, engine: EngineDouble) -> Iterator[RunningExplorer]:
    with explorer_running(settings_for(tmp_path_factory.mktemp("texts"), [engine.url])) as running:
        yield running


def test_an_engine_reads_one_text_at_a_time_and_chats_go_on(explorer: RunningExplorer, engine: EngineDouble) -> None:
    engine.text_pause_s, statuses = 0.1, list[int]()

    def ask() -> None:
        statuses.append(explorer.http.post("/tokenize", json={"model": "tiny", "prompt": "ab"}).status_code)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert explorer.chat().status_code == 200
    for thread in threads:
        thread.join()
    assert statuses == [200] * 6
    assert engine.most_texts == 1


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
def test_a_text_that_would_stop_the_engine_is_refused(explorer: RunningExplorer, path: str) -> None:
    answer = explorer.http.post(path, json={"model": "tiny", "prompt": "x" * (600 << 10)})
    assert answer.status_code == 413


def test_a_slash_too_many_is_no_redirect_to_where_the_client_likes(explorer: RunningExplorer) -> None:
    for path in ("/commit/", "/feedback/", "/health/"):
        answer = explorer.http.post(path, headers={"Host": "evil.example"}, json={})
        assert (answer.status_code, "location" in answer.headers) == (403, False)
        answer = explorer.http.post(path, json={})
        assert (answer.status_code, "location" in answer.headers) == (404, False)
