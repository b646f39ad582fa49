"""Which GPUs an engine gets, and how exact it is there."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import httpx
import orjson
import pytest

from tests.doubles.engine import MODEL, PASSED, EngineDouble, EnginePlace
from tests.explorer import adapters, checkpoints
from tests.explorer.checkpoints import register
from tests.explorer.conftest import Run
from tests.explorer.running import RunningExplorer, eventually, explorer_running, settings_for
from tests.explorer.versions.test_attestation import mismatches, outcomes
from tests.explorer.versions.test_reload import until_ready
from tests.explorer.versions.test_trial import SHARE, answered, by_hash
from tuneloop.explorer.engines.adapter_names import ModelRenaming
from tuneloop.explorer.engines.client import RenamedEngineReply, _Connection
from tuneloop.explorer.engines.fleet import EngineState
from tuneloop.explorer.engines.vllm import command, environment, tolerance
from tuneloop.shared.checkpoints import Probe
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import VersionState
from tuneloop.shared.settings.serving import LoraSettings
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.versions import RolloutSettings

SETTINGS = Settings.model_validate(
    {
        "mode": "serve",
        "model": {"model_path": "m"},
        "cluster": {"gpu_per_node": 4},
        "explorer": {"rollout_model": {"engine_num": 2, "tensor_parallel_size": 2}},
    }
)


@pytest.mark.parametrize(
    ("given", "first", "second"),
    [(None, "0,1", "2,3"), ("4,5,6,7", "4,5", "6,7"), ("GPU-a, GPU-b,GPU-c,GPU-d,GPU-e", "GPU-a,GPU-b", "GPU-c,GPU-d")],
)
def test_engines_share_out_the_gpus_that_were_given(monkeypatch, given, first, second):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert [environment(SETTINGS, each)["CUDA_VISIBLE_DEVICES"] for each in (0, 1)] == [first, second]


@pytest.mark.parametrize("given", ["", "0,1,2"])
def test_too_few_gpus_are_refused(monkeypatch, given):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    with pytest.raises(EnvironmentRefused, match=r"cluster\.gpu_per_node: the engines need 4 GPUs"):
        environment(SETTINGS, 1)


def test_an_engine_runs_no_code_of_a_model_and_loads_nothing_that_could_be_unpickled() -> None:
    plain, socket = Settings.model_validate({"mode": "serve", "model": {"model_path": "m"}}), Path("s")
    arguments = command(plain, model=Path("m"), socket=socket)
    assert "--trust-remote-code" not in arguments
    assert arguments[arguments.index("--load-format") + 1] == "safetensors"
    wanted = plain.model_copy(update={"model": plain.model.model_copy(update={"trust_remote_code": True})})
    assert "--trust-remote-code" in command(wanted, model=Path("m"), socket=socket)


@pytest.mark.parametrize(
    ("dtype", "gpus", "allowed"),
    [("float32", 0, 0.001), ("float32", 1, 0.01), ("bfloat16", 1, 0.1), ("bfloat16", 0, 0.1)],
)
def test_what_may_differ_from_the_trainer_is_what_the_machine_s_numbers_make(
    dtype: str, gpus: int, allowed: float
) -> None:
    values = {
        "mode": "serve",
        "model": {"model_path": "m"},
        "cluster": {"gpu_per_node": gpus},
        "explorer": {"rollout_model": {"dtype": dtype}},
    }
    assert tolerance(Settings.model_validate(values)) == allowed


@pytest.mark.parametrize(
    ("but", "asked"),
    [
        ({}, True),
        ({"rollout_model": {"engine_args": ["--structured-outputs-config.backend", "xgrammar"]}}, True),
        ({"rollout_model": {"engine_args": ["--structured-outputs-config.backend", "outlines"]}}, False),
    ],
)
def test_engines_tell_the_grammars_of_requests_where_these_are_rebuilt(but: dict[str, object], asked: bool) -> None:
    settings = Settings.model_validate({"mode": "serve", "model": {"model_path": "m"}, "explorer": but})
    assert ("--enable-scale-out" in command(settings, model=Path("m"), socket=Path("s"))) is asked


def told(**but: object) -> list[str]:
    values: dict[str, object] = {"mode": "serve", "model": {"model_path": "m"}, **but}
    return command(Settings.model_validate(values), model=Path("m"), socket=Path("s"))


@pytest.mark.parametrize(
    ("cores", "engines", "servers"), [(1, 1, 1), (3, 1, 1), (4, 1, 2), (16, 1, 4), (16, 4, 2), (64, 1, 4)]
)
def test_engines_on_gpus_get_api_servers_by_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, engines: int, servers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    arguments = told(cluster={"gpu_per_node": 4}, explorer={"rollout_model": {"engine_num": engines}})
    if servers == 1:
        assert arguments[3] == "vllm.entrypoints.openai.api_server"
        assert "--api-server-count" not in arguments
    else:
        assert arguments[3] == "tuneloop.explorer.engines.vllm_plugin"
        assert arguments[arguments.index("--api-server-count") + 1] == str(servers)


@pytest.mark.parametrize(
    "but",
    [
        {},
        {"cluster": {"gpu_per_node": 1}, "model": {"model_path": "m", "lora": {"rank": 8}}},
        {"cluster": {"gpu_per_node": 1}, "explorer": {"rollout_model": {"single_process": True}}},
    ],
)
def test_engines_on_a_cpu_of_one_process_or_with_adapters_have_one_api_server(
    monkeypatch: pytest.MonkeyPatch, but: dict[str, object]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert "--api-server-count" not in told(**but)


@pytest.mark.parametrize(
    ("rollout", "rank", "why"),
    [
        ({"single_process": True, "api_servers": 2}, 0, "an engine of a single process has one API server"),
        ({"api_servers": 2}, 8, "vLLM loads adapters while it serves through one API server only"),
        ({"engine_args": ["--api-server-count", "2"]}, 0, r"write explorer\.rollout_model\.api_servers"),
    ],
)
def test_api_servers_that_no_engine_can_have_are_refused(rollout: dict[str, object], rank: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        told(model={"model_path": "m", "lora": {"rank": rank}}, explorer={"rollout_model": rollout})


# Versions that are adapters: clients see what they would see of all weights, and nothing in flight is disturbed.


Start = Callable[..., RunningExplorer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts an explorer of adapters."""
    with ExitStack() as stack:

        def run(*doubles: EngineDouble, **explorer: Any) -> RunningExplorer:
            running = stack.enter_context(explorer_running(adapters.adapted(tmp_path, *doubles, **explorer)))
            eventually(lambda: {each.state for each in running.services.fleet.engines} == {EngineState.READY})
            return running

        yield run


def candidate(explorer: RunningExplorer, probe: Probe | None = None) -> int:
    settings = explorer.settings
    return adapters.register(explorer.ledger, settings.job_dir, settings.model.model_path, probe=probe)


def until(explorer: RunningExplorer, number: int, state: VersionState) -> None:
    eventually(lambda: explorer.ledger.versions.all()[number].state == state)


def requested_model(double: EngineDouble) -> str:
    """What the newest chat named as its model."""
    return str(double.chats[-1].body["model"])


def test_a_version_is_loaded_beside_the_others_and_named_in_requests(start: Start, double: EngineDouble) -> None:
    explorer = start(double)
    assert explorer.version() == 0
    assert requested_model(double) == MODEL
    candidate(explorer)
    until(explorer, 1, VersionState.CHAMPION)
    reply = explorer.chat()
    assert (reply.headers["x-tuneloop-version"], reply.json()["model"]) == ("1", MODEL)
    assert requested_model(double).startswith("tuneloop-adapter-1-")
    assert double.chats[-1].weights == explorer.ledger.versions.champion().path / "actor"
    assert not {"/pause", "/collective_rpc", "/reset_prefix_cache"} & set(double.posts)


@pytest.mark.parametrize("on_reload", ["keep", "wait"])
def test_a_reply_in_flight_ends_with_the_adapter_that_it_began_with(
    start: Start, double: EngineDouble, on_reload: str
) -> None:
    explorer = start(double, on_reload=on_reload)
    candidate(explorer)
    until(explorer, 1, VersionState.CHAMPION)
    double.hangs = True
    asking = threading.Thread(target=explorer.chat)
    asking.start()
    eventually(lambda: len(double.chats) == 1)
    candidate(explorer)
    until(explorer, 2, VersionState.CHAMPION)
    double.hangs = False
    asking.join()
    assert explorer.version() == 2
    kept = [each.experiences[0] for each in explorer.exchanges()]
    assert [(each.version_min, each.version_max, each.unsampled) for each in kept] == [(1, 1, None), (2, 2, None)]


@pytest.mark.parametrize("extended", [True, False])
def test_an_adapter_that_is_not_the_files_to_the_bit_is_found_by_its_fingerprint(
    start: Start, double: EngineDouble, tmp_path: Path, extended: bool
) -> None:
    double.extended, double.weights = extended, adapters.adapted(tmp_path, double).model.model_path.absolute()
    explorer = start(double, probe_interval=0.2)
    candidate(explorer)
    until(explorer, 1, VersionState.CHAMPION)
    proof = "fingerprint" if extended else "log-probabilities only"
    eventually(lambda: explorer.chat().headers["x-tuneloop-attested"] == proof)
    double.adapter_one_unit_off = True
    if extended:
        eventually(lambda: bool(mismatches(explorer)))
        assert mismatches(explorer)[0]["parts"] == 1
    else:
        seen = outcomes(explorer)["matched"]
        eventually(lambda: outcomes(explorer)["matched"] >= seen + 2)


def test_weights_below_adapters_are_proven_at_the_start_and_now_and_then(
    start: Start, double: EngineDouble, tmp_path: Path
) -> None:
    double.extended, double.weights = True, adapters.adapted(tmp_path, double).model.model_path.absolute()
    explorer = start(double, probe_interval=20.0)
    eventually(lambda: outcomes(explorer)["matched"] > 0)
    before = double.bases_summed
    for version in (1, 2):
        candidate(explorer)
        until(explorer, version, VersionState.CHAMPION)
        eventually(lambda seen=version: outcomes(explorer)["matched"] > seen)
    assert double.bases_summed == before
    assert explorer.chat().headers["x-tuneloop-attested"] == "fingerprint"
    double.weights = adapters.write_base(tmp_path / "other", seed=1)
    eventually(lambda: bool(mismatches(explorer)))


@pytest.mark.parametrize("engine_too", [False, True])
def test_after_a_restart_the_champion_is_served(
    tmp_path: Path, places: list[EnginePlace], double: EngineDouble, engine_too: bool
) -> None:
    with explorer_running(adapters.adapted(tmp_path, double)) as first:
        candidate(first)
        until(first, 1, VersionState.CHAMPION)
    if engine_too:
        double = places[0].fresh()
    with explorer_running(adapters.adapted(tmp_path, double)) as second:
        eventually(lambda: second.services.fleet.engines[0].state == EngineState.READY)
        assert second.version() == 1
        assert requested_model(double).startswith("tuneloop-adapter-1-")


def test_all_weights_are_rejected_where_adapters_are_served(start: Start, double: EngineDouble) -> None:
    explorer = start(double)
    checkpoints.register(explorer.ledger, explorer.settings.job_dir)
    until(explorer, 1, VersionState.REJECTED)
    assert explorer.version() == 0


def test_an_adapter_is_rejected_where_all_weights_are_served(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double)
    adapters.write_base(explorer.settings.model.model_path)
    candidate(explorer)
    until(explorer, 1, VersionState.REJECTED)
    assert "model.lora.rank is 0" in str(explorer.ledger.versions.all()[1].reason)
    assert double.weights == explorer.settings.model.model_path.absolute()


def test_engines_are_started_with_the_base_model_and_room_for_adapters(tmp_path: Path) -> None:
    settings = adapters.adapted(tmp_path)
    reply = command(settings, model=Path("m"), socket=Path("s"))
    assert "--enable-lora" in reply
    flags = ("--max-lora-rank", "--max-loras", "--max-cpu-loras")
    assert [reply[reply.index(flag) + 1] for flag in flags] == ["8", "8", "16"]
    many = settings.model.model_copy(update={"lora": LoraSettings(rank=8, max_rank=16, resident=64)})
    reply_many = command(settings.model_copy(update={"model": many}), model=Path("m"), socket=Path("s"))
    assert [reply_many[reply_many.index(flag) + 1] for flag in flags] == ["16", "64", "72"]
    targets = reply.index("--lora-target-modules") + 1
    assert tuple(reply[targets : targets + 7]) == settings.model.lora.targets
    assert environment(settings, 0)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    without = settings_for(tmp_path)
    assert not [
        each for each in command(without, model=Path("m"), socket=Path("s")) if each.startswith("--") and "lora" in each
    ]
    assert environment(without, 0)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "0"


THEIRS = "tuneloop-adapter-2-abc"
RENAMING = ModelRenaming(public_name="ours", adapter_name=THEIRS)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_reply_is_renamed_wherever_its_blocks_are_cut(size: int) -> None:
    event = b'data: {"model":"%b","text":"\\"model\\":\\"tuneloop-adapter-2-abc\\""}\n\n'
    reply, received = RenamedEngineReply(cast(_Connection, None), RENAMING), bytearray()
    reply._sink = lambda block: received.extend(block) is None
    body = event % THEIRS.encode() * 3 + b'{"model":"tuneloop-adapter-1-of-before"}'
    for at in range(0, len(body), size):
        reply.receive(body[at : at + size])
    reply.receive_end()
    assert received == event % b"ours" * 3 + b'{"model":"ours"}'


@pytest.fixture
def start_both() -> Iterator[Callable[[Settings], RunningExplorer]]:
    """Starts an explorer with two places for a version on one engine."""
    with ExitStack() as stack:

        def run(settings: Settings) -> RunningExplorer:
            running = stack.enter_context(explorer_running(settings))
            until_ready(running, 2)
            return running

        yield run


def tried(tmp_path: Path, double: EngineDouble, **rollout: Any) -> Settings:
    return adapters.adapted(tmp_path, double).model_copy(
        update={"rollout": RolloutSettings(**{"mode": "canary", "share": SHARE} | rollout)}
    )


def test_a_version_is_tried_beside_the_champion_and_rolled_back(
    start_both: Callable[[Settings], RunningExplorer], tmp_path: Path, double: EngineDouble
) -> None:
    explorer = start_both(tried(tmp_path, double))
    candidate(explorer)
    until(explorer, 1, VersionState.CANARY)
    until_ready(explorer, 2)
    assert answered(explorer) == by_hash()
    request = {str(each.body["user"]): str(each.body["model"]) for each in double.chats if "user" in each.body}
    assert {user: name.startswith("tuneloop-adapter-1-") for user, name in request.items()} == {
        user: bool(version) for user, version in by_hash().items()
    }
    assert not {"/pause", "/collective_rpc"} & set(double.posts)
    explorer.ledger.versions.roll_back(1, by="admin:anna", reason="to see")
    eventually(lambda: explorer.services.fleet.split is None)
    until_ready(explorer, 2)
    assert set(answered(explorer).values()) == {0}


def test_an_engine_that_was_started_again_gets_the_champion_s_adapter(
    tmp_path: Path, places: list[EnginePlace], start_both: Callable[[Settings], RunningExplorer]
) -> None:
    explorer = start_both(tried(tmp_path, places[0].fresh()))
    candidate(explorer)
    until(explorer, 1, VersionState.CANARY)
    explorer.ledger.versions.promote(1, by="admin:anna", reason="to see")
    eventually(lambda: [each.version for each in explorer.services.fleet.engines] == [1, 1])
    places[0].fresh().dead = True
    eventually(lambda: {each.state for each in explorer.services.fleet.engines} == {EngineState.DOWN})
    again = places[0].fresh()
    until_ready(explorer, 2)
    assert explorer.version() == 1
    assert str(again.chats[-1].body["model"]).startswith("tuneloop-adapter-1-")


# Clients that name the version they want: `model: "t@2"`.


@pytest.fixture
def trying(tmp_path: Path, doubles: list[EngineDouble]) -> Iterator[RunningExplorer]:
    """Version 0 serves on one engine, and version 1 is tried on the other with hardly any traffic; pins are allowed."""
    urls = [each.url for each in doubles]
    rollout = {"mode": "canary", "share": 1e-9}
    with ExitStack() as stack:
        settings = settings_for(tmp_path, urls, rollout=rollout, version_pins=True)
        explorer = stack.enter_context(explorer_running(settings))
        register(explorer.ledger, settings.job_dir)
        eventually(lambda: sorted(each.version for each in explorer.services.fleet.engines) == [0, 1])
        eventually(lambda: explorer.chat(model=f"{MODEL}@1").status_code == 200)
        yield explorer


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    """The status, the code and the sentence."""
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


def test_the_version_that_is_named_answers(trying: RunningExplorer, doubles: list[EngineDouble]) -> None:
    for each in doubles:
        each.chats.clear()
    for version in (0, 1, 1, 0):
        for body in ({}, {"stream": True}):
            answer = trying.chat(model=f"{MODEL}@{version}", **body)
            assert (answer.status_code, answer.headers["x-tuneloop-version"]) == (200, str(version))
    assert trying.version() == 0, "who names none gets the champion"
    received = [chat.body for each in doubles for chat in each.chats]
    assert {body["model"] for body in received} == {MODEL}, "engines know their own name only"
    reply = [orjson.loads(exchange.request)["model"] for exchange in trying.exchanges()[-9:]]
    assert reply == ["t@0", "t@0", "t@1", "t@1", "t@1", "t@1", "t@0", "t@0", "t"]
    assert [each.experiences[0].version_max for each in trying.exchanges()[-9:]] == [0, 0, 1, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("path", PASSED)
def test_routes_that_sample_nothing_take_it_too(
    trying: RunningExplorer, doubles: list[EngineDouble], path: str
) -> None:
    for version in (0, 1, 1):
        assert trying.http.post(path, json={"model": f"{MODEL}@{version}", "prompt": "ab"}).status_code == 200
    of_version = {engine.version: doubles[engine.number] for engine in trying.services.fleet.engines}
    request = (path, b'{"model":"t","prompt":"ab"}')
    assert [of_version[version].passed.count(request) for version in (0, 1)] == [1, 2]
    for wrong in ("7", "x", "-1", ""):
        refused = trying.http.post(path, json={"model": f"{MODEL}@{wrong}", "prompt": "ab"})
        answer = refusal(trying.chat(model=f"{MODEL}@{wrong}"))
        assert (refused.status_code, refused.json()["error"]["message"]) == (answer[0], answer[2])
        assert (refused.json().get("type") == "error") == path.startswith("/v1/messages")
    assert [of_version[version].passed.count(request) for version in (0, 1)] == [1, 2], "no engine got those"


def test_a_version_that_is_not_served_is_no_model(trying: RunningExplorer) -> None:
    answer = "the model does not exist: version 7 is not served; these are: 0, 1"
    assert refusal(trying.chat(model=f"{MODEL}@7")) == (404, "model_not_found", answer)
    for wrong in ("", "x", "-1", "1.0", "9" * 40):
        answer = "the model does not exist: t@ must be followed by the number of a version"
        assert refusal(trying.chat(model=f"{MODEL}@{wrong}")) == (404, "model_not_found", answer)
    assert trying.chat(model="other@1").status_code == 404


def test_what_a_pinned_engine_fails_at_no_other_version_does(
    trying: RunningExplorer, doubles: list[EngineDouble]
) -> None:
    tried = next(each.number for each in trying.services.fleet.engines if each.version == 1)
    doubles[tried].status = 500
    assert trying.chat(model=f"{MODEL}@1").status_code == 500
    assert trying.chat(model=f"{MODEL}@0").status_code == 200


def test_the_models_that_may_be_named_are_listed(trying: RunningExplorer) -> None:
    listed = [each["id"] for each in trying.http.get("/v1/models").json()["data"]]
    assert listed == ["t", "t@0", "t@1"]
    assert trying.http.get("/v1/models/t@1").json()["id"] == "t@1"
    assert trying.http.get("/v1/models/t@7").status_code == 404
