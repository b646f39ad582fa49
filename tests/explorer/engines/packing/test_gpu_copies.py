"""What is as it was in the last step is not copied to a GPU again."""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tuneloop.explorer.engines.packing import gpu_copies
from tuneloop.explorer.engines.packing.patching import UnknownVllm

_FOLDER = "vllm.v1.worker.gpu.sample"

#: As much of vLLM 0.26's model runner as is looked at.
_RUNNER = """
copied = []

def copy_to_gpu(x, out=None, device=None):
    copied.append((x.copy(), device))
    return copied[-1] if out is None else out

async_copy_to_gpu = copy_to_gpu

class GPUModelRunner:
    device = "gpu"

    def prepare_inputs(self, idx_mapping_np, cu_num_logits_np, buffer):
        idx_mapping = async_copy_to_gpu(idx_mapping_np, device=self.device)
        cu_num_logits = async_copy_to_gpu(cu_num_logits_np, device=self.device)
        async_copy_to_gpu(idx_mapping_np, out=buffer)
        return idx_mapping, cu_num_logits
"""


def keeper(path: str, known: set[str]) -> type:
    """A class that keeps parameters, with the functions that vLLM's has."""

    def add_request(self: Any, *of_request: Any) -> None:
        self.added = [*getattr(self, "added", ()), of_request]

    def apply_staged_writes(self: Any) -> None:
        self.copied = [*getattr(self, "copied", ()), list(getattr(self, "added", ()))]

    def __init__(self: Any) -> None:
        """Nothing is kept yet."""

    functions = {"__init__": __init__, "add_request": add_request, "apply_staged_writes": apply_staged_writes}
    return type(path.rpartition(".")[2], (), functions | dict.fromkeys(known, lambda self: None))


class Sampler:
    """As much of vLLM 0.26's as is changed."""

    def __init__(self, keepers: list[type]) -> None:
        self.sampling_states, self.penalties_state, self.logit_bias_state, *others = (each() for each in keepers)
        self.bad_words_state, self.logprob_token_ids_state = others

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        self.sampling_states.add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        self.sampling_states.apply_staged_writes()
        self.penalties_state.apply_staged_writes()
        self.logit_bias_state.apply_staged_writes()
        self.bad_words_state.apply_staged_writes()
        self.logprob_token_ids_state.apply_staged_writes()


def put_runner(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> Any:
    """A module in place of the model runner."""
    path = folder / f"runner_{len(list(folder.iterdir()))}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(gpu_copies._RUNNER, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, gpu_copies._RUNNER, module)
    return module


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    return put_runner(monkeypatch, tmp_path, _RUNNER)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, runner: Any) -> dict[str, Any]:
    """The classes that are looked for, by their names."""

    class Own(Sampler):
        """Changed for one test."""

    for name in ("add_request", "apply_staged_writes"):
        setattr(Own, name, vars(Sampler)[name])
    found: dict[str, Any] = {"Sampler": Own}
    modules = {f"{_FOLDER}.sampler": {"Sampler": Own}}
    for path, known in gpu_copies._KEEPERS.items():
        module, _, name = path.rpartition(".")
        found[name] = keeper(path, known)
        modules[module] = {name: found[name]}
    for module, has in modules.items():
        made = types.ModuleType(module)
        made.__dict__.update(has)
        monkeypatch.setitem(sys.modules, module, made)
    return found


def sampler_of(vllm: dict[str, Any]) -> Any:
    return vllm["Sampler"]([each for name, each in vllm.items() if name != "Sampler"])


def test_parameters_are_copied_once_for_those_who_came_since(vllm: dict[str, Any]) -> None:
    gpu_copies.install()
    sampler, other = sampler_of(vllm), sampler_of(vllm)
    for step in range(6):
        if step in (2, 3):
            sampler.add_request(step, 5, "hot")
        sampler.apply_staged_writes()
    copied = [[], [(2, "hot")], [(2, "hot"), (3, "hot")]]
    assert sampler.sampling_states.copied == copied
    assert len(sampler.penalties_state.copied) == len(copied)
    other.apply_staged_writes()
    assert other.sampling_states.copied == [[]]  # what one has copied is no other's


def test_what_could_not_be_copied_is_copied_in_the_next_step(vllm: dict[str, Any]) -> None:
    gpu_copies.install()
    sampler = sampler_of(vllm)
    whole, sampler.sampling_states = sampler.sampling_states, None
    with pytest.raises(AttributeError):
        sampler.apply_staged_writes()
    sampler.sampling_states = whole
    sampler.apply_staged_writes()
    assert whole.copied == [[]]


def test_a_class_that_might_change_parameters_elsewhere_is_left_alone(vllm: dict[str, Any]) -> None:
    vllm["PenaltiesState"].decay = lambda self: None
    before = dict(vars(vllm["Sampler"]))
    with pytest.raises(UnknownVllm, match="decay"):
        gpu_copies.install()
    assert dict(vars(vllm["Sampler"])) == before


def test_a_sampler_that_keeps_more_parameters_is_left_alone(vllm: dict[str, Any]) -> None:
    def apply_staged_writes(self: Any) -> None:
        self.thinking_budget.apply_staged_writes()

    vllm["Sampler"].apply_staged_writes = apply_staged_writes
    with pytest.raises(UnknownVllm, match="thinking_budget"):
        gpu_copies.install()


def numbers(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.int32)


def test_an_array_of_the_batch_is_copied_when_it_is_another(vllm: dict[str, Any], runner: Any) -> None:
    gpu_copies.install()
    inputs, buffer = runner.GPUModelRunner(), object()
    steps = [inputs.prepare_inputs(places, numbers(0, 1, 2), buffer) for places in [numbers(4, 7)] * 3]
    assert all(step[0] is steps[0][0] and step[1] is steps[0][1] for step in steps)
    assert [(x.tolist(), device) for x, device in runner.copied] == [
        ([4, 7], "gpu"),
        ([0, 1, 2], "gpu"),
        *[([4, 7], None)] * 3,  # what is written into a buffer is written in each step
    ]
    other, _ = inputs.prepare_inputs(numbers(4, 8), numbers(0, 1, 2), buffer)
    assert other[0].tolist() == [4, 8]
    wide, _ = inputs.prepare_inputs(np.array([4, 7], dtype=np.int64), numbers(0, 1, 2), buffer)
    assert wide[0].dtype == np.int64


def test_few_arrays_are_kept(vllm: dict[str, Any], runner: Any) -> None:
    gpu_copies.install()
    first = runner.async_copy_to_gpu(numbers(0), device="gpu")
    for place in range(1, 9):
        assert runner.async_copy_to_gpu(numbers(place), device="gpu")[0].tolist() == [place]
    assert runner.async_copy_to_gpu(numbers(0), device="gpu") is not first


@pytest.mark.parametrize(
    ("known", "other"),
    [
        ("x, out=None, device=None", "x, device=None, out=None"),
        ("idx_mapping = async", "self.idx_mapping = other = async"),
        ("return idx_mapping, cu", "async_copy_to_gpu(buffer, device=self.device)\n        return idx_mapping, cu"),
    ],
)
def test_a_runner_of_another_kind_is_left_alone(
    vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, known: str, other: str
) -> None:
    assert known in _RUNNER
    changed = put_runner(monkeypatch, tmp_path, _RUNNER.replace(known, other))
    copy, before = changed.async_copy_to_gpu, dict(vars(vllm["Sampler"]))
    with pytest.raises(UnknownVllm):
        gpu_copies.install()
    assert changed.async_copy_to_gpu is copy
    assert dict(vars(vllm["Sampler"])) == before
