"""Which engine answers the next turn of a conversation."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.doubles.engine import EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tuneloop.explorer.engines.affinity import PrefixAffinity, hash_prefixes, is_overloaded
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.fleet import Engine, EngineState, pick_engine


@dataclass
class Known:
    number: int
    loads: int = 0


def turn(text: str, *before: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "Be kind."}, *before, {"role": "user", "content": text}]}


def next_turn(request: dict[str, Any], reply: str, text: str) -> dict[str, Any]:
    return turn(text, *request["messages"][1:], {"role": "assistant", "content": reply})


def engines(*in_flight: int) -> list[Engine]:
    found = [Engine(number, EngineHttp()) for number in range(len(in_flight))]
    for engine, count in zip(found, in_flight, strict=True):
        engine.state, engine.in_flight = EngineState.READY, count
    return found


def test_the_next_turn_is_known_to_who_was_asked_the_last_one() -> None:
    affinity, fleet, first = PrefixAffinity(), [Known(0), Known(1)], turn("hello")
    affinity.record(hash_prefixes(first), fleet[1])
    assert affinity.engines_with_prefix(hash_prefixes(next_turn(first, "hi", "and you?")), fleet) == [{1}]
    assert affinity.engines_with_prefix(hash_prefixes(next_turn(turn("good day"), "hi", "and you?")), fleet) == []


def test_a_prompt_that_many_conversations_begin_with_draws_nobody() -> None:
    affinity, fleet = PrefixAffinity(), [Known(0), Known(1)]
    affinity.record(hash_prefixes(turn("hello")), fleet[0])
    assert affinity.engines_with_prefix(hash_prefixes(turn("good day")), fleet) == []


def test_who_knows_the_longest_beginning_comes_first() -> None:
    affinity, fleet, first = PrefixAffinity(), [Known(0), Known(1)], turn("hello")
    second = next_turn(first, "hi", "and you?")
    affinity.record(hash_prefixes(first), fleet[0])
    affinity.record(hash_prefixes(second), fleet[1])
    assert affinity.engines_with_prefix(hash_prefixes(next_turn(second, "fine", "bye")), fleet) == [{1}, {0}]
    affinity.record(hash_prefixes(second), fleet[0])
    assert affinity.engines_with_prefix(hash_prefixes(next_turn(second, "fine", "bye")), fleet) == [{0, 1}, {0}]


def test_new_weights_forget_what_was_cached() -> None:
    affinity, engine, first = PrefixAffinity(), Known(0), turn("hello")
    affinity.record(hash_prefixes(first), engine)
    engine.loads += 1
    assert affinity.engines_with_prefix(hash_prefixes(next_turn(first, "hi", "and you?")), [engine]) == []


def test_as_many_requests_are_remembered_as_are_said_the_oldest_forgotten_first() -> None:
    affinity, engine = PrefixAffinity(max_entries=3), Known(0)
    for text in "abcad":
        affinity.record(hash_prefixes(turn(text)), engine)
    assert len(affinity) == 3
    known = [
        bool(affinity.engines_with_prefix(hash_prefixes(next_turn(turn(text), "", "")), [engine])) for text in "abcd"
    ]
    assert known == [True, False, True, True]


@pytest.mark.parametrize("long", ["a story " * 1000, list(range(8000))])
def test_a_prompt_goes_on_where_an_earlier_one_ended(long: Any) -> None:
    affinity, engine = PrefixAffinity(), Known(3)
    affinity.record(hash_prefixes({"prompt": long}), engine)
    assert affinity.engines_with_prefix(hash_prefixes({"prompt": long + long}), [engine]) == [{3}]
    assert affinity.engines_with_prefix(hash_prefixes({"prompt": long[1:] + long}), [engine]) == []


@pytest.mark.parametrize("fields", [{}, {"prompt": "short"}, {"prompt": ["a", "b"]}, {"input": "x"}, {"messages": {}}])
def test_what_has_no_beginning_is_known_to_nobody(fields: dict[str, Any]) -> None:
    affinity = PrefixAffinity()
    affinity.record(hash_prefixes(fields), Known(0))
    assert affinity.engines_with_prefix(hash_prefixes(fields), [Known(0)]) == []


def test_who_knows_it_answers_unless_it_is_overloaded_or_not_ready() -> None:
    idle, usual, busy = fleet = engines(0, 8, 9)
    assert not is_overloaded(8, 0)
    assert is_overloaded(9, 0)
    assert not is_overloaded(108, 80)
    assert pick_engine(fleet) is idle
    assert pick_engine(fleet, [{1, 2}]) is usual
    assert pick_engine(fleet, [{2}, {1}]) is usual
    assert pick_engine(fleet, [{2}]) is idle
    assert busy.in_flight == 9
    usual.state = EngineState.DOWN
    assert pick_engine(fleet, [{1}]) is idle
    assert pick_engine([usual], [{1}]) is None


@pytest.fixture
def two(running_explorer: Run, doubles: list[EngineDouble]) -> RunningExplorer:
    explorer = running_explorer(*doubles)
    eventually(lambda: all(each.state is EngineState.READY for each in explorer.services.fleet.engines))
    return explorer


def asked_of(double: EngineDouble) -> list[str]:
    """What the conversations that came to an engine are about."""
    return [received.body["messages"][1]["content"] for received in double.chats]


def test_conversations_stay_with_their_engine_are_shared_out_and_move_when_it_goes(
    two: RunningExplorer, doubles: list[EngineDouble]
) -> None:
    fleet = two.services.fleet
    talks = {f"talk {number}": turn(f"talk {number}") for number in range(4)}
    for number, (name, request) in enumerate(talks.items()):
        other = fleet.engines[1 - number % 2]
        other.in_flight += 1  # so that they are shared out
        assert two.chat(**request).status_code == 200
        other.in_flight -= 1
        talks[name] = next_turn(request, "yes", "go on")
    assert [asked_of(double) for double in doubles] == [["talk 0", "talk 2"], ["talk 1", "talk 3"]]
    for _ in range(3):
        for name, request in talks.items():
            assert two.chat(**request).status_code == 200
            talks[name] = next_turn(request, "yes", "go on")
    assert [asked_of(double) for double in doubles] == [["talk 0", "talk 2"] * 4, ["talk 1", "talk 3"] * 4]
    fleet.engines[1].in_flight += 9
    assert two.chat(**talks["talk 1"]).status_code == 200
    assert asked_of(doubles[0])[-1] == "talk 1"
    fleet.engines[1].in_flight -= 9
    doubles[1].dead = True
    assert two.chat(**talks["talk 3"]).status_code == 200
    assert asked_of(doubles[0])[-1] == "talk 3"


def test_without_affinity_the_least_busy_engine_answers(running_explorer: Run, doubles: list[EngineDouble]) -> None:
    explorer = running_explorer(*doubles, prefix_affinity=False)
    fleet = explorer.services.fleet
    eventually(lambda: all(each.state is EngineState.READY for each in fleet.engines))
    first = turn("hello")
    assert explorer.chat(**first).status_code == 200
    fleet.engines[0].in_flight += 1
    assert explorer.chat(**next_turn(first, "yes", "go on")).status_code == 200
    fleet.engines[0].in_flight -= 1
    assert [len(double.chats) for double in doubles] == [1, 1]
    assert HELLO["model"] == doubles[0].chats[0].body["model"]
