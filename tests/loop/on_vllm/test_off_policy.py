"""On real vLLM: held-out replies are as likely to the engine as they are to the trainer with the same weights."""

import asyncio
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest

from tests.loop.harness.bare_engine import MODEL, session_of
from tuneloop.explorer.engines.fleet import Engine
from tuneloop.explorer.engines.vllm import EngineControl
from tuneloop.explorer.versions.engine_queries import EngineQueries
from tuneloop.shared.evaluation.off_policy import HeldOutReply
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.evaluation.off_policy import likelihoods
from tuneloop.trainer.models.model import Actor

pytestmark = pytest.mark.vllm

LONGEST = 4096  # as the engine of these tests is started


def reply(number: int, prompt: int, said: int) -> HeldOutReply:
    ids = np.random.default_rng(number).integers(0, 250, prompt + said, dtype=np.int32)
    return HeldOutReply(number, ids[:prompt], ids[prompt:], np.zeros(said, np.float32), 1.0, 0.0, None)


def test_the_engine_and_the_trainer_find_them_alike_up_to_the_longest(bare_engine: httpx.Client, model: Path) -> None:
    settings = Settings.model_validate({"model": {"model_path": model}, "trainer": {"device": "cpu"}})
    replies = [reply(number, 1 + 7 * number, 1 + 5 * number) for number in range(8)]
    replies.append(reply(9, LONGEST - 41, 40))

    async def asked() -> tuple[int, list[float]]:
        async with session_of(bare_engine) as session:
            engine = Engine(0, cast("Any", None), EngineControl(session, model_name=MODEL))
            told = await EngineQueries(settings, []).likelihoods(engine, replies, at_once=4)
            return await engine.control.max_sequence_length(), told

    longest, told = asyncio.run(asked())
    assert longest == LONGEST
    assert max(each.tokens for each in replies) == longest - 1
    expected = likelihoods(Actor.load(settings, model), replies, budget=4096)
    tokens = np.array([len(each.completion_ids) for each in replies])
    assert np.abs(np.array(told) - expected).max() < 0.05
    assert (np.abs(np.array(told) - expected) / tokens).max() < 1e-3
