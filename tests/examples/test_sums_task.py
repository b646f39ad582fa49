"""The demo's task and its judge."""

import random
from collections import Counter
from itertools import islice

import pytest

from examples.sums import task
from examples.sums.drive import reward_by


@pytest.mark.parametrize(
    ("reply", "reward"),
    [("12", 1.0), (" 12\n", 1.0), ("1", 0.0), ("012", 0.0), ("12.", 0.0), ("", 0.0), (None, 0.0)],
)
def test_only_the_right_answer_is_rewarded(reply: str | None, reward: float) -> None:
    assert task.judge(task.Sum(5, 7), reply) == reward


def test_every_sum_is_asked_equally_often_in_an_order_of_the_seed() -> None:
    asked = list(islice(task.forever(1), 300))
    assert Counter(asked) == dict.fromkeys(task.ALL, 3)
    assert asked == list(islice(task.forever(1), 300))
    assert asked != list(islice(task.forever(2), 300))


def test_the_control_tosses_another_coin_than_the_one_that_orders_the_sums() -> None:
    toss, same = reward_by("random", 1), random.Random(1)
    tossed = [toss(task.Sum(1, 2), "3") for _ in range(64)]
    assert tossed != [float(same.random() < 0.5) for _ in range(64)]
    assert set(tossed) == {0.0, 1.0}
    again = reward_by("random", 1)
    assert tossed == [again(task.Sum(5, 7), "1") for _ in range(64)]
