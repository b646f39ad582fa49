"""Packed log-probabilities: what is asked of engines, and what becomes of a vLLM that is built otherwise."""

import json
import os
import subprocess
import sys
import types
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.doubles.engine import EngineDouble
from tests.explorer.running import RunningExplorer
from tuneloop.explorer.engines.packing import core, gpu_scores, gpu_worker
from tuneloop.explorer.engines.packing.front_end import Arrived, ReplyLogprobs, _distribute
from tuneloop.explorer.engines.packing.patching import MARK, MASK
from tuneloop.explorer.engines.packing.wire import HEADER, PACKED
from tuneloop.explorer.engines.proof import vllm_worker
from tuneloop.explorer.engines.vllm_plugin import PACKS, register

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "t", "messages": [{"role": "user", "content": "Hi"}]}


def asked_for(explorer: RunningExplorer, double: EngineDouble, **but: object) -> str | None:
    explorer.http.post(CHAT, json=HELLO | but).raise_for_status()
    return double.chats[-1].headers.get(HEADER.lower())


def test_only_what_nobody_else_reads_is_packed(explorer: RunningExplorer, double: EngineDouble) -> None:
    assert asked_for(explorer, double) == PACKED
    assert asked_for(explorer, double, logprobs=True) is None
    assert asked_for(explorer, double, logprobs=True, top_logprobs=2) is None


def test_beside_vllm_the_plugin_needs_numpy_alone() -> None:
    """`pip install --no-deps .` brings it into the environment of others' engines."""
    load = f"import sys; there = set(sys.modules); import {register.__module__}, {vllm_worker.__name__}"
    tell = "print(*{name.split('.')[0] for name in set(sys.modules) - there} - sys.stdlib_module_names)"
    told = "print(*[name for name in sys.modules if name.startswith('tuneloop.runner')])"
    found = subprocess.run(
        [sys.executable, "-c", f"{load}; {tell}; {told}"], capture_output=True, text=True, check=True
    )
    brought, of_runner = found.stdout.splitlines()
    assert (set(brought.split()), of_runner) == ({"numpy", "tuneloop"}, "")


#: What this vLLM has in each process, as it is or built otherwise: each in a process that is forked after the imports.
_ASK = """
import json, os, sys
from vllm.plugins import load_general_plugins
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.output_processor import OutputProcessor

def other(self, something_else):
    raise AssertionError

for variables, owner, name in json.loads(sys.stdin.read()):
    if not os.fork():
        os.environ.update(variables)
        if name:
            setattr(globals()[owner], name, other)
        load_general_plugins()
        found = Scheduler.update_from_output, OutputProcessor.process_outputs, OpenAIServingChat.create_chat_completion
        print(json.dumps([each.__module__.startswith("tuneloop.") for each in found]), flush=True)
        os._exit(0)
    os.wait()
"""

#: Whether the core packs, and API servers ask it to.
EXPECTED = {
    ("1", "", ""): [True, True, True],
    ("0", "", ""): [False, False, False],
    ("1", "Scheduler", "update_from_output"): [False, True, True],
    ("1", "OutputProcessor", "process_outputs"): [True, False, False],
    ("1", "OpenAIServingChat", "_create_chat_logprobs"): [True, False, False],
}


@pytest.fixture(scope="module")
def told() -> tuple[list[list[bool]], str]:
    """What vLLM has in each case, and what is said of it."""
    without = {name: value for name, value in os.environ.items() if name != PACKS}
    cases = [({PACKS: on}, owner, name) for on, owner, name in EXPECTED]
    asked = subprocess.run(
        [sys.executable, "-c", _ASK], input=json.dumps(cases), env=without, capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in asked.stdout.splitlines() if line.startswith("[")], asked.stderr


@pytest.mark.vllm
def test_a_vllm_that_is_built_otherwise_goes_its_own_way_and_says_so(told: tuple[list[list[bool]], str]) -> None:
    found, said = told
    assert found == list(EXPECTED.values())
    warnings = [line for line in said.splitlines() if "is left unchanged" in line]
    assert [line[line.index("left unchanged") :].split(":")[0] for line in warnings] == [
        "left unchanged in core",
        "left unchanged in front_end",
        "left unchanged in front_end",
    ]


class Tensors(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any
    selected_token_ranks: Any
    cu_num_generated_tokens: Any = None


def ranked(logits: torch.Tensor, number: int, sampled: torch.Tensor, starts: Any = None, **more: Any) -> Tensors:
    return Tensors(sampled[:, None], score(logits, sampled[:, None]), sampled, starts)


def score(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, ids)


class Sampling(NamedTuple):
    extra_args: dict[str, int] | None


class Batch(NamedTuple):
    idx_mapping_np: np.ndarray[Any, Any]


class Sampler:
    """As much of vLLM 0.26's as is changed; its functions are found where vLLM's are."""

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        """Nothing is kept."""

    def returns_logprobs(self, idx_mapping_np: Any) -> bool:
        return True

    def __call__(self, logits: torch.Tensor, input_batch: Batch) -> Any:
        module: Any = sys.modules["vllm.v1.worker.gpu.sample.sampler"]
        return module.compute_topk_scores(logits, 0, logits.argmax(-1), max_per_req_token_ids=0, logits_mode=False)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Sampler:
    class Own(Sampler):
        """Changed for one test."""

    for name in ("add_request", "returns_logprobs", "__call__"):
        setattr(Own, name, vars(Sampler)[name])
    for module, has in {
        "vllm.v1.worker.gpu.sample.sampler": {"Sampler": Own, "compute_topk_scores": ranked},
        "vllm.v1.worker.gpu.sample.logprob": {"compute_token_logprobs": score},
        "vllm.v1.outputs": {"LogprobsTensors": Tensors, "LogprobsLists": Tensors},
    }.items():
        made = types.ModuleType(module)
        made.__dict__.update(has)
        monkeypatch.setitem(sys.modules, module, made)
    gpu_worker.install()
    return Own()


def test_a_gpu_tells_numbers_alone_where_all_requests_of_a_step_are_packed(worker: Sampler) -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    for place in range(3):
        worker.add_request(place, 5, Sampling({MARK: 1}))
    worker.add_request(3, 5, Sampling(None))
    short, whole = (worker(logits, Batch(np.array(places))) for places in ((0, 1), (0, 3)))
    kept = short.to_cpu_nonblocking()
    assert (kept.logprob_token_ids, kept.selected_token_ranks) == (None, None)
    assert kept.tolists().logprobs.tolist() == score(logits, logits.argmax(-1)[:, None]).numpy().tolist()
    assert whole.selected_token_ranks is not None


def test_a_place_that_another_request_takes_is_told_in_full(worker: Sampler) -> None:
    logits = torch.zeros(1, 9)
    worker.add_request(0, 5, Sampling({MARK: 1}))
    worker.add_request(0, 5, Sampling({"other": 1}))
    assert worker(logits, Batch(np.array([0]))).selected_token_ranks is not None


class Kernel:
    """What vLLM's kernel is called with, and does."""

    def __init__(self) -> None:
        self.arg_names = list(gpu_scores._PARAMETERS)
        self.options: dict[str, int] = {}

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(into: Any, logits: Any, stride: int, ids: Any, columns: int, width: int, **options: int) -> None:
            assert (grid, stride, ids.dtype, columns, width) == ((len(logits),), width, torch.int64, 1, logits.shape[1])
            into.copy_(score(logits, ids))
            self.options = options

        return run


@pytest.fixture
def scoring(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = types.ModuleType(gpu_scores._MODULE)
    made._topk_log_softmax_kernel, made.compute_token_logprobs = Kernel(), score
    monkeypatch.setitem(sys.modules, gpu_scores._MODULE, made)
    return made


def test_a_row_of_the_vocabulary_is_read_in_large_pieces(scoring: Any) -> None:
    gpu_scores.install()
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    sampled = logits.argmax(-1).int()
    assert torch.equal(scoring.compute_token_logprobs(logits, sampled[:, None]), score(logits, sampled[:, None].long()))
    kernel = scoring._topk_log_softmax_kernel
    assert kernel.options["BLOCK_SIZE"] > 1024
    kernel.options = {}
    two = torch.stack([sampled, sampled], 1).long()
    assert torch.equal(scoring.compute_token_logprobs(logits, two), score(logits, two))
    assert not kernel.options


# What leaves an engine's core in a step: a number for each new token of an API server's outputs, in their order.


def output(name: str, *tokens: int) -> Any:
    return SimpleNamespace(
        request_id=name, new_token_ids=list(tokens), new_logprobs="vLLM's own", kv_transfer_params=None
    )


def client(*outputs: Any) -> Any:
    return SimpleNamespace(outputs=list(outputs))


def computed(*numbers: float, starts: list[int] | None = None) -> Any:
    column = np.array(numbers, dtype=np.float32)[:, None]
    return SimpleNamespace(logprobs=column, cu_num_generated_tokens=starts)


def packed(of_client: Any) -> list[float] | None:
    first, *others = of_client.outputs
    assert all(each.kv_transfer_params is None for each in others)
    return None if first.kv_transfer_params is None else np.frombuffer(first.kv_transfer_params[MARK], "f").tolist()


ROWS = {"a": 0, "b": 1, "c": 2, "d": 3}


def test_each_api_server_gets_the_numbers_of_its_own_outputs() -> None:
    clients = [client(output("d", 9), output("a", 9)), client(output("c")), client(output("b", 9), output("c"))]
    core._attach(clients, ROWS, computed(0.0, -1.0, -2.0, -3.0))
    assert [packed(each) for each in clients] == [[-3.0, 0.0], None, [-1.0]]


def test_of_accepted_drafts_each_has_its_number() -> None:
    clients = [client(output("b", 7, 8, 9), output("a", 5)), client(output("d", 4, 4))]
    numbers = computed(*(-float(each) for each in range(10)), starts=[0, 2, 5, 6])
    core._attach(clients, ROWS, numbers)
    assert [packed(each) for each in clients] == [[-2.0, -3.0, -4.0, 0.0], [-6.0, -7.0]]


def test_what_is_of_a_transfer_stays() -> None:
    one = client(output("a", 9))
    one.outputs[0].kv_transfer_params = {"remote": 1}
    core._attach([one], ROWS, computed(-1.0))
    assert one.outputs[0].kv_transfer_params["remote"] == 1
    assert MARK in one.outputs[0].kv_transfer_params


@pytest.mark.parametrize(("marked", "has"), [({"a", "d"}, True), ({"b"}, False)])
def test_marked_requests_lose_vllms_own(marked: set[str], has: bool) -> None:
    one = client(output("a", 9), output("c", 9))
    assert core._clear(one, marked) is has
    assert [each.new_logprobs for each in one.outputs] == [None if has else "vLLM's own", "vLLM's own"]


def test_what_truncation_left_comes_to_those_who_asked_for_it() -> None:
    """Of two API servers; where all that was looked at is left, or nobody asked, nothing is known."""
    cut, ids = -np.inf, np.array([[50, 50, 51, 52], [60, 61, 60, 62], [70, 70, 71, 72], [80, 80, 81, 82]])
    logprobs = np.array([[-1, -1, -2, cut], [-3, -1, -3, cut], [-1, -1, -2, -3], [-1, -1, cut, cut]], np.float32)
    step = SimpleNamespace(logprobs=logprobs, logprob_token_ids=ids, cu_num_generated_tokens=None)
    first, second = client(output("a", 50), output("d", 80)), client(output("c", 70), output("b", 60))
    core._attach([first, second, client(output("d"))], ROWS, step, {"a", "b", "c"})
    heard = {}
    for each in (first, second):
        states = {name: SimpleNamespace(logprobs_processor=SimpleNamespace()) for name in ROWS}
        for name, state in states.items():
            state.logprobs_processor.logprobs = ReplyLogprobs(streamed=True, masked=name != "d")
        rest = _distribute(each.outputs[:1], states, Arrived())
        assert len(rest.numbers) == 1
        assert not _distribute(each.outputs[1:], states, rest).numbers
        for out in each.outputs:
            keeper = states[out.request_id].logprobs_processor
            keeper.logprobs.add(keeper.arrived)
            keeper.logprobs.finished = True
            heard[out.request_id] = [list(part) for part in keeper.logprobs.due(1)]
        assert each.outputs[0].kv_transfer_params is None
    assert heard == {
        "a": [[-1.0], [2], [50, 51]],
        "b": [[-3.0], [2], [61, 60]],
        "c": [[-1.0], [0], []],
        "d": [[-1.0], [], []],
    }


def test_nobody_is_told_what_is_left_where_nothing_was_cut_off() -> None:
    one = client(output("a", 9))
    core._attach([one], ROWS, computed(-1.0))
    assert MASK not in one.outputs[0].kv_transfer_params
