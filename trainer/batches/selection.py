"""Selects the leased samples that can be trained on, and rebuilds the grammars that restricted replies.

A reply under a grammar is a sample of the policy among the allowed tokens. With the same mask on the trainer's logits
the ratio is 1 before any update, and a token without alternatives has log-probability 0 and no gradient.
"""

import importlib.util
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from tuneloop.shared.experience import MAX_REWARD, REDACTED, AllowedTokens, Grammar, Sample, is_captured
from tuneloop.shared.ledger.ledger import BatchRules
from tuneloop.shared.settings.algorithm import OF_GROUPS, AlgorithmSettings
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.batch import run_of, runs, superseded_calls, with_completion
from tuneloop.trainer.batches.edited_answers import edited_answer_ids
from tuneloop.trainer.batches.tokenizer import ends_in_engines, tokenizer_of

Refused = dict[str, list[Sample]]

_CERTAIN = 1e-3  # tolerance of the log-probability 0 of a token without alternatives: engines round
_CACHE = 256 << 20  # size of the cache of compiled grammars in bytes

_MISSING = (
    "a grammar held it, and xgrammar, which rebuilds grammars, is not installed: in a clone, "
    'pip install ./runner ".[grammar]"'
)
_FOREIGN = "the grammar that held it is not the one that was rebuilt: another xgrammar, or other settings of the engine"
_UNTAUGHT = "a grammar or truncation held it, and a teacher behind an endpoint cannot be held to it"
_NO_MASK = "the engine's list of tokens that truncation left is wrong: it lacks a sampled token"


def find_missing_library(settings: Settings) -> str | None:
    """Why all replies under a grammar would be set aside; None if none are recorded, or xgrammar is installed."""
    needed = settings.explorer.rebuilds_grammars and not settings.algorithm.of_any_reply
    if not needed or importlib.util.find_spec("xgrammar") is not None:
        return None
    return (
        "xgrammar, which rebuilds the grammars that held replies, is not installed: they are set aside; in a clone, "
        'pip install ./runner ".[grammar]"'
    )


class _GrammarNotRebuilt(Exception):
    """The message becomes the row's reason."""


def with_allowed_tokens(
    samples: Sequence[Sample], settings: Settings, *, vocabulary: int
) -> tuple[list[Sample], Refused]:
    """The samples, with the allowed tokens of those under a grammar; and those whose grammar cannot be rebuilt."""
    if settings.algorithm.of_any_reply or all(sample.grammar is None for sample in samples):
        return list(samples), {}
    taken: list[Sample] = []
    refused: Refused = defaultdict(list)
    for sample in samples:
        try:
            if sample.grammar is not None:
                if settings.algorithm.algorithm_type == "distill" and settings.algorithm.distill.teacher_url:
                    raise _GrammarNotRebuilt(_UNTAUGHT)
                if sample.grammar.kind == "tokens":
                    allowed = _tokens_left(sample, sample.grammar.sets, vocabulary)
                else:
                    rebuilder = _rebuilder(tokenizer_of(settings), settings.model.model_path, vocabulary)
                    allowed = _replay(sample, sample.grammar, rebuilder)
                sample = msgspec.structs.replace(sample, allowed=allowed)
            taken.append(sample)
        except _GrammarNotRebuilt as error:
            refused[str(error)].append(sample)
    return taken, dict(refused)


class _Rebuilder:
    """Compiles grammars for one model's tokens. Raises _GrammarNotRebuilt without xgrammar."""

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
        """A matcher at the grammar's start. Raises _GrammarNotRebuilt."""
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
        """An empty bitmask of one row."""
        return self._xgrammar.allocate_token_bitmask(1, self._vocabulary)


_rebuilder = cache(_Rebuilder)


def _tokens_left(sample: Sample, sets: bytes, vocabulary: int) -> AllowedTokens:
    """The tokens that truncation left at each position, as the engine returned them. Raises _GrammarNotRebuilt."""
    numbers, size = np.frombuffer(sets, "<i4"), len(sample.completion_ids)
    counts, ids = numbers[:size], numbers[size:]
    if not size or len(counts) != size or counts.min() < 1 or counts.sum() != len(ids):
        raise _GrammarNotRebuilt(_NO_MASK)
    of = np.repeat(np.arange(size), counts)
    has_sampled = np.bincount(of[ids == sample.completion_ids[of]], minlength=size).all()
    in_doubt = (counts == 1) & (np.abs(sample.logprobs) > _CERTAIN)
    if not has_sampled or ((ids < 0) | (ids >= vocabulary)).any() or in_doubt.any():
        raise _GrammarNotRebuilt(_NO_MASK)
    each = np.split(ids[np.lexsort((ids, of))], np.cumsum(counts)[:-1])
    rows: dict[bytes, int] = {}
    at = np.array([rows.setdefault(left.tobytes(), len(rows)) for left in each], np.int32)
    table = np.full((len(rows), counts.max()), -1, np.int32)
    for row, left in zip(table, rows, strict=True):
        row[: len(left) // 4] = np.frombuffer(left, "<i4")
    return AllowedTokens(table, at, listed=True)


def _replay(sample: Sample, grammar: Grammar, rebuilder: _Rebuilder) -> AllowedTokens:
    """The tokens that the grammar allowed at each position. Raises _GrammarNotRebuilt if the reply does not fit it."""
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
    alone = np.append(np.bitwise_count(table.view(np.uint32)).sum(1) == 1, False)  # index -1: all tokens
    if (np.abs(sample.logprobs[alone[at]]) > _CERTAIN).any():
        raise _GrammarNotRebuilt(_FOREIGN)
    return AllowedTokens(table, at)


def make_pairs(samples: Sequence[Sample]) -> tuple[list[Sample], Refused]:
    """The samples as chosen, rejected, chosen, rejected, …, and the others by reason.

    Among a group's replies to one prompt (equal token ids) the best pairs with the worst, the second best with the
    second worst, and so on. Of equal rewards the reply recorded first is better.
    """
    groups: defaultdict[object, defaultdict[bytes, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        # Without a group there is no partner.
        group = ("alone", sample.id) if sample.group_id is None else sample.group_id
        groups[group][sample.prompt_ids.tobytes()].append(sample)
    pairs: list[Sample] = []
    refused: Refused = defaultdict(list)
    for prompts in groups.values():
        for replies in prompts.values():
            ranked = sorted(replies, key=lambda each: (-each.reward, each.id))
            if len(ranked) == 1:
                why = "the other replies of its group cannot be trained on"
                if ranked[0].group_id is None:
                    why = "it is in no group"
                elif len(prompts) > 1:
                    why = "its group's other replies are to other prompts"
                refused[f"no pair: {why}"] += ranked
                continue
            half = len(ranked) // 2
            for better, worse in zip(ranked[:half], reversed(ranked), strict=False):
                if better.reward > worse.reward:
                    pairs += [better, worse]
                else:
                    refused["no pair: another reply to its prompt has the same reward"] += [better, worse]
            refused["no pair: it is in the middle of an odd number of replies"] += ranked[half : len(ranked) - half]
    return pairs, {reason: left for reason, left in refused.items() if left}


def mismatch_replies(samples: Sequence[Sample], *, longest: float = math.inf) -> list[Sample]:
    """Each prompt with the next one's reply, up to `longest` tokens; none for a single sample."""
    if len(samples) < 2:
        return []
    after = [*samples[1:], samples[0]]
    return [
        msgspec.structs.replace(one, completion_ids=other.completion_ids, logprobs=other.logprobs)
        for one, other in zip(samples, after, strict=True)
        if len(one.prompt_ids) + len(other.completion_ids) <= longest
    ]


_TOO_LONG = "the edited answer is too long: the model takes {:.0f} tokens with the prompt"


def with_demonstrations(samples: Sequence[Sample], settings: Settings) -> tuple[list[Sample], Refused]:
    """The samples, with edited answers as their replies; and those whose answer cannot be encoded."""
    if not settings.algorithm.of_edited_answers:
        return list(samples), {}
    taken: list[Sample] = []
    refused: Refused = defaultdict(list)
    longest = settings.model.max_model_len or longest_of(settings.model.model_path)
    for sample in samples:
        if sample.demonstration is None:
            taken.append(sample)
            continue
        ids = edited_answer_ids(sample, sample.demonstration, settings)
        if isinstance(ids, str):
            refused[ids].append(sample)
        elif len(sample.prompt_ids) + len(ids) > longest:
            refused[_TOO_LONG.format(longest)].append(sample)
        else:
            taken.append(with_completion(sample, ids))
    return taken, dict(refused)


def imitable(samples: Sequence[Sample], algorithm: AlgorithmSettings) -> tuple[list[Sample], Refused]:
    """What `sft` or `raft` imitates, and the others by reason. `raft` takes the best run of each group."""
    sft = algorithm.algorithm_type == "sft"
    edited = algorithm.of_edited_answers
    whole = not sft or algorithm.sft.targets != "demonstrations"
    least = algorithm.sft.least_reward
    taken: list[Sample] = []
    refused: Refused = defaultdict(list)
    for sample in samples:
        if edited and sample.demonstration is not None:
            taken.append(sample)
        elif not whole:
            refused["not imitated: it was not edited"].append(sample)
        elif sample.finish_reason == "length":
            refused["not imitated: it was cut off at its token limit"].append(sample)
        elif sample.reward < least:
            refused[f"not imitated: its reward is below {least:g}"].append(sample)
        else:
            taken.append(sample)
    if not sft:
        # The run of each group with the best mean reward, the first of equals; without a group, each run.
        found = runs(samples)
        groups: dict[object, tuple[str, ...]] = {}
        for run, calls in sorted(
            found.items(), key=lambda each: (-fmean(call.reward for call in each[1]), each[1][0].id)
        ):
            groups.setdefault(run if calls[0].group_id is None else calls[0].group_id, run)
        best = set(groups.values())
        worse = [sample for sample in taken if run_of(sample) not in best]
        taken = [sample for sample in taken if run_of(sample) in best]
        if worse:
            refused["not imitated: another run of its group has a better reward"] += worse
    return taken, dict(refused)


@cache
def longest_of(folder: Path) -> float:
    """The model's limit of tokens, infinite if its configuration has none."""
    file = folder / "config.json"
    config = json.loads(file.read_bytes()) if file.is_file() else {}
    config |= config.get("text_config") or {}
    stretched = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return (config.get("max_position_embeddings") or math.inf) * max(1, stretched.get("factor") or 1)


def select(samples: Sequence[Sample], settings: Settings, *, vocabulary: int) -> tuple[list[Sample], Refused]:
    """The samples that can be trained on, with edited answers and allowed tokens; and the others by reason."""
    edited, unwritable = with_demonstrations(samples, settings)
    held, not_rebuilt = with_allowed_tokens(edited, settings, vocabulary=vocabulary)
    grouped: dict[str, Any] = {"group_by": settings.buffer.group_by, "least_runs": BatchRules.of(settings).least_runs}
    kept, refused = sort_out(held, settings.algorithm, vocabulary=vocabulary, sampled=samples, **grouped)
    return kept, unwritable | not_rebuilt | refused


def sort_out(
    samples: Sequence[Sample],
    algorithm: AlgorithmSettings,
    *,
    vocabulary: int,
    group_by: str,
    least_runs: int = 2,
    sampled: Sequence[Sample] = (),
) -> tuple[list[Sample], Refused]:
    """The samples that can be trained on, and the others by reason.

    By `run` or `task`, superseded calls are dropped, judged by what was `sampled` before edits. By `task`, groups with
    fewer than `least_runs` are dropped too and, if the method compares runs, groups of equal rewards.
    """
    refused: Refused = defaultdict(list)
    kept = []
    for sample in samples:
        reason = untrainable(sample, algorithm, vocabulary=vocabulary)
        if reason is None:
            kept.append(sample)
        else:
            refused[reason].append(sample)
    if group_by in {"run", "task"}:
        own = {sample.id: sample for sample in sampled}
        found = runs(own.get(sample.id, sample) for sample in kept)
        again = [call for calls in found.values() for call in superseded_calls(calls)]
        kept = _without(kept, again, refused, "superseded by another reply to the same prompt")
    kept, left = comparable(kept, algorithm, group_by=group_by, least_runs=least_runs)
    found_left = [left]
    if algorithm.algorithm_type == "dpo":
        kept, left = make_pairs(kept)
        found_left.append(left)
    elif algorithm.algorithm_type in {"sft", "raft"}:
        kept, left = imitable(kept, algorithm)
        found_left.append(left)
    for reason, others in (item for left in found_left for item in left.items()):
        refused[reason] += others
    return kept, dict(refused)


def comparable(
    samples: list[Sample], algorithm: AlgorithmSettings, *, group_by: str, least_runs: int = 2
) -> tuple[list[Sample], Refused]:
    """The samples without groups by `task` that have nothing to compare, and these by reason."""
    refused: Refused = defaultdict(list)
    if group_by != "task":
        return samples, refused
    state = "alone in its group" if least_runs == 2 else f"fewer than {least_runs} runs of its group are left"
    reason = f"{state}: the others cannot be trained on"
    kept = _without_groups(samples, lambda group: len(set(map(run_of, group))) < least_runs, refused, reason)
    if algorithm.algorithm_type in OF_GROUPS:
        reason = "all runs of its group have the same reward: it says nothing"

        def is_constant(group: Sequence[Sample]) -> bool:
            rewards = ([call.reward for call in calls] for calls in runs(group).values())
            return len({each[-1] if algorithm.by_result else fmean(each) for each in rewards}) < 2

        kept = _without_groups(kept, is_constant, refused, reason)
    return kept, refused


def untrainable(sample: Sample, algorithm: AlgorithmSettings, *, vocabulary: int) -> str | None:
    """Why the sample must not reach the loss, or None; the sentence becomes its row's reason."""
    ids = np.concatenate([sample.prompt_ids, sample.completion_ids])
    known = ids[ids != REDACTED]
    answered = algorithm.algorithm_type == "distill" and algorithm.distill.mode == "replies"
    rules = {
        "the reply has no tokens": len(sample.completion_ids) > 0,
        "the prompt has no tokens, so the reply's first one was predicted from nothing": len(sample.prompt_ids) > 0,
        f"the reward is not a number within ±{MAX_REWARD:g}": abs(sample.reward) <= MAX_REWARD,
        f"a token is outside the model's vocabulary of {vocabulary}": bool(((known >= 0) & (known < vocabulary)).all()),
        "all of the reply was redacted": not len(sample.completion_ids)
        or bool((sample.completion_ids != REDACTED).any()),
        "its prompt was redacted, so the teacher cannot answer it": not answered or REDACTED not in sample.prompt_ids,
        "the reply has not one log-probability per token": len(sample.logprobs) == len(sample.completion_ids),
    }
    if not algorithm.of_any_reply:
        rules |= {
            "it was redacted: what was sampled cannot be read again": len(known) == len(ids),
            "a log-probability is not finite": not is_captured(sample.logprobs)
            or bool(np.isfinite(sample.logprobs).all()),
            "the reply was chosen at temperature 0, not sampled": 0 < sample.temperature < float("inf"),
        }
    return next((reason for reason, fulfilled in rules.items() if not fulfilled), None)


def _without(kept: list[Sample], left: Sequence[Sample], refused: Refused, reason: str) -> list[Sample]:
    ids = {sample.id for sample in left}
    if ids:
        refused[reason] += left
    return [sample for sample in kept if sample.id not in ids]


def _without_groups(
    kept: list[Sample], is_so: Callable[[Sequence[Sample]], bool], refused: Refused, reason: str
) -> list[Sample]:
    groups: defaultdict[int | None, list[Sample]] = defaultdict(list)
    for sample in kept:
        groups[sample.group_id].append(sample)
    return _without(kept, [each for group in groups.values() if is_so(group) for each in group], refused, reason)
