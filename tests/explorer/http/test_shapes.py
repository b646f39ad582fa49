"""Bodies that are small on the wire and large or deep once they are parsed."""

import json
import tracemalloc
from collections.abc import Iterator

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.doubles.engine import CHAT, EnginePlace
from tests.explorer.running import HELLO, RunningExplorer, explorer_running, settings_for
from tuneloop.explorer.http.bodies import MAX_DEPTH, MAX_VALUES, count_structure, parse_object
from tuneloop.shared.errors import RequestRefused

pytestmark = pytest.mark.contract


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def code_of(data: bytes) -> str | None:
    with pytest.raises(RequestRefused) as refused:
        parse_object(data)
    return refused.value.code


def test_what_is_nested_as_deep_as_allowed_can_be_written_again() -> None:
    body = parse_object(nested(MAX_DEPTH))
    assert orjson.dumps({"a": [{"b": body}]})
    assert code_of(nested(MAX_DEPTH + 1)) == "nested_too_deeply"
    assert code_of(nested(1000)) == "nested_too_deeply"


@pytest.mark.parametrize("piece", [b"[],", b"{},", b'"a",', rb'"\\",'])
def test_very_many_containers_are_refused_before_they_are_made(piece: bytes) -> None:
    data = b'{"a":[' + piece * (MAX_VALUES + 1) + b"0]}"
    tracemalloc.start()
    try:
        assert code_of(data) == "too_many_values"
        assert tracemalloc.get_traced_memory()[1] < 7 * len(data)
    finally:
        tracemalloc.stop()
    assert code_of(b'{"a":[' + b"1," * (MAX_VALUES + 1) + b"1]}") == "too_many_values"


def test_text_is_no_container() -> None:
    text = '[{,\\"' * (MAX_VALUES + 1)
    assert parse_object(json.dumps({"a": text}).encode()) == {"a": text}


def structure(value: object) -> tuple[int, int]:
    """The containers in a value, and the commas between the elements of each."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [structure(each) for each in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(each[0] for each in inner), max(len(value) - 1, 0) + sum(each[1] for each in inner)


_quoting = st.text(st.sampled_from('\\",[]{}n\n'), max_size=9)


@given(st.recursive(_quoting, lambda inner: st.lists(inner) | st.dictionaries(_quoting, inner)))
def test_brackets_and_commas_are_counted_where_they_are_no_text(value: object) -> None:
    assert count_structure(orjson.dumps(value)) == structure(value)


@given(st.recursive(st.none() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_what_is_neither_deep_nor_large_is_read_as_ever(value: object) -> None:
    assert parse_object(orjson.dumps({"a": value})) == {"a": value}


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory, places: list[EnginePlace]) -> Iterator[RunningExplorer]:
    with explorer_running(settings_for(tmp_path_factory.mktemp("shapes"), [places[0].fresh().url])) as running:
        yield running


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/feedback"])
@pytest.mark.parametrize("field", ["metadata", "tools", "demonstration"])
def test_no_route_fails_on_what_is_nested_deeply(explorer: RunningExplorer, path: str, field: str) -> None:
    plain = json.dumps(HELLO | {"input": "x", "prompt": "x", "msg_ids": ["x"]})[:-1]
    for depth in (150, MAX_DEPTH - 2, MAX_DEPTH + 1, 254, 500, 1000):
        content = f'{plain}, "{field}": {{"a": {"[" * depth}{"]" * depth}}}}}'
        answer = explorer.http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code < 500, (depth, answer.text)
