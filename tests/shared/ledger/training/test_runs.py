"""The calls of a run: how many there are, and what is read of them in training."""

import json
from collections.abc import Sequence
from typing import Any

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


USER, AGAIN = {"role": "user", "content": "When?"}, {"role": "user", "content": "Sure?"}


@pytest.mark.parametrize(
    ("second", "turns", "told"),
    [
        # "abc" asked, "<T>x" replied: a thought, and a text.
        ("abc<T>xd", [USER, {"role": "assistant", "content": "x"}, AGAIN], None),
        (
            "abcxd",
            [USER, {"role": "assistant", "content": "x"}, AGAIN],
            "turn 2 lacks the reasoning of turn 1: send its assistant turn back with `reasoning`",
        ),
        (
            "abcxd",
            [USER, {"role": "assistant", "content": "x", "reasoning_content": "T"}, AGAIN],
            "turn 2 has the reply of turn 1 otherwise, from token 1 on: it was edited, or the template",
        ),
        (
            "abcxd",
            [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "T"}]}, AGAIN],
            "turn 2 has the reply of turn 1 otherwise, from token 1 on",
        ),
        (
            "abc<T>yd",
            [USER, {"role": "assistant", "content": "y"}, AGAIN],
            "turn 2 has the reply of turn 1 otherwise, f",
        ),
        ("aXc<T>xd", [USER, AGAIN], "turn 2 leaves the prompt of turn 1 at its token 2 of 3: other instructions"),
        ("abc", [USER], "turn 2 asks the same as turn 1"),
        ("abcxd", None, "turn 2 has the reply of turn 1 otherwise, from token 1 on"),
    ],
)
def test_a_run_says_why_its_calls_are_several_sequences(
    ledger: Ledger, second: str, turns: list[Any] | None, told: str | None
) -> None:
    def asked(prompt: str, turns: object) -> Exchange:
        made = call(prompt, "<T>x")
        ids = {"prompt_ids": made.prompt_ids.tobytes(), "completion_ids": made.completion_ids.tobytes()}
        tokens = experience(**ids, logprobs=pack_logprobs([-0.5] * 4))
        body = json.dumps({"messages": turns}).encode()
        return exchange(task_id="t", run_id="1", request=body, experiences=(tokens,))

    first = asked("abc", [USER])
    ledger.recording.record([first, asked(second, turns)])
    found = ledger.runs.find_breaks("acme", "t", "1")
    assert found == ledger.runs.find_breaks_beside(first.msg_id)
    assert [each.startswith(told or "") for each in found] == ([True] if told else [])
    assert (ledger.runs.count_tokens("acme", "t", "1").sequences > 1) is (told is not None)


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
