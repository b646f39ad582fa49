"""Spans of the training, as a real OTLP receiver gets them of the whole loop."""

from collections.abc import Callable, Iterator
from threading import Event

import pytest

from tests.explorer.proxy.test_tracing import Receiver, attributes_of, links_of
from tests.trainer.factories import commit, sample
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry.spans import span_of_reply, span_of_version
from tuneloop.trainer.loop import run


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver().running() as running:
        yield running


def test_a_version_leads_back_to_its_steps_and_they_to_their_replies(
    settings: Callable[..., Settings], ledger: Ledger, receiver: Receiver
) -> None:
    commit(ledger, [sample(number) for number in range(12)])
    chosen = settings(trainer={"total_steps": 3, "save_interval": 2}, monitor={"otlp_url": receiver.url})
    run(chosen, Event())  # its end sends what waits
    assert receiver.services == {"tuneloop-trainer"}
    steps = {attributes_of(each)["tuneloop.step"]: each for each in receiver.named("step")}
    versions = {attributes_of(each)["tuneloop.version"]: each for each in receiver.named("version")}
    assert (sorted(steps), sorted(versions)) == ([1, 2, 3], [1, 2])
    for version, trained in ((1, (1, 2)), (2, (3,))):
        span = versions[version]
        place = int.from_bytes(span.trace_id), int.from_bytes(span.span_id)
        assert place == span_of_version(f"{chosen.project}/{chosen.name}", version)
        ids = [(int.from_bytes(steps[each].trace_id), int.from_bytes(steps[each].span_id)) for each in trained]
        assert links_of(span) == ids
        replies = f"SELECT DISTINCT msg_id FROM experiences WHERE trained_version = {version}"
        with ledger.transactions.engine.connect() as connection:
            recorded = connection.exec_driver_sql(replies).scalars().all()
        linked = {link for each in trained for link in links_of(steps[each])}
        assert linked == {span_of_reply(msg_id) for msg_id in recorded}
