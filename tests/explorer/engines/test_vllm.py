"""Which GPUs an engine gets, and how exact it is there."""

import os
from pathlib import Path

import pytest

from tuneloop.explorer.engines.vllm import command, environment, tolerance
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.settings import Settings

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


@pytest.mark.parametrize(("gpus", "turn_s", "sleeps"), [(1, 10, True), (1, None, False), (0, 10, False)])
def test_an_engine_on_a_gpu_that_the_trainer_has_by_turns_can_sleep(
    gpus: int, turn_s: float | None, sleeps: bool
) -> None:
    settings = Settings.model_validate(
        {"mode": "serve", "model": {"model_path": "m"}, "cluster": {"gpu_per_node": gpus, "gpu_turn": turn_s}}
    )
    assert ("--enable-sleep-mode" in command(settings, model=Path("m"), socket=Path("s"))) is sleeps


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
