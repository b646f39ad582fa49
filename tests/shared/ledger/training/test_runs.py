"""The calls of a run: how many there are, and what is read of them in training."""

from collections.abc import Sequence

import numpy as np
import pytest
from sqlalchemy import Engine

from tests.doubles.clock import Clock
from tests.factories import exchange, experience
from tuneloop.shared.experience import Exchange, pack_ids, pack_logprobs
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.training.groups import CallTokens, RunTokens, count_tokens, merge_calls


def call(prompt: str, reply: str) -> CallTokens:
    return CallTokens(np.frombuffer(prompt.encode(), np.uint8).astype(np.int32), np.array([*reply.encode()], np.int32))


@pytest.mark.parametrize(
    ("calls", "sequences", "counts"),
    [
        ([], [], (0, 0, 0, 0, 0)),
        ([("ab", "c")], [[0]], (1, 3, 1, 1, 3)),
        ([("ab", "c"), ("abcd", "e"), ("abcdef", "g")], [[0, 1, 2]], (3, 15, 3, 1, 7)),
        ([("ab", "c"), ("xy", "z"), ("abcd", "e"), ("xyzu", "v")], [[0, 2], [1, 3]], (4, 16, 4, 2, 10)),
        ([("ab", "c"), ("abd", "e")], [[0], [1]], (2, 7, 2, 2, 7)),
        ([("ab", "c"), ("ab", "c")], [[0], [1]], (2, 6, 2, 2, 6)),
        ([("a", "b"), ("abc", "d"), ("abx", "y"), ("abcde", "f")], [[0, 1, 3], [2]], (4, 16, 4, 2, 10)),
        ([("", "ab"), ("abc", "d")], [[0, 1]], (2, 6, 3, 1, 4)),
    ],
    ids=["none", "one", "a conversation", "two agents", "an edited history", "asked again", "a fork", "no prompt"],
)
def test_calls_that_continue_one_another_are_one_sequence(
    calls: list[tuple[str, str]], sequences: list[list[int]], counts: tuple[int, ...]
) -> None:
    made = [call(*each) for each in calls]
    place = {id(each): at for at, each in enumerate(made)}
    assert [[place[id(each)] for each in found] for found in merge_calls(made)] == sequences
    assert tuple(count_tokens(made)) == counts


def test_a_run_is_counted_as_its_replies_were_sampled(engine: Engine, clock: Clock) -> None:
    ledger = Ledger(engine, clock=clock)

    def said(at: float, prompt: Sequence[int], reply: Sequence[int], run_id: str = "1") -> Exchange:
        numbers = {"completion_ids": pack_ids(reply), "logprobs": pack_logprobs([-0.5] * len(reply))}
        tokens = experience(prompt_ids=pack_ids(prompt), **numbers)
        return exchange(task_id="t", run_id=run_id, received_at=at, experiences=(tokens,))

    later, sooner = said(8.0, (1, 2, 3, 4), (5,)), said(7.0, (1, 2), (3,))
    ledger.recording.record([later, sooner, said(9.0, (1, 2, 3), (4,), run_id="2")])
    assert ledger.runs.count_calls("acme", "t", "1") == 2
    assert ledger.runs.count_tokens("acme", "t", "1") == RunTokens(2, 8, 2, 1, 5)
    assert ledger.runs.count_tokens("acme", "t", "3") == RunTokens(0, 0, 0, 0, 0)
    assert ledger.runs.count_tokens("another", "t", "1") == RunTokens(0, 0, 0, 0, 0)
