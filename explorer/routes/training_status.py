"""For programs: what the training does now, what a run has asked, and the metrics, for Prometheus or as JSON."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, Metric
from prometheus_client.parser import text_string_to_metric_families

from tuneloop.explorer.auth import TRINITY, caller_of
from tuneloop.explorer.engines.fleet import Engine
from tuneloop.explorer.recorder import Recorder
from tuneloop.shared.errors import LedgerUnavailable, PolicyRefused, RequestRefused
from tuneloop.shared.experience import State, steady_clock
from tuneloop.shared.ledger.facts import Facts, LedgerFacts, Rules, Standstill, StateCount
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.policies import Policy
from tuneloop.shared.operations.diagnosis import diagnose
from tuneloop.shared.outbox_status import OutboxStatus
from tuneloop.shared.settings.policies import settings_of_policy
from tuneloop.shared.settings.settings import Settings

#: A trainer looks for a batch so many times while a commit counts as new.
_LOOKS = 3

_PATIENCE_S = 8.0

_JSON_TYPE = "application/json"


def add_routes(app: FastAPI, settings: Settings, ledger: Ledger) -> None:
    @app.get("/training")
    async def training(request: Request) -> Response:
        services = request.app.state.services
        served = services.fleet.served_versions
        caller = caller_of(request.scope)
        tenant = None if caller.sees_all else caller.tenant
        name = request.query_params.get("policy", "default")
        stops, outbox = services.control_client.stops(), services.drain_status()

        def tell() -> dict[str, object]:
            try:
                policy = ledger.policies.find(name, tenant)
                own = settings_of_policy(settings, policy.settings) if policy.id else settings
            except PolicyRefused as error:
                raise RequestRefused(str(error), status=404, code="policy_not_found", param="policy") from None
            if not policy.id:
                return _status(own, ledger, policy, served, outbox, tenant, stops)
            champion = ledger.versions.of(policy.id).champion().version
            return _status(own, ledger, policy, [champion], outbox, tenant, stops)

        return Response(orjson.dumps(await asyncio.to_thread(tell)), media_type=_JSON_TYPE)

    @app.get("/training/calls")
    async def calls(request: Request) -> Response:
        query = request.query_params
        missing = [name for name in ("task_id", "run_id") if name not in query]
        if missing:
            raise RequestRefused(f"{missing[0]} is missing", code="missing", param=missing[0])
        caller, control_client = caller_of(request.scope), request.app.state.services.control_client
        if not await control_client.wait_until_taken(_PATIENCE_S):
            raise LedgerUnavailable("the database is away, or still behind: ask again later")
        recorder: Recorder = request.app.state.services.recorder

        def count() -> dict[str, object]:
            run = caller.tenant, *(recorder.name_as_stored(query[name]) for name in ("task_id", "run_id"))
            if query.get("tokens") == "true":
                return ledger.runs.count_tokens(*run)._asdict() | {"breaks": ledger.runs.find_breaks(*run)}
            return {"calls": ledger.runs.count_calls(*run)}

        return Response(orjson.dumps(await asyncio.to_thread(count)), media_type=_JSON_TYPE)


def add_metrics(app: FastAPI) -> None:
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
    samples = [sample for family in families for sample in family.samples]
    found = {}
    for sample in samples:
        written = ",".join(f'{label}="{value}"' for label, value in sample.labels.items())
        found[f"{sample.name}{{{written}}}" if written else sample.name] = sample.value
    return found


def trinity_figures(families: Iterable[Metric], engines: Iterable[Engine]) -> dict[str, float]:
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


def _status(
    settings: Settings,
    ledger: Ledger,
    policy: Policy,
    served: list[int],
    outbox: OutboxStatus,
    tenant: str | None,
    stops: tuple[Standstill, ...],
) -> dict[str, object]:
    """Of a policy, whose `settings` these are. With a `tenant`, counts are its own, and sentences are left out."""
    rules, now, batches = Rules.of(settings, policy.id), steady_clock(), BatchRules.of(settings, policy.id)
    facts = ledger.reports.facts(batches, batch=rules.least)
    reasons = diagnose(Facts(now=now, rules=rules, outbox=outbox, ledger=facts, stops=stops))
    if tenant is not None:
        counts, reasons = ledger.reports.counts(tenant), []
        facts = replace(facts, states={state: StateCount(count) for state, count in counts.items()})
        facts = replace(facts, claimable=ledger.reports.claimable(batches, tenant) if counts[State.COMMITTED] else 0)
    in_training = ledger.policies.in_training(policy.id, tenant)
    training = {state: facts.count(state)._replace(rows=rows) for state, rows in in_training.items()}
    facts = replace(facts, states={**facts.states, **training})
    committed_at = ledger.reports.newest_commit(tenant)
    looked_at = committed_at is None or now - committed_at > _LOOKS * settings.trainer.poll_interval
    weights, buffer, model = facts.weights, settings.buffer, settings.model
    of_hub = (path := model.model_path).parent.name == "snapshots"
    return {
        "served": min(served, default=weights.champion or 0 if weights else 0),
        "newest": weights.newest if weights else 0,
        "step": weights.step if weights else 0,
        # Rows that were leased when the facts were read may have become a version since.
        "settled": is_settled(facts, rules, served, looked_at=looked_at)
        and (weights is None or ledger.versions.of(policy.id).newest().version == weights.servable),
        "trainer_up": facts.trainer is not None and facts.trainer.up(now),
        "experiences": {state.value: facts.count(state).rows for state in State},
        "reasons": [{"code": reason.code.value, "sentence": reason.sentence} for reason in reasons],
        "configured": {  # how it trains, which `tune()` compares with its arguments; no path of this machine
            "algorithm_type": settings.algorithm.algorithm_type,
            "learning_rate": settings.algorithm.optimizer.lr,
            "group_size": buffer.group_size if buffer.group_by == "task" else None,
            "train_batch_size": rules.batch_size,
            "batch_timeout": rules.batch_timeout,
            "save_interval": rules.save_interval,
            "model": path.parents[1].name.rpartition("--")[2] if of_hub else path.name,
            "max_model_len": model.max_model_len,
            "lora_rank": model.lora.rank or None,
        },
    }


def is_settled(facts: LedgerFacts, rules: Rules, served: list[int], *, looked_at: bool) -> bool:
    """Whether no step comes of what is committed, if it was `looked_at`, and all serve the newest version."""
    weights = facts.weights
    if weights is not None and min(served, default=0) < weights.servable:
        return False
    committed, leased = facts.count(State.COMMITTED).rows, facts.count(State.LEASED).rows
    if rules.batch_timeout is not None:
        return committed + leased == 0
    is_learning = leased >= rules.batch_size and rules.save_interval == 1
    is_short = facts.claimable < rules.batch_size or bool(facts.held_back)
    return not is_learning and is_short and (looked_at or not committed)
