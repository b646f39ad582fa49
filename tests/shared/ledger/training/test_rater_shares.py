"""How much of a batch is one rater's word: what its share lets in, and what is told of the rest."""

import pytest
from sqlalchemy import Engine

from tests.factories import exchange, feedback, ids
from tests.shared.ledger.reading import rewards
from tuneloop.shared.experience import Exchange, State, TrustedRaters
from tuneloop.shared.ledger.facts import HeldBack
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.settings.feedback import FeedbackSettings, JudgeSettings, RewardRule


def rated_by_eve_too(ledger: Ledger, count: int) -> list[Exchange]:
    """Replies that two of twenty raters rated, the half of them good, and a key that says of each what they say."""
    said = [exchange() for _ in range(count)]
    events = []
    for number, each in enumerate(said):
        names = (f"rater-{number % 20}", f"rater-{(number + 7) % 20}", "key:eve")
        events += [feedback(msg_id=each.msg_id, source=name, value=float(number % 2)) for name in names]
    ledger.recording.record([*said, *events])
    ledger.recording.commit("acme")
    return said


@pytest.fixture
def ledger(engine: Engine) -> Ledger:
    return Ledger(engine, rule=RewardRule())


def crowded(ledger: Ledger, floods: int, others: int = 10) -> tuple[list[str], list[str]]:
    """Replies that one rater rated, committed first, and others' after them."""
    flood, rest = [exchange() for _ in range(floods)], [exchange() for _ in range(others)]
    ledger.recording.record([*flood, *(feedback(msg_id=each.msg_id, source="flood") for each in flood)])
    names = [f"rater-{number % 10}" for number in range(others)]
    ledger.recording.record(
        [*rest, *(feedback(msg_id=each.msg_id, source=name) for each, name in zip(rest, names, strict=True))]
    )
    ledger.recording.commit("acme")
    return [each.msg_id for each in flood], [each.msg_id for each in rest]


LIMITED = BatchRules(max_rater_share=0.1)


def test_one_rater_has_no_more_than_its_share_of_a_batch(ledger: Ledger) -> None:
    flood, rest = crowded(ledger, floods=25)
    batch = ledger.training.lease(ledger.training.take_epoch("trainer"), 10, LIMITED)
    assert {each.msg_id for each in batch} == {flood[0], *rest[:9]}


TRUSTING = LIMITED._replace(trusted_raters=TrustedRaters(frozenset({("acme", "flood")})))


@pytest.mark.parametrize("policy", [BatchRules(), TRUSTING])
def test_without_a_limit_and_for_a_trusted_rater_nothing_changes(ledger: Ledger, policy: BatchRules) -> None:
    flood, _ = crowded(ledger, floods=25)
    batch = ledger.training.lease(ledger.training.take_epoch("trainer"), 10, policy)
    assert [each.msg_id for each in batch] == flood[:10]


def test_few_raters_are_not_limited(ledger: Ledger) -> None:
    said = [exchange() for _ in range(8)]
    heard = [feedback(msg_id=each.msg_id, source=name) for each in said for name in ("ann", "ben", "cid")]
    ledger.recording.record([*said, *heard])
    ledger.recording.commit("acme")
    assert len(ledger.training.lease(ledger.training.take_epoch("trainer"), 8, LIMITED)) == len(said)


def test_what_one_rater_has_too_many_of_does_not_hide_the_others_for_ever(ledger: Ledger) -> None:
    """Ten rows to a batch, and forty of one rater before them: more than is looked through."""
    _, rest = crowded(ledger, floods=60)
    epoch = ledger.training.take_epoch("trainer")
    batches = [ledger.training.lease(epoch, 10, LIMITED) for _ in range(4)]
    [batch] = [each for each in batches if each]
    assert sum(each.msg_id in rest for each in batch) == 9
    counts = ledger.reports.counts()
    assert counts[State.DROPPED] > 0
    assert sum(counts.values()) == 70


def test_what_takes_the_place_of_some_of_a_batch_keeps_to_the_shares_of_all_of_it(ledger: Ledger) -> None:
    flood, rest = crowded(ledger, floods=17, others=18)
    epoch = ledger.training.take_epoch("trainer")
    batch = ledger.training.lease(epoch, 10, LIMITED)
    ledger.training.drop(epoch, ids(batch)[-2:], "no tokens")
    more = ledger.training.lease(epoch, 10, LIMITED, held=ids(batch)[:-2])
    assert [len(batch), len(more)] == [10, 2]
    assert {each.msg_id for each in batch} == {flood[0], *rest[:9]}
    assert {each.msg_id for each in more} == {rest[9], rest[17]}, "those of the raters that have no row in it"
    assert ledger.reports.counts()[State.DROPPED] == 2, "the flood waits for others"
    assert ledger.training.lease(epoch, 10, LIMITED, held=ids(batch)) == []


def contradicted(ledger: Ledger) -> list[Exchange]:
    """Replies with one honest rater each, and one that nobody yet knows to be wrong."""
    said = [exchange() for _ in range(20)]
    honest = [feedback(msg_id=each.msg_id, source=f"rater-{n}", value=1.0) for n, each in enumerate(said)]
    ledger.recording.record([*said, *honest, *(feedback(msg_id=each.msg_id, source="eve", value=0.0) for each in said)])
    ledger.recording.commit("acme")
    return said


@pytest.mark.parametrize("group_by", ["none", "run"])
@pytest.mark.parametrize(("floods", "timeout"), [(0, None), (30, None), (30, 1e12)])
def test_where_no_batch_comes_about_rewards_stay_as_they_are(
    ledger: Ledger, engine: Engine, group_by: str, floods: int, timeout: float | None
) -> None:
    contradicted(ledger)
    crowded(ledger, floods=floods, others=0)
    before = rewards(engine)
    policy = LIMITED._replace(group_by=group_by, batch_timeout=timeout)
    assert ledger.training.lease(ledger.training.take_epoch("trainer"), 40, policy) == []
    assert rewards(engine) == before


def test_groups_are_limited_as_rows_are(ledger: Ledger) -> None:
    crowded(ledger, floods=0)
    whole = []
    for number in range(12):
        runs = [exchange(task_id=f"task-{number}", run_id=str(run)) for run in range(2)]
        name = "flood" if number < 4 else f"rater-{number}"
        whole += [*runs, *(feedback(msg_id=each.msg_id, source=name) for each in runs)]
    ledger.recording.record(whole)
    ledger.recording.commit("acme")
    policy = LIMITED._replace(group_by="task", group_size=2)
    batch = ledger.training.lease(ledger.training.take_epoch("trainer"), 10, policy)
    assert [each.task_id for each in batch[::2]] == ["task-0", *(f"task-{number}" for number in range(4, 8))]
    assert len(ids(batch)) == 10


@pytest.mark.parametrize("waiting", [64, 256])
def test_one_key_that_rates_every_reply_holds_up_none(ledger: Ledger, waiting: int) -> None:
    said = rated_by_eve_too(ledger, waiting)
    epoch = ledger.training.take_epoch("trainer")
    batches = [ledger.training.lease(epoch, 64, LIMITED) for _ in range(waiting // 64)]
    assert sorted(each.msg_id for batch in batches for each in batch) == sorted(each.msg_id for each in said)
    assert ledger.reports.counts()[State.DROPPED] == 0


@pytest.mark.contract
def test_who_rates_every_reply_does_not_outweigh_the_others(ledger: Ledger, engine: Engine) -> None:
    said = contradicted(ledger)
    epoch = ledger.training.take_epoch("trainer")
    batch = ledger.training.lease(epoch, 20, LIMITED)
    assert [each.reward for each in batch] == [1.0] * 20
    ledger.training.release(epoch)
    ledger.recording.record([feedback(msg_id=said[-1].msg_id, source="rater-3", value=1.0)])
    assert rewards(engine)[-1] == 1.0


def test_a_group_is_taken_though_one_rates_all_of_it(ledger: Ledger) -> None:
    said = [exchange(task_id=f"task-{n // 2}", run_id=str(n)) for n in range(20)]
    names = [("eve", f"rater-{n % 10}") for n in range(20)]
    ledger.recording.record(said)
    ledger.recording.record(
        [feedback(msg_id=each.msg_id, source=name) for each, both in zip(said, names, strict=True) for name in both]
    )
    ledger.recording.commit("acme")
    policy = LIMITED._replace(group_by="task", group_size=2)
    assert len(ledger.training.lease(ledger.training.take_epoch("trainer"), 20, policy)) == 20


def test_the_share_of_a_rater_with_the_name_of_another_tenants_trusted_one_is_limited(ledger: Ledger) -> None:
    flood, rest = crowded(ledger, floods=25)
    options = FeedbackSettings(trusted_raters=("globex/flood", "flood"))
    policy = LIMITED._replace(trusted_raters=options.all_trusted(JudgeSettings()))
    batch = ledger.training.lease(ledger.training.take_epoch("trainer"), 10, policy)
    assert {each.msg_id for each in batch} == {flood[0], *rest[:9]}


@pytest.mark.contract
def test_who_keeps_a_full_batch_from_being_taken_is_told_by_name(ledger: Ledger) -> None:
    """Ten raters with one reply each, and ninety replies of one more."""
    crowded(ledger, floods=90)
    epoch = ledger.training.take_epoch("trainer")
    assert ledger.training.lease(epoch, 32, LIMITED) == []
    assert ledger.reports.facts(LIMITED, batch=32).held_back == (HeldBack("acme", "flood", 87),)
    crowded(ledger, floods=0, others=20)
    assert ledger.reports.facts(LIMITED, batch=32).held_back == ()
    assert len(ledger.training.lease(epoch, 32, LIMITED)) == 32


@pytest.mark.contract
@pytest.mark.parametrize("own", [None, "key:web"])
def test_what_the_application_said_itself_is_never_held_back(ledger: Ledger, own: str | None) -> None:
    """A bulk source beside users' thumbs, of which one is about each of its replies, too."""
    crowded(ledger, floods=0)
    said = [exchange() for _ in range(86)]
    words = [feedback(msg_id=each.msg_id, source=own, value=0.5) for each in said]
    ledger.recording.record([*said, *words, *(feedback(msg_id=each.msg_id, source="key:web/eve") for each in said)])
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    batches = [ledger.training.lease(epoch, 32, LIMITED) for _ in range(3)]
    assert [len(batch) for batch in batches] == [32] * 3
    assert {each.reward for batch in batches for each in batch if each.msg_id in {one.msg_id for one in said}} == {0.5}


def test_the_names_of_one_key_are_one_rater_for_the_shares(ledger: Ledger) -> None:
    said = [exchange() for _ in range(10)]
    names = [f"key:web/user-{number}" for number in range(10)]
    heard = [feedback(msg_id=each.msg_id, source=name) for each, name in zip(said, names, strict=True)]
    ledger.recording.record([*said, *heard])
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    assert len(ledger.training.lease(epoch, 10, LIMITED)) == 10, "there is but one rater, who is not limited"
    ledger.training.release(epoch)
    crowded(ledger, floods=0)
    [batch] = [ledger.training.lease(epoch, 10, LIMITED)]
    assert sum(each.msg_id in {one.msg_id for one in said} for each in batch) == 1
