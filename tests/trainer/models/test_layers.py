"""Layers whose activations are made again, or that are compiled, learn the same."""

import shutil

import pytest
import torch
from structlog.testing import capture_logs

from tests.trainer.factories import gradients_of, sample
from tuneloop.trainer.batches.batch import assemble
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.learner import _collate
from tuneloop.trainer.models.model import is_compiling

SAMPLES = [sample(i) for i in range(6)]


def _gradients(settings, **trainer):
    """Those of an actor and a critic on a mini-batch, and how often the actor's first layer was run for them."""
    learner = snapshot.load(settings(trainer={"micro_batch_tokens": 4096, "dtype": "float32"} | trainer), None)
    torch.manual_seed(1)
    torch.nn.init.normal_(learner.critic.value_head.weight)
    for name, parameter in [*learner.actor.network.named_parameters(), *learner.critic.named_parameters()]:
        if "lora_B" in name:  # else the other half has no gradient
            torch.nn.init.normal_(parameter, std=0.1)
    sequences = assemble(SAMPLES, merge=False)
    batch = _collate(sequences, tempered=learner._asks.tempered)
    targets, _ = learner._targets(sequences, batch)
    runs = []
    learner.actor.network.model.layers[0].self_attn.register_forward_hook(lambda *_: runs.append(1))
    learner.forward_backward(batch, targets)
    return gradients_of(learner, "actor") | gradients_of(learner, "critic"), len(runs), learner


@pytest.mark.parametrize(("adapter", "bits"), [(0, None), (4, None), (4, 4)])
def test_activations_that_are_made_again_change_no_gradient(settings, base, adapter, bits):
    model = {"model_path": base, "lora": {"rank": adapter, "base_bits": bits}}

    def make(trainer):
        return settings(trainer=trainer, model=model)

    expected, once, plain = _gradients(make)
    found, twice, learner = _gradients(make, activation_checkpointing=True)
    assert (once, twice) == (1, 2)
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(found[name], each), name
        assert float(each.abs().max()) > 0 or not adapter, name
    ids_BT = torch.tensor([[5, 6, 7]])
    told = learner.actor.network.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), max_new_tokens=4)
    plain = plain.actor.network
    assert torch.equal(told, plain.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), max_new_tokens=4))


@pytest.mark.parametrize(
    ("wanted", "device", "compilers", "compiles"),
    [
        (None, "cuda", ["gcc"], True),
        (None, "cuda", [], False),
        (None, "cpu", ["gcc"], False),
        (False, "cuda", ["gcc"], False),
        (True, "cpu", [], True),
    ],
)
def test_layers_are_compiled_on_a_gpu_unless_there_is_nothing_to_compile_with(
    monkeypatch, wanted, device, compilers, compiles
):
    monkeypatch.setattr(shutil, "which", lambda name: name if name in compilers else None)
    monkeypatch.setattr(torch._dynamo.config, "suppress_errors", False)
    with capture_logs() as logs:
        assert is_compiling(wanted, torch.device(device)) is compiles
    assert [each["event"] for each in logs] == ["not_compiled"] * (wanted is None and device == "cuda" and not compiles)
    assert torch._dynamo.config.suppress_errors is (wanted is None and compiles)
