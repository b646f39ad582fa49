"""From a request with `top_k` to a step: what that left is recorded, and the policy is the model among it."""

from base64 import b64encode
from threading import Event
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from tests.doubles.engine import EngineDouble, recorded
from tests.explorer.conftest import Run
from tests.explorer.conftest import double as double
from tests.explorer.conftest import doubles as doubles
from tests.explorer.conftest import places as places
from tests.explorer.conftest import running_explorer as running_explorer
from tests.explorer.conftest import warm_verifier as warm_verifier
from tests.explorer.running import HELLO
from tests.factories import feedback
from tests.trainer.conftest import base as base
from tests.trainer.conftest import ledger as ledger
from tests.trainer.conftest import settings as settings
from tests.trainer.factories import points
from tuneloop.explorer.engines.packing.wire import MASK_HEADER
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.trainer.loop import run
from tuneloop.trainer.models.model import Actor

KEPT = 5


def _packed(numbers: list[Any], kind: str) -> str:
    return b64encode(np.array(numbers, kind).tobytes()).decode()


@torch.no_grad()
def sampled(actor: Actor, *, temperature: float, seed: int, masked: bool = True) -> bytes:
    """What an engine with our plug-in answers: a reply of this model with `top_k`, and what that left."""
    reply = orjson.loads(recorded("whole_captured.json"))
    prompt, random = reply["prompt_token_ids"], torch.Generator().manual_seed(seed)
    ids: list[int] = []
    logprobs: list[float] = []
    kept: list[int] = []
    for _ in range(8):
        logits = actor.network(torch.tensor([[*prompt, *ids]])).logits[0, -1] / temperature
        left = logits.topk(KEPT)
        spread = left.values.log_softmax(0)
        chosen = int(torch.multinomial(spread.exp(), 1, generator=random))
        ids.append(int(left.indices[chosen]))
        logprobs.append(float(spread[chosen]))
        kept += left.indices.tolist()
    told = {"content": None, "packed": _packed(logprobs, "<f4")}
    if masked:
        told |= {"kept": _packed([KEPT] * len(ids), "<i4"), "kept_ids": _packed(kept, "<i4")}
    reply["choices"][0] |= {"token_ids": ids, "logprobs": told}
    return orjson.dumps(reply)


def test_replies_with_top_k_are_trained_on_among_what_it_left(
    running_explorer: Run, double: EngineDouble, settings: Any, ledger: Ledger
) -> None:
    chosen = settings(
        trainer={"total_steps": 1},
        buffer={"train_batch_size": 8},
        algorithm={"algorithm_type": "ppo", "optimizer": {"lr": 1e-3}, "kl_coef": 0.1, "entropy_coef": 0.01},
    )
    actor, explorer = Actor.load(chosen, chosen.model.model_path), running_explorer(double)
    body = HELLO | {"top_k": KEPT, "temperature": 0.7}
    for seed in range(9):
        double.answer = sampled(actor, temperature=0.7, seed=seed, masked=seed < 8)
        reply = explorer.http.post("/v1/chat/completions", json=body).raise_for_status().json()
        assert reply["choices"][0]["logprobs"] is None
        assert double.chats[-1].headers[MASK_HEADER.lower()] == "1"
    explorer.http.post("/v1/chat/completions", json=HELLO).raise_for_status()
    assert MASK_HEADER.lower() not in double.chats[-1].headers
    exchanges = explorer.exchanges()[:9]
    assert [each.experiences[0].unsampled for each in exchanges] == [None] * 8 + ["sampling:top_k"]
    told = [feedback(msg_id=each.msg_id, tenant=each.tenant, value=float(n % 2)) for n, each in enumerate(exchanges)]
    ledger.recording.record([*exchanges, *told])
    ledger.recording.commit(exchanges[0].tenant)
    run(chosen, Event())
    counts = ledger.reports.counts()
    assert (counts[State.TRAINED], counts[State.DROPPED]) == (8, 1)
    [(_, mismatch)] = points(chosen.tensorboard_dir / "trainer", "mismatch_kl/fresh")
    assert mismatch == pytest.approx(0, abs=1e-6)
    [(_, entropy)] = points(chosen.tensorboard_dir / "trainer", "actor/entropy")
    assert 0 < entropy <= np.log(KEPT)
