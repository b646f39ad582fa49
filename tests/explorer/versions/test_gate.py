"""Candidates at the gate: tried on an engine that nobody else asks, or judged by the trainer's figures."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.constants import section_of
from tests.doubles.engine import EngineDouble
from tests.doubles.judge import judge_place, verdict
from tests.explorer.checkpoints import register
from tests.explorer.running import RunningExplorer, eventually, explorer_running, open_ledger, settings_for
from tests.explorer.versions.test_reload import until, until_ready, version
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.versions import reload
from tuneloop.explorer.versions.evaluation import CandidateEvaluation
from tuneloop.explorer.versions.reload import Gate
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.evaluation.scores import Figure
from tuneloop.shared.evaluation.tasks import fingerprint, tasks_of
from tuneloop.shared.experience import Evaluator, State, VersionAction, VersionState
from tuneloop.shared.settings.feedback import JudgeSettings
from tuneloop.shared.settings.versions import EvaluationSettings, MonitorSettings
from tuneloop.shared.settings.versions import GateSettings as GateSettings

pytestmark = pytest.mark.contract

TASKS = [
    {"messages": [{"role": "user", "content": "7+5="}], "answer": "12", "slice": "sums"},
    {"messages": [{"role": "user", "content": "8+4="}], "answer": "12"},
]
RIGHT, WRONG = "It is 12.", "It is 13."


def gated(tmp_path: Path, doubles: list[EngineDouble], **gate: Any) -> Any:
    """Settings with a gate; the base model's replies are right, those of version 1 are not."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    for each in doubles:
        each.weights = tmp_path / "model"
        each.says = {tmp_path.name: RIGHT, "global_step_1": WRONG, "global_step_2": RIGHT}
    settings = settings_for(tmp_path, [each.url for each in doubles])
    monitor = MonitorSettings(evaluation=EvaluationSettings(path=path))
    return settings.model_copy(update={"gate": section_of(GateSettings, {"mode": "block"} | gate), "monitor": monitor})


def events(explorer: RunningExplorer, number: int) -> list[Any]:
    return [each for each in explorer.ledger.versions.events(number) if each.action is VersionAction.EVALUATED]


def clients_of(double: EngineDouble, name: str) -> list[Any]:
    """What clients asked an engine while it had those weights; the evaluation's own questions have no request id."""
    return [each for each in double.chats if each.weights.parent.name == name and "x-request-id" in each.headers]


def test_a_candidate_that_answers_wrongly_is_rejected_and_never_answers_a_client(
    tmp_path: Path, doubles: list[EngineDouble]
) -> None:
    with explorer_running(gated(tmp_path, doubles)) as explorer:
        until_ready(explorer, 2)
        register(explorer.ledger, explorer.settings.job_dir)
        while version(explorer, 1).state is VersionState.CANDIDATE:
            assert explorer.chat().headers["x-tuneloop-version"] == "0"
        until(explorer, 1, VersionState.REJECTED)
        assert "it did not pass the gate: its score is 0, the champion's 1" in (version(explorer, 1).reason or "")
        until_ready(explorer, 2)
        assert [each.weights for each in doubles] == [tmp_path / "model"] * 2
        (evaluated,) = events(explorer, 1)
        assert (evaluated.actor, evaluated.details["passed"], evaluated.details["instead_of"]) == ("explorer", False, 0)
        assert evaluated.details["candidate"]["score/sums"] == 0.0
        actions = [str(each.action) for each in explorer.ledger.versions.events(1)]
        assert actions == ["published", "evaluated", "rejected"]
        (rejected,) = [each for each in explorer.ledger.versions.events(1) if each.action is VersionAction.REJECTED]
        assert rejected.details["champion"]["score"] == 1.0
        eventually(lambda: explorer.decisions("rejected") == 1)

        assert register(explorer.ledger, explorer.settings.job_dir) == 2
        until(explorer, 2, VersionState.CHAMPION)
        assert explorer.version() == 2
        assert not any(clients_of(each, "global_step_1") for each in doubles)
        assert sum(len(clients_of(each, "global_step_2")) for each in doubles) == 1


def test_an_evaluation_is_no_exchange(tmp_path: Path, doubles: list[EngineDouble]) -> None:
    with explorer_running(gated(tmp_path, doubles)) as explorer:
        until_ready(explorer, 2)
        register(explorer.ledger, explorer.settings.job_dir)
        before = explorer.counts()
        until(explorer, 1, VersionState.REJECTED)
        asked = [each.body for double in doubles for each in double.chats]
        assert len(asked) == 2 * len(TASKS)
        assert {each["temperature"] for each in asked} == {0.0}
        assert explorer.exchanges() == []
        assert explorer.counts() == before
        assert explorer.counts()[State.RECORDED] == 0


def test_a_report_says_what_is_wrong_and_lets_it_serve(tmp_path: Path, doubles: list[EngineDouble]) -> None:
    with explorer_running(gated(tmp_path, doubles, mode="report")) as explorer:
        until_ready(explorer, 2)
        register(explorer.ledger, explorer.settings.job_dir)
        until(explorer, 1, VersionState.CHAMPION)
        (evaluated,) = events(explorer, 1)
        assert evaluated.details["passed"] is False


def test_a_judge_that_is_away_makes_the_candidate_wait_not_fail(tmp_path: Path, doubles: list[EngineDouble]) -> None:
    with judge_place() as judge, capture_logs() as said:
        settings = gated(tmp_path, doubles)
        evaluation = settings.monitor.evaluation.model_copy(update={"judge": "model"})
        by = section_of(JudgeSettings, {"url": judge.base_url, "model": "j", "retries": 0, "share": 0.001})
        update = {"monitor": MonitorSettings(evaluation=evaluation), "judge": by}
        judge.answers = [(503, {}, {})] * 100
        judge.says = [verdict(5)]
        with explorer_running(settings.model_copy(update=update)) as explorer:
            until_ready(explorer, 2)
            register(explorer.ledger, explorer.settings.job_dir)
            eventually(lambda: any(each["event"] == "version_not_evaluated" for each in said))
            until_ready(explorer, 2)
            assert version(explorer, 1).state is VersionState.CANDIDATE
            assert explorer.ledger.evaluations.of(1, Evaluator.ENGINE) == ()
            assert explorer.version() == 0


class Overtaken:
    """An engine that is given another adapter while it is asked."""

    loads_in_place, renaming, proof = False, None, ""

    def __init__(self) -> None:
        self.engine = Engine(0, SimpleNamespace(renaming=None), self)  # type: ignore[arg-type]
        self.engine.state = EngineState.READY

    async def query(self, path: str, **fields: Any) -> dict[str, Any]:
        self.engine.begin_load()
        self.engine.end_load(1)
        choice = {"message": {"content": RIGHT}, "finish_reason": "stop"}
        return {"choices": [choice], "usage": {"completion_tokens": 3}}


async def test_figures_of_two_adapters_are_nobodys(tmp_path: Path, doubles: list[EngineDouble]) -> None:
    settings = gated(tmp_path, doubles)
    ledger = open_ledger(settings)
    register(ledger, settings.job_dir)
    evaluation = CandidateEvaluation(
        settings,
        Fleet([Overtaken().engine], wait_timeout_s=1),
        ledger=ledger,
        metrics=Metrics(),
        reloader=SimpleNamespace(gate=Gate(settings, ledger), swapping=asyncio.Lock()),  # type: ignore[arg-type]
    )
    await evaluation.turn()
    assert ledger.evaluations.of(0, Evaluator.ENGINE) == ()
    ledger.close()


# With one engine the trainer evaluates.


def figures(settings: Any, score: float) -> list[Figure]:
    evaluation = settings.monitor.evaluation
    asked = fingerprint(tasks_of(evaluation), evaluation, JudgeSettings())
    return [Figure("tasks", "", float(asked), 0.0, 2), Figure("score", "", score, 0.0, 2)]


def rewrite(settings: Any) -> None:
    settings.monitor.evaluation.path.write_text(json.dumps(TASKS[0]))


@pytest.mark.parametrize(("score", "state"), [(0.9, VersionState.CHAMPION), (0.1, VersionState.REJECTED)])
def test_with_one_engine_a_candidate_waits_for_the_trainers_figures(
    tmp_path: Path, double: EngineDouble, score: float, state: VersionState
) -> None:
    settings = gated(tmp_path, [double])
    with explorer_running(settings) as explorer:
        explorer.ledger.evaluations.record(0, Evaluator.TRAINER, figures(settings, 0.9))
        register(explorer.ledger, explorer.settings.job_dir)
        assert explorer.version() == 0
        assert double.posts == []
        explorer.ledger.evaluations.record(1, Evaluator.TRAINER, figures(settings, score))
        until(explorer, 1, state)


async def test_one_that_waits_for_long_is_told_of(
    tmp_path: Path, double: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = gated(tmp_path, [double])
    ledger = open_ledger(settings)
    register(ledger, settings.job_dir)
    candidate = ledger.versions.candidate()
    assert candidate is not None
    champion, patient = ledger.versions.champion(), Gate(settings, ledger)
    assert not await patient.admits(candidate, champion)
    assert [each.action for each in ledger.versions.events(1)] == [VersionAction.PUBLISHED]
    monkeypatch.setattr(reload, "PATIENCE_S", -1)
    for _ in range(2):
        assert not await patient.admits(candidate, champion)
    (_, told) = ledger.versions.events(1)
    assert (told.action, told.reason) == (
        VersionAction.EVALUATED,
        "waits for the trainer's evaluation before it may be served: there is none yet",
    )
    ledger.close()


async def test_figures_of_other_tasks_do_not_count(tmp_path: Path, double: EngineDouble) -> None:
    settings = gated(tmp_path, [double])
    ledger = open_ledger(settings)
    for number, score in enumerate((0.9, 0.9)):
        if number:
            register(ledger, settings.job_dir)
        ledger.evaluations.record(number, Evaluator.TRAINER, figures(settings, score))
    candidate, champion = ledger.versions.candidate(), ledger.versions.champion()
    assert candidate is not None
    assert await Gate(settings, ledger).admits(candidate, champion)
    rewrite(settings)
    assert not await Gate(settings, ledger).admits(candidate, champion)
    ledger.close()


def test_a_file_of_tasks_that_does_not_parse_stops_the_start(tmp_path: Path, double: EngineDouble) -> None:
    settings = gated(tmp_path, [double])
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a"}\n')
    ledger = open_ledger(settings)
    with pytest.raises(EnvironmentRefused, match=r"tasks\.jsonl, line 1: `answer`"):
        Gate(settings, ledger)
    ledger.close()
