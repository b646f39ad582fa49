"""Which engine answers a request: by its version, and by the conversation that it goes on with."""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from tests.doubles.engine import EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.processes.test_workers import Staff, chat
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tests.explorer.test_main import attached_to, service, write_settings
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.fleet import (
    Engine,
    EngineState,
    TrafficSplit,
    bucket_of,
    choose_engine,
    split_of,
)
from tuneloop.explorer.engines.prefix_affinity import PrefixAffinity, hash_prefixes


def turn(text: str, *before: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "Be kind."}, *before, {"role": "user", "content": text}]}


def next_turn(request: dict[str, Any], reply: str, text: str) -> dict[str, Any]:
    return turn(text, *request["messages"][1:], {"role": "assistant", "content": reply})


def engines(*in_flight: int) -> list[Engine]:
    found = [Engine(number, EngineHttp()) for number in range(len(in_flight))]
    for engine, count in zip(found, in_flight, strict=True):
        engine.state, engine.in_flight = EngineState.READY, count
    return found


@pytest.mark.parametrize("long", ["a story " * 1000, list(range(8000))])
def test_a_prompt_goes_on_where_an_earlier_one_ended(long: Any) -> None:
    affinity, engine = PrefixAffinity(), Engine(3, EngineHttp())
    affinity.record(hash_prefixes({"prompt": long}), engine)
    assert affinity.engines_with_prefix(hash_prefixes({"prompt": long + long}), [engine]) == [{3}]
    assert affinity.engines_with_prefix(hash_prefixes({"prompt": long[1:] + long}), [engine]) == []


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


@pytest.mark.xdist_group("workers")
def test_the_next_turn_that_comes_to_another_worker_goes_to_the_same_engine(
    tmp_path: Path, doubles: list[EngineDouble]
) -> None:
    urls = {**attached_to(doubles[0]), "explorer__rollout_model__engine_urls": [each.url for each in doubles]}
    with service(write_settings(tmp_path, explorer__workers=2, **urls)) as (process, http), ExitStack() as stack:
        one, other = Staff(tmp_path, process, http, doubles[0]).clients_of_both(stack).values()
        eventually(lambda: 'tuneloop_engines{state="ready"} 2.0' in http.get("/metrics").text)
        for double in doubles:
            double.chats.clear()
        talks = [turn(f"talk {number}") for number in range(12)]
        for request in talks:
            chat(one, **request)
        for request in talks:
            chat(other, **next_turn(request, "yes", "go on"))
    asked = [Counter(asked_of(double)) for double in doubles]
    assert all(asked)
    assert asked[0].keys().isdisjoint(asked[1])
    assert {*asked[0].values(), *asked[1].values()} == {2}


KEYS = [f"default:user-{number}" for number in range(10_000)]


def engine(number: int, version: int, *, in_flight: int = 0, state: EngineState = EngineState.READY) -> Engine:
    made = Engine(number, cast("Any", None))
    made.version, made.in_flight, made.state = version, in_flight, state
    return made


def number(engines: Sequence[Engine], split: TrafficSplit | None, key: str | None) -> int | None:
    found = choose_engine(engines, split, key)
    return found.number if found else None


TRIED = next(key for key in KEYS if TrafficSplit(2, share=0.1).answers(key))
OTHER = next(key for key in KEYS if not TrafficSplit(2, share=0.1).answers(key))


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_the_tried_version_gets_its_share_of_the_keys(share: float) -> None:
    got = sum(TrafficSplit(3, share=share).answers(key) for key in KEYS)
    assert abs(got - share * len(KEYS)) < 5 * math.sqrt(len(KEYS) * share * (1 - share))


def test_a_key_stays_where_it_is_and_goes_over_when_the_share_grows() -> None:
    assert bucket_of(2, "default:anna") == 0.39715205203954207
    assert all(TrafficSplit(2, share=0.5).answers(key) for key in KEYS if TrafficSplit(2, share=0.1).answers(key))


def test_nobody_is_answered_by_a_version_without_a_share() -> None:
    assert not any(TrafficSplit(2, share=0.5).without_traffic().answers(key) for key in KEYS)
    assert not any(split_of("shadow", 2, 1.0).answers(key) for key in KEYS)
    assert all(split_of("shadow", 2, 1.0).shadows(key) for key in KEYS)
    assert not any(split_of("canary", 2, 1.0).shadows(key) for key in KEYS)


def test_the_version_that_is_tried_answers_its_own_and_nobody_else() -> None:
    engines, split = [engine(0, 1, in_flight=9), engine(1, 2)], TrafficSplit(2, share=0.1)
    assert number(engines, split, TRIED) == 1
    assert number(engines, split, OTHER) == 0
    assert number(engines, split, None) == 0


def test_the_champion_stands_in_for_the_version_that_is_tried_but_not_the_other_way_round() -> None:
    split, down = TrafficSplit(2, share=0.1), EngineState.DOWN
    assert number([engine(0, 1), engine(1, 2, state=down)], split, TRIED) == 0
    assert number([engine(0, 1, state=down), engine(1, 2)], split, OTHER) is None
    assert number([engine(0, 1, state=down), engine(1, 2)], split, None) is None
