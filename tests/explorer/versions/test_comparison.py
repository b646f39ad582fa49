"""What becomes of a version that is tried: simulated rollouts, and each reason to decide."""

import statistics
from typing import Any

import pytest

from tests.explorer.rollouts import Traffic, bernoulli, normal, trials
from tuneloop.explorer.versions.trial import decide
from tuneloop.shared.evaluation.samples import Figures, SampleStatistics, Share
from tuneloop.shared.settings.versions import RolloutSettings

CANARY, AB = (RolloutSettings(mode=mode) for mode in ("canary", "ab"))


def sample(mean: float, replies: int = 400, *, deviation: float = 1.0, units: int | None = None) -> SampleStatistics:
    return SampleStatistics(replies, replies if units is None else units, mean, deviation**2)


def fine(**but: Any) -> Figures:
    fields: dict[str, Any] = {
        "reward": sample(0.5, deviation=0.5),
        "failures": Share(1, 400),
        "refusals": Share(2, 400),
        "latency": sample(0.02, deviation=0.01),
        "length": sample(100.0, deviation=50.0),
    }
    return Figures(**fields | but)


def action(
    rollout: RolloutSettings = CANARY, *, elapsed_s: float = 0.0, champion: Figures | None = None, **but: Any
) -> str:
    return decide(rollout, champion or fine(), fine(**but), elapsed_s=elapsed_s).action


@pytest.mark.parametrize(
    ("rollout", "reward", "rewards"),
    [(AB, bernoulli(0.6), 1000), (CANARY, bernoulli(0.6), 2000), (AB, normal(0.0), 1000), (CANARY, normal(0.0), 2000)],
)
def test_of_200_versions_as_good_as_the_champion_no_more_than_the_error_are_promoted(rollout, reward, rewards):
    """Called better or worse wrongly are at most 5 % of them: 10. (Of 1000, 0 to 2.4 % are.)"""
    ends = [each.decision for each in trials(200, rollout, Traffic(reward, reward), rewards=rewards)]
    promoted = sum(end.action == "promote" for end in ends)
    worse = sum(end.reason.startswith("it earns less") for end in ends)
    assert promoted + worse <= rollout.error * len(ends)
    assert {end.reason.partition(":")[0] for end in ends if end.action == "roll_back"} <= {
        "the window has ended",
        "it earns less",
    }


@pytest.mark.parametrize(
    ("rollout", "champion", "tried", "most"),
    [(AB, bernoulli(0.6), bernoulli(0.7), 4000), (CANARY, normal(0.0), normal(0.3), 4000)],
)
def test_a_better_version_is_promoted(rollout, champion, tried, most):
    ends = list(trials(50, rollout, Traffic(champion, tried), rewards=most))
    assert [end.decision.reason for end in ends if end.decision.action != "promote"] == []


@pytest.mark.parametrize("rollout", [CANARY, AB])
def test_a_scrambled_version_is_rolled_back_as_soon_as_there_are_rewards_enough(rollout):
    ends = list(trials(50, rollout, Traffic(bernoulli(0.6), bernoulli(0.05)), rewards=1000))
    assert {end.decision.action for end in ends} == {"roll_back"}
    assert statistics.median(end.of_tried for end in ends) <= rollout.rewards + 10


def test_all_well_means_to_wait_until_the_window_ends():
    assert action() == "wait"
    assert action(elapsed_s=CANARY.window) == "roll_back"


@pytest.mark.parametrize(
    ("but", "word"),
    [
        ({"failures": Share(40, 400)}, "failed requests"),
        ({"refusals": Share(120, 400)}, "refusals"),
        ({"latency": sample(0.05, deviation=0.02)}, "seconds per token"),
        ({"length": sample(300.0, deviation=90.0)}, "tokens per reply"),
        ({"length": sample(20.0, deviation=15.0)}, "shorter"),
    ],
)
@pytest.mark.parametrize("rollout", [CANARY, AB])
def test_a_broken_guard_rolls_it_back(but, word, rollout):
    decision = decide(rollout, fine(), fine(**but), elapsed_s=0.0)
    assert decision.action == "roll_back"
    assert word in decision.reason


def test_the_reason_has_the_numbers_and_says_what_is_missing():
    worse = decide(CANARY, fine(), fine(reward=sample(0.1, 60, deviation=0.3)), elapsed_s=0.0)
    assert worse.reason.startswith(
        "it earns less: 0.1 in 60 replies against 0.5 in 400, the difference lies between -0."
    )
    assert decide(CANARY, fine(), Figures(), elapsed_s=0.0).reason == "it has only 0 of 50 rewarded replies"
    late = decide(CANARY, Figures(), fine(), elapsed_s=CANARY.window)
    assert late.reason == "the window has ended: the champion has only 0 of 50 rewarded replies"
    users = decide(CANARY, fine(), fine(reward=sample(0.1, units=9)), elapsed_s=0.0)
    assert "fewer than 10 users or tasks" in users.reason
