"""Which tasks come first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneloop.runner.tasks.task_set import DifficultySelector, outcomes_of

OUTCOMES = {"always": [1.0] * 8, "never": [0.0] * 8, "half": [1.0, 0.0] * 4, "mostly": [1.0] * 7 + [0.0]}


def test_what_is_solved_sometimes_comes_first() -> None:
    order = DifficultySelector(unseen=0.0).order([*OUTCOMES, "fresh"], OUTCOMES)
    assert order[:2] == ["half", "mostly"]
    assert set(order[2:4]) == {"always", "never"}
    assert order[4] == "fresh"


def test_a_share_has_never_been_run() -> None:
    known = {f"k{at}": [1.0, 0.0] for at in range(40)}
    tasks = [*known, *(f"f{at}" for at in range(40))]
    order = DifficultySelector(unseen=0.2).order(tasks, known)
    assert sum(each.startswith("f") for each in order[:20]) == 4
    assert sorted(order) == sorted(tasks)


def test_tasks_may_be_rows() -> None:
    rows = [{"task_id": "never", "question": "a"}, {"task_id": "half", "question": "b"}]
    assert DifficultySelector().order(rows, OUTCOMES, count=1) == [rows[1]]


def test_what_was_long_ago_is_forgotten() -> None:
    learnt = {"t": [0.0] * 100 + [1.0] * 16}
    assert DifficultySelector(newest=16).measure("t", learnt).solve_rate == pytest.approx(17 / 18)
    assert DifficultySelector(newest=16).measure("t", {}).variance == pytest.approx(1 / 6)


def test_equal_tasks_come_in_an_order_by_the_seed() -> None:
    tasks = [str(at) for at in range(20)]
    orders = [DifficultySelector(seed=seed).order(tasks, {}) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


@given(st.lists(st.booleans(), max_size=40), st.lists(st.booleans(), max_size=40))
def test_every_task_comes_once(seen: list[bool], solved: list[bool]) -> None:
    tasks = [str(at) for at in range(len(seen))]
    outcomes = {task: [float(each) for each in solved] for task, known in zip(tasks, seen, strict=True) if known}
    assert sorted(DifficultySelector().order(tasks, outcomes)) == sorted(tasks)


@pytest.mark.parametrize("rule", [{"prior": (0.0, 1.0)}, {"unseen": 1.5}, {"newest": 0}])
def test_rules_that_make_no_sense_are_refused(rule: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match="prior"):
        DifficultySelector(**rule)
    with pytest.raises(ValueError, match="an outcome is"):
        DifficultySelector().order(["t", "u"], {"t": [3.0], "u": [1.0]})


def test_outcomes_are_read_from_rows() -> None:
    rows = [
        {"task_id": "t", "run_id": "0", "reward": None},
        {"task_id": "t", "run_id": "0", "reward": 0.1},
        {"task_id": "t", "run_id": "0", "reward": 0.9},
        {"task_id": "t", "total_reward": 0.4},
        {"reward": 1.0},
        {"task_id": "u", "total_reward": 0.5},
    ]
    assert outcomes_of(rows) == {"t": [1.0, 0.0], "u": [1.0]}
