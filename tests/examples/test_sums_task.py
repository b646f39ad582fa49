"""The demo's task and its judge."""

from collections import Counter
from itertools import islice

import pytest

from examples.sums import task


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
