"""What leaves an engine's core in a step: a number for each new token of an API server's outputs, in their order."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tuneloop.explorer.engines.packing import core
from tuneloop.explorer.engines.packing.front_end import Arrived, ReplyLogprobs, _distribute
from tuneloop.explorer.engines.packing.patching import MARK, MASK


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
