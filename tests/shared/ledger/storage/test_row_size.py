"""What an exchange takes in the database: hardly more than its bare numbers."""

import json
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, select

from tests.factories import exchange, experience
from tuneloop.shared.experience import pack_ids, pack_logprobs
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.schema import exchanges, experiences

VOCABULARY = 151_000
WORDS = ("the", "model", "answers", "a", "question", "about", "how", "its", "weights", "were", "trained", "then")
PROMPT = 1000


def text_of(tokens: int, random: np.random.Generator) -> str:
    """As long as so many tokens of English are, about four characters each."""
    return " ".join(random.choice(WORDS) + str(random.integers(10)) for _ in range(tokens))[: 4 * tokens]


def size(value: Any) -> int:
    """Bytes of a value as both databases store it."""
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, str):
        return len(value.encode())
    return 0 if value is None else 8


@pytest.mark.parametrize("tokens", [64, 512])
def test_a_row_is_within_a_tenth_and_300_bytes_of_its_numbers(ledger: Ledger, engine: Engine, tokens: int) -> None:
    """Counting the request and the text, on ids without any pattern: those of a real text compress better."""
    random = np.random.default_rng(tokens)
    request = json.dumps({"model": "m", "messages": [{"role": "user", "content": text_of(PROMPT, random)}]})
    choice = experience(
        prompt_ids=pack_ids(random.integers(0, VOCABULARY, PROMPT).tolist()),
        completion_ids=pack_ids(random.integers(0, VOCABULARY, tokens).tolist()),
        logprobs=pack_logprobs((-random.exponential(0.7, tokens)).tolist()),
        text=text_of(tokens, random),
    )
    ledger.recording.record([exchange(request=request.encode(), experiences=(choice,))])
    with engine.connect() as connection:
        rows = [connection.execute(select(table)).one() for table in (exchanges, experiences)]
    bare = 4 * (PROMPT + 2 * tokens)
    assert sum(size(value) for row in rows for value in row) <= 1.1 * bare + 300
