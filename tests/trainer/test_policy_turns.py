"""Whose turn it is: the one whose oldest row has waited longest, and nobody twice in a round."""

from tuneloop.shared.experience import PolicyState
from tuneloop.shared.ledger.policies import Policy
from tuneloop.shared.ledger.training.training import WaitingRows
from tuneloop.trainer.policies import PolicyTurns


def _policy(number: int) -> Policy:
    values = {"tenant": "", "name": str(number), "parent": 0, "settings": {}, "created_at": 0.0, "created_by": "ops"}
    return Policy(id=number, state=PolicyState.ACTIVE, **values)


def ready(*seconds: float) -> list[WaitingRows]:
    """Policies 0, 1, 2, … whose oldest row has waited so long."""
    return [WaitingRows(_policy(number), 8, each) for number, each in enumerate(seconds)]


def turns(order: PolicyTurns, waiting: list[WaitingRows], count: int) -> list[int]:
    """The next turns, if the same wait all the while."""
    found = []
    for _ in range(count):
        found.append(order.order(waiting)[0])
        order.note(found[-1])
    return found


def test_the_oldest_row_comes_first_and_of_equal_ones_the_first_policy() -> None:
    assert PolicyTurns().order(ready(1.0, 9.0, 5.0, 9.0)) == [1, 3, 2, 0]


def test_none_starves_however_old_the_rows_of_others_are() -> None:
    assert turns(PolicyTurns(), ready(9000.0, 8000.0, 1.0), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_one_that_comes_later_goes_before_those_that_had_a_turn() -> None:
    order = PolicyTurns()
    assert turns(order, ready(9.0, 8.0), 3) == [0, 1, 0]
    assert order.order(ready(9.0, 1.0, 0.5)) == [1, 2, 0]


def test_alone_it_goes_on() -> None:
    assert turns(PolicyTurns(), ready(1.0), 3) == [0, 0, 0]
