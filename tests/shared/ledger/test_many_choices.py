"""A reply of as many choices as there may be takes as many statements as one of a few, and no work for each pair."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event, select

from tests.factories import exchange, experience, feedback, ids, published
from tuneloop.shared.experience import Exchange, Feedback, State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.shared.settings.feedback import RewardRule

CHOICES = 1024

#: Events about one reply, as many as there may be: each voice has a part of them.
EVENTS = 1000

Statements = Callable[[Callable[[], object]], int]


@pytest.fixture
def statements(engine: Engine) -> Statements:
    seen: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *heard: seen.append(heard[2]))

    def counted(verb: Callable[[], object]) -> int:
        seen.clear()
        verb()
        return sum(not each.startswith("BEGIN") for each in seen)

    return counted


@pytest.fixture
def ledger(engine: Engine) -> Ledger:
    return Ledger(engine, rule=RewardRule(clip=None), compensate_late=True)


def recorded(ledger: Ledger, **but: Any) -> Exchange:
    said = exchange(experiences=tuple(experience(choice=number) for number in range(CHOICES)), **but)
    ledger.recording.record([said])
    return said


def about_each(said: Exchange, **but: Any) -> Iterator[Feedback]:
    """An event about each choice, all of one call's time."""
    for number in range(EVENTS):
        of_one = {"msg_id": said.msg_id, "choice": number, "source": f"s{number // 200}", "received_at": 1e6}
        yield feedback(**of_one | {name: each(number) if callable(each) else each for name, each in but.items()})


def values(engine: Engine, said: Exchange) -> list[float | None]:
    with engine.connect() as connection:
        rows = select(experiences.c.reward).where(experiences.c.msg_id == said.msg_id).order_by(experiences.c.id)
        return list(connection.execute(rows).scalars())


def test_choices_that_are_rated_alike_by_twos(ledger: Ledger, engine: Engine, statements: Statements) -> None:
    said = recorded(ledger)
    assert statements(lambda: ledger.recording.record([*about_each(said, value=lambda n: float(n // 2))])) < 20
    assert values(engine, said) == [float(number // 2) for number in range(EVENTS)] + [None] * (CHOICES - EVENTS)


def test_trained_choices_whose_rewards_change(ledger: Ledger, engine: Engine, statements: Statements) -> None:
    said = recorded(ledger)
    ledger.recording.record([feedback(msg_id=said.msg_id, source="ann")])
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    rows = ledger.training.lease(epoch, CHOICES, BatchRules())
    ledger.training.register(epoch, ids(rows), step=1, publish=published)
    assert statements(lambda: ledger.recording.record([*about_each(said, value=lambda n: n + 2.0)])) < 20
    again = sorted(each for each in values(engine, said) if each != 1.0)
    assert again == [(1.0 + number + 2.0) / 2 for number in range(EVENTS)]
    assert ledger.reports.counts()[State.REWARDED] == EVENTS
