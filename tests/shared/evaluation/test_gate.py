"""What a candidate must show: each margin and each guard, at its edge and just beyond it."""

import json

import pytest

from tests.constants import section_of
from tuneloop.shared.evaluation.gate import evaluator_of, gate_verdict
from tuneloop.shared.evaluation.scores import LENGTH, MALFORMED, REFUSALS, SCORE, TASKS, Figure
from tuneloop.shared.experience import Evaluator
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.versions import GateSettings


def figures(**values: float) -> tuple[Figure, ...]:
    named = {SCORE: 0.9, LENGTH: 100.0, REFUSALS: 0.1, TASKS: 7.0} | values
    parts = [(*name.partition("__")[::2], value) for name, value in named.items()]
    return tuple(Figure(metric, part, value, 0.0, 10) for metric, part, value in parts)


CHAMPION = figures(score__sums=0.8, score__words=1.0)


@pytest.mark.parametrize(
    ("gate", "candidate", "complaint"),
    [
        ({}, {}, None),
        ({}, {SCORE: 0.95, "score__sums": 0.9}, None),
        ({"margin": 0.1}, {SCORE: 0.8}, None),
        ({"margin": 0.1}, {SCORE: 0.799}, "its score is 0.799, the champion's 0.9: more than 0.1 below"),
        ({"margin": 0}, {SCORE: 0.9}, None),
        ({}, {"score__sums": 0.75}, None),
        ({}, {"score__sums": 0.74}, "its score on the slice sums is 0.74, the champion's 0.8"),
        ({"margin": 1}, {"score__words": 0.94}, "on the slice words"),
        ({}, {LENGTH: 200.0}, None),
        ({}, {LENGTH: 201.0}, "its replies have 201 tokens, the champion's 100"),
        ({}, {LENGTH: 50.0}, None),
        ({}, {LENGTH: 49.0}, "its replies have 49 tokens"),
        ({}, {LENGTH: 0.0}, "its replies have 0 tokens"),
        ({}, {REFUSALS: 0.2}, None),
        ({}, {REFUSALS: 0.21}, "21.0% of its replies refuse, 10.0% of the champion's"),
        ({}, {MALFORMED: 0.1}, None),
        ({}, {MALFORMED: 0.11}, "11.0% of its replies lack the form that their task demands, 0.0% of the champion's"),
    ],
)
def test_each_margin_and_guard_at_its_edge(
    gate: dict[str, float], candidate: dict[str, float], complaint: str | None
) -> None:
    found = figures(**{"score__sums": 0.8, "score__words": 1.0} | candidate)
    verdict = gate_verdict(section_of(GateSettings, gate), found, CHAMPION)
    assert verdict.passed == (complaint is None)
    assert len(verdict.reasons) == (complaint is not None)
    assert (complaint or "") in "".join(verdict.reasons)


def test_all_that_is_wrong_is_told_with_the_figures_of_both() -> None:
    verdict = gate_verdict(GateSettings(), figures(score=0.5, reply_length=300.0, refusals=0.9), CHAMPION)
    assert len(verdict.reasons) == 3
    assert verdict.figures["candidate"] == {SCORE: 0.5, LENGTH: 300.0, REFUSALS: 0.9}
    assert verdict.figures["champion"]["score/sums"] == 0.8
    assert json.loads(json.dumps(verdict.figures)) == verdict.figures


@pytest.mark.parametrize(
    ("rollout", "evaluator"),
    [
        ({}, Evaluator.TRAINER),
        ({"engine_num": 2}, Evaluator.ENGINE),
        ({"engine_urls": ["http://a:1"], "engine_num": 2}, Evaluator.TRAINER),
        ({"engine_urls": ["http://a:1", "http://b:1"]}, Evaluator.ENGINE),
    ],
)
def test_a_fleet_evaluates_on_an_engine_one_engine_leaves_it_to_the_trainer(
    rollout: dict[str, object], evaluator: Evaluator
) -> None:
    settings = Settings.model_validate({"model": {"model_path": "/m"}, "explorer": {"rollout_model": rollout}})
    assert evaluator_of(settings) is evaluator
