"""OpenAI's routes that try a grader before a job is made with it."""

import time
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tuneloop.explorer.finetuning.own_service import asking
from tuneloop.explorer.http.bodies import read_object, wrong_type
from tuneloop.shared.errors import EngineError, JobRefused, RequestRefused
from tuneloop.shared.finetuning.graders import Grade, ModelSample, check_grader, grade

_MAX_BODY_BYTES = 1 << 20

#: OpenAI's names of what may go wrong with a sample.
_ERRORS = (
    *("formula_parse_error", "sample_parse_error", "truncated_observation_error", "unresponsive_reward_error"),
    *("invalid_variable_error", "other_error", "python_grader_server_error", "python_grader_runtime_error"),
    *("model_grader_server_error", "model_grader_refusal_error", "model_grader_parse_error"),
)
_DETAILS = (
    *("python_grader_server_error_type", "python_grader_runtime_error_details", "model_grader_server_error_details"),
)


def add_routes(app: FastAPI, *, timeout_s: float) -> None:
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
            except EngineError as error:
                found = Grade(reward=0.0, error="model_grader_server_error", details=str(error))
        details: dict[str, object] = {**dict.fromkeys(_ERRORS, False), **dict.fromkeys(_DETAILS)}
        details |= {found.error: True, f"{found.error}_details": found.details} if found.error else {}
        named = {"name": grader.get("name", ""), "type": grader["type"]}
        measured = {"execution_time": time.perf_counter() - began, "scores": found.scores, "token_usage": None}
        metadata = {**named, "errors": details, **measured, "sampled_model_name": grader.get("model")}
        rewards = {"reward": found.reward, "sub_rewards": found.scores}
        return JSONResponse({**rewards, "metadata": metadata, "model_grader_token_usage_per_model": {}})
