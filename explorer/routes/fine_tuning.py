"""OpenAI's fine-tuning jobs, /v1/fine_tuning/jobs, and DELETE /v1/models/ft:…: a tenant's own."""

import asyncio
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response

from tuneloop.explorer.auth import Caller, caller_of
from tuneloop.explorer.engines.fleet import Fleet
from tuneloop.explorer.engines.model_routes import no_model
from tuneloop.explorer.http.bodies import read_object, wrong_type
from tuneloop.explorer.http.lists import json_response, page_response, parse_page_query
from tuneloop.explorer.jobs import asking
from tuneloop.explorer.routes.stored_completions import parse_metadata
from tuneloop.shared.errors import EngineError, JobRefused, RequestRefused
from tuneloop.shared.experience import JobState
from tuneloop.shared.finetuning.graders import Grade, ModelSample, check_grader, grade
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import CHECKPOINT, Checkpoint, Job
from tuneloop.shared.operations.job_requests import create_job
from tuneloop.shared.settings.settings import Settings

PATH = "/v1/fine_tuning/jobs"

_MAX_BODY_BYTES = 1 << 20  # a grader's prompt may be long

_MEASURES = ("loss", "mean_token_accuracy", "mean_reward")

#: What a checkpoint's metrics may be, as OpenAI names them.
_METRICS = ("step", *(f"{of}_{what}" for of in ("train", "valid", "full_valid") for what in _MEASURES))

#: What a client may ask of a job: the state that it comes to, and what its event says.
_ACTIONS = {
    "cancel": (JobState.CANCELLED, "The job was cancelled by"),
    "pause": (JobState.PAUSED, "The job was paused by"),
    "resume": (JobState.QUEUED, "The job was resumed by"),
}

_EVENT = "ftevent-"

#: OpenAI's names of what may go wrong with a sample.
_ERRORS = (
    *("formula_parse_error", "sample_parse_error", "truncated_observation_error", "unresponsive_reward_error"),
    *("invalid_variable_error", "other_error", "python_grader_server_error", "python_grader_runtime_error"),
    *("model_grader_server_error", "model_grader_refusal_error", "model_grader_parse_error"),
)
_DETAILS = (
    *("python_grader_server_error_type", "python_grader_runtime_error_details", "model_grader_server_error_details"),
)

_T = TypeVar("_T")


def add_routes(app: FastAPI, settings: Settings, ledger: Ledger) -> None:
    jobs = ledger.jobs

    @app.post(PATH)
    async def create(request: Request) -> Response:
        caller, body = caller_of(request.scope), await read_object(request, max_bytes=_MAX_BODY_BYTES)
        if body.get("metadata") is not None:
            parse_metadata(body)

        def make() -> Job:
            return create_job(settings, ledger, body, tenant=caller.tenant, by=_actor(caller))

        return json_response(describe_job(await asyncio.to_thread(make)))

    @app.get(PATH)
    async def list_all(request: Request) -> Response:
        caller, query = caller_of(request.scope), request.query_params
        keep = {name[9:-1]: value for name, value in query.items() if name.startswith("metadata[") and name[-1] == "]"}
        limit, _, after = parse_page_query(query)

        def read() -> tuple[list[Job], list[float | None]]:
            page = list(islice(jobs.page(caller.tenant, after=after, keep=keep), limit + 1))
            return page, [_finish_of(ledger, each) for each in page]

        page, ends = await _find(read, "after")
        told = [describe_job(*each) for each in zip(page, ends, strict=True)]
        return page_response(told[:limit], more=len(told) > limit)

    @app.get(f"{PATH}/{{job_id}}")
    async def retrieve(request: Request, job_id: str) -> Response:
        job = await _find(lambda: jobs.get(job_id, caller_of(request.scope).tenant), "fine_tuning_job_id")
        return json_response(describe_job(job, await asyncio.to_thread(_finish_of, ledger, job)))

    _add_lists(app, ledger)
    _add_decisions(app, ledger)


def _add_lists(app: FastAPI, ledger: Ledger) -> None:
    jobs = ledger.jobs

    @app.get(f"{PATH}/{{job_id}}/events")
    async def list_events(request: Request, job_id: str) -> Response:
        tenant, (limit, _, after) = caller_of(request.scope).tenant, parse_page_query(request.query_params)
        before = None if after is None else after.removeprefix(_EVENT)
        if before is not None and not (before.isascii() and before.isdigit() and len(before) < 19):
            raise RequestRefused(f"there is no event {after}", status=404, code="not_found", param="after")
        older = None if before is None else int(before)
        job = await _find(lambda: jobs.get(job_id, tenant), "fine_tuning_job_id")
        events = await asyncio.to_thread(lambda: jobs.events(job.id, before=older, limit=limit + 1))
        found = [
            {name: getattr(each, name) for name in ("level", "message", "type", "data")}
            | {"object": "fine_tuning.job.event", "id": f"{_EVENT}{each.id}", "created_at": int(each.at)}
            for each in events
        ]
        return page_response(found[:limit], more=len(found) > limit)

    @app.get(f"{PATH}/{{job_id}}/checkpoints")
    async def list_checkpoints(request: Request, job_id: str) -> Response:
        tenant, (limit, _, after) = caller_of(request.scope).tenant, parse_page_query(request.query_params, default=10)
        job = await _find(lambda: jobs.get(job_id, tenant), "fine_tuning_job_id")
        found = [describe_checkpoint(job, each) for each in await asyncio.to_thread(jobs.checkpoints, job.id)]
        if after is not None:
            ids = [each["id"] for each in found]
            if after not in ids:
                raise RequestRefused(f"there is no checkpoint {after}", status=404, code="not_found", param="after")
            found = found[ids.index(after) + 1 :]
        return page_response(found[:limit], more=len(found) > limit)


def _add_decisions(app: FastAPI, ledger: Ledger) -> None:
    jobs = ledger.jobs

    @app.post(f"{PATH}/{{job_id}}/{{action}}")
    async def change(request: Request, job_id: str, action: str) -> Response:
        if action not in _ACTIONS:
            raise HTTPException(404)
        caller, (state, message) = caller_of(request.scope), _ACTIONS[action]
        job = await _find(lambda: jobs.get(job_id, caller.tenant), "fine_tuning_job_id")

        def decide() -> Job:
            if action == "resume" and job.state is not JobState.PAUSED:
                raise JobRefused(f"the job is {job.state}, and only a paused job is resumed")
            return jobs.change(job.id, state, f"{message} {_actor(caller)}")

        return json_response(describe_job(await asyncio.to_thread(decide)))

    @app.delete("/v1/models/{name:path}")
    async def delete_model(request: Request, name: str) -> Response:
        caller = caller_of(request.scope)

        def end() -> None:
            job = jobs.of_model(name, caller.tenant)
            if job is None or job.policy not in jobs.models():
                raise no_model("only those of fine-tuning jobs of this key's tenant can be deleted, once")
            if name != job.name:
                reason = f"a checkpoint goes with its model: delete {job.name}"
                raise RequestRefused(reason, code="checkpoint_not_deleted", param="model")
            if job.finished_at is None:
                raise RequestRefused(
                    f"the fine-tuning job {job.id} is {job.state}: cancel it first", status=409, code="job_not_over"
                )
            ledger.policies.delete(job.policy, by=_actor(caller))

        await asyncio.to_thread(end)
        fleet: Fleet = request.app.state.services.fleet
        await fleet.learn_policies()
        return json_response({"id": name, "object": "model", "deleted": True})


def add_graders(app: FastAPI, *, timeout_s: float) -> None:
    """Routes that try a grader before a job is made with it."""

    async def parse(request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
        body = await read_object(request, max_bytes=_MAX_BODY_BYTES)
        try:
            return body, check_grader(body.get("grader"))
        except JobRefused as error:
            param = str(error).partition(" ")[0].rstrip(":")
            raise RequestRefused(str(error), code="invalid_grader", param=param) from None

    @app.post("/v1/fine_tuning/alpha/graders/validate")
    async def validate(request: Request) -> Response:
        _, grader = await parse(request)
        return JSONResponse({"grader": grader})

    @app.post("/v1/fine_tuning/alpha/graders/run")
    async def run(request: Request) -> Response:
        body, grader = await parse(request)
        text, item = body.get("model_sample"), body.get("item")
        if not isinstance(text, str):
            raise wrong_type("model_sample", "a string")
        if not isinstance(item, dict | None):
            raise wrong_type("item", "an object")
        # The caller asks the model, by the same key and limits as if it sent the request itself.
        names = ("authorization", "x-api-key")
        headers = {name: value for name in names if (value := request.headers.get(name)) is not None}
        host, port = request.scope["server"]
        began = time.perf_counter()
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", headers=headers, timeout=timeout_s) as client:
            try:
                found = await grade(grader, ModelSample(text=text, item=item or {}), asking(client))
            except (EngineError, JobRefused) as error:
                found = Grade(reward=0.0, error="model_grader_server_error", details=str(error))
        details: dict[str, object] = {**dict.fromkeys(_ERRORS, False), **dict.fromkeys(_DETAILS)}
        details |= {found.error: True, f"{found.error}_details": found.details} if found.error else {}
        named = {"name": grader.get("name", ""), "type": grader["type"]}
        measured = {"execution_time": time.perf_counter() - began, "scores": found.scores, "token_usage": None}
        metadata = {**named, "errors": details, **measured, "sampled_model_name": grader.get("model")}
        rewards = {"reward": found.reward, "sub_rewards": found.scores}
        return JSONResponse({**rewards, "metadata": metadata, "model_grader_token_usage_per_model": {}})


async def _find(query: Callable[[], _T], param: str) -> _T:
    try:
        return await asyncio.to_thread(query)
    except JobRefused as error:
        raise RequestRefused(str(error), status=404, code="not_found", param=param) from None


def _actor(caller: Caller) -> str:
    return f"key:{caller.name}" if caller.name else "a client without a key"


def describe_job(job: Job, estimated_finish: float | None = None) -> dict[str, Any]:
    own: dict[str, Any] = {"hyperparameters": job.hyperparameters}
    if job.grader is not None:
        own["grader"] = job.grader
    return {
        "object": "fine_tuning.job",
        "id": job.id,
        "model": job.model,
        "created_at": int(job.created_at),
        "finished_at": None if job.finished_at is None else int(job.finished_at),
        "fine_tuned_model": job.name if job.state is JobState.SUCCEEDED else None,
        "organization_id": job.tenant,
        "result_files": [],
        "status": job.state,
        "validation_file": job.validation_file,
        "training_file": job.training_file,
        "hyperparameters": job.hyperparameters if job.method == "supervised" else {},
        "trained_tokens": job.trained_tokens if job.state is JobState.SUCCEEDED else None,
        "error": job.error,
        "user_provided_suffix": job.suffix,
        "seed": job.seed,
        "estimated_finish": None if estimated_finish is None else int(estimated_finish),
        "integrations": [],
        "metadata": job.metadata,
        "method": {"type": job.method, job.method: own},
    }


def _finish_of(ledger: Ledger, job: Job) -> float | None:
    """When a running job will have succeeded, by the pace of its last steps; None: that is not known."""
    if job.state is not JobState.RUNNING:
        return None
    steps = [(each.at, each.data["step"]) for each in ledger.jobs.progress(job.id) if each.data and "step" in each.data]
    if not steps or (made := steps[0][1] - steps[-1][1]) <= 0:
        return None
    pace_s = (steps[0][0] - steps[-1][0]) / made
    return float(steps[0][0] + pace_s * max(0, job.total_steps - steps[0][1]))


def describe_checkpoint(job: Job, checkpoint: Checkpoint) -> dict[str, Any]:
    told: Mapping[str, Any] = {"step": checkpoint.step} | checkpoint.metrics
    return {
        "object": "fine_tuning.job.checkpoint",
        "id": f"ftckpt-{job.id.removeprefix('ftjob-')}-{checkpoint.step}",
        "created_at": int(checkpoint.created_at),
        "fine_tuned_model_checkpoint": f"{job.name}{CHECKPOINT}{checkpoint.step}",
        "step_number": checkpoint.step,
        "metrics": {name: told[name] for name in _METRICS if name in told},
        "fine_tuning_job_id": job.id,
    }
