"""Replies that a grammar held: samples of the policy for who has the grammar, and for nobody else."""

import pytest
from sqlalchemy import Engine

from tests.factories import exchange, experience, feedback
from tuneloop.shared.experience import Grammar, decode, encode, pack_ids
from tuneloop.shared.ledger.export import Selection
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage.schema import experiences

GRAMMAR = Grammar(kind="json", spec='{"type": "object", "title": "' + "Grüezi! " * 100 + '"}', stop_ids=(7, 8))
LEFT = Grammar(kind="tokens", spec="", sets=pack_ids([9] * 20 + list(range(100_000, 100_180))))


@pytest.mark.parametrize("grammar", [GRAMMAR, LEFT])
def test_it_comes_to_the_trainer_with_its_grammar(engine: Engine, grammar: Grammar) -> None:
    ledger = Ledger(engine)
    said = exchange(experiences=(experience(grammar=grammar), experience(choice=1)))
    assert decode(encode(said)) == said
    assert ledger.recording.record([said, feedback(msg_id=said.msg_id)]).not_trained == {}
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    leased = ledger.training.lease(epoch, 2, BatchRules())
    assert [(each.grammar, each.unsampled, each.allowed) for each in leased] == [
        (grammar, None, None),
        (None, None, None),
    ]
    with engine.connect() as connection:
        stored = connection.execute(experiences.select().where(experiences.c.choice == 0)).one().grammar
    assert len(stored) < max(len(grammar.spec), len(grammar.sets)) / 2


def test_a_file_says_that_it_is_no_sample(engine: Engine) -> None:
    ledger = Ledger(engine)
    marked = experience(choice=2, unsampled="sampling:top_p")
    said = exchange(experiences=(experience(grammar=GRAMMAR), experience(choice=1), marked))
    ledger.recording.record([said])
    [page] = ledger.exports.replies(Selection(tenant="acme"))
    assert [reply.unsampled for reply in page] == ["sampling:grammar", None, "sampling:top_p"]
