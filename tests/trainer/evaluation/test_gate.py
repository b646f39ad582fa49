"""Versions examined by the trainer before they serve, with a real tiny model."""

import json
from threading import Event

import pytest
import torch
from structlog.testing import capture_logs

from tests.doubles.judge import judge_place, shown, verdict
from tests.trainer.factories import commit, sample
from tuneloop.shared.evaluation.tasks import tasks_of
from tuneloop.shared.experience import Evaluator, VersionAction
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.evaluation.evaluation import GateEvaluation, HeldOut
from tuneloop.trainer.loop import run
from tuneloop.trainer.models.model import Actor

TASKS = [{"prompt": "7+5=", "answer": "12", "slice": "sums"}, {"prompt": "a", "answer": "no such thing"}]


@pytest.fixture
def gated(settings, tmp_path):
    """Makes settings with a gate and tasks; `gate` and `evaluation` are options of theirs."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in TASKS))

    def make(*, gate=None, evaluation=None, **but):
        options = {"path": path, "most_tokens": 4, "every": 100} | (evaluation or {})
        return settings(gate={"mode": "report"} | (gate or {}), monitor={"evaluation": options}, **but)

    return make


def metrics(ledger, version):
    return [(each.metric, each.slice) for each in ledger.evaluations.of(version, Evaluator.TRAINER)]


def evaluated(ledger):
    return [each for each in ledger.versions.events() if each.action is VersionAction.EVALUATED]


MEASURED = [("refusals", ""), ("reply_length", ""), ("score", ""), ("score", "sums"), ("tasks", "")]


def test_the_loop_examines_the_base_and_each_version_and_keeps_what_came_of_it(gated, ledger):
    commit(ledger, [sample(i) for i in range(8)])
    run(gated(trainer={"total_steps": 2}), Event())
    assert metrics(ledger, 0) == MEASURED
    assert metrics(ledger, 1) == metrics(ledger, 2) == MEASURED
    first, second = evaluated(ledger)
    assert (first.version, second.version, first.actor) == (1, 2, "trainer")
    assert (first.details["passed"], first.details["instead_of"]) == (True, 0)
    assert first.reason == "no worse than version 0"
    assert ledger.reports.counts()["recorded"] == 0  # an evaluation is no experience


def test_a_fleet_is_left_to_examine_by_itself(gated, ledger):
    commit(ledger, [sample(i) for i in range(4)])
    run(gated(explorer={"rollout_model": {"engine_num": 2}}, trainer={"total_steps": 1}), Event())
    assert metrics(ledger, 0) == metrics(ledger, 1) == []


def test_a_version_that_does_worse_is_said_to(gated, ledger):
    chosen = gated()
    ledger.versions.ensure_base(chosen.model.model_path)
    learner = snapshot.load(chosen, None)
    prompt = HeldOut(chosen, tasks_of(chosen.monitor.evaluation))
    ids = prompt._generate(learner.actor, [prompt._tokenizer("7+5=")["input_ids"]])[0]
    said = prompt._tokenizer.decode(ids, skip_special_tokens=True)
    task = TASKS[0] | {"answer": said}
    chosen.monitor.evaluation.path.write_text(json.dumps(task))
    commit(ledger, [sample(i) for i in range(4)])
    run(gated(trainer={"total_steps": 1}), Event())
    assert [each.version for each in ledger.versions.all()] == [0, 1]
    with torch.no_grad():
        for each in learner.actor.network.parameters():
            each.copy_(torch.randn_like(each))
    ledger.evaluations.record(1, Evaluator.TRAINER, ())
    GateEvaluation(chosen, ledger).evaluate(learner, 1)
    worse = evaluated(ledger)[-1]
    assert worse.details["passed"] is False
    assert "its score is 0, the champion's 1" in worse.reason


def test_a_restart_examines_the_newest_version_and_the_champion_if_nobody_has(gated, ledger):
    commit(ledger, [sample(i) for i in range(4)])
    run(gated(gate={"mode": "off"}, trainer={"total_steps": 1}), Event())
    run(gated(trainer={"total_steps": 1}), Event())
    assert metrics(ledger, 0) == metrics(ledger, 1) == MEASURED
    assert [each.version for each in evaluated(ledger)] == [1]
    run(gated(trainer={"total_steps": 1}), Event())
    assert len(evaluated(ledger)) == 1


def test_other_tasks_make_another_examination(gated, ledger):
    commit(ledger, [sample(i) for i in range(4)])
    run(gated(trainer={"total_steps": 1}), Event())
    chosen = gated(trainer={"total_steps": 1})
    chosen.monitor.evaluation.path.write_text(json.dumps(TASKS[0]))
    run(chosen, Event())
    samples = [{each.samples for each in ledger.evaluations.of(version, Evaluator.TRAINER)} for version in (0, 1)]
    assert samples == [{1}, {1}]


# A model that judges.


def test_a_model_judges_with_the_question_and_the_answer_before_it(gated):
    with judge_place() as place:
        chosen = gated(evaluation={"judge": "model"}, judge={"url": place.base_url, "model": "j", "retries": 0})
        place.says = [verdict(3)]
        held_out = HeldOut(chosen, tasks_of(chosen.monitor.evaluation))
        found = held_out.figures(Actor.load(chosen, chosen.model.model_path))
    assert next(each.value for each in found if each.metric == "score") == 0.5
    heard = "".join(map(shown, place.requests))
    assert "7+5=" in heard
    assert "no such thing" in heard


def test_a_judge_that_is_away_leaves_the_version_without_figures_until_it_is_back(gated, ledger):
    with judge_place() as place:
        chosen = gated(evaluation={"judge": "model"}, judge={"url": place.base_url, "model": "j", "retries": 0})
        ledger.versions.ensure_base(chosen.model.model_path)
        learner, gate = snapshot.load(chosen, None), GateEvaluation(chosen, ledger, again_s=0)
        place.answers = [(503, {}, {})] * 2
        with capture_logs() as said:
            gate.evaluate(learner, 0)
        assert [each["event"] for each in said] == ["version_not_evaluated"]
        assert metrics(ledger, 0) == []
        place.answers.clear()  # the second task may not have been asked about any more
        gate.evaluate(learner, 0)
        assert metrics(ledger, 0) == MEASURED
