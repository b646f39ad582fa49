"""Raters in the ledger: compared, put into quarantine, released; and what their feedback is worth meanwhile."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, select

from tests.factories import exchange, feedback, ids, trained
from tuneloop.shared.errors import UnknownRater
from tuneloop.shared.experience import Exchange, Kind, State
from tuneloop.shared.ledger.assessment import BY, ON_ONE_REPLY
from tuneloop.shared.ledger.ledger import BatchPolicy, Ledger
from tuneloop.shared.ledger.raters.newest_feedback import KeyWithFeedback
from tuneloop.shared.ledger.raters.rater_tables import RaterState
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.shared.settings.feedback import FeedbackSettings, JudgeSettings, RewardRule, TrustedRaters

OPTIONS = FeedbackSettings()
HONEST = ("ann", "ben", "cid")


@pytest.fixture
def ledger(engine: Engine) -> Ledger:
    return Ledger(engine, rule=RewardRule())


def judged(ledger: Ledger, count: int = 60, *, liar: bool = True, honest: Sequence[str] = HONEST) -> list[Exchange]:
    """Replies, the half of them good, which the honest tell and a liar turns round."""
    said = [exchange() for _ in range(count)]
    events = []
    for number, each in enumerate(said):
        good = float(number % 2)
        verdicts = {name: good for name in honest} | ({"liar": 1 - good} if liar else {})
        events += [feedback(msg_id=each.msg_id, source=name, value=value) for name, value in verdicts.items()]
    ledger.recording.record([*said, *events])
    return said


def rewards(engine: Engine) -> list[float | None]:
    with engine.connect() as connection:
        return list(connection.execute(select(experiences.c.reward).order_by(experiences.c.id)).scalars())


def states(ledger: Ledger) -> dict[str, RaterState]:
    return {each.name: each.state for each in ledger.raters.all()}


def test_who_contradicts_all_others_goes_into_quarantine_with_the_reason(ledger: Ledger) -> None:
    judged(ledger)
    [decided] = ledger.raters.assess(OPTIONS)
    assert (decided.name, decided.state, decided.actor) == ("liar", RaterState.QUARANTINED, BY)
    assert decided.reason.startswith("it agrees with the others in 0% of 60 comparisons")
    assert states(ledger) == dict.fromkeys(HONEST, RaterState.ACTIVE) | {"liar": RaterState.QUARANTINED}
    assert ledger.raters.decisions() == [decided]
    assert ledger.raters.assess(OPTIONS) == []
    reliable = {each.name: each.reliability for each in ledger.raters.all()}
    assert reliable["liar"] < 0.1
    assert min(reliable[name] for name in HONEST) > 0.9


def test_who_is_erased_while_raters_are_compared_is_not_named_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged(ledger)
    read = ledger.raters._window

    def read_and_erase(keys: Sequence[KeyWithFeedback]) -> list[Any]:
        events = read(keys)
        ledger.retention.erase("acme", "ann")
        return events

    monkeypatch.setattr(ledger.raters, "_window", read_and_erase)
    ledger.raters.assess(OPTIONS)
    assert states(ledger).keys() == {"ben", "cid", "liar"}


def test_raters_are_measured_by_their_own_tenants(ledger: Ledger) -> None:
    """Another's scale is no reason for quarantine, and makes no liar honest."""
    judged(ledger)
    others = [exchange(tenant="globex") for _ in range(60)]
    stars = [
        feedback(tenant="globex", msg_id=each.msg_id, source="zoe", value=5.0 * (n % 2))
        for n, each in enumerate(others)
    ]
    ledger.recording.record([*others, *stars])
    assert [(each.tenant, each.name) for each in ledger.raters.assess(OPTIONS)] == [("acme", "liar")]


def test_what_a_rater_in_quarantine_said_counts_for_nothing_and_again_when_it_is_released(
    ledger: Ledger, engine: Engine
) -> None:
    judged(ledger)
    alone = exchange()
    ledger.recording.record([alone, feedback(msg_id=alone.msg_id, source="liar", value=0.25)])
    assert rewards(engine)[-1] == 0.25
    ledger.raters.assess(OPTIONS)
    assert rewards(engine)[-1] is None
    ledger.recording.record([feedback(msg_id=alone.msg_id, source="liar", value=0.75)])
    assert rewards(engine)[-1] is None
    ledger.raters.release("acme", "liar", by="eve", reason="a mistake")
    assert rewards(engine)[-1] == 0.75
    judged(ledger)
    assert ledger.raters.assess(OPTIONS) == []
    assert [each.actor for each in ledger.raters.decisions()] == [BY, "eve"]


def test_who_is_put_into_quarantine_by_hand_is_not_heard(ledger: Ledger, engine: Engine) -> None:
    said = exchange()
    ledger.recording.record([said, feedback(msg_id=said.msg_id, source="ann"), feedback(msg_id=said.msg_id, value=0.0)])
    assert rewards(engine) == [0.5]
    ledger.raters.quarantine("acme", "ann", by="eve", reason="she left")
    assert rewards(engine) == [0.0]
    ledger.raters.quarantine("acme", "", by="eve", reason="nobody knows who")
    assert rewards(engine) == [None]
    with pytest.raises(UnknownRater, match="no feedback by bob of acme"):
        ledger.raters.quarantine("acme", "bob", by="eve", reason="never seen")


def test_a_crash_before_the_rewards_are_made_anew_leaves_nothing_behind(ledger: Ledger, engine: Engine) -> None:
    said = exchange()
    ledger.recording.record([said, feedback(msg_id=said.msg_id, source="ann")])
    died = Ledger(engine, rule=RewardRule())
    died.raters._settle = lambda: None  # type: ignore[method-assign]
    died.raters.quarantine("acme", "ann", by="eve", reason="she left")
    assert rewards(engine) == [1.0]
    ledger.raters.assess(OPTIONS)
    assert rewards(engine) == [None]


def test_what_was_trained_on_stays(ledger: Ledger, engine: Engine) -> None:
    trained(ledger)
    ledger.raters.quarantine("acme", "", by="eve", reason="it lied")
    assert rewards(engine) == [1.0]


def test_labels_edits_and_preferences_of_a_rater_in_quarantine_count_for_nothing(ledger: Ledger) -> None:
    edited, better, worse = exchange(), exchange(), exchange()
    edit = feedback(msg_id=edited.msg_id, source="liar", kind=Kind.DEMONSTRATION, text="Wrong.", value=None)
    preference = {"kind": Kind.PREFERENCE, "value": None, "other_msg_id": worse.msg_id, "metric": "preference"}
    ledger.recording.record([edited, better, worse, edit, feedback(msg_id=better.msg_id, source="liar", **preference)])
    ledger.recording.record([feedback(msg_id=each.msg_id) for each in (edited, better, worse)])
    ledger.raters.quarantine("acme", "liar", by="eve", reason="it lies")
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    assert ledger.training.lease(epoch, 2, BatchPolicy(group_by="preference", any_reply=True)) == []
    assert [each.demonstration for each in ledger.training.lease(epoch, 3, BatchPolicy())] == [None] * 3


def test_little_evidence_is_not_enough(ledger: Ledger) -> None:
    judged(ledger, 10)
    assert ledger.raters.assess(OPTIONS) == []


def test_a_trusted_rater_is_right_against_all_others(ledger: Ledger) -> None:
    judged(ledger)
    decided = ledger.raters.assess(OPTIONS, trusted=[("acme", "liar")])
    assert {each.name for each in decided} == set(HONEST)


def test_the_name_of_a_trusted_rater_is_worth_nothing_at_another_tenant(ledger: Ledger) -> None:
    judged(ledger)
    options = FeedbackSettings(trusted_raters=("globex/liar", "liar"))
    trusted = options.all_trusted(JudgeSettings(url="http://judge", model="m"))
    assert [each.name for each in ledger.raters.assess(options, trusted=trusted)] == ["liar"]
    assert ("globex", "liar") in trusted
    assert ("default", "liar") in trusted
    assert ("acme", "judge:m") in trusted


def test_the_share_of_a_rater_with_the_name_of_another_tenants_trusted_one_is_limited(ledger: Ledger) -> None:
    flood, rest = crowded(ledger, floods=25)
    options = FeedbackSettings(trusted_raters=("globex/flood", "flood"))
    policy = LIMITED._replace(trusted_raters=options.all_trusted(JudgeSettings()))
    batch = ledger.training.lease(ledger.training.take_epoch("trainer"), 10, policy)
    assert {each.msg_id for each in batch} == {flood[0], *rest[:9]}


def test_quarantine_can_be_switched_off(ledger: Ledger) -> None:
    judged(ledger)
    assert ledger.raters.assess(FeedbackSettings(quarantine_below=None)) == []


def test_a_single_rater_is_never_an_outlier(ledger: Ledger) -> None:
    said = [exchange() for _ in range(40)]
    ledger.recording.record([*said, *(feedback(msg_id=each.msg_id, value=1e6) for each in said)])
    assert ledger.raters.assess(OPTIONS) == []


def test_the_names_of_one_key_put_no_other_into_quarantine(ledger: Ledger) -> None:
    said = [exchange() for _ in range(40)]
    names = ("key:web", "key:eve/a", "key:eve/b")
    verdicts = [(each.msg_id, name, (n % 2) ^ ("eve" in name)) for n, each in enumerate(said) for name in names]
    ledger.recording.record([*said, *(feedback(msg_id=reply, source=name, value=v) for reply, name, v in verdicts)])
    assert ledger.raters.assess(OPTIONS) == []


def test_who_alone_gives_rewards_beyond_the_clip_is_an_outlier(ledger: Ledger) -> None:
    judged(ledger, liar=False)
    said = [exchange() for _ in range(15)]
    ledger.recording.record([*said, *(feedback(msg_id=each.msg_id, source="eve", value=1e6) for each in said)])
    [decided] = ledger.raters.assess(OPTIONS)
    assert (decided.name, decided.reason) == ("eve", "15 of its 15 numbers are beyond reward.clip, of the others' 0")


def test_who_speaks_of_one_reply_only_is_an_outlier(ledger: Ledger) -> None:
    [said, *_] = judged(ledger, liar=False)
    flood = [feedback(msg_id=said.msg_id, source="eve", value=number / 100) for number in range(ON_ONE_REPLY + 1)]
    ledger.recording.record(flood)
    [decided] = ledger.raters.assess(OPTIONS)
    assert (decided.name, decided.reason) == ("eve", "21 of its 21 events are about one reply, under one metric")


def test_names_that_are_used_once_are_forgotten(ledger: Ledger) -> None:
    judged(ledger, liar=False)
    strangers = [exchange() for _ in range(3)]
    ledger.recording.record([*strangers, *(feedback(msg_id=each.msg_id, source=each.msg_id) for each in strangers)])
    ledger.raters.assess(OPTIONS)
    assert len(ledger.raters.all()) == 6
    for each in strangers:
        ledger.stored.delete("acme", each.msg_id)
    judged(ledger, 2, liar=False)
    ledger.raters.assess(OPTIONS)
    assert set(states(ledger)) == set(HONEST)


# How much of a batch is one rater's.


def crowded(ledger: Ledger, floods: int, others: int = 10) -> tuple[list[str], list[str]]:
    """Replies that one rater rated, committed first, and others' after them."""
    flood, rest = [exchange() for _ in range(floods)], [exchange() for _ in range(others)]
    ledger.recording.record([*flood, *(feedback(msg_id=each.msg_id, source="flood") for each in flood)])
    names = [f"rater-{number % 10}" for number in range(others)]
    ledger.recording.record(
        [*rest, *(feedback(msg_id=each.msg_id, source=name) for each, name in zip(rest, names, strict=True))]
    )
    ledger.recording.commit("acme")
    ledger.raters.assess(OPTIONS)
    return [each.msg_id for each in flood], [each.msg_id for each in rest]


LIMITED = BatchPolicy(max_rater_share=0.1)


def test_one_rater_has_no_more_than_its_share_of_a_batch(ledger: Ledger) -> None:
    flood, rest = crowded(ledger, floods=25)
    batch = ledger.training.lease(ledger.training.take_epoch("trainer"), 10, LIMITED)
    assert {each.msg_id for each in batch} == {flood[0], *rest[:9]}


TRUSTING = LIMITED._replace(trusted_raters=TrustedRaters(frozenset({("acme", "flood")})))


@pytest.mark.parametrize("policy", [BatchPolicy(), TRUSTING])
def test_without_a_limit_and_for_a_trusted_rater_nothing_changes(ledger: Ledger, policy: BatchPolicy) -> None:
    flood, _ = crowded(ledger, floods=25)
    batch = ledger.training.lease(ledger.training.take_epoch("trainer"), 10, policy)
    assert [each.msg_id for each in batch] == flood[:10]


def test_few_raters_are_not_limited(ledger: Ledger) -> None:
    said = judged(ledger, 8)
    ledger.recording.commit("acme")
    ledger.raters.assess(OPTIONS)
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
    ledger.raters.assess(OPTIONS)
    return said


@pytest.mark.parametrize("group_by", ["none", "run"])
@pytest.mark.parametrize(("floods", "timeout"), [(0, None), (30, None), (30, 1e12)])
def test_where_no_batch_comes_about_all_who_rated_a_reply_are_heard(
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


def rated_by_eve_too(ledger: Ledger, count: int) -> list[Exchange]:
    """Replies that two of twenty raters rated, the half of them good, and a key that says of each what they say."""
    said = [exchange() for _ in range(count)]
    events = []
    for number, each in enumerate(said):
        names = (f"rater-{number % 20}", f"rater-{(number + 7) % 20}", "key:eve")
        events += [feedback(msg_id=each.msg_id, source=name, value=float(number % 2)) for name in names]
    ledger.recording.record([*said, *events])
    ledger.recording.commit("acme")
    ledger.raters.assess(OPTIONS)
    return said


@pytest.mark.parametrize("waiting", [64, 256])
def test_one_key_that_rates_every_reply_holds_up_none(ledger: Ledger, waiting: int) -> None:
    said = rated_by_eve_too(ledger, waiting)
    epoch = ledger.training.take_epoch("trainer")
    batches = [ledger.training.lease(epoch, 64, LIMITED) for _ in range(waiting // 64)]
    assert sorted(each.msg_id for batch in batches for each in batch) == sorted(each.msg_id for each in said)
    assert ledger.reports.counts()[State.DROPPED] == 0


def test_who_has_its_share_is_not_heard_of_the_other_replies(ledger: Ledger, engine: Engine) -> None:
    said = contradicted(ledger)
    epoch = ledger.training.take_epoch("trainer")
    batch = ledger.training.lease(epoch, 20, LIMITED)
    assert sorted(each.reward for each in batch) == [0.5] * 4 + [1.0] * 16
    ledger.training.release(epoch)
    ledger.recording.record([feedback(msg_id=said[-1].msg_id, source="rater-3", value=1.0)])
    assert rewards(engine)[-1] == 1.0


def test_a_group_is_taken_without_the_word_of_who_has_its_share(ledger: Ledger) -> None:
    said = [exchange(task_id=f"task-{n // 2}", run_id=str(n)) for n in range(20)]
    names = [("eve", f"rater-{n % 10}") for n in range(20)]
    ledger.recording.record(said)
    ledger.recording.record(
        [feedback(msg_id=each.msg_id, source=name) for each, both in zip(said, names, strict=True) for name in both]
    )
    ledger.recording.commit("acme")
    ledger.raters.assess(OPTIONS)
    policy = LIMITED._replace(group_by="task", group_size=2)
    assert len(ledger.training.lease(ledger.training.take_epoch("trainer"), 20, policy)) == 20


def test_many_raters_are_compared_in_transactions_of_a_few_and_what_is_unchanged_is_not_written(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = [exchange() for _ in range(2)]
    said = [feedback(msg_id=each.msg_id, source=f"rater {number}") for each in replies for number in range(500)]
    ledger.recording.record([*replies, *said])
    written: list[float] = []
    write = ledger.raters._write

    @contextmanager
    def counting() -> Iterator[Connection]:
        with write() as connection:
            began = connection.exec_driver_sql("SELECT count(*) FROM raters").scalar_one()
            yield connection
            written.append(connection.exec_driver_sql("SELECT count(*) FROM raters").scalar_one() - began)

    monkeypatch.setattr(ledger.raters, "_write", counting)
    assert ledger.raters.assess(OPTIONS) == []
    assert written == [200, 200, 100]
    ledger.recording.record([feedback(msg_id=replies[0].msg_id, source="rater 7", value=0.5)])
    assert ledger.raters.assess(OPTIONS) == []
    assert len(written) == 4
