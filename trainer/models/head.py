"""Computes log-probabilities and entropies from hidden states, in chunks, so that all logits never exist at once.

    z       = (W h + b) / temperature, with forbidden tokens at no probability
    logprob = z[token] - log sum exp z                     d logprob / d z = [token] - p
    entropy = log sum exp z - sum p z                      d entropy / d z = -p (log p + entropy)

The backward pass recomputes the logits, and only the gradients that are needed. Dimension suffixes are those of
trainer/batches/batch.py.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

_F = TypeVar("_F", bound=Callable[..., Any])


@cache
def _compile_once(function: _F) -> _F:
    return cast(_F, torch.compile(function, dynamic=True))


def compile_if(function: _F, *, wanted: bool) -> _F:
    """The function, compiled for dynamic shapes if `wanted`."""
    return _compile_once(function) if wanted else function


CHUNK = 2048  # reply tokens whose logits exist at a time: in float32, 1.2 GiB for a vocabulary of 150 000
IMPOSSIBLE = -1e30  # the logit of a forbidden token: its probability underflows to 0


class AllowedSets(NamedTuple):
    """The allowed tokens at some reply tokens, as in a Batch: -1 for all."""

    held_N: Tensor
    allowed_KW: Tensor | None
    left_LS: Tensor | None = None

    def part(self, chosen: slice) -> "AllowedSets":
        return self._replace(held_N=self.held_N[chosen])

    def forbidden(self, vocabulary: int) -> Tensor:
        """The forbidden tokens, of shape NV."""
        free_N = self.held_N == -1
        if free_N.all():
            return free_N.new_zeros(1, 1)
        forbidden_NV = torch.zeros(len(free_N), vocabulary, dtype=torch.bool, device=free_N.device)
        if self.allowed_KW is not None:
            # Byte by byte: word by word needs four times the memory.
            bytes_NX = self.allowed_KW.view(torch.uint8)[self.held_N.clamp(min=0)]
            bits = torch.arange(8, dtype=torch.uint8, device=bytes_NX.device)
            allowed_NV = ((bytes_NX[:, :, None] >> bits) & 1).flatten(1)[:, :vocabulary].bool()
            forbidden_NV |= ~(allowed_NV | (self.held_N < 0)[:, None])
        if self.left_LS is not None:
            ids_NS = self.left_LS[(-2 - self.held_N).clamp(min=0)]
            # Padding repeats the first id, which is never padding.
            ids_NS = ids_NS.where(ids_NS >= 0, ids_NS[:, :1]).long()
            cut_N1 = (self.held_N < -1)[:, None]
            forbidden_NV |= cut_N1
            forbidden_NV.scatter_(1, ids_NS, forbidden_NV.gather(1, ids_NS) & ~cut_N1)
        return forbidden_NV


class ScoredTokens(NamedTuple):
    """Reply tokens, their temperatures (None: 1), and the tokens that a grammar allowed (None: all)."""

    tokens_N: Tensor
    temperatures_N: Tensor | None = None
    allowed: AllowedSets | None = None

    def part(self, chosen: slice) -> "ScoredTokens":
        temperatures_N = None if self.temperatures_N is None else self.temperatures_N[chosen]
        allowed = None if self.allowed is None else self.allowed.part(chosen)
        return ScoredTokens(self.tokens_N[chosen], temperatures_N, allowed)

    def parts(self, chunk: int) -> Iterator[tuple[slice, "ScoredTokens"]]:
        """Chunks of the tokens, and their slices."""
        for start in range(0, len(self.tokens_N), chunk):
            chosen = slice(start, start + chunk)
            yield chosen, self.part(chosen)


class Head(NamedTuple):
    """A model's last layer, and whether the functions after its product are compiled."""

    weight_VD: Tensor
    bias_V: Tensor | None
    compiled: bool

    @classmethod
    def of(cls, layer: nn.Linear, *, compiled: bool) -> "Head":
        return cls(layer.weight, layer.bias, compiled)

    def score(self, features_ND: Tensor, scored: ScoredTokens) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each token, in float32, from the hidden state before it."""
        if not torch.is_grad_enabled():
            logprobs_N, entropy_N, _ = _forward(self, features_ND, scored, with_entropy=True)
            return logprobs_N, entropy_N
        found = _Scores.apply(features_ND, self.weight_VD, self.bias_V, scored, self.compiled)  # type: ignore[no-untyped-call]
        return cast(tuple[Tensor, Tensor], found)

    @torch.no_grad()
    def logprobs(self, features_ND: Tensor, scored: ScoredTokens) -> Tensor:
        return _forward(self, features_ND, scored, with_entropy=False)[0]


def _forward(
    head: Head, features_ND: Tensor, scored: ScoredTokens, *, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies (0 if not wanted) and the log sums, each of shape N."""
    measure = compile_if(_measure, wanted=head.compiled)
    logprobs_N, entropy_N, norms_N = (features_ND.new_zeros(len(features_ND), dtype=torch.float32) for _ in range(3))
    for chosen, part in scored.parts(CHUNK):
        logits_NV = linear(features_ND[chosen], head.weight_VD, head.bias_V)
        forbidden_NV = None if part.allowed is None else part.allowed.forbidden(logits_NV.shape[1])
        found = measure(logits_NV, part.tokens_N, part.temperatures_N, forbidden_NV, with_entropy)
        logprobs_N[chosen], entropy_N[chosen], norms_N[chosen] = found
    return logprobs_N, entropy_N, norms_N


def _scale_logits(logits_NV: Tensor, temperatures_N: Tensor | None, forbidden_NV: Tensor | None) -> Tensor:
    """Scales float32 logits in place: nothing else reads them."""
    scaled_NV = logits_NV.float()
    if temperatures_N is not None:
        scaled_NV = scaled_NV.div_(temperatures_N[:, None])
    if forbidden_NV is not None:
        # Not -inf: the entropy multiplies it by probability 0, which gives NaN.
        scaled_NV = scaled_NV.masked_fill_(forbidden_NV, IMPOSSIBLE)
    return scaled_NV


def _measure(
    logits_NV: Tensor, tokens_N: Tensor, temperatures_N: Tensor | None, forbidden_NV: Tensor | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    scaled_NV = _scale_logits(logits_NV, temperatures_N, forbidden_NV)
    norms_N = scaled_NV.logsumexp(1)
    logprobs_N = scaled_NV.gather(1, tokens_N[:, None])[:, 0] - norms_N
    if not with_entropy:
        return logprobs_N, torch.zeros_like(norms_N), norms_N
    probabilities_NV = (scaled_NV - norms_N[:, None]).exp_()
    return logprobs_N, norms_N - probabilities_NV.mul_(scaled_NV).sum(1), norms_N


def _slopes(
    logits_NV: Tensor,
    scored: tuple[Tensor, Tensor | None, Tensor | None],
    norms_N: Tensor,
    logprob_slopes_N: Tensor | None,
    entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The gradient of the logits, in their dtype. `entropy` and its gradient are None if unused."""
    tokens_N, temperatures_N, forbidden_NV = scored
    dtype = logits_NV.dtype
    scaled_NV = _scale_logits(logits_NV, temperatures_N, forbidden_NV).sub_(norms_N[:, None])
    if entropy is None:
        assert logprob_slopes_N is not None
        slopes_NV = scaled_NV.exp_().mul_(-logprob_slopes_N[:, None])
    else:
        entropy_N, entropy_slopes_N = entropy
        probabilities_NV = scaled_NV.exp()
        slopes_NV = scaled_NV.add_(entropy_N[:, None]).mul_(-entropy_slopes_N[:, None])
        if logprob_slopes_N is not None:
            slopes_NV = slopes_NV.sub_(logprob_slopes_N[:, None])
        slopes_NV = slopes_NV.mul_(probabilities_NV)
    if logprob_slopes_N is not None:
        slopes_NV = slopes_NV.scatter_add_(1, tokens_N[:, None], logprob_slopes_N[:, None])
    if forbidden_NV is not None:
        slopes_NV = slopes_NV.masked_fill_(forbidden_NV, 0.0)
    if temperatures_N is not None:
        slopes_NV = slopes_NV.div_(temperatures_N[:, None])
    return slopes_NV.to(dtype)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        features_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        scored: ScoredTokens,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        head = Head(weight_VD, bias_V, compiled)
        logprobs_N, entropy_N, norms_N = _forward(head, features_ND, scored, with_entropy=True)
        context.save_for_backward(features_ND, weight_VD, bias_V, entropy_N, norms_N)
        context.scored, context.compiled = scored, compiled
        context.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        context: Any, logprob_slopes_N: Tensor | None, entropy_slopes_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if logprob_slopes_N is None and entropy_slopes_N is None:
            return None, None, None, None, None
        features_ND, weight_VD, bias_V, entropy_N, norms_N = context.saved_tensors
        slopes = compile_if(_slopes, wanted=context.compiled)
        of_features, of_weight, of_bias = context.needs_input_grad[:3]
        sums = _HeadSums(weight_VD if of_weight else None, bias_V if of_bias else None)
        features_slopes_ND = torch.empty_like(features_ND) if of_features else None
        for chosen, part in context.scored.parts(CHUNK):
            logits_NV = linear(features_ND[chosen], weight_VD, bias_V)
            forbidden_NV = None if part.allowed is None else part.allowed.forbidden(logits_NV.shape[1])
            of_logprobs_N = None if logprob_slopes_N is None else logprob_slopes_N[chosen]
            entropy = None if entropy_slopes_N is None else (entropy_N[chosen], entropy_slopes_N[chosen])
            scored = (part.tokens_N, part.temperatures_N, forbidden_NV)
            slopes_NV = slopes(logits_NV, scored, norms_N[chosen], of_logprobs_N, entropy)
            del logits_NV
            if features_slopes_ND is not None:
                torch.mm(slopes_NV, weight_VD, out=features_slopes_ND[chosen])
            sums.add(slopes_NV, features_ND[chosen])
        return features_slopes_ND, *sums.gradients(), None, None


class _HeadSums:
    """Gradients of weight and bias, summed in float32 over the chunks."""

    def __init__(self, weight_VD: Tensor | None, bias_V: Tensor | None) -> None:
        self._like = (weight_VD, bias_V)
        self._sums = [None if each is None else torch.zeros_like(each, dtype=torch.float32) for each in self._like]

    def add(self, slopes_NV: Tensor, features_ND: Tensor) -> None:
        weight_VD, bias_V = self._sums
        if weight_VD is not None and slopes_NV.dtype == torch.float32:
            weight_VD.addmm_(slopes_NV.T, features_ND)
        elif weight_VD is not None:
            weight_VD.add_(slopes_NV.T @ features_ND)
        if bias_V is not None:
            bias_V.add_(slopes_NV.sum(0, dtype=torch.float32))

    def gradients(self) -> Iterator[Tensor | None]:
        for each, like in zip(self._sums, self._like, strict=True):
            yield None if each is None or like is None else each.to(like.dtype)
