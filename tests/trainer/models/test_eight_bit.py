"""AdamW in 8 bits: as small as it says, the same after a restart to the bit, and it learns as 32 bits do."""

import importlib

import pytest
import torch
from torch import nn

from tests.trainer.factories import sample
from tuneloop.shared.capacity.memory import EIGHT_BIT_MOMENTS
from tuneloop.shared.settings.algorithm import OptimizerSettings
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.models.eight_bit import EightBitAdamW, decode_moment
from tuneloop.trainer.models.optimizer import MasterAdamW

BITS = {"optimizer": {"lr": 1e-3, "bits": 8}, "critic_optimizer": {"lr": 1e-3}}

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.01}


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


@pytest.mark.gpu
@pytest.mark.parametrize("count", [5, 256, 70_001])
def test_the_kernel_of_a_gpu_makes_the_same_updates(count):
    random = torch.Generator().manual_seed(count)
    weights = torch.randn(count, generator=random).cuda()
    ours = [
        EightBitAdamW({nn.Parameter(weights.clone()): 3 * count}, compiled=compiled, **ADAMW)
        for compiled in (False, True)
    ]
    for _ in range(5):
        gradient = (torch.randn(count, generator=random) * torch.logspace(-8, 0, count)).cuda()
        gradient[::7] = 0
        for each in ours:
            each.param_groups[0]["params"][0].grad = gradient
            each.step()
    (one, by_torch), (other, by_kernel) = (next(iter(each.state.items())) for each in ours)
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    for moment in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(by_kernel[f"{moment}_scale"], by_torch[f"{moment}_scale"], rtol=1e-5, atol=1e-12)
        apart = (by_kernel[moment].int() - by_torch[moment].int()).abs()
        assert int(apart.max()) <= 1  # What lies between two steps may be rounded to either.
        assert float((apart > 0).float().mean()) < 1e-3


@pytest.mark.gpu
def test_a_kernel_adds_gradients_of_another_type():
    total, part = torch.randn(1 << 20 | 3, device="cuda"), torch.randn(1 << 20 | 3, device="cuda").bfloat16()
    expected = total + part
    add_to = importlib.import_module("tuneloop.trainer.models.kernels").add_to
    add_to(total, part)
    assert torch.equal(total, expected)


def test_a_parameter_takes_a_byte_for_each_moment(settings):
    learner = snapshot.load(settings(algorithm=BITS), None)
    learner.step([sample(i) for i in range(4)])
    parameters = sum(each.numel() for each in learner.actor.network.parameters())
    kept = learner.optimizers["actor"].state()
    taken = sum(each.nbytes for name, each in kept if not name.startswith("step"))
    assert taken / parameters == pytest.approx(EIGHT_BIT_MOMENTS, rel=0.02)


def test_updates_are_those_of_32_bits_but_for_rounding():
    random = torch.Generator().manual_seed(0)
    scales = torch.logspace(-6, 0, 1000)  # blocks of very different gradients, and such within each
    gradients = [scales * (1 + torch.randn(1000, generator=random)) for _ in range(200)]
    exact, ours = (_updated(bits, gradients) for bits in (32, 8))
    error = ((ours - exact).abs() / exact.abs()).mean()
    assert float(error) < 0.05
    assert float(((ours - exact) / exact.abs()).mean().abs()) < 0.01, "not all in one direction"


@pytest.mark.parametrize(("before", "after"), [(32, 8), (8, 32)])
def test_where_the_bits_were_changed_the_moments_are_converted(settings, tmp_path, before, after):
    made = settings(algorithm={"optimizer": {"lr": 1e-3, "bits": before}})
    learner = snapshot.load(made, None)
    learner.step([sample(i) for i in range(4)])
    folder = tmp_path / "saved"
    folder.mkdir()
    snapshot.save(learner, folder, base=made.model.model_path)
    changed = snapshot.load(settings(algorithm={"optimizer": {"lr": 1e-3, "bits": after}}), folder)
    states = [dict(each.optimizers["actor"].state()) for each in (learner, changed)]
    eight, full = states if before == 8 else reversed(states)
    for moment, steps in {"exp_avg": 8, "exp_avg_sq": 6}.items():  # to an octave
        name, scale = f"{moment}.model.norm.weight", f"{moment}_scale.model.norm.weight"
        decoded = decode_moment({moment: eight[name], f"{moment}_scale": eight[scale]}, moment)
        apart = (decoded - full[name]).abs() / full[name].abs().clamp(min=1e-3 * float(full[name].abs().max()))
        assert float(apart.max()) < 2 ** (1 / steps) - 1
    assert changed.optimizers["actor"].updates == learner.optimizers["actor"].updates


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
