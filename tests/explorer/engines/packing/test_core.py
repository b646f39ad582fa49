"""What leaves an engine's core in a step: a number for each new token of an API server's outputs, in their order."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tuneloop.explorer.engines.packing import core
from tuneloop.explorer.engines.packing.patching import MARK


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
