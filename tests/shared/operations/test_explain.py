"""What `explain` tells of a reply in each of its states."""

import random
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from tests.constants import settings_of
from tests.factories import committed, exchange, experience, feedback, ids, published, rewarded, trained
from tuneloop.shared.experience import Exchange, Kind, TrustedRaters
from tuneloop.shared.ledger.ledger import Alarm, BatchRules, Ledger
from tuneloop.shared.operations.explain import Explanation, explain
from tuneloop.shared.outbox_status import OutboxStatus
from tuneloop.shared.settings.feedback import RewardRule
from tuneloop.shared.settings.settings import Settings

pytestmark = pytest.mark.contract


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_of({"checkpoint_root_dir": tmp_path, "model": {"model_path": "some/model"}})


@pytest.fixture
def base(ledger: Ledger) -> Ledger:
    ledger.versions.ensure_base(Path("/base"))
    return ledger


def told(ledger: Ledger, settings: Settings, said: Exchange | str) -> Explanation:
    return explain(ledger, settings, said if isinstance(said, str) else said.msg_id, OutboxStatus)


def waits(found: Explanation) -> list[str]:
    return [reason.code.value for reply in found.replies for reason in reply.waits_for]


def test_a_recorded_reply_waits_for_feedback(base: Ledger, settings: Settings) -> None:
    said = exchange(engine=1)
    base.recording.record([said, feedback(msg_id=said.msg_id, kind=Kind.COMMENT, value=None, text="so", metric="c")])
    found = told(base, settings, said)
    assert "by engine 1" in found.sentences[0]
    [reply] = found.replies
    assert (reply.state, reply.sampling, reply.reward, reply.parts) == ("recorded", "sample", None, {})
    assert [each.fate for each in reply.feedback] == ["comment"]
    assert waits(found) == ["no_feedback"]


@pytest.mark.parametrize(
    ("but", "method", "sampling", "code"),
    [
        ({"unsampled": "sampling:top_p"}, "ppo", "otherwise", ["not_trainable"]),
        ({"unsampled": "sampling:top_p"}, "sft", "otherwise", ["no_feedback"]),
        ({"drop_reason": "cut_off"}, "ppo", "of_no_use", []),
    ],
)
def test_the_verdict_on_sampling_is_told_by_the_method(
    base: Ledger, tmp_path: Path, but: dict[str, str], method: str, sampling: str, code: list[str]
) -> None:
    values = {"checkpoint_root_dir": tmp_path, "model": {"model_path": "some/model"}}
    settings = settings_of({**values, "algorithm": {"algorithm_type": method}})
    said = exchange(experiences=(experience(**but),))
    base.recording.record([said])
    if not code:
        base.recording.record([feedback(msg_id=said.msg_id)])
    found = told(base, settings, said)
    assert found.replies[0].sampling == sampling
    assert found.replies[0].sampling_reason in but.values()
    assert waits(found) == code


def test_a_rewarded_reply_waits_for_a_commit_and_a_committed_one_for_a_batch(base: Ledger, settings: Settings) -> None:
    [said] = rewarded(base)
    found = told(base, settings, said)
    assert (found.replies[0].reward, found.replies[0].parts, waits(found)) == (1.0, {"reward": 1.0}, ["not_committed"])
    base.recording.commit("acme")
    assert waits(told(base, settings, said)) == ["no_trainer", "batch_not_full"]
    private = explain(base, settings, said.msg_id, OutboxStatus, tenant="acme", sees_all=False)
    assert waits(private) == ["no_trainer", "batch_not_full"]
    assert not any("1 can be had" in reason.sentence for reason in private.replies[0].waits_for)


def test_a_leased_reply_and_a_trained_one_name_epoch_step_and_version(base: Ledger, settings: Settings) -> None:
    [said] = committed(base)
    epoch = base.training.take_epoch("trainer")
    samples = base.training.lease(epoch, 1, BatchRules())
    [reply] = told(base, settings, said).replies
    assert (reply.state, reply.epoch, reply.waits_for) == ("leased", epoch, [])
    version = base.training.register(epoch, ids(samples), step=7, publish=published)
    found = told(base, settings, said)
    [reply] = found.replies
    assert (reply.state, reply.version, reply.step, reply.epoch) == ("trained", version, 7, epoch)
    assert "the version, or a later one, is not served yet" in reply.sentences
    base.alarms.raise_alarm(Alarm("reply_length", "replies are long", holds=True))
    assert waits(told(base, settings, said)) == ["promotion_held"]
    [private] = explain(base, settings, said.msg_id, OutboxStatus, tenant="acme", sees_all=False).replies
    assert not any("trainer trainer" in each or "reply_length" in each for each in private.sentences)
    base.versions.promote(version)
    assert "the version, or a later one, is served since" in "\n".join(told(base, settings, said).lines)


def test_late_feedback_counts_in_the_correction_alone(engine: Engine, settings: Settings) -> None:
    ledger = Ledger(engine, rule=RewardRule(clip=None), compensate_late=True)
    ledger.versions.ensure_base(Path("/base"))
    [said] = committed(ledger)
    epoch = ledger.training.take_epoch("trainer")
    samples = ledger.training.lease(epoch, 1, BatchRules())
    ledger.training.register(epoch, ids(samples), step=1, publish=published)
    ledger.recording.record([feedback(msg_id=said.msg_id, value=-1.0)])
    first, correction = told(ledger, settings, said).replies
    assert [each.fate for each in first.feedback] == ["counts", "late"]
    assert "the correction has it" in first.feedback[1].sentence
    assert (first.reward, first.parts, first.correction) == (1.0, {"reward": 1.0}, 0)
    assert [each.fate for each in correction.feedback] == ["replaced", "counts"]
    assert (correction.reward, correction.parts, correction.correction) == (-1.0, {"reward": -1.0}, 1)
    assert [each.code for each in correction.waits_for] == ["not_committed"]


def test_a_row_of_a_policy_is_told_by_its_rules(base: Ledger, settings: Settings) -> None:
    options = {"buffer.group_by": "run", "trainer.max_staleness": 0}
    policy = base.policies.create("side", settings=options, by="ops").id
    [said] = committed(base, policy=policy, experiences=(experience(version_min=1, version_max=1),))
    trained(base)
    [reply] = told(base, settings, said).replies
    assert any("version 1 of the policy side" in sentence for sentence in reply.sentences)
    assert [each.code for each in reply.waits_for] == ["groups_incomplete"]


def test_what_was_set_aside_says_why(base: Ledger, settings: Settings) -> None:
    [old] = committed(base)
    epoch = base.training.take_epoch("trainer")
    base.training.lease(epoch, 1, BatchRules(max_staleness=-1))
    [reply] = told(base, settings, old).replies
    assert reply.state == "expired"
    assert any(sentence.startswith("set aside (expired): ") for sentence in reply.sentences)


def test_a_deleted_reply_one_that_feedback_waits_for_and_an_unknown_one_are_told_apart(
    base: Ledger, settings: Settings
) -> None:
    [said] = rewarded(base)
    base.stored.delete("acme", said.msg_id)
    assert "was deleted at" in told(base, settings, said).sentences[0]
    base.recording.record([feedback(msg_id="chatcmpl-early")])
    assert "1 feedback event about it wait for the reply" in told(base, settings, "chatcmpl-early").sentences
    assert told(base, settings, "chatcmpl-none").sentences[0].startswith("the ledger has no reply 'chatcmpl-none'")


def test_another_tenants_reply_is_told_as_an_unknown_one(base: Ledger, settings: Settings) -> None:
    [said] = rewarded(base)
    gone = exchange()
    base.recording.record([gone])
    base.stored.delete("acme", gone.msg_id)
    for each in (said, gone):
        found = explain(base, settings, each.msg_id, OutboxStatus, tenant="other", sees_all=False)
        assert found.replies == []
        assert found.sentences[0].startswith("the ledger has no reply")


def test_each_event_says_what_became_of_it(engine: Engine, settings: Settings) -> None:
    rule = RewardRule(weights={"reward": 2.0, "preference": 1.0, "mood": 1.0}, clip=(-3.0, 3.0), attribution_window=1e9)
    ledger = Ledger(engine, rule=rule, trusted_raters=TrustedRaters(frozenset({("acme", "boss")})))
    ledger.versions.ensure_base(Path("/base"))
    said, worse = exchange(task_id="t", run_id="r"), exchange()
    name: Any = {"msg_id": said.msg_id}
    of_run: Any = {"msg_id": None, "task_id": "t", "run_id": "r"}
    prefer: Any = {"kind": Kind.PREFERENCE, "metric": "preference", "value": None}
    events = [
        feedback(**name, value=0.5, source="ann"),
        feedback(**name, value=2.0, source="ann"),
        feedback(**name, value=1.0, source="boss"),
        feedback(**name, value=1.0, metric="speed"),
        feedback(**name, kind=Kind.LABEL, value=None, text="fine", metric="mood"),
        feedback(**of_run, value=-1.0, source="ann"),
        feedback(**name, **prefer, other_msg_id=worse.msg_id),
        feedback(**name, value=None, kind=Kind.DEMONSTRATION, text="Hello!", metric="demonstration"),
        feedback(**name, value=0.1, metric="mood", source="eve"),
        feedback(**name, value=None, kind=Kind.RETRACTION, metric="mood", source="eve"),
        feedback(**name, value=1.0, received_at=3e9),
    ]
    ledger.recording.record([said, worse, *events])
    [reply] = told(ledger, settings, said).replies
    assert [each.fate for each in reply.feedback] == [
        *("replaced", "settled", "counts", "no_weight", "no_value", "run_feedback_unused", "counts", "edit_stands"),
        *("retracted", "retraction", "out_of_window"),
    ]
    assert reply.parts == {"reward": 2.0, "preference": 1.0}
    assert reply.reward == 3.0
    [rejected] = told(ledger, settings, worse).replies
    assert "preferring another reply, counts" in rejected.feedback[0].sentence
    assert rejected.reward == sum(rejected.parts.values()) == 0.0


def test_feedback_of_a_quarantined_rater_is_told_as_such(base: Ledger, settings: Settings) -> None:
    said = exchange()
    base.recording.record([said, feedback(msg_id=said.msg_id, source="eve")])
    base.raters.quarantine("acme", "eve", by="me", reason="lies")
    [reply] = told(base, settings, said).replies
    assert [each.fate for each in reply.feedback] == ["quarantined"]
    assert reply.reward is None


@pytest.mark.parametrize("seed", range(4))
def test_the_parts_add_up_to_the_reward(engine: Engine, settings: Settings, seed: int) -> None:
    chance = random.Random(seed)
    rule = RewardRule(
        weights={"reward": 1.0, "speed": -0.5, "preference": 0.25},
        clip=chance.choice([None, (-1.0, 1.0)]),
        aggregate=chance.choice(["mean", "median"]),
        run_feedback=chance.choice(["fallback", "add"]),
        label_values={"good": 0.7},
    )
    ledger = Ledger(engine, rule=rule, compensate_late=True)
    ledger.versions.ensure_base(Path("/base"))
    replies = [exchange(task_id="t", run_id="r", experiences=(experience(), experience(choice=1))) for _ in range(4)]
    ledger.recording.record(replies)
    epoch = ledger.training.take_epoch("trainer")
    for _ in range(3):
        events = []
        for _ in range(6):
            one, other = chance.sample(replies, 2)
            about: Any = {"msg_id": one.msg_id, "choice": chance.choice([None, 0, 1])}
            whose: Any = {"source": chance.choice(["ann", "bob", None]), "call_id": f"call-{chance.randrange(3)}"}
            run: Any = {"msg_id": None, "task_id": "t", "run_id": "r"}
            number = {"value": chance.uniform(-2, 2), "metric": chance.choice(["reward", "speed", "none"])}
            label = {"kind": Kind.LABEL, "value": None, "text": chance.choice(["good", "odd"]), "metric": "reward"}
            better = {"kind": Kind.PREFERENCE, "value": None, "metric": "preference", "other_msg_id": other.msg_id}
            back = {"kind": Kind.RETRACTION, "value": None, "metric": chance.choice(["reward", "preference"])}
            events.append(
                feedback(**chance.choice([run | number, about | chance.choice([number, label, better, back])]), **whose)
            )
        ledger.recording.record(events)
        ledger.recording.commit("acme")
        if samples := ledger.training.lease(epoch, 3, BatchRules()):
            ledger.training.register(epoch, ids(samples), step=1, publish=published)
    low, high = rule.clip or (-1e9, 1e9)
    explained = [reply for each in replies for reply in told(ledger, settings, each).replies]
    assert {"trained"} < {reply.state for reply in explained}
    for reply in explained:
        counted = [each for each in reply.feedback if each.fate == "counts"]
        assert (reply.reward is None) == (not counted)
        if reply.reward is not None:
            assert min(max(sum(reply.parts.values()), low), high) == pytest.approx(reply.reward)
