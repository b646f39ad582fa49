"""Grammars are rebuilt as the engine enforced them, and log-probabilities are those among the tokens they allow."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xgrammar

from examples.sums.model import build, save
from tests.trainer.factories import sample
from tuneloop.shared.experience import Grammar, Sample, pack_ids
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.batch import Batch, TokenSequence, assemble, collate
from tuneloop.trainer.batches.selection import select, with_allowed_tokens
from tuneloop.trainer.batches.tokenizer import tokenizer_of
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.models.model import Actor

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
YES_OR_NO = Grammar(kind="json", spec=json.dumps(SCHEMA))
TAGGED = Grammar(
    kind="structural_tag",
    spec=json.dumps(
        {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["<tool_call>"],
                "tags": [
                    {
                        "begin": '<tool_call>{"name": "add", "arguments": ',
                        "content": {"type": "json_schema", "json_schema": SCHEMA},
                        "end": "}</tool_call>",
                    }
                ],
            },
        }
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are bytes."""
    found = tmp_path_factory.mktemp("bytes")
    save(*build(), found)
    return found


@pytest.fixture
def of_bytes(settings: Callable[..., Settings], folder: Path) -> Callable[..., Settings]:
    """Makes settings of an experiment with it."""
    return lambda **but: settings(**{"model": {"model_path": folder}, **but})


@pytest.fixture
def actor(of_bytes: Callable[..., Settings], folder: Path) -> Actor:
    return Actor.load(of_bytes(), folder)


def _ids(settings: Settings, text: str) -> np.ndarray[Any, Any]:
    return np.array(tokenizer_of(settings).encode(text, add_special_tokens=False), np.int32)


def _sampled(actor: Actor, settings: Settings, grammar: Grammar, *, temperature: float = 0.7, seed: int = 0) -> Sample:
    """A reply as an engine samples it: one step at a time, every forbidden token's logit at minus infinity."""
    words = tokenizer_of(settings)
    info = xgrammar.TokenizerInfo.from_huggingface(words, vocab_size=actor.vocabulary)  # type: ignore[arg-type]
    compiler = xgrammar.GrammarCompiler(info)
    compiled = (
        compiler.compile_json_schema(grammar.spec)
        if grammar.kind == "json"
        else compiler.compile_structural_tag(grammar.spec)
        if grammar.kind == "structural_tag"
        else compiler.compile_regex(grammar.spec)
    )
    matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[words.eos_token_id, *grammar.stop_ids])
    random, prompt = torch.Generator().manual_seed(seed), _ids(settings, "a<tool_call>"[: 1 + 11 * (seed % 2)])
    ids: list[int] = []
    logprobs: list[float] = []
    with torch.no_grad():
        while len(ids) < 60 and not matcher.is_terminated():
            logits = actor.network(torch.tensor([[*prompt.tolist(), *ids]])).logits[0, -1:].float()
            bitmask = xgrammar.allocate_token_bitmask(1, actor.vocabulary)
            matcher.fill_next_token_bitmask(bitmask)
            xgrammar.apply_token_bitmask_inplace(logits, bitmask)
            spread = (logits[0] / temperature).log_softmax(0)
            chosen = int(torch.multinomial(spread.exp(), 1, generator=random))
            assert matcher.accept_token(chosen)
            ids.append(chosen)
            logprobs.append(float(spread[chosen]))
    return sample(
        seed,
        prompt_ids=prompt,
        completion_ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        temperature=temperature,
        grammar=grammar,
        reward=float(seed % 2),
    )


def _scored(actor: Actor, samples: list[Sample]) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    batch = collate(assemble(samples, merge=False))
    return batch, *actor.score(batch)


REGEX = Grammar(kind="regex", spec="[a-z]{3}[A-Z]+", stop_ids=(200,))


@pytest.mark.parametrize("grammar", [YES_OR_NO, TAGGED, REGEX])
def test_the_ratio_is_one_under_the_grammar(actor: Actor, of_bytes: Callable[..., Settings], grammar: Grammar) -> None:
    settings = of_bytes()
    given = [_sampled(actor, settings, grammar, seed=seed) for seed in range(6)]
    held, refused = with_allowed_tokens(given, settings, vocabulary=actor.vocabulary)
    assert refused == {}
    batch, logprobs_BR, entropy_BR = _scored(actor, held)
    assert torch.allclose(logprobs_BR, batch.sampled_BR, atol=1e-4)
    assert torch.isfinite(entropy_BR).all()
    free, logprobs_free_BR, _ = _scored(actor, given)
    assert free.held_BR is None
    if grammar is not TAGGED:
        assert not torch.allclose(logprobs_free_BR, batch.sampled_BR, atol=0.1)


def test_calls_that_share_a_sequence_keep_each_its_own_grammar(actor: Actor, of_bytes: Callable[..., Settings]) -> None:
    settings = of_bytes()
    first = _sampled(actor, settings, YES_OR_NO)
    ids = np.concatenate([first.prompt_ids, first.completion_ids, _ids(settings, "go on")])
    free = sample(9, prompt_ids=ids, completion_ids=np.array([70, 71], np.int32), logprobs=np.zeros(2, np.float32))
    [held, other], _ = with_allowed_tokens([first, free], settings, vocabulary=actor.vocabulary)
    merged = TokenSequence.alone(held).then(other)
    batch = collate([merged])
    assert batch.held_BR is not None
    length = len(held.completion_ids)
    assert held.allowed is not None
    assert batch.held_BR[0, :length].tolist() == held.allowed.at.tolist()
    assert batch.held_BR[0, length:].tolist() == [-1] * (len(merged.ids) - merged.start - length)
    alone_BR, _ = actor.score(collate([TokenSequence.alone(held)]))
    together_BR, _ = actor.score(batch)
    assert torch.allclose(together_BR[0, :length], alone_BR[0], atol=1e-5)


def _truncated(actor: Actor, number: int, *, largest: int, temperature: float = 0.7) -> Sample:
    """A reply as an engine samples it that leaves so many tokens at most, and tells these."""
    random, prompt = np.random.default_rng(number), np.array([5, 6, number], np.int32)
    ids: list[int] = []
    logprobs: list[float] = []
    left: list[list[int]] = []
    for _ in range(5):
        with torch.no_grad():
            logits = actor.network(torch.tensor([[*prompt.tolist(), *ids]])).logits[0, -1] / temperature
        best = logits.topk(int(random.integers(1, largest + 1)))
        spread = best.values.log_softmax(0)
        chosen = int(random.integers(len(spread)))
        left.append(best.indices.tolist())
        ids.append(left[-1][chosen])
        logprobs.append(float(spread[chosen]))
    return sample(
        number,
        prompt_ids=prompt,
        completion_ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        temperature=temperature,
        grammar=Grammar(kind="tokens", spec="", sets=pack_ids([*map(len, left), *(i for each in left for i in each)])),
    )


def test_the_ratio_is_one_among_what_truncation_left(actor: Actor, of_bytes: Callable[..., Settings]) -> None:
    """Beside replies under a grammar and free ones, in one batch and in its parts."""
    settings = of_bytes()
    cut = [_truncated(actor, number, largest=number) for number in (4, 9, 60)]
    grammar, free = _sampled(actor, settings, YES_OR_NO), sample(8)
    held, refused = with_allowed_tokens([cut[0], grammar, *cut[1:], free], settings, vocabulary=actor.vocabulary)
    assert refused == {}
    batch, logprobs_BR, entropy_BR = _scored(actor, held)
    assert torch.allclose(logprobs_BR[:4], batch.sampled_BR[:4], atol=1e-4)
    assert torch.isfinite(entropy_BR).all()
    for index in ([0, 2], [1, 4], [3], [4]):
        part = batch.rows(torch.tensor(index))
        assert (part.left_LS is None) is (index == [1, 4] or index == [4])
        assert part.left_LS is None or len(part.left_LS) <= 5 * len(index)
        found_BR, _ = actor.score(part)
        assert torch.allclose(found_BR, logprobs_BR[index, : found_BR.shape[1]] * part.mask_BR, atol=1e-5)
    _, unmasked_BR, _ = _scored(actor, cut)
    assert not torch.allclose(unmasked_BR, torch.from_numpy(np.stack([each.logprobs for each in cut])), atol=0.1)


def test_what_cannot_be_left_is_refused(actor: Actor, of_bytes: Callable[..., Settings]) -> None:
    said = _truncated(actor, 3, largest=3)
    assert said.grammar is not None
    numbers = np.frombuffer(said.grammar.sets, np.int32)
    outside, foreign = numbers.copy(), numbers.copy()
    outside[-1] = actor.vocabulary
    foreign[5:] = 7 if 7 not in said.completion_ids else 8
    bad = [pack_ids(each.tolist()) for each in (numbers[:3], numbers[:-1], outside, foreign)]
    alone = pack_ids([1] * 5 + said.completion_ids.tolist())
    masks = [Grammar(kind="tokens", spec="", sets=sets) for sets in (*bad, alone)]
    doubted = said.logprobs - np.float32(1)
    given = [msgspec.structs.replace(said, id=n, logprobs=doubted, grammar=each) for n, each in enumerate(masks)]
    kept, refused = with_allowed_tokens([said, *given], of_bytes(), vocabulary=actor.vocabulary)
    assert [each.id for each in kept] == [said.id]
    [(reason, dropped)] = refused.items()
    assert reason.startswith("the engine's list of tokens that truncation left is wrong")
    assert [each.id for each in dropped] == [0, 1, 2, 3, 4]


def test_a_step_begins_at_ratio_one_and_learns(actor: Actor, of_bytes: Callable[..., Settings]) -> None:
    settings = of_bytes(algorithm={"algorithm_type": "reinforce", "kl_coef": 0.1, "entropy_coef": 0.01})
    learner = Learner(settings, actor=actor, critic=None, reference=actor.reference(settings))
    given = [_sampled(actor, settings, YES_OR_NO, temperature=1.0, seed=seed) for seed in range(8)]
    kept, refused = select(given, settings, vocabulary=actor.vocabulary)
    assert refused == {}
    before = [each.clone() for each in actor.network.parameters()]
    metrics = learner.step(kept, version=0)
    assert metrics["mismatch_kl/fresh"] == pytest.approx(0, abs=1e-6)
    assert any(not torch.equal(old, new) for old, new in zip(before, actor.network.parameters(), strict=True))


def test_a_reply_that_the_grammar_does_not_allow_is_refused(actor: Actor, of_bytes: Callable[..., Settings]) -> None:
    settings = of_bytes()
    said = _sampled(actor, settings, YES_OR_NO)
    other = sample(1, completion_ids=_ids(settings, "hello"), logprobs=np.full(5, -1, np.float32), grammar=YES_OR_NO)
    in_doubt = sample(
        2, completion_ids=said.completion_ids, logprobs=said.logprobs - np.float32(0.5), grammar=YES_OR_NO
    )
    unreadable = sample(3, grammar=Grammar(kind="json", spec='{"type": 3}'))
    kept, refused = with_allowed_tokens([said, other, in_doubt, unreadable], settings, vocabulary=actor.vocabulary)
    assert [each.id for each in kept] == [said.id]
    by_reason = {reason: [each.id for each in samples] for reason, samples in refused.items()}
    assert sorted(by_reason.values()) == [[1, 2], [3]]
    assert any(reason.startswith("the grammar that held it cannot be rebuilt: ") for reason in by_reason)


def test_without_xgrammar_it_is_said_what_is_missing(
    actor: Actor, of_bytes: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "same"
    save(*build(), elsewhere)
    said = _sampled(actor, of_bytes(), YES_OR_NO)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    settings = of_bytes(model={"model_path": elsewhere})
    kept, refused = with_allowed_tokens([said, sample(7)], settings, vocabulary=actor.vocabulary)
    assert [each.id for each in kept] == [7]
    [(reason, [dropped])] = refused.items()
    assert dropped is said
    assert 'pip install ./runner ".[grammar]"' in reason
