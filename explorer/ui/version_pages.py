"""The versions: their curve, their evaluations, two of them side by side, and what is decided about them."""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from tuneloop.explorer.routes.admin import find_policy, parse_decision, parse_version
from tuneloop.explorer.ui.conversation import read_calls, read_request
from tuneloop.explorer.ui.overview import chart_of, compare_versions_by_reward, reward_points
from tuneloop.explorer.ui.sessions import PATH
from tuneloop.explorer.ui.site import Site
from tuneloop.shared.errors import RequestRefused, VersionRefused
from tuneloop.shared.experience import VersionState
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import Policy
from tuneloop.shared.operations import version_decisions
from tuneloop.shared.operations.job_requests import list_jobs
from tuneloop.shared.operations.policy_report import list_policies
from tuneloop.shared.operations.version_decisions import DecisionRequest, DecisionResult

#: Versions in the list, events, and prompts side by side.
LISTED, EVENTS, PROMPTS = 60, 30, 8

#: The author of decisions that are made here.
AUTHOR = "page"

_Decision = Callable[[Ledger, int, DecisionRequest], DecisionResult]

_DECISIONS: Mapping[str, _Decision] = {
    "promote": version_decisions.promote,
    "rollback": version_decisions.roll_back,
    "reject": version_decisions.reject,
    "pin": version_decisions.pin,
    "unpin": version_decisions.unpin,
}

#: What may be decided of a version in each state.
_OFFERED: Mapping[VersionState, tuple[str, ...]] = {
    VersionState.CANDIDATE: ("promote", "pin", "reject"),
    VersionState.CANARY: ("promote", "rollback"),
    VersionState.CHAMPION: ("pin", "rollback"),
    VersionState.RETIRED: ("promote", "pin", "reject"),
    VersionState.REJECTED: (),
    VersionState.ROLLED_BACK: (),
}

#: What is done, once it is.
_DONE = {
    "promote": "is the champion now",
    "rollback": "was rolled back",
    "reject": "was rejected",
    "pin": "is pinned",
    "unpin": "is not pinned any more",
}


def add_versions(router: APIRouter, site: Site) -> None:
    @router.get("/versions")
    async def versions(request: Request) -> Response:
        policy = await site.in_thread(request, _policy_of, site, request)
        return site.show(request, "versions.html", **await site.in_thread(request, _list, site.ledger, policy))

    @router.get("/policies")
    async def policies(request: Request) -> Response:
        tenant = _tenant_of(site, request)
        rows, jobs = await site.in_thread(
            request, lambda: (list_policies(site.ledger, tenant), list_jobs(site.ledger, tenant))
        )
        return site.show(request, "policies.html", rows=rows, jobs=jobs)

    @router.get("/versions/compare")
    async def compare(request: Request) -> Response:
        tenant = site.tenant_of(request)
        sides = [request.query_params.get(side, "") for side in ("a", "b")]
        return await site.show_long(request, "compare.html", lambda: _compare(site.ledger, tenant, *sides))

    @router.get("/versions/{version}")
    async def version(request: Request, version: str) -> Response:
        done = request.query_params.get("done", "")
        context = await site.in_thread(request, _describe, site.ledger, version)
        return site.show(request, "version.html", **context, done=_DONE.get(done, ""), wrong="")

    @router.post("/versions/{version}/{action}")
    async def decide(request: Request, version: str, action: str) -> Response:
        _, form = await site.form(request)
        if action not in _DECISIONS:
            raise RequestRefused(f"{action[:20]} is not a decision about a version", status=404, code="not_found")
        try:
            expect = form.get("expect", "")
            seen = int(expect) if expect.isascii() and expect.isdigit() else None
            decided = parse_decision({"reason": form.get("reason", ""), "by": AUTHOR, "expect": seen})
            if not decided.reason:
                raise RequestRefused("Say why: the reason stays with the version.", code="missing", param="reason")
            await site.in_thread(
                request, lambda: _DECISIONS[action](site.ledger, parse_version(version, site.ledger), decided)
            )
        except (VersionRefused, RequestRefused) as error:
            status = error.status if isinstance(error, RequestRefused) else 409
            context = await site.in_thread(request, _describe, site.ledger, version)
            return site.show(request, "version.html", status, **context, done="", wrong=str(error))
        return RedirectResponse(f"{PATH}/versions/{version}?done={action}", 303)


def _tenant_of(site: Site, request: Request) -> str | None:
    """Whose policies a request may see; None: all."""
    return None if site.guard.is_operators(site.guard.admit(request)) else site.tenant_of(request)


def _policy_of(site: Site, request: Request) -> Policy:
    tenant, _, name = request.query_params.get("policy", "default").rpartition("/")
    own = _tenant_of(site, request)
    return find_policy(site.ledger, name, own if own is not None else tenant or None)


def _list(ledger: Ledger, policy: Policy) -> dict[str, Any]:
    versions = [each for each in ledger.versions.all() if each.policy == policy.id]
    points = reward_points(ledger, versions)
    listed = versions[::-1][:LISTED]
    scores: dict[int, list[Any]] = {}
    for score in ledger.evaluations.of_versions([each.version for each in listed]):
        if not score.slice:
            scores.setdefault(score.version, []).append(score)
    return {
        "policy": policy,
        "versions": listed,
        "more": len(versions) - len(listed),
        "rewards": {each.version: each for each in points},
        "chart": chart_of(points),
        "points": points,
        "scores": scores,
        "events": ledger.versions.events(last=EVENTS)[::-1],
    }


def _describe(ledger: Ledger, version: str) -> dict[str, Any]:
    number = parse_version(version, ledger)
    found = ledger.versions.get(number)
    assert found is not None
    versions = [each for each in ledger.versions.all() if each.policy == found.policy]
    served = [each.version for each in versions if each.served_at is not None and each.version < number]
    return {
        "version": found,
        "before": served[-1] if served else None,
        "champion": next((each.version for each in versions if each.state is VersionState.CHAMPION), None),
        "offered": ("unpin",) if found.pinned else _OFFERED[found.state],
        "trained_on": ledger.evaluations.trained_on(number),
        "scores": ledger.evaluations.of_versions([number]),
        "events": ledger.versions.events(number)[::-1],
        "points": reward_points(ledger, [found]),
    }


def _compare(ledger: Ledger, tenant: str, a: str, b: str) -> dict[str, Any]:
    known = [each.version for each in ledger.versions.all()][::-1]
    if not a and not b:
        a, b = ([*map(str, known[1:2]), *map(str, known[:1])] * 2)[:2]
    one, other = parse_version(a, ledger), parse_version(b, ledger)
    pairs = ledger.same_prompts.side_by_side(tenant, one, other, limit=PROMPTS) if one != other else []
    scores = ledger.evaluations.of_versions([one, other])
    table: dict[tuple[str, str, str], dict[int, Any]] = {}
    for score in scores:
        table.setdefault((score.metric, score.slice, score.evaluator), {})[score.version] = score
    return {
        "known": known,
        "a": one,
        "b": other,
        "verdict": compare_versions_by_reward(ledger, other, one) if one != other else None,
        "table": table,
        "pairs": [(read_request(pair.request).turns, _view_of(pair.one), _view_of(pair.other)) for pair in pairs],
    }


def _view_of(answer: Any) -> dict[str, Any]:
    return {**answer._asdict(), "calls": read_calls(answer.tool_calls)}
