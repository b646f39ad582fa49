"""The metrics, for Prometheus or as JSON, and the prefix for clients of Trinity-RFT, whose metrics are JSON."""

from collections.abc import Iterable

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, Metric
from prometheus_client.parser import text_string_to_metric_families

from tuneloop.explorer.auth import TRINITY
from tuneloop.explorer.engines.fleet import Engine

_JSON_TYPE = "application/json"


def add_routes(app: FastAPI) -> None:
    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        if _JSON_TYPE in request.headers.get("accept", ""):
            return await metrics_json(request)
        return Response(await request.app.state.services.control_client.exposition(), media_type=CONTENT_TYPE_LATEST)

    @app.get(f"{TRINITY}/metrics")
    async def metrics_json(request: Request) -> Response:
        services = request.app.state.services
        exposition: bytes = await services.control_client.exposition()
        families = list(text_string_to_metric_families(exposition.decode()))
        figures = samples_by_name(families) | trinity_figures(families, services.fleet.engines)
        return Response(orjson.dumps(figures), media_type=_JSON_TYPE)


def samples_by_name(families: Iterable[Metric]) -> dict[str, float]:
    """Every sample, under its name and its labels as Prometheus writes them."""
    samples = [sample for family in families for sample in family.samples]
    found = {}
    for sample in samples:
        written = ",".join(f'{label}="{value}"' for label, value in sample.labels.items())
        found[f"{sample.name}{{{written}}}" if written else sample.name] = sample.value
    return found


def trinity_figures(families: Iterable[Metric], engines: Iterable[Engine]) -> dict[str, float]:
    """The figures that Trinity has, under its names. Requests are counted for all engines together."""
    sums: dict[str, float] = {}
    rewarded = 0.0
    for sample in (sample for family in families for sample in family.samples):
        sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        if sample.name == "tuneloop_experiences" and sample.labels["state"] == "rewarded":
            rewarded = sample.value
    figures = {
        "rollout/total_experience_count": sums.get("tuneloop_experiences", 0.0),
        "rollout/ready_experience_count": rewarded,
    }
    for engine in engines:
        figures[f"rollout/model_{engine.number}/total_request_count"] = sums.get("tuneloop_request_seconds_count", 0.0)
        figures[f"rollout/model_{engine.number}/model_version"] = float(engine.version)
    return figures
