"""Packed rows: the numbers are those of transformers' plain forward, sequence by sequence, and nothing is padded."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests.loop.harness.architectures import make_architecture
from tests.trainer.factories import gradients_of, sample
from tuneloop.trainer.algorithms import ALGORITHMS
from tuneloop.trainer.batches.batch import assemble, collate
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.learner import _collate
from tuneloop.trainer.models import attention
from tuneloop.trainer.models.attention import bounds_of, enable_packing
from tuneloop.trainer.models.model import Actor

#: What each method looks at: the base model, the start of the step, the entropy.
_POLICY = {"kl_coef": 0.05, "entropy_coef": 0.02, "off_policy": {"proximal": "recomputed"}}
METHODS = {name: _POLICY for name in ALGORITHMS if name not in {"sft", "raft", "dpo", "kto"}} | {
    name: {} for name in ("sft", "raft", "dpo", "kto")
}
_BUDGET = 40


def _samples():
    """Two groups of four replies to one prompt, better and worse by turns, of lengths of their own."""
    made = []
    for number in range(8):
        like, group = sample(number), number // 4
        prompt = sample(100 + group, prompt_ids=np.arange(20 + 5 * group, 31 + 8 * group, dtype=np.int32)).prompt_ids
        made.append(
            sample(
                number,
                prompt_ids=prompt,
                completion_ids=like.completion_ids % 200,
                logprobs=like.logprobs,
                reward=float(number % 2 == 0) + 0.1 * group,
                group_id=group,
                task_id=f"t{group}",
                run_id=str(number),
            )
        )
    return made


class _Opinions:
    """A teacher that thinks little of everything."""

    def score(self, sequences, *, tokens):
        widest = max(int((len(each.ids)) - each.start) for each in sequences)
        return -torch.rand(len(sequences), widest, generator=torch.Generator().manual_seed(1)) - 1


def _collated(samples):
    return collate(assemble(samples, merge=False))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: make_architecture(name, folder / name.split()[0], seed=3) for name in ("Qwen2", "Qwen3", "Llama")}


def _plain(network, batch):
    """Log-probabilities and entropies of shape BR, one sequence at a time, from all logits at once."""
    logprobs_BR, entropy_BR = (torch.zeros(batch.mask_BR.shape) for _ in range(2))
    for row, length in enumerate(batch.lengths_B.tolist()):
        logits_TV = network(input_ids=batch.ids_BT[row : row + 1, :length]).logits[0]
        mask_R = batch.mask_BR[row]
        chosen_NV = logits_TV[batch.predicts_BT[row, :length]] / batch.temperatures_BR[row, mask_R][:, None]
        spread_NV = chosen_NV.log_softmax(1)
        said_N = spread_NV.gather(1, batch.replies_BR[row, mask_R][:, None])[:, 0]
        at = (torch.tensor(row), mask_R.nonzero()[:, 0])
        logprobs_BR = logprobs_BR.index_put(at, said_N)
        entropy_BR = entropy_BR.index_put(at, -(spread_NV.exp() * spread_NV).sum(1))
    return logprobs_BR, entropy_BR


def _plain_values(body, head, batch):
    values_BR = torch.zeros(batch.mask_BR.shape)
    for row, length in enumerate(batch.lengths_B.tolist()):
        states_TD = body(input_ids=batch.ids_BT[row : row + 1, :length]).last_hidden_state[0]
        values_N = head(states_TD[batch.predicts_BT[row, :length]])[:, 0]
        values_BR = values_BR.index_put((torch.tensor(row), batch.mask_BR[row].nonzero()[:, 0]), values_N)
    return values_BR


def _agree(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Llama"])
def test_every_method_has_the_numbers_and_gradients_of_the_plain_forward(settings, models, name, method):
    folder = models[name]
    learner = snapshot.load(
        settings(
            algorithm={"algorithm_type": method, "distill": {"teacher_path": folder}, "mini_batches": 1, "kl_coef": 0.0}
            | METHODS[method],
            buffer={"group_by": "task"},
            model={"model_path": folder},
            trainer={"micro_batch_tokens": _BUDGET, "dtype": "float32"},
        ),
        None,
    )
    assert learner.actor.is_packed
    learner.teacher = _Opinions()
    plain, body = AutoModelForCausalLM.from_pretrained(folder), AutoModel.from_pretrained(folder)
    if learner.critic is not None:
        torch.nn.init.normal_(learner.critic.value_head.weight, std=0.1)
    sequences = assemble(_samples(), merge=False)
    batch = _collate(sequences, tempered=learner._asks.tempered)
    targets, _ = learner._targets(sequences, batch)
    logprobs_BR, entropy_BR = _plain(plain, batch)
    with torch.no_grad():
        for each_BR in (targets.reference_BR, targets.start_BR):
            if each_BR is not None:  # neither has been trained yet
                _agree(each_BR, logprobs_BR)
    found = learner.forward_backward(batch, targets)
    algorithm, page = learner._algorithm, ALGORITHMS[method]
    loss = page.actor_loss(algorithm, targets, logprobs_BR, entropy_BR, targets.totals)
    loss.value.backward()
    for metric, value in loss.metrics.items():
        if metric == "rewards/accuracies":  # A margin of 0 before the first update: rounding says which is better.
            continue
        assert found[metric] == pytest.approx(float(value), rel=1e-5, abs=1e-5), metric
    ours, theirs = gradients_of(learner, "actor"), dict(plain.named_parameters())
    for parameter, _ in learner.actor.network.named_parameters():
        _agree(ours.get(parameter), theirs[parameter].grad)
    if learner.critic is not None:
        values_BR = _plain_values(body, learner.critic.value_head, batch)
        _agree(targets.values_BR, values_BR)
        learner.critic.value_head.zero_grad()
        page.critic_loss(algorithm, targets, values_BR, targets.totals).value.backward()
        ours, theirs = gradients_of(learner, "critic"), dict(body.named_parameters())
        for parameter, _ in learner.critic.body.named_parameters():
            _agree(ours.get(f"body.{parameter}"), theirs[parameter].grad)


def test_a_model_whose_attention_cannot_be_packed_is_padded_and_says_so(settings, tmp_path):
    folder = make_architecture("Gemma 2 (tied)", tmp_path / "model", seed=1)
    learner = snapshot.load(settings(model={"model_path": folder}, algorithm={"mini_batches": 1}), None)
    assert not learner.actor.is_packed
    batch = _collated(_samples())
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        _agree(learner.actor.score(batch), _plain(plain, batch))
    assert 0.5 < learner.step(_samples())["perf/useful_tokens"] < 1


_TINY = {
    "vocab_size": 250,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
_WINDOWS = {"sliding_window": 6}


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "phi3", "granite"])
def test_windows_and_logits_that_are_scaled_after_the_head_are_packed_too(kind):
    """Granite divides its logits; the others look back six tokens, Gemma 3 in some of its layers."""
    config = AutoConfig.for_model(kind, **_TINY, **({"logits_scaling": 3.0} if kind == "granite" else _WINDOWS))
    torch.manual_seed(5)
    network, plain = AutoModelForCausalLM.from_config(config).eval(), AutoModelForCausalLM.from_config(config).eval()
    plain.load_state_dict(network.state_dict())
    enable_packing(network)
    actor, batch = Actor(network), _collated(_samples())
    assert actor.is_packed
    assert int(batch.lengths_B.max()) > 12
    with torch.no_grad():
        scored = actor.score(batch)
        _agree(scored, _plain(plain, batch))
        _agree(actor.logprobs(batch), scored[0])
    if kind in {"mistral", "phi3"}:
        plain.config.sliding_window = None
        with torch.no_grad():
            assert not torch.allclose(_plain(plain, batch)[0], scored[0], atol=1e-3)


def _by_hand(query, key, value, ends, _, longest, _also, *, scale, window_size, enable_gqa=False, is_told=False):
    """What torch says of `varlen_attn`: tokens x heads x width, (how far back, how far ahead), in float64."""
    assert longest == ends.diff().max()
    repeats = query.shape[1] // key.shape[1]
    assert repeats > 1, "the keys of several heads are read once, not copied"
    assert enable_gqa == is_told
    key, value = (each.repeat_interleave(repeats, dim=1).double() for each in (key, value))
    at, of = torch.arange(len(query)), torch.bucketize(torch.arange(len(query)), ends[1:], right=True)
    back, (left, right) = at[:, None] - at, window_size
    seen = (of[:, None] == of) & (back >= -right) & ((back <= left) | torch.tensor(left < 0))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -1e30).softmax(-1), value).to(query.dtype)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_a_gpu_s_kernel_is_asked_for_what_the_cpu_makes(monkeypatch, window, grouped):
    monkeypatch.setattr(attention, "_KERNEL_HAS_GQA", grouped)
    monkeypatch.setattr(attention.varlen, "varlen_attn", partial(_by_hand, is_told=grouped))
    query, key, value = (
        torch.randn(1, heads, 14, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2)
    )
    bounds = bounds_of([7, 3, 3, 1], torch.device("cpu"))
    ends, longest = bounds["cu_seq_lens_q"], bounds["max_length_q"]
    attended = attention._in_one(query, key, value, ends, longest, 0.3, window)
    _agree(attended, attention._by_length(query, key, value, ends, 0.3, window))


def test_with_a_gpu_s_kernel_a_layer_is_compiled_in_one_piece(monkeypatch):
    """Whatever breaks it costs a third of a step's time, and nothing says so."""

    def kernel(query, key, value, ends, _, longest, _also, *, scale, window_size, enable_gqa=False):
        return attended(query, key, value)

    @torch.library.custom_op("tuneloop_tests::attended", mutates_args=())
    def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query + key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)

    attended.register_fake(lambda query, *_: torch.empty_like(query))
    monkeypatch.setattr(attention, "_KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(attention.varlen, "varlen_attn", kernel)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    network = AutoModel.from_config(config, dtype=torch.bfloat16)
    network.set_attn_implementation(attention.PACKED)
    network.layers[0].compile(dynamic=True, fullgraph=True, backend="eager")
    ids_BT, device = torch.arange(14)[None], torch.device("cpu")
    with torch.no_grad():
        network(
            input_ids=ids_BT, attention_mask=attention.no_mask(device), use_cache=False, **bounds_of([7, 7], device)
        )
    assert attention.is_packable(network)


def test_a_gpu_s_kernel_takes_what_it_is_given():
    """Its shapes alone, forth and back: there is no GPU here."""
    query, key = (
        torch.empty(1, heads, 14, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2)
    )
    attended = attention._in_one(query, key, key, torch.empty(5, device="meta", dtype=torch.int32), 7, 0.3, 3)
    assert attended.shape == (1, 14, 4, 64)
    attended.sum().backward()
    assert query.grad.shape == query.shape
