import math
from collections.abc import Sequence
from typing import Any, cast

import pytest

from tuneloop.explorer.engines.fleet import Engine, EngineState, choose_engine
from tuneloop.explorer.engines.version_routing import TrafficSplit, bucket_of, split_of

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
