"""Rewards that are named by their weights."""

import pytest

from tuneloop.runner import Reply, reward_function

MATH = {"correctness": 3.0, "steps_penalty": -0.1, "format_bonus": 0.5}


def test_a_math_reward_is_what_its_weights_say() -> None:
    reward = reward_function(MATH)
    right = reward(Reply(text="So x = 3.\nAnswer: 12", expected=12, turns=5))
    assert right.values == {"correctness": 1.0, "steps_penalty": 5.0, "format_bonus": 1.0}
    assert right.total == pytest.approx(3.0)
    assert reward(Reply(text="12 I think, or 13", expected="12", turns=1)).total == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Paris", 1.0),
        ("Let me think.\nAnswer: Paris.", 1.0),
        ("Answer: Rome\nNo. The answer is Paris", 1.0),
        ("答案:Paris", 1.0),
        ("Paris, Rome, London or Berlin", 0.0),
        ("Answer: Paris or Rome", 0.0),
    ],
)
def test_an_answer_in_words_is_compared_as_a_whole(text: str, right: float) -> None:
    assert reward_function({"correctness": 1.0})(Reply(text=text, expected="Paris")).total == right


def test_own_components_go_beside_ours_or_in_their_place() -> None:
    weights = {"correctness": 1.0, "brevity": 0.5}
    reward = reward_function(weights, components={"brevity": lambda reply: 1.0, "correctness": lambda reply: 0.5})
    assert reward(Reply(text="")).total == 1.0


@pytest.mark.parametrize(
    ("weights", "components", "words"),
    [
        ({"corectness": 1.0}, {}, "no component is called corectness"),
        ({"correctness": 1.0}, {"brevity": lambda reply: 1.0}, "brevity has no weight"),
        ({"steps_penalty": 0.1}, {}, "steps_penalty counts what is wrong"),
        ({"correctness": float("nan")}, {}, "weights must be finite"),
    ],
)
def test_what_makes_no_sense_is_refused(weights: dict, components: dict, words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=words):
        reward_function(weights, components=components)
