"""Which engine answers the next turn of a conversation."""

import os
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.processes.test_workers import Staff, chat
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tests.explorer.test_main import attached_to, service, write_settings
from tuneloop.explorer.engines.affinity import PrefixAffinity, hash_prefixes
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.fleet import Engine, EngineState


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


@pytest.mark.parametrize("long", ["a story " * 1000, list(range(8000))])
def test_a_prompt_goes_on_where_an_earlier_one_ended(long: Any) -> None:
    affinity, engine = PrefixAffinity(), Known(3)
    affinity.record(hash_prefixes({"prompt": long}), engine)
    assert affinity.engines_with_prefix(hash_prefixes({"prompt": long + long}), [engine]) == [{3}]
    assert affinity.engines_with_prefix(hash_prefixes({"prompt": long[1:] + long}), [engine]) == []


def test_every_process_hashes_a_beginning_alike() -> None:
    code = (
        f"from tuneloop.explorer.engines.affinity import *; print(hash_prefixes({turn('hello')!r}), rendezvous((7,), "
    )
    code += "[type('E', (), {'number': each}) for each in range(5)]))"
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


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
