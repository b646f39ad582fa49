"""Grammars rebuilt: which tokens an engine allowed at each position of a reply that it held to one.

A reply that was sampled under a grammar is a sample of the policy among the tokens that the grammar allows. With the
same mask under the trainer's logits the ratio is 1 before any update, and a token that was the only one allowed has
log-probability 0 whatever the weights: nothing is learnt from it.
"""

import importlib.util
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from tuneloop.shared.experience import AllowedTokens, Grammar, Sample
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.tokenizer import ends_in_engines, tokenizer_of

Refused = dict[str, list[Sample]]

#: The log-probability of the only token that is allowed is 0; engines round.
_CERTAIN = 1e-3

#: Bytes of compiled grammars that are remembered.
_CACHE = 256 << 20

_MISSING = (
    "a grammar held it, and xgrammar, which rebuilds grammars, is not installed: in a clone, "
    'pip install ./runner ".[grammar]"'
)
_FOREIGN = "the grammar that held it is not the one that was rebuilt: another xgrammar, or other settings of the engine"
_UNTAUGHT = "a grammar held it, and a teacher behind an endpoint cannot be held to it"


def find_missing_library(settings: Settings) -> str | None:
    """Why replies that a grammar held would all be set aside here; None if they would not, or nobody records any."""
    needed = settings.explorer.rebuilds_grammars and not settings.algorithm.of_any_reply
    if not needed or importlib.util.find_spec("xgrammar") is not None:
        return None
    return (
        "xgrammar, which rebuilds the grammars that held replies, is not installed: they are set aside; in a clone, "
        'pip install ./runner ".[grammar]"'
    )


class _GrammarNotRebuilt(Exception):
    """The message becomes the reason of the row."""


def with_allowed_tokens(
    samples: Sequence[Sample], settings: Settings, *, vocabulary: int
) -> tuple[list[Sample], Refused]:
    """The samples, those that a grammar held with what it allowed; and those whose grammar cannot be rebuilt.

    A method that learns from any reply compares no probabilities with those that were sampled from: it needs none.
    """
    if settings.algorithm.of_any_reply or all(sample.grammar is None for sample in samples):
        return list(samples), {}
    taken: list[Sample] = []
    refused: Refused = defaultdict(list)
    for sample in samples:
        try:
            if sample.grammar is not None:
                if settings.algorithm.algorithm_type == "distill" and settings.algorithm.distill.teacher_url:
                    raise _GrammarNotRebuilt(_UNTAUGHT)
                rebuilder = _rebuilder(tokenizer_of(settings), settings.model.model_path, vocabulary)
                sample = msgspec.structs.replace(sample, allowed=_replay(sample, sample.grammar, rebuilder))
            taken.append(sample)
        except _GrammarNotRebuilt as error:
            refused[str(error)].append(sample)
    return taken, dict(refused)


class _Rebuilder:
    """Compiles grammars for the tokens of one model. Raises _GrammarNotRebuilt without xgrammar."""

    def __init__(self, words: PreTrainedTokenizerBase, folder: Path, vocabulary: int) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise _GrammarNotRebuilt(_MISSING) from error
        self._xgrammar: Any = xgrammar
        self._vocabulary = vocabulary
        self._ends = ends_in_engines(folder, words)
        known = xgrammar.TokenizerInfo.from_huggingface(words, vocab_size=vocabulary)
        self._compiler: Any = xgrammar.GrammarCompiler(known, cache_limit_bytes=_CACHE)
        bits = np.arange(-(-vocabulary // 32) * 32) < vocabulary
        self.everything = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)

    def matcher(self, grammar: Grammar) -> Any:
        """A matcher at the grammar's beginning. Raises _GrammarNotRebuilt."""
        try:
            match grammar.kind:
                case "json":
                    compiled = self._compiler.compile_json_schema(grammar.spec)
                case "regex":
                    compiled = self._compiler.compile_regex(grammar.spec)
                case "structural_tag":
                    compiled = self._compiler.compile_structural_tag(grammar.spec)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise _GrammarNotRebuilt(f"the grammar that held it cannot be rebuilt: {reason}") from error
        ends = sorted({*self._ends, *grammar.stop_ids})
        return self._xgrammar.GrammarMatcher(compiled, override_stop_tokens=ends or None)

    def bitmask(self) -> Any:
        """A row to be filled, as a tensor."""
        return self._xgrammar.allocate_token_bitmask(1, self._vocabulary)


@cache
def _rebuilder(words: PreTrainedTokenizerBase, folder: Path, vocabulary: int) -> _Rebuilder:
    return _Rebuilder(words, folder, vocabulary)


def _replay(sample: Sample, grammar: Grammar, rebuilder: _Rebuilder) -> AllowedTokens:
    """What the grammar allowed, token by token. Raises _GrammarNotRebuilt if it was not this one."""
    matcher, bitmask = rebuilder.matcher(grammar), rebuilder.bitmask()
    everything, words = rebuilder.everything.tobytes(), len(rebuilder.everything)
    rows: dict[bytes, int] = {}
    at = np.full(len(sample.completion_ids), -1, np.int32)
    for position, token in enumerate(sample.completion_ids.tolist()):
        if matcher.is_terminated():
            break
        matcher.fill_next_token_bitmask(bitmask)
        row = (bitmask[0].numpy() & rebuilder.everything).tobytes()
        if not matcher.accept_token(token):
            raise _GrammarNotRebuilt(_FOREIGN)
        if row != everything:
            at[position] = rows.setdefault(row, len(rows))
    table = np.array([np.frombuffer(row, np.int32) for row in rows], np.int32).reshape(len(rows), words)
    alone = np.append(np.bitwise_count(table.view(np.uint32)).sum(1) == 1, False)  # at -1: all are allowed
    if (np.abs(sample.logprobs[alone[at]]) > _CERTAIN).any():
        raise _GrammarNotRebuilt(_FOREIGN)
    return AllowedTokens(table, at)
