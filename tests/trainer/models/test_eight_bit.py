"""AdamW in 8 bits: as small as it says, the same after a restart to the bit, and it learns as 32 bits do."""

import pytest
import torch
from structlog.testing import capture_logs

from tests.trainer.factories import sample
from tuneloop.shared.capacity.memory import EIGHT_BIT_MOMENTS
from tuneloop.shared.settings.algorithm import OptimizerSettings
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.models.optimizer import MasterAdamW

BITS = {"optimizer": {"lr": 1e-3, "bits": 8}, "critic_optimizer": {"lr": 1e-3}}


def _optimizer(weights, **but):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weights.clone())
    return module, MasterAdamW(module, OptimizerSettings(**{"lr": 1e-2} | but))


def _updated(bits, gradients, *, weights=None):
    """The weights after an update with each of the gradients."""
    module, optimizer = _optimizer(torch.zeros_like(gradients[0]) if weights is None else weights, bits=bits)
    for gradient in gradients:
        module.weight.grad = gradient.clone()
        optimizer.add_up()
        optimizer.update(norm=1.0, max_norm=1e9)
    return module.weight.detach()


def test_a_parameter_takes_a_byte_for_each_moment(settings, wide):
    learner = snapshot.load(settings(algorithm=BITS, model={"model_path": wide}), None)
    learner.step([sample(i) for i in range(4)])
    kept = dict(learner.optimizers["actor"].state())
    embeddings = learner.actor.network.get_input_embeddings().weight
    taken = sum(each.nbytes for name, each in kept.items() if "embed" in name and "step" not in name)
    assert taken / embeddings.numel() == pytest.approx(EIGHT_BIT_MOMENTS)
    assert kept["exp_avg.model.norm.weight"].dtype == torch.float32, "there are few of these"


def test_updates_are_those_of_32_bits_but_for_rounding():
    random = torch.Generator().manual_seed(0)
    scales = torch.logspace(-6, 0, 4096)  # blocks of very different gradients, and such within each
    gradients = [scales * (1 + torch.randn(4096, generator=random)) for _ in range(200)]
    exact, ours = (_updated(bits, gradients) for bits in (32, 8))
    error = ((ours - exact).abs() / exact.abs()).mean()
    assert float(error) < 0.05
    assert float(((ours - exact) / exact.abs()).mean().abs()) < 0.01, "not all in one direction"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_is_resumed_is_the_same_to_the_bit(settings, wide, tmp_path, dtype):
    made = settings(algorithm=BITS, model={"model_path": wide}, trainer={"dtype": dtype})
    batches = [[sample(i) for i in range(4 * at, 4 * at + 4)] for at in range(4)]
    straight, begun = snapshot.load(made, None), snapshot.load(made, None)
    for batch in batches:
        straight.step(batch)
    for batch in batches[:2]:
        begun.step(batch)
    folder = tmp_path / "saved"
    folder.mkdir()
    snapshot.save(begun, folder, base=made.model.model_path)
    resumed = snapshot.load(made, folder)
    for batch in batches[2:]:
        resumed.step(batch)
    for name, optimizer in straight.optimizers.items():
        one, other = dict(optimizer.state()), dict(resumed.optimizers[name].state())
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    one, other = straight.actor.tensors(), resumed.actor.tensors()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(("before", "after"), [(32, 8), (8, 32)])
def test_where_the_bits_were_changed_the_moments_are_converted(settings, wide, tmp_path, before, after):
    model = {"model_path": wide}
    learner = snapshot.load(settings(model=model, algorithm={"optimizer": {"lr": 1e-3, "bits": before}}), None)
    learner.step([sample(i) for i in range(4)])
    folder = tmp_path / "saved"
    folder.mkdir()
    snapshot.save(learner, folder, base=wide)
    changed = snapshot.load(settings(model=model, algorithm={"optimizer": {"lr": 1e-3, "bits": after}}), folder)
    name = "exp_avg.model.embed_tokens.weight"
    (one, scale), other = _eight_and_32_bits(
        [dict(each.optimizers["actor"].state()) for each in (learner, changed)], name
    )
    assert float((one.float() / 255 - 0.5).abs().max()) <= 0.5
    assert scale.max() == pytest.approx(float(other.abs().max()), rel=0.02)


def _eight_and_32_bits(states, name):
    eight, full = sorted(states, key=lambda each: each[name].dtype != torch.uint8)
    return (eight[name], eight[name.replace("exp_avg", "exp_avg_scale")]), full[name]


def test_moments_in_8_bits_of_an_older_release_begin_anew():
    _, optimizer = _optimizer(torch.zeros(4096), bits=8)
    older = {"exp_avg.weight": torch.zeros(4096, dtype=torch.int8), "step.weight": torch.ones(())}
    with capture_logs() as logs:
        optimizer.restore(updates=3, kept=older)
    assert [log["event"] for log in logs] == ["optimizer_begins_anew"]
    assert dict(optimizer.state()) == {}


def test_what_a_version_takes_on_disk_is_reckoned(settings, wide, tmp_path):
    made = settings(algorithm=BITS, model={"model_path": wide})
    learner = snapshot.load(made, None)
    reckoned = snapshot.size_of_weights(learner) + snapshot.size_of_state(learner)
    learner.step([sample(i) for i in range(4)])
    folder = tmp_path / "saved"
    folder.mkdir()
    snapshot.save(learner, folder, base=made.model.model_path)
    kept = (*folder.glob("actor/*.safetensors"), *folder.glob("critic/*.safetensors"))
    written = sum(file.stat().st_size for file in (*kept, *folder.glob("trainer_state/*.safetensors")))
    assert reckoned == pytest.approx(written, rel=0.2)
