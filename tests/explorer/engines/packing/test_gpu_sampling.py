"""On a GPU, an engine that copies only what has changed samples what vLLM itself does, token for token."""

import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.on_gpu.random_model import make_model
from tuneloop.explorer.engines.packing import gpu_copies
from tuneloop.explorer.engines.vllm_plugin import PACKS

vllm = pytest.importorskip("vllm")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

#: All that a request may bring of its own to the sampler.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 1, "min_p": 0.1},
    {"temperature": 0.5, "presence_penalty": 1.5},
    {"temperature": 1, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    {"temperature": 1, "logit_bias": {100: 5.0}},
    {"temperature": 1, "min_tokens": 10},
    {"temperature": 0, "bad_words": ["a"]},
    {"temperature": 1, "logprobs": 0},
    {"temperature": 0.8, "logprobs": 3},
]
REQUESTS, PROMPT = 96, 24
#: A request comes in each so many steps, then all at once those that are left; some are aborted.
STAGGER, ABORTED = 2, 7

Samples = dict[str, tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """In this process, so that one compilation serves both; not ours as yet."""
    wanted = {PACKS: "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    model = make_model("0.6b", tmp_path_factory.mktemp("model"), on_gpu=True)
    memory = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 4 << 30, "max_model_len": 2048}
    made = vllm.LLMEngine.from_engine_args(
        vllm.EngineArgs(model=str(model), dtype="bfloat16", logprobs_mode="processed_logprobs", **memory)
    )
    yield made
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def sampled(engine: Any) -> Samples:
    """What the engine samples of requests that come and go at the same steps each time."""
    assert engine.reset_prefix_cache()
    found: Samples = {}
    started, step = 0, 0
    while started < REQUESTS or engine.has_unfinished_requests():
        while started < REQUESTS and (step >= STAGGER * started or started >= REQUESTS // 2):
            parameters = vllm.SamplingParams(
                **KINDS[started % len(KINDS)], seed=started, max_tokens=20 + 9 * (started % 11), ignore_eos=True
            )
            prompt = {"prompt_token_ids": [1000 + 17 * started + number for number in range(PROMPT)]}
            engine.add_request(str(started), prompt, parameters)
            started += 1
        for output in engine.step():
            [completion] = output.outputs
            chosen = zip(completion.token_ids, completion.logprobs or [], strict=False)
            found[output.request_id] = (
                list(completion.token_ids),
                [logprobs[token].logprob for token, logprobs in chosen],
            )
            number = int(output.request_id)
            if number % ABORTED == 0 and len(completion.token_ids) == ABORTED + number % 5:
                engine.abort_request([output.request_id])
        step += 1
    return found


def test_what_comes_and_goes_is_sampled_with_its_own_parameters(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, runner = gpu_copies._known_sampler(), importlib.import_module(gpu_copies._RUNNER)
    driver = engine.engine_core.engine_core.model_executor.driver_worker.worker
    assert isinstance(driver.model_runner, runner.GPUModelRunner)
    keeper = importlib.import_module(f"{gpu_copies._FOLDER}.states").SamplingStates
    copy, copied = keeper.apply_staged_writes, 0

    def copy_parameters(self: Any) -> None:
        nonlocal copied
        copied += 1
        copy(self)

    sampled(engine)  # what is compiled at the first use is compiled
    monkeypatch.setattr(keeper, "apply_staged_writes", copy_parameters)
    expected, in_each_step = sampled(engine), copied
    assert sampled(engine) == expected  # else this would say nothing

    for name in ("add_request", "apply_staged_writes"):
        monkeypatch.setattr(sampler, name, getattr(sampler, name))
    monkeypatch.setattr(runner, "async_copy_to_gpu", runner.async_copy_to_gpu)
    gpu_copies.install()
    copied = 0
    found = sampled(engine)
    assert copied < in_each_step / 2
    assert found == expected

    monkeypatch.setattr(sampler, "apply_staged_writes", lambda self: None)
    assert sampled(engine) != expected  # who lacks a copy is seen
