"""Raters in the ledger: whose word settles a reward, and quarantine by hand."""

from collections.abc import Callable

import pytest
from sqlalchemy import Connection, Engine

from tests.factories import exchange, feedback
from tests.shared.ledger.reading import rewards
from tuneloop.shared.errors import UnknownRater
from tuneloop.shared.experience import Kind, RaterState
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.rater_decisions import RaterStatus
from tuneloop.shared.ledger.storage.database import Transactions
from tuneloop.shared.settings.feedback import FeedbackSettings, JudgeSettings, RewardRule


@pytest.fixture
def ledger(engine: Engine) -> Ledger:
    return Ledger(engine, rule=RewardRule())


def say(ledger: Ledger, **values: float) -> None:
    said = exchange()
    ledger.recording.record([said, *(feedback(msg_id=said.msg_id, source=who, value=v) for who, v in values.items())])


@pytest.mark.contract
@pytest.mark.parametrize(("key", "own"), [("", None), ("web", "key:web")])
def test_what_the_application_says_itself_outweighs_the_users_that_it_names(
    ledger: Ledger, engine: Engine, key: str, own: str | None
) -> None:
    said = exchange()
    users = [f"key:{key}/{name}" if key else name for name in ("ann", "bob")]
    heard = [feedback(msg_id=said.msg_id, source=name, value=1.0, call_id=name) for name in users]
    ledger.recording.record([said, heard[0], feedback(msg_id=said.msg_id, source=own, value=0.0), heard[1]])
    assert rewards(engine) == [0.0]
    other = exchange()
    ledger.recording.record([other, feedback(msg_id=other.msg_id, source=users[0], value=1.0)])
    assert rewards(engine) == [0.0, 1.0]


@pytest.mark.contract
def test_a_source_that_the_operator_trusts_outweighs_others_at_its_tenant_only(engine: Engine) -> None:
    options = FeedbackSettings(trusted_raters=("acme/qa",))
    trusted = options.all_trusted(JudgeSettings(url="http://judge", model="m"))
    ledger = Ledger(engine, trusted_raters=trusted)
    say(ledger, ann=1.0, bob=1.0, qa=0.0)
    say(ledger, **{"ann": 1.0, "bob": 1.0, "judge:m": 0.0})
    other = exchange(tenant="globex")
    heard = [feedback(tenant="globex", msg_id=other.msg_id, source=who, value=v) for who, v in (("ann", 1), ("qa", 0))]
    ledger.recording.record([other, *heard])
    assert rewards(engine) == [0.0, 0.0, 0.5]


@pytest.mark.contract
def test_raters_who_agree_with_each_other_silence_nobody(ledger: Ledger, engine: Engine) -> None:
    for number in range(60):
        say(ledger, ann=float(number % 2), eve=1.0 - number % 2, eva=1.0 - number % 2)
    say(ledger, ann=0.25)
    assert rewards(engine)[-1] == 0.25
    assert {each.state for each in ledger.raters.all()} == {RaterState.ACTIVE}


def test_raters_are_listed_with_how_much_they_said_lately_those_in_quarantine_first(ledger: Ledger) -> None:
    say(ledger, ann=1.0, eve=0.0)
    say(ledger, ann=1.0)
    ledger.recording.record([feedback(msg_id=exchange().msg_id)])
    ledger.raters.quarantine("acme", "eve", by="ops", reason="she lies")
    assert ledger.raters.all() == [
        RaterStatus("acme", "eve", RaterState.QUARANTINED, 1, "she lies"),
        RaterStatus("acme", "", RaterState.ACTIVE, 1, None),
        RaterStatus("acme", "ann", RaterState.ACTIVE, 2, None),
    ]


def test_what_a_rater_in_quarantine_said_counts_for_nothing_and_again_when_it_is_released(
    ledger: Ledger, engine: Engine
) -> None:
    said = exchange()
    ledger.recording.record([said, feedback(msg_id=said.msg_id, source="liar", value=0.25)])
    ledger.raters.quarantine("acme", "liar", by="eve", reason="it lies")
    assert rewards(engine) == [None]
    ledger.recording.record([feedback(msg_id=said.msg_id, source="liar", value=0.75)])
    assert rewards(engine) == [None]
    ledger.raters.release("acme", "liar", by="ann", reason="a mistake")
    assert rewards(engine) == [0.75]
    assert [(each.state.value, each.actor) for each in ledger.raters.decisions()] == [
        ("quarantined", "eve"),
        ("active", "ann"),
    ]


def test_who_is_put_into_quarantine_is_not_heard(ledger: Ledger, engine: Engine) -> None:
    say(ledger, ann=1.0, bob=0.0)
    assert rewards(engine) == [0.5]
    ledger.raters.quarantine("acme", "ann", by="eve", reason="she left")
    assert rewards(engine) == [0.0]
    ledger.recording.record([feedback(msg_id="chatcmpl-0")])
    ledger.raters.quarantine("acme", "", by="eve", reason="nobody knows who")
    with pytest.raises(UnknownRater, match="no feedback by cid of acme"):
        ledger.raters.quarantine("acme", "cid", by="eve", reason="never seen")


def test_a_crash_before_the_rewards_are_made_anew_leaves_nothing_behind(ledger: Ledger, engine: Engine) -> None:
    class Dying(Transactions):
        """Ends after its first write."""

        writes = 0

        def write(self) -> Callable[[], Connection]:  # type: ignore[override]
            self.writes += 1
            if self.writes > 1:
                raise KeyboardInterrupt
            return super().write()  # type: ignore[return-value]

    say(ledger, ann=1.0)
    with pytest.raises(KeyboardInterrupt):
        Ledger(engine, rule=RewardRule(), transactions=Dying).raters.quarantine("acme", "ann", by="eve", reason="left")
    assert rewards(engine) == [1.0]
    ledger.raters.settle()
    assert rewards(engine) == [None]


def test_labels_edits_and_preferences_of_a_rater_in_quarantine_count_for_nothing(ledger: Ledger) -> None:
    edited, better, worse = exchange(), exchange(), exchange()
    edit = feedback(msg_id=edited.msg_id, source="liar", kind=Kind.DEMONSTRATION, text="Wrong.", value=None)
    preference = {"kind": Kind.PREFERENCE, "value": None, "other_msg_id": worse.msg_id, "metric": "preference"}
    ledger.recording.record([edited, better, worse, edit, feedback(msg_id=better.msg_id, source="liar", **preference)])
    ledger.recording.record([feedback(msg_id=each.msg_id) for each in (edited, better, worse)])
    ledger.raters.quarantine("acme", "liar", by="eve", reason="it lies")
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    assert ledger.training.lease(epoch, 2, BatchRules(group_by="preference", any_reply=True)) == []
    assert [each.demonstration for each in ledger.training.lease(epoch, 3, BatchRules())] == [None] * 3
