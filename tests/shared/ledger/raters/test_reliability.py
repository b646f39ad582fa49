"""Who agrees with whom, and what that makes of their words."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneloop.shared.ledger.raters.reliability import (
    LEAST_WEIGHT,
    Opinion,
    RaterFigures,
    RaterVerdict,
    figures,
    together,
    weight_of,
)

_opinions = st.lists(st.builds(Opinion, st.floats(-1e6, 1e6), st.floats(0.01, 10)), min_size=1)


def verdict(rater: str, reply: int, value: float, metric: str = "reward") -> RaterVerdict:
    return RaterVerdict(("acme", rater), ("acme", f"chatcmpl-{reply}", None), metric, value)


def crowd(honest: int, liars: int, replies: int = 60) -> Iterator[RaterVerdict]:
    """Each reply is judged by three of the crowd; the liars say the opposite."""
    chance = random.Random(0)
    names = [f"honest-{number}" for number in range(honest)] + [f"liar-{number}" for number in range(liars)]
    for reply in range(replies):
        right = float(chance.random() < 0.5)
        for name in chance.sample(names, 3):
            yield verdict(name, reply, 1 - right if name.startswith("liar") else right)


@given(_opinions)
def test_together_is_between_the_least_and_the_greatest(opinions: list[Opinion]) -> None:
    values = [each.value for each in opinions]
    assert min(values) <= together(opinions) <= max(values)


@given(_opinions.filter(lambda opinions: len(opinions) > 2), st.floats(-1e6, 1e6))
def test_who_has_less_than_half_of_the_weight_decides_nothing(opinions: list[Opinion], value: float) -> None:
    weight = 0.9 * sum(each.weight for each in opinions)
    values = [each.value for each in opinions]
    assert min(values) <= together([*opinions, Opinion(value, weight)]) <= max(values)


def test_two_that_share_the_middle_meet_half_way() -> None:
    assert together([Opinion(value, 1.0) for value in (0.0, 0.0, 1.0, 1.0)]) == 0.5


def test_liars_are_told_from_the_honest() -> None:
    found = figures(crowd(18, 2, replies=300))
    assert min(each.reliability for (_, name), each in found.items() if name.startswith("honest")) > 0.85
    assert max(each.highest for (_, name), each in found.items() if name.startswith("liar")) < 0.5


def test_a_liar_counts_for_as_little_as_a_stranger() -> None:
    assert RaterFigures(100, 0.1).weight == LEAST_WEIGHT == RaterFigures().weight
    assert RaterFigures(4, 1.0).weight == LEAST_WEIGHT < RaterFigures(5, 1.0).weight


def test_many_strangers_do_not_make_liars_of_the_honest() -> None:
    """Each reply that a liar is asked about is judged under ten more names, which are used once."""
    flood = [
        verdict(f"name-{reply}-{number}", reply, 1 - each.value)
        for each in crowd(18, 0, replies=300)
        if int(each.subject[1].rpartition("-")[2]) % 4 == 0
        for reply in [int(each.subject[1].rpartition("-")[2])]
        for number in range(10)
    ]
    found = figures([*crowd(18, 0, replies=300), *flood])
    assert min(each.reliability for (_, name), each in found.items() if name.startswith("honest")) > 0.85


def test_of_two_nobody_knows_who_is_wrong() -> None:
    said = [verdict(name, reply, value) for reply in range(50) for name, value in (("a", 1.0), ("b", reply % 2))]
    assert {each.compared for each in figures(said).values()} == {0}


def test_the_names_of_one_key_are_one_to_be_compared_with() -> None:
    """The liar is not measured by what it says twice either."""
    names = ("key:web", "key:eve/a", "key:eve/b")
    said = [verdict(name, reply, float((reply % 2) ^ ("eve" in name))) for reply in range(50) for name in names]
    assert {each.compared for each in figures(said).values()} == {0}
    found = figures([*said, *(verdict("key:app", reply, float(reply % 2)) for reply in range(50))])
    assert [found["acme", name].agreement for name in ("key:eve/a", "key:eve/b")] == [0.0, 0.0]
    assert [found["acme", name].highest > 0.5 for name in ("key:web", "key:app")] == [True, True]


def test_where_there_is_one_key_its_names_are_compared_with_one_another() -> None:
    names = {"key:web/ann": 0, "key:web/ben": 0, "key:web/cid": 0, "key:web/liar": 1}
    said = [verdict(name, reply, float((reply % 2) ^ turned)) for reply in range(50) for name, turned in names.items()]
    ranging = [verdict(name, reply, float(reply % 2)) for reply in (50, 51) for name in ("key:app", "key:api")]
    found = figures([*said, *ranging])
    assert {name: found["acme", name].agreement for name in names} == {name: 1.0 - each for name, each in names.items()}
    gone = [verdict("key:gone", reply, 1.0) for reply in range(50)]
    heard = figures([*said, *ranging, *gone], ignored={("acme", "key:gone")})
    assert {name: heard["acme", name] for name in names} == {name: found["acme", name] for name in names}


def test_a_trusted_rater_is_enough_to_be_compared_with() -> None:
    said = [
        verdict(name, reply, value)
        for reply in range(50)
        for name, value in (("gold", reply % 2), ("a", reply % 2), ("b", 1 - reply % 2), ("c", 1 - reply % 2))
    ]
    found = figures(said, trusted={("acme", "gold")})
    assert [found["acme", name].agreement for name in "abc"] == [1.0, 0.0, 0.0]


def test_what_one_says_alone_does_not_make_the_others_alike() -> None:
    """Under two names of one key too."""
    alone = [verdict("key:eve", 1000, -100.0), *(verdict(f"key:eve/{n}", 1001, -100.0) for n in range(2))]
    assert figures([*crowd(5, 1), *alone]) | figures(crowd(5, 1)) == figures([*crowd(5, 1), *alone])


def test_a_metric_in_which_all_is_alike_tells_nothing() -> None:
    said = [verdict(name, reply, 1.0) for reply in range(9) for name in "abc"]
    assert {each.compared for each in figures(said).values()} == {0}


def test_one_verdict_far_out_does_not_make_the_others_alike() -> None:
    said = [verdict(name, reply, float(reply % 2)) for reply in range(40) for name in "abc"]
    found = figures([*said, *(verdict("liar", reply, -1e6) for reply in range(40))])
    assert found["acme", "liar"].agreement == 0.0
    assert found["acme", "a"].agreement == 1.0


@pytest.mark.parametrize("reliability", [0.0, 0.3, 0.5])
def test_no_better_than_a_coin_is_no_weight(reliability: float) -> None:
    assert weight_of(reliability, 1000) == LEAST_WEIGHT
