"""The head in parts: its numbers and gradients are those of all logits at once, which never exist together."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tuneloop.trainer.models import head as heads
from tuneloop.trainer.models.head import AllowedSets, Head, ScoredTokens

N, D, V = 70, 8, 90


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(heads, "CHUNK", 16)


def _random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _given(*, bias, tempered, grammar):
    """Features, weight and bias with gradients, and what was said; each forced or free token is an allowed one."""
    leaves = [_random(N, D), _random(V, D, seed=1) / 3, _random(V, seed=2) if bias else None]
    for each in leaves:
        if each is not None:
            each.requires_grad_()
    tokens_N = torch.arange(N) * 7 % V
    temperatures_N = _random(N, seed=3).abs() + 0.5 if tempered else None
    allowed = None
    if grammar:
        bits = np.random.default_rng(0).integers(0, 2, (N, 96)).astype(np.uint8)
        bits[np.arange(N), tokens_N.numpy()] = 1
        rows = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32).copy())
        lists = [np.flatnonzero(row[:V]) for row in bits]
        left_LS = torch.full((N, max(map(len, lists))), -1, dtype=torch.int32)
        for row, ids in zip(left_LS, lists, strict=True):
            row[: len(ids)] = torch.from_numpy(ids)
        number_N = torch.arange(N)
        # Of three tokens one may be any, one is among a grammar's, one among those that truncation left.
        held_N = torch.where(number_N % 3 == 0, -1, torch.where(number_N % 3 == 1, number_N, -2 - number_N))
        allowed = AllowedSets(held_N, rows, left_LS)
        same = AllowedSets(torch.where(number_N % 3 == 0, -1, number_N), rows)
        assert torch.equal(allowed.forbidden(V), same.forbidden(V))
    return leaves, ScoredTokens(tokens_N, temperatures_N, allowed)


def _whole(leaves, said):
    """In float64."""
    logits_NV = torch.nn.functional.linear(*(None if each is None else each.double() for each in leaves))
    temperatures_N = torch.ones(N) if said.temperatures_N is None else said.temperatures_N
    logits_NV = logits_NV / temperatures_N[:, None]
    if said.allowed is not None:
        logits_NV = logits_NV.masked_fill(said.allowed.forbidden(V), -1e30)
    spread_NV = logits_NV.log_softmax(1)
    return spread_NV.gather(1, said.tokens_N[:, None])[:, 0], -(spread_NV.exp() * spread_NV).sum(1)


@pytest.mark.parametrize("learnt", ["both", "logprobs", "entropy"])
@pytest.mark.parametrize(
    "given",
    [
        {"bias": True, "tempered": True, "grammar": True},
        {"bias": False, "tempered": False, "grammar": False},
        {"bias": False, "tempered": True, "grammar": False},
    ],
)
def test_numbers_and_gradients_are_those_of_all_logits_at_once(given, learnt):
    leaves, said = _given(**given)
    weights = _random(2, N, seed=4) * torch.tensor([[learnt != "entropy"], [learnt != "logprobs"]])
    there = [each for each in leaves if each is not None]
    found, expected = Head(leaves[1], leaves[2], compiled=False).score(leaves[0], said), _whole(leaves, said)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5)
    used = [row for row in (0, 1) if weights[row].any()]
    slopes = [
        torch.autograd.grad(sum((weights[row] * each[row]).sum() for row in used), there) for each in (found, expected)
    ]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(Head(leaves[1], leaves[2], compiled=False).logprobs(leaves[0], said), found[0])


class _Largest(TorchDispatchMode):
    """The most elements that any tensor had."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, torch.Tensor):
                self.most = max(self.most, each.numel())
        return found


def test_no_tensor_holds_all_logits_forth_or_back():
    leaves, said = _given(bias=True, tempered=True, grammar=False)
    with _Largest() as seen:
        logprobs_N, entropy_N = Head(leaves[1], leaves[2], compiled=False).score(leaves[0], said)
        (logprobs_N.sum() + entropy_N.sum()).backward()
    assert 16 * V <= seen.most < N * V / 2
    with _Largest() as seen:
        _whole(leaves, said)
    assert seen.most >= N * V


def test_a_head_that_is_not_trained_has_no_gradient_made_for_it():
    leaves, said = _given(bias=False, tempered=False, grammar=False)
    weight_VD = leaves[1].detach()
    with _Largest() as seen:
        logprobs_N, _ = Head(weight_VD[:, :4].contiguous(), None, compiled=False).score(leaves[0][:, :4], said)
        logprobs_N.sum().backward()
    assert leaves[0].grad is not None
    assert seen.most == 16 * V
