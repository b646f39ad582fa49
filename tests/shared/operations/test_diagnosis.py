"""Why no step is happening: each reason, from a ledger in which it holds."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from tests.factories import committed, exchange, experience, feedback, leased, rewarded, trained
from tuneloop.shared.experience import Kind, State
from tuneloop.shared.ledger.facts import TRAINER_SEEN_S, Facts, LedgerFacts, Rules, StateCount, Trainer, Weights
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.versions.alarms import Alarm
from tuneloop.shared.operations.diagnosis import Code, ago, diagnose, equation
from tuneloop.shared.outbox_status import OutboxStatus
from tuneloop.shared.settings.settings import Settings

PAIRS, ANY = Rules(2), BatchRules()
NO_OUTBOX = OutboxStatus()


def reasons(ledger: Ledger, rules: Rules = PAIRS, policy: BatchRules = ANY, *, in_s: float = 0.0) -> dict[Code, str]:
    facts = Facts(now=time.time() + in_s, rules=rules, outbox=NO_OUTBOX, ledger=ledger.reports.facts(policy, drops=5))
    return dict(diagnose(facts))


def rules_of(**but: Any) -> Rules:
    return Rules.of(Settings.model_validate({"model": {"model_path": "some/model"}, **but}))


def served(ledger: Ledger) -> Ledger:
    """The ledger with its base model, and a trainer that lives."""
    ledger.versions.ensure_base(Path("/base"))
    ledger.training.take_epoch("host:1")
    return ledger


def the_only(found: dict[Code, str], code: Code) -> str:
    assert list(found) == [code]
    return found[code]


def test_every_reason_is_written_down() -> None:
    page = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text()
    assert [code for code in Code if f"\n|`{code}`|" not in page] == []


def test_an_experiment_that_has_just_begun(ledger: Ledger) -> None:
    assert the_only(reasons(served(ledger)), Code.NOTHING_RECORDED).startswith(
        "no experience was recorded yet: send requests"
    )


def test_no_feedback_has_come(ledger: Ledger) -> None:
    served(ledger).recording.record([exchange(), exchange(), feedback(msg_id="chatcmpl-unknown")])
    found = reasons(ledger)
    assert list(found) == [Code.NO_FEEDBACK]
    assert found[Code.NO_FEEDBACK].startswith("2 experiences wait for a reward, none has one")
    assert found[Code.NO_FEEDBACK].endswith("1 event waits for a reply that is not recorded")


PAIRED: dict[str, Any] = {
    "mode": "serve",
    "algorithm": {"algorithm_type": "dpo"},
    "buffer": {"train_batch_size": 2, "group_by": "preference"},
}


def test_preferences_that_are_worth_nothing_are_told(ledger: Ledger) -> None:
    served(ledger).recording.record([exchange()])
    told = reasons(ledger, rules_of(**PAIRED))[Code.NO_FEEDBACK]
    assert told.endswith("; preferences are worth nothing: give the metric preference a weight in reward.weights")
    assert rules_of(**PAIRED, reward={"weights": {"preference": 1.0}}).ignored_feedback is None
    assert rules_of(**PAIRED, reward={"default": 0.0, "attribution_window": 60.0}).ignored_feedback is None


@pytest.mark.contract
def test_edited_answers_that_the_method_does_not_learn_are_told(ledger: Ledger) -> None:
    told = exchange()
    edited = feedback(msg_id=told.msg_id, kind=Kind.DEMONSTRATION, metric="demonstration", value=None, text="Better.")
    served(ledger).recording.record([told, edited])
    ledger.recording.commit("acme")
    assert reasons(ledger, Rules(5, method="grpo"))[Code.EDITS_NOT_LEARNT] == (
        "1 committed edited answer, of which grpo learns nothing: rate the replies too, or let algorithm_type: sft"
        " learn the answers"
    )


def test_a_judge_that_changes_nothing_is_told() -> None:
    judge = {"url": "http://judge/v1", "model": "j"}
    assert "give the metric judge a weight" in (rules_of(judge=judge).ignored_feedback or "")
    assert rules_of(judge=judge, reward={"weights": {"judge": 1.0}}).ignored_feedback is None
    assert rules_of(reward={"weights": {"judge": 1.0}}).ignored_feedback is None


def test_what_is_rewarded_is_not_committed(ledger: Ledger) -> None:
    rewarded(served(ledger), 3)
    assert reasons(ledger) == {
        Code.NOT_COMMITTED: "3 experiences with a reward or an edited answer, but not committed: POST /commit",
    }


def test_a_batch_is_not_full(ledger: Ledger) -> None:
    committed(served(ledger), 3)
    assert the_only(reasons(ledger, Rules(5)), Code.BATCH_NOT_FULL).startswith("a step takes 5, 3 can be had now")


def test_what_the_trainer_holds_already_counts_for_the_batch(ledger: Ledger) -> None:
    committed(ledger, 3)
    ledger.training.lease(ledger.training.take_epoch("host:1"), 2, BatchRules())
    assert reasons(ledger, Rules(5))[Code.BATCH_NOT_FULL].startswith("a step takes 5, 3 can be had now")


def test_a_group_is_not_complete(ledger: Ledger) -> None:
    policy = BatchRules(group_by="task", group_size=2)
    committed(served(ledger), 2, task_id="a", run_id="first")
    assert ledger.training.lease(1, 2, policy) == []
    assert the_only(reasons(ledger, Rules(2, group_by="task"), policy), Code.GROUPS_INCOMPLETE).startswith(
        "2 committed experiences wait until their task is complete"
    )


def test_what_is_committed_is_too_old(ledger: Ledger) -> None:
    trained(ledger)
    committed(ledger, 2)
    assert the_only(reasons(ledger, policy=BatchRules(max_staleness=0)), Code.TOO_STALE).startswith(
        "2 committed experiences too old for the next"
    )


def test_all_has_expired(ledger: Ledger) -> None:
    trained(ledger)
    committed(ledger, 2)
    policy = BatchRules(max_staleness=0)
    ledger.training.lease(ledger.training.take_epoch("host:1"), 2, policy)
    assert the_only(reasons(ledger, policy=policy), Code.ALL_EXPIRED).startswith(
        "2 experiences expired and none is left"
    )


def test_nothing_can_be_trained_on(ledger: Ledger) -> None:
    why = ["cut off", "cut off", "sampled with top_p"]
    served(ledger).recording.record([exchange(experiences=(experience(drop_reason=each),)) for each in why])
    assert the_only(reasons(ledger), Code.NOT_TRAINABLE).startswith(
        "3 of the last 3 experiences cannot be trained on, most often: cut off"
    )


def test_nothing_is_a_sample_of_the_policy(ledger: Ledger) -> None:
    served(ledger).recording.record([exchange(experiences=(experience(unsampled="sampling:top_p"),)) for _ in range(3)])
    found = reasons(ledger)
    assert list(found) == [Code.NOT_TRAINABLE, Code.NO_FEEDBACK]
    assert found[Code.NOT_TRAINABLE].startswith(
        "3 of the last 3 experiences cannot be trained on (3 are not samples of the policy), most often: sampling:top_p"
        " (the engine did not return what was left: load tuneloop's plug-in"
    )
    assert list(reasons(ledger, policy=BatchRules(any_reply=True))) == [Code.NO_FEEDBACK]


@pytest.mark.parametrize(
    ("reason", "cure"),
    [
        ("all runs of its group have the same reward: it says nothing", "reward the runs of a task differently"),
        ("no pair: another reply to its prompt has the same reward", "reward the runs of a task differently"),
        ("not imitated: its reward is below 0.5", "lower algorithm.sft.least_reward"),
    ],
)
def test_groups_without_contrast_are_told_with_what_to_do(ledger: Ledger, reason: str, cure: str) -> None:
    served(ledger).recording.record([exchange(experiences=(experience(drop_reason=reason),)) for _ in range(3)])
    assert f"{reason}: {cure}" in reasons(ledger)[Code.NOT_TRAINABLE]


def test_that_nothing_is_learnt_is_a_reason_whatever_else_holds(ledger: Ledger) -> None:
    leased(served(ledger), 2)
    assert Code.NOT_LEARNING not in reasons(ledger)
    ledger.alarms.raise_alarm(Alarm(Code.NOT_LEARNING, "all rewards of the last 10 steps are 1: …"))
    assert reasons(ledger)[Code.NOT_LEARNING].startswith("all rewards of the last 10 steps are 1")


def test_no_trainer_has_ever_started(ledger: Ledger) -> None:
    committed(ledger, 2)
    assert the_only(reasons(ledger), Code.NO_TRAINER).startswith("no trainer has ever started")


def test_the_trainer_has_stopped(ledger: Ledger) -> None:
    epoch, _ = leased(served(ledger), 2)
    ledger.training.end(epoch)
    found = reasons(ledger, in_s=600)
    assert list(found) == [Code.NO_TRAINER]
    assert found[Code.NO_TRAINER].startswith("trainer trainer stopped at 20")
    assert "UTC, 10 min ago: start it again" in found[Code.NO_TRAINER]


def test_the_trainer_is_dead(ledger: Ledger) -> None:
    leased(served(ledger), 2)
    assert list(reasons(ledger)) == [Code.LEASED]
    assert the_only(reasons(ledger, in_s=TRAINER_SEEN_S + 5), Code.NO_TRAINER).startswith(
        "trainer trainer was last seen at 20"
    )


def test_a_step_is_being_made(ledger: Ledger) -> None:
    leased(served(ledger), 2)
    assert re.match(r"2 experiences in training, for 2\d s at most", the_only(reasons(ledger, in_s=20), Code.LEASED))


def test_all_steps_are_done(ledger: Ledger) -> None:
    ledger.training.end(1 if trained(ledger, 2) == 1 else 0)
    committed(ledger, 2)
    assert list(reasons(ledger, Rules(2, total_steps=1))) == [Code.STEPS_DONE]
    assert list(reasons(ledger, Rules(2, total_steps=2))) == [Code.NO_TRAINER]


def test_versions_keep_being_rejected(ledger: Ledger) -> None:
    ledger.versions.ensure_base(Path("/base"))
    for reason in ("its probe differs", "NaN in lm_head"):
        ledger.versions.reject(trained(ledger), reason)
    committed(ledger, 2)
    found = reasons(ledger)
    assert list(found) == [Code.REJECTED_VERSIONS]
    assert "the newest 2 versions were rejected" in found[Code.REJECTED_VERSIONS]
    assert "NaN in lm_head" in found[Code.REJECTED_VERSIONS]


def test_a_version_is_held_back_by_an_alarm(ledger: Ledger) -> None:
    ledger.versions.ensure_base(Path("/base"))
    trained(ledger)
    for name, holds in (("reward_jump", True), ("entropy", False)):
        ledger.alarms.raise_alarm(Alarm(name, "it fell", holds=holds))
    committed(ledger, 2)
    found = reasons(ledger)
    assert found[Code.PROMOTION_HELD].endswith("not served while these alarms are open: reward_jump (it fell)")
    ledger.alarms.clear("reward_jump")
    assert Code.PROMOTION_HELD not in reasons(ledger)


def test_a_version_that_nothing_holds_back_is_not_served(ledger: Ledger) -> None:
    ledger.versions.ensure_base(Path("/base"))
    first = trained(ledger)
    began, _ = ledger.reports.facts(ANY).weights.waiting_since, time.sleep(0.1)
    second = trained(ledger)
    assert ledger.reports.facts(ANY).weights.waiting_since == began
    assert Code.VERSION_NOT_SERVED not in reasons(ledger, in_s=30)
    assert re.search(r"waited to be served for 7\d s", reasons(ledger, in_s=70)[Code.VERSION_NOT_SERVED])
    assert Code.VERSION_NOT_SERVED not in reasons(ledger, PAIRS._replace(gated=True), in_s=70)
    ledger.alarms.raise_alarm(Alarm("reward_jump", "it fell", holds=True))
    assert Code.VERSION_NOT_SERVED not in reasons(ledger, in_s=70)
    ledger.alarms.clear("reward_jump")
    ledger.versions.begin_canary(first, by="explorer", reason="")
    assert Code.VERSION_NOT_SERVED not in reasons(ledger, in_s=70)
    ledger.versions.promote(second)
    assert ledger.reports.facts(ANY).weights.waiting_since is None


def test_reasons_come_in_the_order_of_the_road(ledger: Ledger) -> None:
    committed(ledger, 1)
    rewarded(ledger, 1)
    ledger.recording.record([exchange(experiences=(experience(drop_reason="cut off"),)) for _ in range(50)])
    assert list(reasons(ledger)) == [Code.NO_TRAINER, Code.NOT_TRAINABLE, Code.NOT_COMMITTED, Code.BATCH_NOT_FULL]


def test_a_database_that_is_away_hides_the_rest() -> None:
    outbox = OutboxStatus(files=1, records=2, bytes=70, since=1000.0)
    found = diagnose(Facts(now=1100.0, rules=Rules(2), outbox=outbox, ledger=None, away="refused"))
    assert [reason.code for reason in found] == [Code.DATABASE_AWAY, Code.OUTBOX_NOT_DRAINED]


@pytest.mark.parametrize(("now", "codes"), [(1030.0, [Code.NONE]), (1200.0, [Code.OUTBOX_NOT_DRAINED])])
def test_what_waits_in_the_outbox_for_long_is_a_reason(now: float, codes: list[Code]) -> None:
    outbox = OutboxStatus(files=1, records=2, bytes=70, since=1000.0)
    ledger = LedgerFacts(
        states={State.COMMITTED: StateCount(2, 900.0, 2)},
        claimable=2,
        trainer=Trainer("host:1", 1, 900.0, now, None),
        weights=Weights(newest=0, registered_at=900.0, champion=0, step=0, rejected=0, reason=None, servable=0),
    )
    found = diagnose(Facts(now=now, rules=Rules(2), outbox=outbox, ledger=ledger))
    assert [reason.code for reason in found] == codes


def test_a_database_that_refuses_is_the_reason_and_not_what_waits_for_it() -> None:
    outbox = OutboxStatus(files=1, records=2, bytes=70, since=1000.0, refusal="no such table: exchanges")
    [reason] = [
        each
        for each in diagnose(Facts(now=1200.0, rules=Rules(2), outbox=outbox, ledger=LedgerFacts(states={})))
        if "outbox" in each.sentence
    ]
    assert reason.code is Code.DATABASE_REFUSES
    assert "no such table: exchanges" in reason.sentence


def test_the_equation_of_a_ledger(ledger: Ledger, engine: Engine) -> None:
    trained(ledger, 3)
    rewarded(ledger, 2)
    ledger.recording.record([exchange()])
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE versions SET purged = 1, consumed = 4 WHERE version = 1")
    assert equation(ledger.reports.facts(BatchRules())) == [
        "6 experiences = 1 recorded + 2 rewarded + 0 committed + 0 leased + 3 trained + 0 expired + 0 dropped",
        "3 trained + 1 purged = 4 consumed by 1 version",
    ]
    assert ledger.reports.audit() == []


@pytest.mark.parametrize(
    ("seconds", "words"), [(-3, "0 s"), (0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 d")]
)
def test_times_are_told_as_people_do(seconds: float, words: str) -> None:
    assert ago(1_000_000.0, 1_000_000.0 - seconds) == words


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        (
            "UPDATE versions SET consumed = 1 + consumed",
            "version 1 consumed 3, but 2 rows name it and 0 are purged",
        ),
        (
            "UPDATE experiences SET lease_epoch = 1 WHERE state = 'leased'",
            "experiences leased under an epoch that has ended: 1",
        ),
        (
            "UPDATE experiences SET group_id = id + 1 WHERE state = 'leased'",
            "experiences in a group that is named after a later one: 1",
        ),
    ],
)
def test_the_audit_finds_what_does_not_add_up(ledger: Ledger, engine: Engine, statement: str, sentence: str) -> None:
    trained(ledger, 2)
    leased(ledger, 1)
    assert ledger.reports.audit() == []
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    assert sentence in ledger.reports.audit()
