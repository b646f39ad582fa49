"""What a version would have earned: reckoned by hand, and against versions whose rewards are known."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from tuneloop.shared.errors import NotEvaluated
from tuneloop.shared.evaluation.off_policy import (
    MIN_EFFECTIVE_SIZE,
    HeldOutReply,
    ReplayPair,
    estimate,
    is_replay_against,
    replay_figures,
    replay_pairs,
)
from tuneloop.shared.evaluation.scores import Figure

#: The reward of each of three tokens, and how likely they are to some versions.
EARNS = np.array([0.0, 0.5, 1.0])
SAMPLED, BETTER, WORSE, FAR = (np.array(each) for each in ([4, 3, 3], [3, 3, 4], [5, 3, 2], [1, 1, 98]))


def reply(number: int = 1, **but: object) -> HeldOutReply:
    values: dict[str, object] = {
        "id": number,
        "prompt_ids": np.array([7], np.int32),
        "completion_ids": np.array([4, 5], np.int32),
        "logprobs": np.array([-1.0, -0.5], np.float32),
        "temperature": 1.0,
        "reward": 1.0,
        "task_id": None,
    }
    return HeldOutReply(**values | but)  # type: ignore[arg-type]


def test_weights_are_truncated_and_normalised_as_by_hand() -> None:
    # √4 = 2 truncates the 8. Of 1.5 + 0.5 + 1 + 2 = 5, the rewards come to 1.5 + 3 = 4.5.
    found = estimate([1.0, 0.0, 3.0, 0.0], [math.log(each) for each in (1.5, 0.5, 1.0, 8.0)])
    assert found.value == pytest.approx(0.9)
    assert found.deviation == pytest.approx(math.sqrt((1.5 * 0.01 + 0.5 * 0.81 + 1 * 4.41 + 2 * 0.81) / 5))
    assert found.size == pytest.approx(5**2 / (2.25 + 0.25 + 1 + 4))


def test_replies_of_its_own_count_in_full_and_their_mean_is_the_estimate() -> None:
    assert estimate([1.0, 0.0, 0.5, 0.5], [0.0] * 4) == pytest.approx((0.5, math.sqrt(0.125), 4.0))


@pytest.mark.parametrize("ratio", [-10.0, -1e4, -math.inf])
def test_a_version_that_would_have_said_none_of_this_has_no_effective_size(ratio: float) -> None:
    found = estimate([1.0, 0.0], [ratio, ratio])
    assert found.value == 0.5
    assert found.size == pytest.approx(2 * math.exp(ratio))


def test_a_log_probability_that_is_no_number_is_no_evaluation() -> None:
    with pytest.raises(NotEvaluated):
        estimate([1.0, 0.0], [0.0, math.nan])


def drawn(seed: int, replies: int = 1000, tokens: int = 4) -> tuple[Sequence[float], dict[str, list[float]]]:
    """Rewards of replies that were sampled, and the log-ratios of some versions."""
    rng = np.random.default_rng(seed)
    shares = {name: of / of.sum() for name, of in {"same": SAMPLED, "better": BETTER, "worse": WORSE}.items()}
    said = rng.choice(3, size=(replies, tokens), p=shares["same"])
    ratios = {name: np.log(of / shares["same"])[said].sum(1).tolist() for name, of in shares.items()}
    return EARNS[said].mean(1).tolist(), ratios


def test_estimates_come_near_the_truth_and_rank_versions_rightly() -> None:
    truth = {"same": 0.45, "better": 0.55, "worse": 0.35}
    for seed in range(20):
        rewards, ratios = drawn(seed)
        found = {name: estimate(rewards, each) for name, each in ratios.items()}
        assert found["worse"].value < found["same"].value < found["better"].value
        assert all(abs(found[name].value - truth[name]) < 0.05 for name in truth)
        assert all(each.size > 500 for each in found.values())


def test_a_version_that_is_far_away_is_worth_little() -> None:
    rng = np.random.default_rng(1)
    shares = SAMPLED / SAMPLED.sum()
    said = rng.choice(3, size=(1000, 12), p=shares)
    ratios = np.log(FAR / FAR.sum() / shares)[said].sum(1).tolist()
    assert estimate(EARNS[said].mean(1).tolist(), ratios).size < MIN_EFFECTIVE_SIZE


# Figures.


def test_both_versions_are_compared_on_the_same_replies() -> None:
    replies = [reply(1, reward=1.0), reply(2, reward=0.0)]  # each was sampled with -1.5
    found = replay_figures(replies, [-1.5 + math.log(1.2), -1.5 - math.log(2)], [-1.5, -1.5], of=3)
    assert is_replay_against(found, 3)
    assert not is_replay_against(found, 4)
    [pair] = replay_pairs(found)
    assert pair[:1] + pair[4:] == ("", 2)
    # The sum of 1.2 and 0.5 is less than 2, and more than Kish's 1.7² / 1.69.
    assert pair[1:4] == pytest.approx((1.2 / 1.7, 0.5, min(1.7, 1.7**2 / (1.44 + 0.25))))
    assert not pair.concludes
    assert ReplayPair("", 1.0, 1.0, MIN_EFFECTIVE_SIZE, 1).concludes


def test_a_slice_is_what_stands_before_the_slash_where_there_are_enough() -> None:
    enough, few = int(MIN_EFFECTIVE_SIZE), int(MIN_EFFECTIVE_SIZE) - 1
    named = [("sums/1", enough), ("words/1", few), ("alone", enough), ("/x", enough), (None, enough), ("x" * 99, 100)]
    replies = [reply(task_id=name) for name, count in named for _ in range(count)]
    told = [-1.5] * len(replies)
    found = {pair.slice: pair for pair in replay_pairs(replay_figures(replies, told, told, of=0))}
    assert {name: pair.replies for name, pair in found.items()} == {
        "": len(replies),
        "alone": enough,
        "sums": enough,
        "x" * 64: 100,
    }
    assert all(pair.concludes for pair in found.values())


def test_without_held_out_replies_there_is_only_that_it_was_looked_for() -> None:
    assert replay_figures([], [], [], of=3) == (Figure("replay_of", "", 3.0, 0.0, 1),)
    assert list(replay_pairs(replay_figures([], [], [], of=3))) == []
