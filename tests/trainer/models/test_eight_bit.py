"""AdamW in 8 bits: as small as it says, the same after a restart to the bit, and it learns as 32 bits do."""

import math

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


def test_a_parameter_takes_a_byte_for_each_moment(settings):
    learner = snapshot.load(settings(algorithm=BITS), None)
    learner.step([sample(i) for i in range(4)])
    moments = learner.optimizers["actor"].moments()
    parameters = sum(each.numel() for each in learner.actor.network.parameters())
    taken = sum(each.nbytes for name, each in moments.items() if not name.startswith("step"))
    assert taken / parameters == pytest.approx(EIGHT_BIT_MOMENTS, rel=0.02)


def test_updates_are_those_of_32_bits_but_for_rounding():
    random = torch.Generator().manual_seed(0)
    scales = torch.logspace(-6, 0, 1000)  # blocks of very different gradients, and such within each
    gradients = [scales * (1 + torch.randn(1000, generator=random)) for _ in range(200)]
    exact, ours = (_updated(bits, gradients) for bits in (32, 8))
    error = ((ours - exact).abs() / exact.abs()).mean()
    assert float(error) < 0.05
    assert float(((ours - exact) / exact.abs()).mean().abs()) < 0.01, "not all in one direction"


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_update_is_the_same_and_is_compiled_once():
    random = torch.Generator().manual_seed(0)
    counts: list[int] = []
    found = {}
    for compiled in (False, True):
        module = torch.nn.Module()
        for number, length in enumerate((1000, 256, 300_000, 70)):
            module.register_parameter(f"p{number}", torch.nn.Parameter(torch.zeros(length)))
        optimizer = MasterAdamW(module, OptimizerSettings(lr=1e-2, bits=8, lr_warmup_steps=3), compiled=compiled)
        random.manual_seed(0)
        for _ in range(5):
            for parameter in module.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=random)
            optimizer.add_up()
            optimizer.update(norm=1.0, max_norm=1e9)
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        found[compiled] = torch.cat([each.detach() for each in module.parameters()])
    # A moment on the border of two steps may be rounded to either.
    assert torch.allclose(found[True], found[False], atol=1e-3)
    assert ((found[True] - found[False]).abs() > 1e-6).float().mean() < 1e-3
    assert counts[5] > counts[4]
    assert counts[9] == counts[5], "other numbers, and other updates, are compiled anew"


def test_a_second_moment_is_forgotten_as_slowly_as_in_32_bits():
    """A step of the scale is 12 %, and an update takes 0.1 % away: rounded to the nearest it would stay for ever."""
    large, small = torch.full((256,), 1.0), torch.full((256,), 0.01)
    gradients = [large, *[small] * 2000]
    exact, ours = (_updated(bits, gradients) for bits in (32, 8))
    assert torch.allclose(ours.mean(), exact.mean(), rtol=0.02)


def test_a_place_without_gradients_stays_and_one_of_tiny_ones_does_not_jump():
    gradient = torch.zeros(600)
    gradient[0], gradient[1] = 1.0, 1e-12
    weights = _updated(8, [gradient] * 20)
    assert weights[2:].abs().max() == 0
    assert weights.abs().max() <= 20 * 1e-2 * 1.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_is_resumed_is_the_same_to_the_bit(settings, tmp_path, dtype):
    made = settings(algorithm=BITS, trainer={"dtype": dtype})
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
        for one, other in ((optimizer.moments(), resumed.optimizers[name].moments()),):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
        weights = resumed.optimizers[name].weights()
        assert all(torch.equal(each, weights[key]) for key, each in optimizer.weights().items())


@pytest.mark.parametrize(("before", "after"), [(32, 8), (8, 32)])
def test_where_the_bits_were_changed_the_moments_begin_anew_and_the_weights_stay(settings, tmp_path, before, after):
    made = settings(algorithm={"optimizer": {"lr": 1e-3, "bits": before}})
    learner = snapshot.load(made, None)
    learner.step([sample(i) for i in range(4)])
    folder = tmp_path / "saved"
    folder.mkdir()
    snapshot.save(learner, folder, base=made.model.model_path)
    with capture_logs() as logs:
        changed = snapshot.load(settings(algorithm={"optimizer": {"lr": 1e-3, "bits": after}}), folder)
    assert [log["event"] for log in logs].count("optimizer_begins_anew") == 1
    assert changed.optimizers["actor"].moments() == {}
    weights = changed.optimizers["actor"].weights()
    assert all(torch.equal(each, weights[name]) for name, each in learner.optimizers["actor"].weights().items())
    changed.step([sample(i) for i in range(4)])
    assert math.isfinite(changed.optimizers["actor"].gradient_norm())


def test_what_a_version_takes_on_disk_is_reckoned(settings, tmp_path):
    made = settings(algorithm=BITS)
    learner = snapshot.load(made, None)
    reckoned = snapshot.size_of_weights(learner) + snapshot.size_of_state(learner)
    learner.step([sample(i) for i in range(4)])
    folder = tmp_path / "saved"
    folder.mkdir()
    snapshot.save(learner, folder, base=made.model.model_path)
    kept = (*folder.glob("actor/*.safetensors"), *folder.glob("critic/*.safetensors"))
    written = sum(file.stat().st_size for file in (*kept, *folder.glob("trainer_state/*.safetensors")))
    assert reckoned == pytest.approx(written, rel=0.2)
