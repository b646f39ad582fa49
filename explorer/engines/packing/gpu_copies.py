"""In a worker on a GPU: what is as it was in the last step is not copied there again.

vLLM copies a dozen arrays of sampling parameters in each step, whether a request has brought any or not, and where the
requests of the batch are kept. That takes an eighth of the time of the process that the core lives in, where that is
what a step takes: more than what it does beside for log-probabilities.
"""

import importlib
import inspect
from typing import Any

from tuneloop.explorer.engines.packing.patching import UnknownVllm, find, method

_RUNNER, _FOLDER = "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu.sample"
#: All functions of the classes that keep parameters, as they are in 0.26: of each, `add_request` alone changes any.
_KEEPERS = {
    f"{_FOLDER}.states.SamplingStates": {
        "apply_temperature",
        "apply_min_p",
        "get_top_k_top_p",
        "apply_top_k_top_p",
        "any_greedy",
        "any_explicit_seed",
        "max_num_logprobs",
    },
    f"{_FOLDER}.penalties.PenaltiesState": {"apply_penalties"},
    f"{_FOLDER}.logit_bias.LogitBiasState": {"apply_logit_bias"},
    f"{_FOLDER}.bad_words.BadWordsState": {"apply_bad_words"},
    f"{_FOLDER}.logprob.LogprobTokenIdsState": {"max_num_token_ids"},
}
_COMMON = {"__init__", "add_request", "apply_staged_writes"}
_FIELDS = ("sampling_states", "penalties_state", "logit_bias_state", "bad_words_state", "logprob_token_ids_state")
#: The runner's calls of the function that copies: two make a new array on the GPU, which nobody writes to there; the
#: third writes into an array that is there.
_CALL, _CALLS = "async_copy_to_gpu(", 3
_NEW_ARRAYS = (
    "idx_mapping = async_copy_to_gpu(idx_mapping_np, device=self.device)",
    "cu_num_logits = async_copy_to_gpu(cu_num_logits_np, device=self.device)",
)

#: Arrays that are kept: two in each step, and those of a step between.
_KEPT = 4


def install() -> None:
    """Change the sampler and the inputs of vLLM's newer model runner, as it is in 0.26. Raises UnknownVllm."""
    sampler = _known_sampler()
    add = method(sampler, "add_request", "req_idx", "prompt_len", "sampling_params")
    copy_parameters, copy_array = method(sampler, "apply_staged_writes"), _known_copy()

    def add_request(self: Any, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        self.parameters_copied = False
        add(self, req_idx, prompt_len, sampling_params)

    def apply_staged_writes(self: Any) -> None:
        if not getattr(self, "parameters_copied", False):
            copy_parameters(self)
            self.parameters_copied = True

    kept: dict[tuple[Any, ...], Any] = {}

    def async_copy_to_gpu(x: Any, out: Any = None, device: Any = None) -> Any:
        if out is not None:
            return copy_array(x, out, device)
        key = (x.dtype, x.tobytes(), device)
        if (copied := kept.get(key)) is None:
            copied = copy_array(x, None, device)
            if len(kept) >= _KEPT:
                del kept[next(iter(kept))]
            kept[key] = copied
        return copied

    sampler.add_request, sampler.apply_staged_writes = add_request, apply_staged_writes
    importlib.import_module(_RUNNER).async_copy_to_gpu = async_copy_to_gpu  # type: ignore[attr-defined]


def _known_sampler() -> Any:
    """The sampler, whose parameters change when a request comes, and else never. Raises UnknownVllm."""
    sampler = find(f"{_FOLDER}.sampler", "Sampler")
    copies = set(method(sampler, "apply_staged_writes").__code__.co_names)
    if copies != {"apply_staged_writes", *_FIELDS}:
        raise UnknownVllm(f"{sampler.__qualname__}.apply_staged_writes does {', '.join(sorted(copies))}")
    for path, known in _KEEPERS.items():
        keeper = find(*path.rsplit(".", 1))
        if (has := {name for name, _ in inspect.getmembers(keeper, inspect.isfunction)}) != _COMMON | known:
            raise UnknownVllm(f"{path} has, or lacks, {', '.join(sorted(has ^ (_COMMON | known)))}")
    return sampler


def _known_copy() -> Any:
    """The function that copies the arrays of a batch, which makes arrays that are only read. Raises UnknownVllm."""
    copy = find(_RUNNER, "async_copy_to_gpu")
    if list(inspect.signature(copy).parameters) != ["x", "out", "device"]:
        raise UnknownVllm(f"{_RUNNER}.async_copy_to_gpu takes {inspect.signature(copy)}")
    source = inspect.getsource(importlib.import_module(_RUNNER))
    calls = source.count(_CALL)
    if calls != _CALLS or not all(each in source for each in _NEW_ARRAYS):
        raise UnknownVllm(f"{_RUNNER} copies {calls} arrays, or others than are known")
    return copy
