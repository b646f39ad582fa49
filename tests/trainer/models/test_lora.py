"""An adapter is trained instead of the weights, and any tool that knows peft finds what was trained."""

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.trainer.factories import masters_of, sample
from tests.trainer.fine_tuning import LORA
from tuneloop.shared.capacity.memory import reckon
from tuneloop.shared.capacity.model_shape import read_shape
from tuneloop.shared.errors import EnvironmentRefused, SettingsError
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.batches.batch import assemble, collate
from tuneloop.trainer.checkpoints import snapshot

BATCHES = [[sample(10 * step + i) for i in range(8)] for step in range(4)]


def _contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _logprobs(network, ids):
    with torch.no_grad():
        logits = network(torch.tensor([ids])).logits[0, :-1].float()
    return logits.log_softmax(1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_only_the_adapter_is_trained(adapted, base):
    learner = snapshot.load(adapted(), None)
    before = {name: each.clone() for name, each in learner.actor.network.state_dict().items()}
    for batch in BATCHES[:2]:
        learner.step(batch)
    changed = {name for name, each in learner.actor.network.state_dict().items() if not torch.equal(each, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    assert len(changed) == 2 * 7 * 2  # two matrices for each of seven targets in two layers


def _tensors(network):
    """What a network computes with, but adapters."""
    named = [*network.named_parameters(), *network.named_buffers()]
    return {each.data_ptr(): each.nbytes for name, each in named if "lora_" not in name}


@pytest.mark.parametrize("bits", [None, 4])
def test_the_base_is_there_once_and_reckoned_once_and_the_adapters_twice(adapted, base, bits):
    chosen = adapted(model={"model_path": base, "lora": LORA | {"base_bits": bits}})
    learner = snapshot.load(chosen, None)
    ours = _tensors(learner.actor.network)
    assert _tensors(learner.critic.body) == ours
    assert _tensors(learner.reference.network) == ours
    assert not [each for each in learner.reference.network.parameters() if each.requires_grad]
    trained = {name: masters_of(each) for name, each in learner.optimizers.items()}
    adapter = sum(each.nbytes for each in trained["actor"])
    assert sum(each.nbytes for each in trained["critic"]) == adapter + 4 * (32 + 1)
    shape = read_shape(base)
    memory, less = (
        reckon(each, (shape, shape, None))
        for each in (chosen, chosen.model_copy(update={"algorithm": AlgorithmSettings(algorithm_type="reinforce")}))
    )
    assert memory.weights - less.weights == adapter
    assert (memory.optimizer, memory.gradients, memory.reference) == (2 * less.optimizer, 2 * adapter, 0)


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_a_step_of_one_does_not_move_the_other(adapted, name):
    learner = snapshot.load(adapted(), None)
    learner.step(BATCHES[0])  # Both have left where they began.
    batch = collate(assemble(BATCHES[1], merge=False))
    learner.forward_backward(batch, learner._targets(assemble(BATCHES[1], merge=False), batch)[0])
    before = {
        which: [each.clone() for each in model.parameters()]
        for which, model in (("actor", learner.actor.network), ("critic", learner.critic))
    }
    optimizer = learner.optimizers[name]
    optimizer.update(norm=optimizer.gradient_norm(), max_norm=1.0)
    for which, model in (("actor", learner.actor.network), ("critic", learner.critic)):
        moved = [not torch.equal(one, other) for one, other in zip(model.parameters(), before[which], strict=True)]
        assert sum(moved) == (len(masters_of(optimizer)) if which == name else 0)


def test_a_new_adapter_changes_nothing_and_the_reference_stays_there(adapted, settings):
    learner, bare = snapshot.load(adapted(), None), snapshot.load(settings(), None)
    ids = list(range(40, 60))
    assert learner.logprobs(ids) == bare.logprobs(ids)
    learner.step(BATCHES[0])
    trained = learner.logprobs(ids)
    assert trained != bare.logprobs(ids)
    learner.actor = learner.reference
    assert learner.logprobs(ids) == bare.logprobs(ids)


@pytest.mark.parametrize(
    ("dtype", "bits", "base_bits"), [("float32", 32, None), ("bfloat16", 32, 4), ("bfloat16", 8, None)]
)
def test_loaded_adapters_go_on_to_the_bit(adapted, base, tmp_path, dtype, bits, base_bits):
    chosen = adapted(
        trainer={"dtype": dtype},
        algorithm={"optimizer": {"lr": 1e-3, "bits": bits}, "mini_batches": 2},
        model={"model_path": base, "lora": LORA | {"base_bits": base_bits}},
    )

    def losses_of(learner, batches):
        return [[learner.step(batch)[name] for name in ("actor/pg_loss", "critic/vf_loss")] for batch in batches]

    straight = snapshot.load(chosen, None)
    losses = losses_of(straight, BATCHES)
    snapshot.save(straight, tmp_path / "straight", base=base)

    first = snapshot.load(chosen, None)
    again = losses_of(first, BATCHES[:2])
    snapshot.save(first, tmp_path / "half", base=base)
    second = snapshot.load(chosen, tmp_path / "half")
    again += losses_of(second, BATCHES[2:])
    snapshot.save(second, tmp_path / "again", base=base)

    assert again == losses
    assert _contents(tmp_path / "again") == _contents(tmp_path / "straight")
    types = {each.dtype for each in load_file(tmp_path / "again" / "actor" / "adapter_model.safetensors").values()}
    assert types == {getattr(torch, dtype)}
    for name, optimizer in second.optimizers.items():
        assert {each.dtype for each in masters_of(optimizer)} == {torch.float32}, name


def test_peft_and_the_merged_weights_find_the_probe_s_logprobs(adapted, base, tmp_path):
    learner = snapshot.load(adapted(), None)
    learner.step(BATCHES[0])
    snapshot.save(learner, tmp_path, base=base)
    probe = snapshot.probe(learner, adapted())()
    assert sorted(path.name for path in (tmp_path / "actor").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]

    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "actor")
    assert torch.allclose(_logprobs(theirs, probe.prompt_ids), torch.tensor(probe.logprobs), atol=1e-5)

    merged = AutoModelForCausalLM.from_pretrained(base)
    tensors = load_file(tmp_path / "actor" / "adapter_model.safetensors")
    assert tensors.keys() == get_peft_model_state_dict(theirs).keys()
    weights = dict(merged.named_parameters())
    for name in {each.rpartition(".lora_")[0] for each in tensors}:
        down, up = (tensors[f"{name}.lora_{part}.weight"] for part in "AB")
        assert up.abs().max() > 0
        weights[f"{name.removeprefix('base_model.model.')}.weight"].data += up @ down * 8 / 4
    assert torch.allclose(_logprobs(merged, probe.prompt_ids), torch.tensor(probe.logprobs), atol=1e-5)


def test_an_experiment_does_not_change_between_adapters_and_all_weights(adapted, settings, base, tmp_path):
    snapshot.save(snapshot.load(settings(), None), tmp_path / "full", base=base)
    snapshot.save(snapshot.load(adapted(), None), tmp_path / "lora", base=base)
    with pytest.raises(EnvironmentRefused, match=r"^model\.lora\.rank: is 4, but .* holds all weights"):
        snapshot.load(adapted(), tmp_path / "full")
    with pytest.raises(EnvironmentRefused, match=r"^model\.lora\.rank: is 0, but .* holds only an adapter"):
        snapshot.load(settings(), tmp_path / "lora")
    with pytest.raises(EnvironmentRefused, match=r"^model\.lora: the adapter in .* has rank 4, alpha 8 "):
        snapshot.load(adapted(model={"model_path": base, "lora": {"rank": 2}}), tmp_path / "lora")


LAYERS = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"


@pytest.mark.parametrize(
    ("targets", "wrong"),
    [
        (["c_attn"], "c_attn: engines serve no adapter of that"),
        (["q_proj", "lm_head", "embed_tokens", "v_proj"], "lm_head, embed_tokens: engines serve no adapter of that"),
        (["input_layernorm"], "input_layernorm: engines serve no adapter of that"),
        (["self_attn.q_proj"], "self_attn.q_proj: engines serve no adapter of that"),
        ([], "names no layer"),
    ],
)
def test_targets_that_no_engine_serves_are_refused_with_those_that_there_are(adapted, base, targets, wrong):
    chosen = adapted(model={"model_path": base, "lora": {"rank": 2, "targets": targets}})
    with pytest.raises(SettingsError) as refused:
        snapshot.load(chosen, None)
    assert str(refused.value) == f"model.lora.targets: {wrong}; the linear layers of this model are {LAYERS}"
