"""AdamW in main memory comes to the same numbers, and what is trained takes no room for it where the model is."""

import pytest
import torch

from tests.trainer.factories import masters_of, moments_of, sample
from tuneloop.trainer.checkpoints import snapshot

BATCHES = [[sample(i) for i in range(4 * at, 4 * at + 4)] for at in range(2)]


def _learnt(settings, *, offload, device="cpu", batches=BATCHES, **but):
    learner = snapshot.load(settings(trainer={"optimizer_offload": offload, "device": device} | but), None)
    for batch in batches:
        learner.step(batch)
    return learner


def _tensors(learner):
    state = snapshot.state_of(learner)
    weights = {f"weights/{name}": each for name, each in learner.actor.network.state_dict().items()}
    return weights | {f"{part}/{key}": each for part, own in state.optimizers.items() for key, each in own.items()}


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_offloaded_optimizer_comes_to_the_same_numbers(settings, dtype, bits):
    made = settings
    algorithm = {"optimizer": {"lr": 1e-3, "bits": bits}, "mini_batches": 2, "max_grad_norm": 0.1}

    def settings_of(**but):
        return made(algorithm=algorithm, **but)

    here = _learnt(settings_of, offload=False, dtype=dtype)
    there = _learnt(settings_of, offload=True, dtype=dtype)
    one, other = _tensors(here), _tensors(there)
    assert one.keys() == other.keys()
    assert all(torch.allclose(each.float(), other[name].float(), atol=1e-6) for name, each in one.items())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_beside_a_gpu_it_is_in_main_memory(settings, dtype):
    # One update, not two: where a weight falls on the other side of a rounding, the next gradients differ.
    here, there = (
        _learnt(settings, offload=offload, device="cuda", dtype=dtype, batches=BATCHES[:1]) for offload in (False, True)
    )
    for name, optimizer in there.optimizers.items():
        own = [*masters_of(optimizer), *moments_of(optimizer).values()]
        assert {each.device.type for each in own} == {"cpu"}, name
    one, other = _tensors(here), _tensors(there)
    for name, each in one.items():
        unit = torch.finfo(each.dtype).eps
        assert torch.allclose(each.float().cpu(), other[name].float().cpu(), rtol=unit, atol=1e-6), name
