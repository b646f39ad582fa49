"""Policies on their engines: each answers with its own versions, who may ask which, and what one costs another."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer import adapters
from tests.explorer.running import HELLO, RunningExplorer, eventually, explorer_running
from tuneloop.explorer.auth import Caller
from tuneloop.explorer.engines.fleet import EngineState, Fleet, PinParser, TrafficSplit
from tuneloop.explorer.versions import policy_serving
from tuneloop.shared.checkpoints import Probe
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import Scope, VersionAction, VersionState
from tuneloop.shared.ledger.keys import KeyGrant
from tuneloop.shared.settings.serving import AliasSettings
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.versions import EvaluationSettings, MonitorSettings, RolloutSettings

pytestmark = pytest.mark.contract

Start = Callable[..., RunningExplorer]

WRONG = Probe(prompt_ids=(1, 2, 3), logprobs=(-100.0, -100.0), tolerance=0.01)


def served(tmp_path: Path, *doubles: EngineDouble, **but: Any) -> Settings:
    """Settings of an explorer of adapters."""
    rollout = RolloutSettings.model_validate(but.pop("rollout", {}))
    settings = adapters.adapted(tmp_path, *doubles, **but)
    model = settings.model.model_copy(update={"aliases": {"small": AliasSettings(train=False)}})
    return settings.model_copy(update={"model": model, "rollout": rollout})


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts an explorer of adapters."""
    with ExitStack() as stack:

        def run(*doubles: EngineDouble, **but: Any) -> RunningExplorer:
            running = stack.enter_context(explorer_running(served(tmp_path, *doubles, **but)))
            eventually(lambda: {each.state for each in running.services.fleet.engines} == {EngineState.READY})
            return running

        yield run


def policy(explorer: RunningExplorer, name: str, **but: Any) -> int:
    """A new policy that the workers know."""
    made = explorer.ledger.policies.create(name, by="tests", **but)
    eventually(lambda: made.id in (explorer.services.fleet.policies or {}))
    return made.id


def candidate(explorer: RunningExplorer, of: int, probe: Probe | None = None) -> int:
    settings = explorer.settings
    return adapters.register(explorer.ledger, settings.job_dir, settings.model.model_path, probe=probe, policy=of)


def until(explorer: RunningExplorer, number: int, state: VersionState) -> None:
    def has_come() -> bool:
        version = explorer.ledger.versions.get(number)
        return version is not None and version.state == state

    eventually(has_come)


def promoted(explorer: RunningExplorer, of: int) -> int:
    """A new version of a policy that is its champion, and that the workers know."""
    number = candidate(explorer, of)
    until(explorer, number, VersionState.CHAMPION)
    eventually(lambda: (explorer.services.fleet.policies or {})[of].champion == number)
    return number


def key(explorer: RunningExplorer, name: str, tenant: str = "default", of: int | None = None) -> dict[str, str]:
    """The headers of a new key that is in force."""
    grant = KeyGrant(name=name, tenant=tenant, scopes=(Scope.INFERENCE, Scope.READ), policy=of)
    _, secret = explorer.ledger.keys.create(grant, actor="tests")
    headers = {"Authorization": f"Bearer {secret}"}
    eventually(lambda: explorer.http.get("/v1/models").status_code == 401)
    eventually(lambda: explorer.http.get("/v1/models", headers=headers).status_code == 200)
    return headers


def chat(explorer: RunningExplorer, model: str | None, headers: dict[str, str], **but: Any) -> httpx.Response:
    return explorer.http.post("/v1/chat/completions", json=HELLO | {"model": model} | but, headers=headers)


def refusal(reply: httpx.Response) -> tuple[int, str, str]:
    error = reply.json()["error"]
    return reply.status_code, error["code"], error["message"]


def names(explorer: RunningExplorer, headers: dict[str, str]) -> list[str]:
    return [each["id"] for each in explorer.http.get("/v1/models", headers=headers).json()["data"]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_policy_answers_by_its_name_with_its_own_versions(start: Start, double: EngineDouble, stream: bool) -> None:
    explorer = start(double)
    one, other = policy(explorer, "one"), policy(explorer, "other")
    begun = explorer.ledger.versions.of(one).champion().version
    reply = explorer.chat(model="one", stream=stream)
    assert (reply.headers["x-tuneloop-version"], reply.headers["x-tuneloop-policy"]) == (str(begun), "one")
    assert double.chats[-1].body["model"] == MODEL, "it begins as the base model"
    number = promoted(explorer, one)
    reply = explorer.chat(model="one", stream=stream)
    assert reply.headers["x-tuneloop-version"] == str(number)
    assert '"model":"one"' in reply.text
    assert "tuneloop-adapter" not in reply.text
    assert double.chats[-1].weights == explorer.ledger.versions.of(one).champion().path / "actor"
    assert explorer.chat(model="other").headers["x-tuneloop-policy"] == "other"
    assert double.chats[-1].body["model"] == MODEL
    plain = explorer.chat()
    assert (plain.headers["x-tuneloop-version"], "x-tuneloop-policy" in plain.headers) == ("0", False)
    rows = [(each.policy, each.experiences[0].version_min) for each in explorer.exchanges()]
    copy = explorer.ledger.versions.of(other).champion().version
    assert rows == [(one, begun), (one, number), (other, copy), (0, 0)]
    assert explorer.rows("SELECT policy, version_max FROM experiences WHERE tenant = 'default' ORDER BY id") == rows


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1, 2], "max_tokens": 4}),
        ("/v1/responses", {"input": "3+4="}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "3+4="}], "max_tokens": 12}),
    ],
)
def test_every_dialect_takes_a_policys_name(
    start: Start, double: EngineDouble, path: str, body: dict[str, Any]
) -> None:
    explorer = start(double)
    one = policy(explorer, "one")
    number = promoted(explorer, one)
    reply = explorer.http.post(path, json=body | {"model": "one"})
    assert reply.status_code == 200, reply.text
    assert (reply.headers["x-tuneloop-version"], reply.headers["x-tuneloop-policy"]) == (str(number), "one")
    assert reply.json()["model"] == "one"
    refused = explorer.http.post(path, json=body | {"model": "none"})
    assert refused.status_code == 404
    assert "this key may use t, small, one" in refused.text


def test_a_name_that_there_is_not_is_refused_with_those_that_there_are(start: Start, double: EngineDouble) -> None:
    explorer = start(double)
    policy(explorer, "one")
    before = len(double.chats)
    sentence = "the model does not exist: this key may use t, small, one"
    for wrong in ("none", "one@", "one@1", "tuneloop-adapter-1-0"):
        assert refusal(explorer.chat(model=wrong)) == (404, "model_not_found", sentence)
    assert len(double.chats) == before
    assert explorer.chat(model="default").json()["model"] == "default"
    assert explorer.http.post("/tokenize", json={"model": "one", "prompt": "a"}).status_code == 200
    assert explorer.http.post("/tokenize", json={"model": "none", "prompt": "a"}).status_code == 404


def test_a_flood_of_names_that_there_are_not_hardly_reaches_the_database(
    start: Start, double: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    explorer = start(double, service_status_check_interval=1.0)
    read, reads = explorer.ledger.jobs.models, list[int]()
    monkeypatch.setattr(explorer.ledger.jobs, "models", lambda: reads.append(1) or read())
    began = time.monotonic()
    with ThreadPoolExecutor(16) as asking:
        answers = [*asking.map(lambda number: explorer.chat(model=f"none-{number}").status_code, range(400))]
    assert answers == [404] * 400
    assert 1 <= len(reads) <= 2 + 11 * (time.monotonic() - began), "by itself once a second, and ten times"
    explorer.ledger.policies.create("new", by="tests")
    assert explorer.chat(model="new").status_code == 200


def test_a_tenant_sees_its_own_policies_and_shared_ones(start: Start, double: EngineDouble) -> None:
    explorer = start(double)
    for name, tenant in (("shared", ""), ("mine", "acme"), ("theirs", "beta")):
        policy(explorer, name, tenant=tenant)
    twins = [policy(explorer, "twin", tenant=tenant) for tenant in ("acme", "beta")]
    keys = {each: key(explorer, each, each) for each in ("acme", "beta")}
    assert names(explorer, keys["acme"]) == ["t", "small", "shared", "mine", "twin"]
    assert names(explorer, keys["beta"]) == ["t", "small", "shared", "theirs", "twin"]
    seen = {"acme": ("shared", "mine", "twin"), "beta": ("shared", "theirs", "twin")}
    for tenant, headers in keys.items():
        for name in ("shared", "mine", "theirs"):
            wanted = 200 if name in seen[tenant] else 404
            assert chat(explorer, name, headers).status_code == wanted
            assert explorer.http.get(f"/v1/models/{name}", headers=headers).status_code == wanted
    unknown = refusal(chat(explorer, "theirs", keys["acme"]))
    assert unknown == refusal(chat(explorer, "nobodys", keys["acme"])), "nothing tells that it is there"
    for headers in keys.values():
        chat(explorer, "twin", headers)
    assert [each.policy for each in explorer.exchanges()[-2:]] == twins


def test_a_key_has_a_policy_of_its_own(start: Start, double: EngineDouble) -> None:
    explorer = start(double)
    one, other = policy(explorer, "one"), policy(explorer, "other")
    headers = key(explorer, "web", of=one)
    for model, wanted in ((MODEL, one), ("small", one), ("other", other), ("default", 0), (MODEL, one)):
        reply = chat(explorer, model, headers)
        assert (reply.status_code, reply.json()["model"]) == (200, model)
        assert explorer.exchanges()[-1].policy == wanted
    dropped = [each.experiences[0].drop_reason for each in explorer.exchanges()]
    assert dropped == [None, "opt_out", None, None, None], "an alias keeps its own rule about training"
    explorer.ledger.policies.delete(one, by="tests")
    eventually(lambda: chat(explorer, MODEL, headers).status_code == 404)
    sentence = "the model does not exist: the policy of this key was deleted; this key may use t, small, other"
    assert refusal(chat(explorer, MODEL, headers)) == (404, "model_not_found", sentence)
    assert chat(explorer, "one", headers).status_code == 404
    assert chat(explorer, "other", headers).status_code == 200


def test_while_policies_are_not_known_the_model_itself_answers(tmp_path: Path) -> None:
    async def is_away(policy: int, version: int) -> str:
        return "the database is away"

    names, fleet = PinParser(served(tmp_path)), Fleet([], wait_timeout_s=1.0, load_version=is_away)
    fleet.policies = None
    assert asyncio.run(names.route({"model": MODEL}, Caller(), fleet)).policy is None
    for body, caller in (({"model": "one"}, Caller()), ({}, Caller(policy=1))):
        with pytest.raises(RequestRefused, match="database cannot be asked") as caught:
            asyncio.run(names.route(body, caller, fleet))
        assert (caught.value.status, caught.value.code) == (503, "policies_unknown")


def test_a_version_of_a_policy_may_be_pinned(start: Start, double: EngineDouble) -> None:
    explorer = start(double, version_pins=True)
    one = policy(explorer, "one")
    number = promoted(explorer, one)
    assert explorer.chat(model=f"one@{number}").headers["x-tuneloop-version"] == str(number)
    sentence = f"the model does not exist: version 0 is not served; these are: {number}"
    assert refusal(explorer.chat(model="one@0")) == (404, "model_not_found", sentence)
    assert explorer.chat(model="default@0").headers["x-tuneloop-version"] == "0"
    assert names(explorer, {}) == ["t", "small", "one", "t@0", f"one@{number}"]
    headers = key(explorer, "web", of=one)
    assert chat(explorer, f"{MODEL}@{number}", headers).headers["x-tuneloop-version"] == str(number)


def test_a_rollback_is_followed_and_what_is_in_flight_stays_as_it_was(start: Start, double: EngineDouble) -> None:
    explorer = start(double)
    one = policy(explorer, "one")
    first, second = promoted(explorer, one), promoted(explorer, one)
    line = explorer.ledger.versions.of(one)
    double.hangs = True
    asking = threading.Thread(target=lambda: explorer.chat(model="one"))
    asking.start()
    eventually(lambda: bool(double.chats))
    line.roll_back(second, by="tests", reason="it is worse")
    eventually(lambda: (explorer.services.fleet.policies or {})[one].champion == first)
    double.hangs = False
    asking.join()
    assert explorer.chat(model="one").headers["x-tuneloop-version"] == str(first)
    rows = [(each.experiences[0].version_min, each.experiences[0].version_max) for each in explorer.exchanges()]
    assert rows == [(second, second), (first, first)]
    assert explorer.ledger.versions.champion().version == 0


@pytest.mark.parametrize("fault", ["probe", "nan", "truncated", "refused"])
def test_a_bad_version_is_rejected_and_touches_nobody(start: Start, double: EngineDouble, fault: str) -> None:
    explorer = start(double)
    one, other = policy(explorer, "one"), policy(explorer, "other")
    first, theirs = promoted(explorer, one), promoted(explorer, other)
    if fault == "refused":
        double.refuses_load_of = {f"global_step_{theirs + 1}"}
    with pytest.MonkeyPatch.context() as patch:
        halves = adapters.halves

        def damaged(seed: int = 0) -> dict[str, Any]:
            found = halves(seed)
            found[min(found)].flat[0] = float("nan")
            return found

        def cut(store: Any, staging: Path, version: int, *, probe: Probe | None = None) -> tuple[Path, str]:
            path, sha256 = seal(store, staging, version, probe=probe)
            weights = path / "actor" / "adapter_model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-8])
            return path, sha256

        seal = adapters.seal
        if fault == "nan":
            patch.setattr(adapters, "halves", damaged)
        if fault == "truncated":
            patch.setattr(adapters, "seal", cut)
        bad = candidate(explorer, one, WRONG if fault == "probe" else None)
    until(explorer, bad, VersionState.REJECTED)
    rejected = explorer.ledger.versions.get(bad)
    words = {
        "probe": "nats from the trainer's",
        "nan": "NaN",
        "truncated": "adapter_model",
        "refused": "Loading lora failed",
    }
    assert words[fault] in str(rejected and rejected.reason)
    assert explorer.chat(model="one").headers["x-tuneloop-version"] == str(first)
    assert explorer.chat(model="other").headers["x-tuneloop-version"] == str(theirs)
    assert explorer.version() == 0
    assert not any(name.startswith(f"tuneloop-adapter-{bad}-") for name in double.adapters)
    assert promoted(explorer, one) == bad + 1


def test_to_prove_an_adapter_takes_no_longer_where_others_are_held(start: Start, double: EngineDouble) -> None:
    double.extended, double.weights = True, Path()
    explorer = start(double)
    double.weights = explorer.settings.model.model_path.absolute()
    policies = [policy(explorer, name) for name in ("a", "b", "c", "d")]
    summed = []
    for each in policies:
        before = double.adapters_summed
        promoted(explorer, each)
        summed.append(double.adapters_summed - before)
    assert 0 < summed[-1] <= summed[0] + 1  # the engine's own proof may fall between
    assert explorer.chat(model="d").headers["x-tuneloop-attested"] == "fingerprint"


def test_an_adapter_that_became_wrong_is_loaded_again_and_its_replies_alone_are_not_trained(
    start: Start, double: EngineDouble
) -> None:
    explorer = start(double, probe_interval=0.3)
    numbers = {name: promoted(explorer, policy(explorer, name)) for name in ("one", "other")}
    (one, right), (_, wrong) = double.adapters.items()
    replies = {name: explorer.chat(model=name).json()["id"] for name in numbers}

    def states() -> dict[str, tuple[str, str | None]]:
        rows = explorer.rows("SELECT msg_id, state, reason FROM experiences WHERE policy > 0 AND state != 'trained'")
        found = {row.msg_id: (row.state, row.reason) for row in rows}
        return {name: found.get(reply, ("", None)) for name, reply in replies.items()}

    def is_answered_by_the_wrong_one() -> bool:
        double.adapters[one] = wrong
        reply = explorer.chat(model="one")
        replies["one"] = reply.json().get("id", "")
        return reply.status_code == 200 and double.adapters.get(one) == wrong

    eventually(lambda: set(states().values()) == {("recorded", None)})
    eventually(is_answered_by_the_wrong_one)
    eventually(lambda: explorer.chat(model="one").status_code == 200 and double.adapters.get(one) == right)
    eventually(lambda: states()["one"] == ("dropped", "engine_mismatch"))
    assert states()["other"] == ("recorded", None)
    mismatches = explorer.rows("SELECT engine, version FROM mismatches")
    assert {tuple(each) for each in mismatches} == {(0, numbers["one"])}
    [alarm] = explorer.ledger.alarms.all()
    assert (alarm.name, alarm.version, alarm.holds) == ("engine_mismatch", numbers["one"], False)
    replies["one"] = explorer.chat(model="one").json()["id"]
    eventually(lambda: states()["one"] == ("recorded", None))
    double.adapters.clear()
    eventually(lambda: explorer.chat(model="one").status_code == 200 and double.adapters[one] == right)


def test_beyond_its_bound_the_adapter_that_was_not_asked_for_longest_makes_room(
    start: Start, double: EngineDouble
) -> None:
    explorer = start(double, resident=2)
    policies = {name: policy(explorer, name) for name in ("a", "b", "c")}
    versions = {name: promoted(explorer, of) for name, of in policies.items()}

    def loaded() -> set[int]:
        return {int(name.split("-")[2]) for name in double.adapters}

    def ask(name: str) -> None:
        assert explorer.chat(model=name).headers["x-tuneloop-version"] == str(versions[name])
        assert len(loaded()) <= 2

    @contextmanager
    def in_flight(name: str) -> Iterator[None]:
        double.stalls_after = 2
        with explorer.http.stream(
            "POST", "/v1/chat/completions", json=HELLO | {"model": name, "stream": True}
        ) as reply:
            lines = reply.iter_lines()
            assert next(lines)
            double.stalls_after = None
            yield

    for name in "abcbac":
        ask(name)
    assert loaded() == {versions["a"], versions["c"]}
    with in_flight("a"):
        ask("c")
        ask("b")
        assert loaded() == {versions["a"], versions["b"]}, "it is being asked, whatever was asked after it"
    assert explorer.control.fleet.engines[0].control.held.keys() == loaded()
    with in_flight("b"):
        with in_flight("a"):
            assert explorer.chat(model="c").headers["x-tuneloop-version"] == str(versions["c"])
            assert loaded() == {*versions.values()}, "what is in flight for it must end before it is unloaded"
        eventually(lambda: len(loaded()) == 2)
        assert versions["c"] in loaded()


def test_after_an_engines_restart_adapters_are_loaded_before_it_is_asked(start: Start, double: EngineDouble) -> None:
    explorer = start(double)
    one = policy(explorer, "one")
    number = promoted(explorer, one)
    assert explorer.chat(model="one").headers["x-tuneloop-version"] == str(number)
    began = double.began_at
    double.start_again()
    eventually(lambda: double.began_at != began and explorer.control.fleet.engines[0].control.held == {})
    eventually(lambda: explorer.control.fleet.engines[0].state is EngineState.READY)
    eventually(lambda: number not in explorer.services.fleet.engines[0].guests)
    reply = explorer.chat(model="one")
    assert (reply.status_code, reply.headers["x-tuneloop-version"]) == (200, str(number))
    assert str(double.chats[-1].body["model"]).startswith(f"tuneloop-adapter-{number}-")


def test_an_engine_without_the_adapter_is_not_asked_and_gets_it(start: Start, doubles: list[EngineDouble]) -> None:
    explorer = start(*doubles)
    number = promoted(explorer, policy(explorer, "one"))
    assert all(len(each.adapters) == 1 for each in doubles), "it is on every engine before it answers"
    doubles[0].dead = True
    for _ in range(3):
        assert explorer.chat(model="one").headers["x-tuneloop-version"] == str(number)
    doubles[0].dead = False
    doubles[0].start_again()
    eventually(lambda: len(doubles[0].adapters) == 1)


def test_what_cannot_be_loaded_any_more_is_said(start: Start, double: EngineDouble) -> None:
    explorer = start(double, resident=1)
    one, other = policy(explorer, "one"), policy(explorer, "other")
    first, number = promoted(explorer, one), promoted(explorer, one)
    promoted(explorer, other)
    weights = explorer.ledger.versions.of(one).champion().path / "actor" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert explorer.chat(model="other").status_code == 200
    reply = explorer.chat(model="one")
    assert (reply.status_code, reply.headers["x-tuneloop-version"]) == (200, str(first)), "the one before stands in"
    assert explorer.ledger.versions.of(one).champion().version == first
    assert number > first
    double.refuses_load_of = {f"global_step_{first}"}
    assert explorer.chat(model="other").status_code == 200
    refused = explorer.chat(model="one")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "policy_unavailable")
    assert f"version {first} of policy one cannot be loaded" in refused.text
    assert explorer.chat(model="other").status_code == 200


def test_a_policy_that_begins_with_an_adapter_shares_it(start: Start, double: EngineDouble) -> None:
    explorer = start(double)
    parent = promoted(explorer, one := policy(explorer, "one"))
    other = policy(explorer, "other", parent=parent)
    copy = explorer.ledger.versions.of(other).champion()
    assert copy.version != parent
    assert copy.path == explorer.ledger.versions.of(one).champion().path
    assert explorer.chat(model="other").headers["x-tuneloop-version"] == str(copy.version)
    assert len(double.adapters) == 1
    number = promoted(explorer, other)
    assert explorer.chat(model="other").headers["x-tuneloop-version"] == str(number)
    assert explorer.chat(model="one").headers["x-tuneloop-version"] == str(parent)
    into = explorer.ledger.policies.promote(one, by="tests")
    until(explorer, into, VersionState.CHAMPION)
    eventually(lambda: explorer.version() == into)
    assert double.chats[-1].weights.parent.name == f"global_step_{parent}"
    assert len(double.adapters) == 2, "the default policy shares it, too"


def test_a_canary_answers_its_share_of_the_keys_on_one_engine(start: Start, double: EngineDouble) -> None:
    explorer = start(double)
    one = policy(explorer, "one", settings={"rollout.mode": "canary", "rollout.share": 0.5})
    begun = explorer.ledger.versions.of(one).champion().version
    number = candidate(explorer, one)
    until(explorer, number, VersionState.CANARY)
    eventually(lambda: (explorer.services.fleet.policies or {})[one].canary == number)
    split = TrafficSplit(number, share=0.5)
    users = [f"user-{each}" for each in range(12)]
    wanted = [number if split.answers(f"default:{each}") else begun for each in users]
    assert len({*wanted}) == 2
    found = [int(explorer.chat(model="one", user=each).headers["x-tuneloop-version"]) for each in users]
    assert found == wanted
    assert explorer.version() == 0
    explorer.ledger.versions.of(one).roll_back(number, by="tests", reason="worse")
    eventually(lambda: (explorer.services.fleet.policies or {})[one].canary is None)
    assert {explorer.chat(model="one", user=each).headers["x-tuneloop-version"] for each in users} == {str(begun)}


def test_a_policys_gate_lets_pass_what_does_no_worse(tmp_path: Path, double: EngineDouble) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"messages": [{"role": "user", "content": "7+5="}], "answer": "12"}\n')
    double.says = {tmp_path.name: "It is 12.", "global_step_2": "It is 13.", "global_step_3": "It is 12."}
    settings = served(tmp_path, double)
    double.weights = settings.model.model_path
    monitor = MonitorSettings(evaluation=EvaluationSettings(path=tmp_path / "tasks.jsonl"))
    with explorer_running(settings.model_copy(update={"monitor": monitor})) as explorer:
        one = policy(explorer, "one", settings={"gate.mode": "block"})
        begun = explorer.ledger.versions.of(one).champion().version
        assert candidate(explorer, one) == 2
        until(explorer, 2, VersionState.REJECTED)
        reason = str(explorer.ledger.versions.all()[2].reason)
        assert "it did not pass the gate: its score is 0, the champion's 1" in reason
        assert explorer.chat(model="one").headers["x-tuneloop-version"] == str(begun)
        assert promoted(explorer, one) == 3
        actions = [str(each.action) for each in explorer.ledger.versions.events(3)]
        assert actions == ["published", "evaluated", "promoted"]
        asked = [each.weights.parent.name for each in double.chats if "x-request-id" in each.headers]
        assert "global_step_2" not in asked, "no client was answered by it"
        assert explorer.version() == 0


def test_a_canary_is_decided_about_by_the_figures_of_its_line(
    start: Start, double: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_serving, "_DECIDE_S", 0.1)
    explorer = start(double)
    rollout = {"rollout.mode": "ab", "rollout.window": 0.5}
    one, other = (policy(explorer, name, settings=rollout) for name in ("one", "other"))
    begun = explorer.ledger.versions.of(one).champion().version
    number, theirs = candidate(explorer, one), candidate(explorer, other)
    until(explorer, number, VersionState.ROLLED_BACK)
    until(explorer, theirs, VersionState.ROLLED_BACK)
    decided = [each for each in explorer.ledger.versions.events(number) if each.action is VersionAction.ROLLED_BACK]
    assert [(each.actor, (each.reason or "")[:20]) for each in decided] == [("explorer", "the window has ended")]
    assert explorer.ledger.versions.of(one).champion().version == begun
    assert explorer.ledger.versions.champion().version == 0


def test_a_version_is_taken_up_while_all_that_an_engine_holds_is_asked(start: Start, double: EngineDouble) -> None:
    explorer = start(double, resident=1)
    first = promoted(explorer, one := policy(explorer, "one"))
    double.stalls_after = 2
    body = HELLO | {"model": "one", "stream": True}
    with explorer.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = reply.iter_lines()
        assert next(lines)
        double.stalls_after = None
        number = promoted(explorer, one)
        assert explorer.chat(model="one").headers["x-tuneloop-version"] == str(number)
        assert len(double.adapters) == 2, "the reply in flight ends with the adapter that it began with"
    promoted(explorer, policy(explorer, "other"))
    eventually(lambda: len(double.adapters) == 1)
    assert reply.headers["x-tuneloop-version"] == str(first)


def test_the_default_policy_tries_its_own_versions_beside_them(start: Start, double: EngineDouble) -> None:
    explorer = start(double, rollout={"mode": "canary", "share": 0.5})
    assert len(explorer.services.fleet.engines) == 2, "one process counts as two engines"
    tried = candidate(explorer, 0)
    until(explorer, tried, VersionState.CANARY)
    one = policy(explorer, "one", parent=tried, settings={"rollout.mode": "all", "rollout.share": None})
    copy = explorer.ledger.versions.of(one).champion().version
    assert explorer.chat(model="one").headers["x-tuneloop-version"] == str(copy)
    assert double.chats[-1].weights.parent.name == f"global_step_{tried}"
    explorer.ledger.versions.roll_back(tried, by="tests", reason="worse")
    numbers = [promoted(explorer, one) for _ in range(6)]
    assert explorer.chat(model="one").headers["x-tuneloop-version"] == str(numbers[-1])
    assert explorer.version() == 0


def test_with_all_weights_trained_policies_are_refused(start: Start, double: EngineDouble) -> None:
    explorer = start(double, rank=0)
    policy(explorer, "one")
    status, code, sentence = refusal(explorer.chat(model="one"))
    assert (status, code) == (404, "model_not_found")
    assert "needs adapters" in sentence
    assert explorer.chat(model="none").status_code == 404
    assert explorer.version() == 0
    with pytest.raises(ValueError, match="policies: all weights are trained"):
        Settings.model_validate(explorer.settings.model_dump() | {"policies": {"one": {}}})
