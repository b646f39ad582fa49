"""OpenAI's fine-tuning API as its own client uses it, from a file to a model that answers."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests import factories
from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer import adapters
from tests.explorer.finetuning.job_service import TrainerDouble, job_service, put
from tests.explorer.running import RunningExplorer, eventually
from tests.explorer.versions.test_policies import WRONG
from tuneloop.shared.experience import JobState, PolicyState, Scope, State, VersionState
from tuneloop.shared.ledger.keys import KeyGrant

pytestmark = pytest.mark.contract


@pytest.fixture
def explorer(tmp_path: Path, double: EngineDouble) -> Iterator[RunningExplorer]:
    with job_service(adapters.adapted(tmp_path, double)) as running:
        yield running


@pytest.fixture
def client(explorer: RunningExplorer) -> OpenAI:
    return explorer.openai()


@pytest.fixture
def trainer(explorer: RunningExplorer) -> TrainerDouble:
    return TrainerDouble(explorer.ledger, explorer.settings)


def queued(explorer: RunningExplorer, client: OpenAI, **but: Any) -> str:
    """A job whose files were checked."""
    fields: dict[str, Any] = {"model": MODEL, "training_file": put(explorer)} | but
    job = client.fine_tuning.jobs.create(**fields)
    assert job.status == "validating_files"
    eventually(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "queued")
    return job.id


def client_of(explorer: RunningExplorer, tenant: str, *scopes: Scope) -> OpenAI:
    """A client with a key of a tenant."""
    grant = KeyGrant(
        name=f"{tenant}-{len(scopes)}", tenant=tenant, scopes=scopes or (Scope.INFERENCE, Scope.READ, Scope.COMMIT)
    )
    _, secret = explorer.ledger.keys.create(grant, actor="tests")
    eventually(lambda: explorer.http.get("/v1/models").status_code == 401)
    found = OpenAI(base_url=f"{explorer.url}/v1", api_key=secret, max_retries=0)

    def is_let_in() -> bool:
        try:
            found.models.list()
        except openai.AuthenticationError:
            return False
        return True

    eventually(is_let_in)
    return found


def ask(client: OpenAI, model: str) -> Any:
    hello: Any = [{"role": "user", "content": "3+4="}]
    return client.chat.completions.with_raw_response.create(model=model, messages=hello, max_tokens=12)


def refusal(call: Callable[[], Any]) -> tuple[int, str | None, str | None, str]:
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    error = caught.value
    return error.status_code, error.code, error.param, error.message


def test_a_job_from_its_file_to_its_model(
    explorer: RunningExplorer, client: OpenAI, trainer: TrainerDouble, double: EngineDouble
) -> None:
    began = time.time()
    training, validation = put(explorer), put(explorer, filename="held-out.jsonl")
    job = client.fine_tuning.jobs.create(
        model=MODEL,
        training_file=training,
        validation_file=validation,
        suffix="sums",
        seed=7,
        metadata={"team": "a"},
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}}},
    )
    assert (job.object, job.model, job.training_file, job.validation_file) == (
        "fine_tuning.job",
        MODEL,
        training,
        validation,
    )
    assert (job.seed, job.metadata, job.result_files, job.organization_id) == (7, {"team": "a"}, [], "default")
    assert (job.fine_tuned_model, job.finished_at, job.trained_tokens, job.error) == (None, None, None, None)
    assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (2, 4)
    assert job.method is not None
    assert job.method.supervised is not None
    assert job.method.supervised.hyperparameters is not None
    assert job.method.supervised.hyperparameters.learning_rate_multiplier == 1.0
    assert began - 1 <= job.created_at <= time.time() + 1
    eventually(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "queued")

    running = trainer.begin(job.id)
    name = f"ft:{MODEL}:sums:{job.id.removeprefix('ftjob-')}"
    eventually(lambda: f"the fine-tuning job {job.id} is running" in refusal(lambda: ask(client, name))[3])
    assert refusal(lambda: ask(client, name))[:3] == (404, "model_not_found", "model")
    first = trainer.step(running, 1, full_valid_loss=0.5)
    assert refusal(lambda: ask(client, f"{name}:ckpt-step-1"))[0] == 404
    second = trainer.step(running, 2, train_mean_token_accuracy=0.75)
    assert client.fine_tuning.jobs.retrieve(job.id).estimated_finish is not None
    trainer.succeed(running, second)

    done = client.fine_tuning.jobs.retrieve(job.id)
    assert (done.status, done.fine_tuned_model, done.trained_tokens) == ("succeeded", name, 123)
    assert done.finished_at is not None
    reply = ask(client, name)  # at once
    assert reply.headers["x-tuneloop-version"] == str(second)
    assert reply.parse().model == name
    assert double.chats[-1].weights == explorer.settings.job_dir / f"global_step_{second}" / "actor"
    reply = ask(client, f"{name}:ckpt-step-1")
    assert reply.headers["x-tuneloop-version"] == str(first)
    assert reply.parse().model == f"{name}:ckpt-step-1"

    checkpoints = client.fine_tuning.jobs.checkpoints.list(job.id).data
    assert [each.step_number for each in checkpoints] == [2, 1]
    assert checkpoints[1].fine_tuned_model_checkpoint == f"{name}:ckpt-step-1"
    assert (checkpoints[1].metrics.full_valid_loss, checkpoints[0].metrics.train_mean_token_accuracy) == (0.5, 0.75)
    assert checkpoints[0].fine_tuning_job_id == job.id
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=2))
    assert [each.message for each in events[::-1]][:2] == [
        f"Created fine-tuning job: {job.id}",
        "Files validated (4 lines); the job is queued",
    ]
    assert [each.data["step"] for each in events if each.type == "metrics"] == [2, 1]  # type: ignore[index]

    own = {each.id for each in client.models.list()}
    assert {name, f"{name}:ckpt-step-1", f"{name}:ckpt-step-2"} <= own
    assert not any(job.id in each for each in own)
    assert client.models.retrieve(name).id == name
    assert explorer.version() == 0, "it is the champion of its own line alone"
    assert explorer.ledger.versions.champion().version == 0


def test_a_later_version_changes_nothing_under_a_jobs_name(
    explorer: RunningExplorer, client: OpenAI, trainer: TrainerDouble
) -> None:
    job = queued(explorer, client)
    *_, last = trainer.train(job)
    name = client.fine_tuning.jobs.retrieve(job).fine_tuned_model
    assert name is not None
    later = trainer.step(explorer.ledger.jobs.get(job), 3)
    line = explorer.ledger.versions.of(explorer.ledger.jobs.get(job).policy)
    eventually(lambda: line.champion().version == later)
    assert ask(client, name).headers["x-tuneloop-version"] == str(last)


@pytest.mark.parametrize("stop", ["cancel", "fail"])
def test_what_a_job_made_before_its_end_can_be_asked(
    explorer: RunningExplorer, client: OpenAI, trainer: TrainerDouble, stop: str
) -> None:
    job = trainer.begin(queued(explorer, client))
    first = trainer.step(job, 1)
    if stop == "cancel":
        assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    else:
        error = {"code": "not_finite", "message": "the loss is not finite", "param": None}
        explorer.ledger.jobs.change(job.id, JobState.FAILED, "It failed", error=error)
        told = client.fine_tuning.jobs.retrieve(job.id).error
        assert told is not None
        assert (told.code, told.message) == ("not_finite", "the loss is not finite")
    assert ask(client, f"{job.name}:ckpt-step-1").headers["x-tuneloop-version"] == str(first)
    assert "cancelled" in refusal(lambda: ask(client, job.name))[3] or stop == "fail"
    assert client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model is None
    assert explorer.ledger.policies.get(job.policy).state is PolicyState.PAUSED


def test_a_job_is_paused_resumed_and_cancelled(
    explorer: RunningExplorer, client: OpenAI, trainer: TrainerDouble
) -> None:
    jobs, policies = client.fine_tuning.jobs, explorer.ledger.policies
    job = trainer.begin(queued(explorer, client))
    assert jobs.pause(job.id).status == "paused"
    assert policies.get(job.policy).state is PolicyState.PAUSED
    assert refusal(lambda: jobs.pause(job.id))[0] == 400
    assert jobs.resume(job.id).status == "queued"
    assert policies.get(job.policy).state is PolicyState.ACTIVE
    status, code, _, message = refusal(lambda: jobs.resume(job.id))
    assert (status, code) == (400, "job_refused")
    assert "the job is queued, and only a paused job is resumed" in message
    policies.pause(job.policy)
    assert jobs.retrieve(job.id).status == "paused", "who pauses the policy pauses the job"
    policies.pause(job.policy, paused=False)
    assert jobs.retrieve(job.id).status == "queued"

    factories.committed(explorer.ledger, 3, policy=job.policy)
    assert jobs.cancel(job.id).status == "cancelled"
    assert policies.waiting().get(job.policy) is None
    assert explorer.ledger.reports.counts()[State.DROPPED] == 3
    for verb in (jobs.cancel, jobs.pause, jobs.resume):
        assert refusal(lambda verb=verb: verb(job.id))[0] == 400  # type: ignore[misc]
    assert refusal(lambda: client.post(f"/fine_tuning/jobs/{job.id}/burn", cast_to=object))[0] == 404


def test_jobs_events_and_checkpoints_come_in_pages(
    explorer: RunningExplorer, client: OpenAI, trainer: TrainerDouble
) -> None:
    jobs = client.fine_tuning.jobs
    made = [queued(explorer, client, metadata={"n": str(n % 2)}, suffix="same") for n in range(5)]
    page = jobs.list(limit=2)
    assert ([each.id for each in page.data], page.has_more) == (made[:-3:-1], True)
    assert [each.id for each in jobs.list(limit=2)] == made[::-1]
    odd = client.get("/fine_tuning/jobs?metadata[n]=1&limit=5", cast_to=object)
    assert [each["id"] for each in odd["data"]] == [made[3], made[1]]  # type: ignore[index]
    assert odd["has_more"] is False  # type: ignore[index]
    job = trainer.begin(made[0])
    for step in range(1, 4):
        trainer.step(job, step)
    assert [each.step_number for each in jobs.checkpoints.list(job.id, limit=2)] == [3, 2, 1]
    assert jobs.checkpoints.list(job.id, limit=3).has_more is False
    ids = [each.id for each in jobs.list_events(job.id, limit=2)]
    assert len(ids) == len({*ids}) == 6
    for query in ("limit=0", "limit=101", "limit=x", "after=ftjob-none"):
        assert refusal(lambda query=query: client.get(f"/fine_tuning/jobs?{query}", cast_to=object))[0] in {400, 404}  # type: ignore[misc]
    for path in ("events", "checkpoints"):
        query = f"/fine_tuning/jobs/{job.id}/{path}?after=nothing"
        assert refusal(lambda query=query: client.get(query, cast_to=object))[:2] == (404, "not_found")  # type: ignore[misc]


def test_a_deleted_model_answers_nobody_and_its_job_is_still_listed(
    explorer: RunningExplorer, client: OpenAI, trainer: TrainerDouble
) -> None:
    job = queued(explorer, client)
    name = explorer.ledger.jobs.get(job).name
    assert refusal(lambda: client.models.delete(name))[:2] == (409, "job_not_over")
    trainer.train(job)
    ask(client, name)
    trained = explorer.ledger.reports.counts()[State.TRAINED]
    assert refusal(lambda: client.models.delete(f"{name}:ckpt-step-1"))[:2] == (400, "checkpoint_not_deleted")
    deleted = client.models.delete(name)
    assert (deleted.id, deleted.object, deleted.deleted) == (name, "model", True)
    assert refusal(lambda: ask(client, name))[:2] == (404, "model_not_found")
    assert refusal(lambda: client.models.retrieve(name))[:2] == (404, "model_not_found")
    assert name not in {each.id for each in client.models.list()}
    assert refusal(lambda: client.models.delete(name))[:2] == (404, "model_not_found")
    assert refusal(lambda: client.models.delete(MODEL))[:2] == (404, "model_not_found")
    assert client.fine_tuning.jobs.retrieve(job).status == "succeeded"
    assert explorer.ledger.reports.counts()[State.TRAINED] == trained, "rows stay"


def test_a_tenant_sees_and_asks_nothing_of_anothers(explorer: RunningExplorer, trainer: TrainerDouble) -> None:
    acme, umbra = client_of(explorer, "acme"), client_of(explorer, "umbra")
    job = queued(explorer, acme, training_file=put(explorer, tenant="acme"))
    trainer.train(job)
    name = acme.fine_tuning.jobs.retrieve(job).fine_tuned_model or ""
    assert ask(acme, name).http_response.status_code == 200
    jobs = umbra.fine_tuning.jobs
    for call in (jobs.retrieve, jobs.cancel, jobs.pause, jobs.resume, jobs.list_events, jobs.checkpoints.list):
        assert refusal(lambda call=call: call(job))[:2] == (404, "not_found")  # type: ignore[misc]
    assert jobs.list().data == []
    status, code, _, message = refusal(lambda: ask(umbra, name))
    assert (status, code) == (404, "model_not_found")
    assert job.removeprefix("ftjob-") not in message
    assert refusal(lambda: umbra.models.retrieve(name))[0] == 404
    assert refusal(lambda: umbra.models.delete(name))[:2] == (404, "model_not_found")
    assert not [each for each in umbra.models.list() if each.id.startswith("ft:")]
    for model in (name, MODEL):
        fields = {"model": model, "training_file": put(explorer, tenant="umbra" if model == name else "acme")}
        assert refusal(lambda fields=fields: jobs.create(**fields))[0] in {400, 404}  # type: ignore[misc]
    assert ask(acme, name).http_response.status_code == 200
    reader = client_of(explorer, "acme", Scope.READ)
    assert reader.fine_tuning.jobs.retrieve(job).id == job
    assert refusal(lambda: reader.fine_tuning.jobs.cancel(job))[:2] == (403, "scope_missing")
    assert refusal(lambda: reader.models.delete(name))[:2] == (403, "scope_missing")


def test_a_job_goes_on_from_what_another_made(
    explorer: RunningExplorer, client: OpenAI, trainer: TrainerDouble
) -> None:
    jobs, policies = explorer.ledger.jobs, explorer.ledger.policies
    job = queued(explorer, client)
    name = jobs.get(job).name
    status, code, param, message = refusal(lambda: queued(explorer, client, model=name))
    assert (status, code, param) == (400, "model_not_found", "model")
    assert "it is queued" in message
    first, last = trainer.train(job)
    made = policies.create("mail", by="ops", settings={"model.lora.alpha": 3, "algorithm.gamma": 0.5})
    champion = explorer.ledger.versions.of(made.id).champion().version
    parents = {
        MODEL: 0,
        f"{MODEL}@0": 0,
        name: last,
        f"{name}:ckpt-step-1": first,
        "mail": champion,
        f"mail@{champion}": champion,
        "default": 0,
    }
    for model, parent in parents.items():
        later = jobs.get(queued(explorer, client, model=model))
        assert (later.model, policies.get(later.policy).parent) == (model, parent)
        assert later.name.startswith(f"ft:{MODEL}:")
    assert policies.get(jobs.get(queued(explorer, client, model="mail")).policy).settings["model.lora.alpha"] == 3
    for model in (f"{MODEL}@{last}", "mail@1", "nobody", f"{name}:ckpt-step-9", "ft:x:y:z", job):
        assert refusal(lambda model=model: queued(explorer, client, model=model))[:3] == (
            400,
            "model_not_found",
            "model",
        )  # type: ignore[misc]


def test_a_version_that_engines_refuse_is_not_served_under_a_jobs_name(
    explorer: RunningExplorer, client: OpenAI, trainer: TrainerDouble
) -> None:
    job = trainer.begin(queued(explorer, client))
    number = trainer.step(job, 1, probe=WRONG)
    trainer.succeed(job, number)
    assert refusal(lambda: ask(client, job.name))[0] in {404, 503}

    def is_rejected() -> bool:
        version = explorer.ledger.versions.get(number)
        return version is not None and version.state is VersionState.REJECTED

    eventually(is_rejected)
    eventually(lambda: refusal(lambda: ask(client, job.name))[0] == 404)


def test_the_gauge_counts_jobs_and_the_page_has_a_line_each(
    explorer: RunningExplorer, client: OpenAI, trainer: TrainerDouble
) -> None:
    job = queued(explorer, client)
    eventually(lambda: 'tuneloop_fine_tuning_jobs{state="queued"} 1.0' in explorer.http.get("/metrics").text)
    assert 'tuneloop_fine_tuning_jobs{state="running"} 0.0' in explorer.http.get("/metrics").text
    trainer.train(job)
    page = " ".join(explorer.http.get("/ui/policies").text.split())
    assert f"ft:{MODEL}::{job.removeprefix('ftjob-')}</td><td>supervised</td><td>succeeded</td>" in page
    assert '2 of 2</td><td class="num">0.5' in page
