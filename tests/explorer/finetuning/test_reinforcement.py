"""Jobs of the method reinforcement: prompts of a file are asked, graded, released and waited for, each sample once."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai.types.fine_tuning import FineTuningJob

from tests import factories
from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer import adapters
from tests.explorer.finetuning.job_service import TrainerDouble, job_service, put
from tests.explorer.running import RunningExplorer, eventually, explorer_running
from tests.house.documents.page_files import python_of
from tuneloop.explorer import jobs
from tuneloop.explorer.jobs import LineChecks
from tuneloop.explorer.processes.control import Workers
from tuneloop.explorer.tokens import JobClaims, TokenSigner
from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.experience import JobState, Scope, steady_clock
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.keys import KeyGrant
from tuneloop.shared.ledger.ledger import BatchRules
from tuneloop.shared.ledger.policies import Job, JobDraft
from tuneloop.shared.settings.feedback import TenantSettings

ASKED = {"batch_size": 2, "n_epochs": 1, "eval_interval": 1, "eval_samples": 1, "reasoning_effort": "default"}
GRADER = {
    "type": "string_check",
    "name": "right",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}


@pytest.fixture
def explorer(tmp_path: Path, double: EngineDouble, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningExplorer]:
    """An explorer of adapters, whose jobs look often; the base model says 7, whatever it is asked."""
    double.says |= {"models": "7"} | {f"global_step_{number}": "7" for number in range(1, 9)}
    for name, value in (("POLL_S", 0.05), ("_PAUSE_S", 0.2)):
        monkeypatch.setattr(jobs, name, value)
    monkeypatch.setattr(LineChecks, "check", lambda *_: None)  # the tests queue their jobs themselves
    url: list[str] = []
    monkeypatch.setattr(Workers, "url", property(lambda self: url[0]))
    with explorer_running(adapters.adapted(tmp_path, double)) as running:
        url.append(running.url)
        yield running


def uploaded(explorer: RunningExplorer, *lines: Any) -> str:
    data = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    form: dict[str, Any] = {"files": {"file": ("a.jsonl", data)}, "data": {"purpose": "fine-tune"}}
    return str(explorer.http.post("/v1/files", **form).json()["id"])


def prompt(question: str, answer: str = "7") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "answer": answer}


def queued(explorer: RunningExplorer, file: str, *, steps: int = 2, tenant: str = "default", **but: Any) -> Job:
    options = {
        "buffer.group_by": "task",
        "buffer.group_size": 2,
        "gate.mode": "off",
        "algorithm.algorithm_type": "grpo",
    }
    draft: dict[str, Any] = {"hyperparameters": ASKED, "grader": GRADER, "rows_in_all": 3} | but
    job = explorer.ledger.jobs.create(
        JobDraft(
            tenant=tenant,
            model="t",
            parent=0,
            options=options | {"buffer.train_batch_size": 4},
            method="reinforcement",
            training_file=file,
            total_steps=steps,
            by="tests",
            **draft,
        )
    )
    return explorer.ledger.jobs.change(job.id, JobState.QUEUED, "queued")


@contextmanager
def training(explorer: RunningExplorer | SimpleNamespace, job: Job) -> Iterator[list[list[str]]]:
    """A double of the trainer: each step is a version; what it learnt from, by the names of the replies."""
    ledger, steps, ending = explorer.ledger, list[list[str]](), threading.Event()
    rules = BatchRules(policy=job.policy, group_by="task", group_size=2, batch_timeout=0.5)

    def work() -> None:
        epoch, store = ledger.training.take_epoch("trainer"), CheckpointStore(explorer.settings.job_dir)
        while not ending.wait(0.05):
            if not (rows := ledger.training.lease(epoch, 4, rules)):
                continue

            def publish(version: int) -> tuple[Path, str]:
                staging = store.stage(version)
                adapters.write_adapter(staging / "actor", explorer.settings.model.model_path, seed=version)
                return adapters.seal(store, staging, version)

            step = len(steps) + 1
            ledger.training.register(epoch, factories.ids(rows), step=step, publish=publish, policy=job.policy)
            steps.append([each.msg_id for each in rows])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield steps
    finally:
        ending.set()
        thread.join()


def over(explorer: RunningExplorer, job: Job) -> Job:
    eventually(lambda: explorer.ledger.jobs.get(job.id).finished_at is not None)
    return explorer.ledger.jobs.get(job.id)


def metrics(explorer: RunningExplorer, job: Job) -> list[dict[str, Any]]:
    events = explorer.ledger.jobs.events(job.id, limit=100)
    return [each.data for each in reversed(events) if each.data is not None]


def asked_runs(explorer: RunningExplorer, job: Job) -> Counter[tuple[str, str]]:
    rows = explorer.rows(f"SELECT task_id, run_id FROM experiences WHERE policy = {job.policy}")
    return Counter((row[0], row[1]) for row in rows)


def test_a_job_is_asked_graded_trained_and_served(explorer: RunningExplorer, double: EngineDouble) -> None:
    lines = [prompt("3+4=", "7"), prompt("3+5=", "8"), prompt("5+2=", "7")]
    file, validation = uploaded(explorer, *lines), uploaded(explorer, prompt("1+6="), prompt("1+1=", "2"))
    job = queued(explorer, file, validation_file=validation)
    with training(explorer, job) as steps:
        done = over(explorer, job)
    assert done.state is JobState.SUCCEEDED, done.error
    assert done.version == explorer.ledger.versions.of(job.policy).champion().version
    assert [len(each) for each in steps] == [4, 4]
    assert done.trained_tokens > 0
    told = metrics(explorer, job)
    assert [each["step"] for each in told] == [1, 2]
    assert told[0]["valid_mean_reward"] == 0.5
    assert 0 <= told[0]["train_mean_reward"] <= 1
    runs = asked_runs(explorer, job)
    assert set(runs.values()) == {1}
    assert len(runs) == 8
    assert {task.split(":")[0] for task, _ in runs} == {file}
    rewards = explorer.rows(
        f"SELECT task_id, reward FROM experiences WHERE policy = {job.policy} AND version_min = 0 ORDER BY id"
    )
    assert {(row[0].split(":")[1], row[1]) for row in rewards} <= {("1", 1.0), ("2", 0.0), ("3", 1.0)}
    versions = explorer.rows(f"SELECT DISTINCT version_min FROM experiences WHERE policy = {job.policy}")
    assert len(versions) == 2, "the second step is sampled from what the first one made"
    others = explorer.rows("SELECT count(*) FROM experiences WHERE policy = 0")
    assert [tuple(each) for each in others] == [(0,)], "nothing of the validation is recorded"


def test_what_is_recorded_is_not_asked_again_by_who_goes_on(explorer: RunningExplorer, double: EngineDouble) -> None:
    file = uploaded(explorer, prompt("3+4="), prompt("3+5=", "8"))
    job = queued(explorer, file, steps=1)
    eventually(lambda: len(explorer.rows(f"SELECT 1 FROM experiences WHERE policy = {job.policy}")) == 4)
    for _ in range(4):  # its driver is ended anywhere, and another one begins
        explorer.ledger.jobs.change(job.id, JobState.PAUSED, "paused")
        eventually(lambda: not tasks_of(job))
        explorer.ledger.jobs.change(job.id, JobState.QUEUED, "resumed")
        eventually(lambda: explorer.ledger.jobs.get(job.id).state is JobState.RUNNING)
    with training(explorer, job) as steps:
        assert over(explorer, job).state is JobState.SUCCEEDED
    assert [len(each) for each in steps] == [4]
    assert set(asked_runs(explorer, job).values()) == {1}
    assert len(double.chats) == 4


def tasks_of(job: Job) -> list[Any]:
    """The tasks that drive it."""
    import gc

    found = [each for each in gc.get_objects() if isinstance(each, jobs.ReinforcementJobs)]
    return [each._driving[job.id] for each in found if job.id in each._driving]


def test_a_refused_prompt_is_left_out_and_said(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.quotes = lambda request: "broken" in json.dumps(request["messages"])
    file = uploaded(explorer, prompt("broken"), prompt("3+4="), prompt("3+5=", "8"))
    job = queued(explorer, file, steps=2)
    with training(explorer, job):
        assert over(explorer, job).state is JobState.SUCCEEDED
    assert {task.split(":")[1] for task, _ in asked_runs(explorer, job)} == {"2", "3"}
    warnings = [each.message for each in explorer.ledger.jobs.events(job.id, limit=50) if each.level == "warn"]
    assert any(each.startswith("Line 1 of the training file is left out") for each in warnings)


def test_a_job_whose_prompts_are_all_refused_fails(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.quotes = lambda request: True
    done = over(explorer, queued(explorer, uploaded(explorer, prompt("a"), prompt("b"))))
    assert done.state is JobState.FAILED
    assert done.error is not None
    assert "all prompts were refused" in done.error["message"]


@pytest.mark.parametrize(
    ("grader", "words"), [({"type": "python", "source": ""}, "runs no code"), (None, "must be an object")]
)
def test_a_job_without_a_grader_that_can_be_fails(explorer: RunningExplorer, grader: Any, words: str) -> None:
    done = over(explorer, queued(explorer, uploaded(explorer, prompt("a")), grader=grader))
    assert done.error is not None
    assert words in done.error["message"]


def test_a_job_waits_while_the_engine_is_away_and_goes_on(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.status = 500
    job = queued(explorer, uploaded(explorer, prompt("3+4="), prompt("3+5=", "8")), steps=1)
    eventually(lambda: any("The job waits" in each.message for each in explorer.ledger.jobs.events(job.id)))
    assert explorer.ledger.jobs.get(job.id).state is JobState.RUNNING
    double.status = 200
    with training(explorer, job):
        assert over(explorer, job).state is JobState.SUCCEEDED
    assert set(asked_runs(explorer, job).values()) == {1}


def test_a_job_whose_graders_model_does_not_exist_fails(explorer: RunningExplorer) -> None:
    asked = {"role": "user", "content": "Score {{sample.output_text}}"}
    grader = {"type": "score_model", "name": "m", "model": "missing", "input": [asked]}
    job = queued(explorer, uploaded(explorer, prompt("3+4=")), grader=grader)
    done = over(explorer, job)
    assert (done.state, "does not exist" in (done.error or {})["message"]) == (JobState.FAILED, True)


def test_a_job_asks_as_its_tenant_where_keys_are_needed(explorer: RunningExplorer, double: EngineDouble) -> None:
    file = uploaded(explorer, prompt("3+4="), prompt("3+5=", "8"))
    explorer.ledger.keys.create(KeyGrant(name="other", scopes=(Scope.READ,)), actor="test")
    eventually(lambda: explorer.http.get("/training").status_code == 401)
    job = queued(explorer, file, steps=1, tenant="acme")
    with training(explorer, job):
        assert over(explorer, job).state is JobState.SUCCEEDED
    tenants = explorer.rows(f"SELECT DISTINCT tenant FROM experiences WHERE policy = {job.policy}")
    assert [tuple(each) for each in tenants] == [("acme",)]


def test_a_grader_is_the_model_and_not_what_the_job_makes_of_it(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    asked = {"role": "user", "content": "Score {{sample.output_text}}"}
    grader = {"type": "score_model", "name": "m", "model": "t", "input": [asked]}
    double.says["models"] = '{"result": 0.5}'
    job = queued(explorer, uploaded(explorer, prompt("3+4="), prompt("3+5=")), grader=grader)
    with training(explorer, job):
        assert over(explorer, job).state is JobState.SUCCEEDED
    scored = [each for each in double.chats if "Score" in each.body["messages"][0]["content"]]
    assert len(scored) == 8
    assert {each.weights.parent.name for each in scored} == {"models"}
    assert {each.weights.parent.name for each in double.chats} > {"models"}
    assert [each["train_mean_reward"] for each in metrics(explorer, job)] == [0.5, 0.5]


def test_a_job_of_whom_nothing_may_be_kept_fails(explorer: RunningExplorer) -> None:
    file = uploaded(explorer, prompt("3+4="))
    explorer.settings.tenants["acme"] = TenantSettings(store=False)
    done = over(explorer, queued(explorer, file, tenant="acme"))
    assert done.error is not None
    assert "nothing is recorded" in done.error["message"]


def test_of_samples_that_two_explorers_had_the_first_is_learnt(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.status = 500
    job = queued(explorer, uploaded(explorer, prompt("3+4="), prompt("3+5=", "8")), steps=1)
    eventually(lambda: any("The job waits" in each.message for each in explorer.ledger.jobs.events(job.id)))
    labels = {"task_id": f"{job.training_file}:1:{job.id}:0", "policy": job.policy, "tenant": "default"}
    twice = [factories.exchange(run_id="0", **labels) for _ in range(3)]
    rated = factories.feedback(msg_id=twice[1].msg_id, tenant="default")
    explorer.ledger.recording.record([*twice, rated])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "LEAD_S", -1.0)  # the database may let another explorer lead by now
        double.status, before = 200, len(double.chats)
        time.sleep(1.0)
        assert len(double.chats) == before
    with training(explorer, job) as steps:
        assert over(explorer, job).state is JobState.SUCCEEDED
    assert {len(step) for step in steps} == {4}
    assert {twice[0].msg_id, twice[2].msg_id}.isdisjoint(steps[0])
    assert twice[1].msg_id in steps[0]
    reasons = explorer.rows(f"SELECT reason FROM experiences WHERE policy = {job.policy} AND state = 'dropped'")
    assert [row.reason for row in reasons] == ["another explorer had the same sample of the job"] * 2
    assert explorer.ledger.reports.imbalance() == []


def test_a_cancelled_job_stops_at_once(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.hangs = True
    job = queued(explorer, uploaded(explorer, prompt("3+4=")))
    eventually(lambda: len(double.chats) == 4)
    explorer.ledger.jobs.change(job.id, JobState.CANCELLED, "cancelled")
    eventually(lambda: not tasks_of(job))
    double.hangs = False
    assert explorer.ledger.jobs.get(job.id).state is JobState.CANCELLED


def test_a_jobs_token_opens_what_a_job_needs_and_nothing_else(explorer: RunningExplorer) -> None:
    tokens = TokenSigner(load_key(explorer.settings.job_dir / KEY))

    def ask(path: str, token: str) -> int:
        headers = {"authorization": f"Bearer {token}"}
        return httpx.get(explorer.url + path, headers=headers).status_code

    claims = JobClaims("ftjob-x", "acme", 1, steady_clock() + 60)
    token = tokens.sign(claims)
    assert ask("/v1/files", token) == 200
    assert ask("/admin/keys", token) == 403
    assert ask("/metrics", token) == 403
    late = tokens.sign(JobClaims("ftjob-x", "acme", 1, steady_clock() - 1))
    other = TokenSigner(b"x" * 32).sign(claims)
    for wrong in (late, other, token[:-3], token.replace("ftjob-token-", "fb-"), "ftjob-token-", "ftjob-token-é"):
        assert ask("/v1/files", wrong.encode("ascii", "replace").decode()) == 401, wrong


def test_a_grader_is_tried_by_openais_route(explorer: RunningExplorer, double: EngineDouble) -> None:
    graders = explorer.openai().fine_tuning.alpha.graders
    grader: Any = GRADER
    assert graders.validate(grader=grader).grader is not None
    found = graders.run(grader=grader, model_sample="7", item={"answer": "7"})
    assert (found.reward, found.metadata.type, found.metadata.errors.other_error) == (1.0, "string_check", False)
    missing = graders.run(grader=grader, model_sample="7", item={})
    assert (missing.reward, missing.metadata.errors.invalid_variable_error) == (0.0, True)
    asked = {"role": "user", "content": "Score {{sample.output_text}}"}
    model: Any = {"type": "score_model", "name": "m", "model": "t", "input": [asked]}
    double.says["models"] = '{"result": 0.5}'
    assert graders.run(grader=model, model_sample="seven").reward == 0.5
    assert double.chats[-1].body["messages"] == [{"role": "user", "content": "Score seven"}]
    explorer.until_flushed()
    assert explorer.rows("SELECT 1 FROM experiences") == []
    double.status = 500
    away = graders.run(grader=model, model_sample="seven")
    assert (away.reward, away.metadata.errors.api_model_grader_server_error) == (0.0, True)
    for body in ({}, {"grader": {"type": "python", "source": "x", "name": "p"}}):
        refused = explorer.http.post("/v1/fine_tuning/alpha/graders/validate", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_grader")


def test_parts_that_fail_end_the_others() -> None:
    ended = []

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(1)

    async def short() -> None:
        await asyncio.sleep(0)
        raise LookupError("short")

    with pytest.raises(LookupError, match="short"):
        asyncio.run(jobs.gather(long(), short()))
    assert ended == [1]


# The Python of docs/files.md, Fine-tuning jobs, runs.


def test_its_python_runs(tmp_path: Path, double: EngineDouble) -> None:
    block = python_of("files.md", "Fine-tuning jobs")[0]
    with job_service(adapters.adapted(tmp_path, double)) as explorer:
        jobs = explorer.openai().fine_tuning.jobs

        def finished(job_id: str) -> FineTuningJob:
            eventually(lambda: jobs.retrieve(job_id).status == "queued")
            TrainerDouble(explorer.ledger, explorer.settings).train(job_id)
            return jobs.retrieve(job_id)

        here = {
            "http://localhost:8010": explorer.url,
            '"tiny"': f'"{MODEL}"',
            'client.files.create(file=open("data.jsonl", "rb"), purpose="fine-tune")': "stored",
            "client.fine_tuning.jobs.retrieve(": "finished(",
        }
        for theirs, ours in here.items():
            assert theirs in block
            block = block.replace(theirs, ours)
        names: dict[str, Any] = {"stored": SimpleNamespace(id=put(explorer)), "finished": finished}
        exec(block, names)  # noqa: S102 - our own page
        assert names["job"].fine_tuned_model.startswith(f"ft:{MODEL}:sums:")
        assert double.chats[-1].weights is not None
