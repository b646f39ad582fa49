"""A judge that real vLLM serves: what it is asked, vLLM takes, and what vLLM holds it to is a verdict."""

from collections.abc import Iterator

import httpx
import pytest

from tests.loop.harness.bare_engine import KEY, MODEL, url_of
from tuneloop.runner import Judge, Reply

pytestmark = [pytest.mark.vllm, pytest.mark.contract]

CRITERIA = {"relevance": "Does it answer what was asked?", "accuracy": "Is it correct?"}
REPLY = Reply(text="Monday.", messages=({"role": "user", "content": "Where is my parcel?"},))


@pytest.fixture
def judge(bare_engine: httpx.Client) -> Iterator[Judge]:
    # A model that knows nothing ends a word by chance alone, so it must not be asked for its likeliest one.
    judge = Judge(
        base_url=f"{url_of(bare_engine)}/v1", model=MODEL, api_key=KEY, criteria=CRITERIA, temperature=1.0, timeout=120
    )
    yield judge
    judge.close()


def test_scores_are_on_the_scale(judge: Judge) -> None:
    verdict = judge.score(REPLY)
    assert set(verdict.scores) == set(CRITERIA)
    assert all(score in range(1, 6) for score in verdict.scores.values())
    assert verdict.normalised == pytest.approx((sum(verdict.scores.values()) / 2 - 1) / 4)
    assert verdict.prompt_tokens > len("Where is my parcel?")
    assert judge.endpoint._refused == set()


def test_one_of_two_is_better_or_neither(judge: Judge) -> None:
    preference = judge.compare(REPLY, Reply(text="No.", messages=REPLY.messages))
    assert preference.winner in {"a", "b", "tie"}
    assert preference.consistent or preference.winner == "tie"
