"""Builds batches: token sequences as tensors, their micro-batches, and the credit of calls.

Dimensions, written as suffixes of tensors throughout the trainer:
    B sequences   T positions of prompt and reply   R positions from the first reply token on
    N all reply tokens, sequence after sequence   C replies ("calls"; a merged sequence has several)
    P positions that a model reads, padding included   D width of the model   V vocabulary
    K sets of tokens that a grammar allows   W words of 32 bits, one bit for each token of the vocabulary
    L sets of tokens that truncation left   S the most of them in one set
T and R are padded on the right. A reply 4 5 to the prompt 7 8 9, padded to T = 6 and R = 3:
    ids_BT       7 8 9 4 5 0
    predicts_BT  . . x x . .     the positions whose next token is a reply token
    replies_BR   4 5 0
    mask_BR      x x .

Calls of a run that extend each other's prompt become one sequence, which contains each prompt once. The mask of a
merged sequence has holes for messages of users and tools, and for redacted tokens, which another token replaces so that
all others keep their position. Models read sequences side by side in one row, or, for a few models, padded. Batches are
made on the CPU: on a GPU each micro-batch would wait for it.

Credit is the reward of each call and the place where it is paid:
    call         its own reward, at its end
    trajectory   the reward of the run's last call, once, at the end of the sequence
    discounted   the reward of the run's last call, times `turn_discount` per later call, at the call's end
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from itertools import accumulate
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tuneloop.shared.experience import REDACTED, Float32s, Int32s, Sample
from tuneloop.shared.ledger.training.groups import merge_calls
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms import CallRewards
from tuneloop.trainer.transfer import hand_over

_STAND_IN = 0  # replaces a redacted token; each vocabulary has it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSequence:
    """Calls in one row of tokens.

    Four arrays of equal length: token ids; the index in `calls` of each token's reply, otherwise -1; the
    log-probability as sampled, otherwise 0; the temperature, otherwise 1.
    """

    ids: Int32s
    of: Int32s
    sampled: Float32s
    temperatures: Float32s
    calls: tuple[Sample, ...]

    @classmethod
    def alone(cls, sample: Sample) -> Self:
        nothing = cls(
            ids=np.zeros(0, np.int32),
            of=np.zeros(0, np.int32),
            sampled=np.zeros(0, np.float32),
            temperatures=np.zeros(0, np.float32),
            calls=(),
        )
        return nothing.then(sample)

    def is_prefix_of(self, sample: Sample) -> bool:
        length = len(self.ids)
        return len(sample.prompt_ids) >= length and np.array_equal(_readable(sample.prompt_ids[:length]), self.ids)

    def then(self, sample: Sample) -> Self:
        between, reply = sample.prompt_ids[len(self.ids) :], sample.completion_ids
        quiet, known = len(between), reply != REDACTED
        nothing, zero, one = np.int32(-1), np.float32(0), np.float32(1)
        owner = np.where(known, np.int32(len(self.calls)), nothing)
        temperatures = np.where(known, np.float32(sample.temperature), one)
        return type(self)(
            ids=np.concatenate([self.ids, _readable(between), _readable(reply)]),
            of=np.concatenate([self.of, np.full(quiet, nothing), owner]),
            sampled=np.concatenate([self.sampled, np.full(quiet, zero), np.where(known, sample.logprobs, zero)]),
            temperatures=np.concatenate([self.temperatures, np.full(quiet, one), temperatures]),
            calls=(*self.calls, sample),
        )

    @property
    def start(self) -> int:
        return int(np.argmax(self.of >= 0))


def _readable(ids: Int32s) -> Int32s:
    return np.where(ids == REDACTED, np.int32(_STAND_IN), ids)


def run_of(sample: Sample) -> tuple[str, ...]:
    """The key of a run; a reply without one is its own run."""
    if sample.task_id is None or sample.run_id is None:
        return (str(sample.id),)
    return (sample.tenant, sample.task_id, sample.run_id)


def when_sampled(sample: Sample) -> tuple[float, int]:
    """Order of calls by request time, since row numbers may differ."""
    return sample.sampled_at, sample.id


def assemble(samples: Iterable[Sample], *, merge: bool) -> list[TokenSequence]:
    """Sequences of the samples; with `merge`, calls of a run that extend each other's prompt share one."""
    if not merge:
        return [TokenSequence.alone(sample) for sample in samples]
    merged = [calls for run in runs(samples).values() for calls in merge_calls(run)]
    return [reduce(TokenSequence.then, calls[1:], TokenSequence.alone(calls[0])) for calls in merged]


def runs(samples: Iterable[Sample]) -> dict[tuple[str, ...], list[Sample]]:
    found: defaultdict[tuple[str, ...], list[Sample]] = defaultdict(list)
    for sample in samples:
        found[run_of(sample)].append(sample)
    return {run: sorted(calls, key=when_sampled) for run, calls in found.items()}


def superseded_calls(calls: Sequence[Sample]) -> list[Sample]:
    """Calls of a run that were repeated, and whose replies no later call continues.

    Of replies to one prompt, those in a later prompt of the run are kept, otherwise those of the last request. Choices
    of one request are all kept unless a later prompt contains one of them.
    """
    same_prompt: defaultdict[bytes, list[Sample]] = defaultdict(list)
    for call in calls:
        same_prompt[call.prompt_ids.tobytes()].append(call)
    left: list[Sample] = []
    for rivals in same_prompt.values():
        if len(rivals) > 1:
            chosen = [
                each
                for each in rivals
                if any(TokenSequence.alone(each).is_prefix_of(other) for other in calls if other is not each)
            ]
            last = max(rivals, key=when_sampled)
            kept = chosen or [each for each in rivals if each is last or (each.msg_id and each.msg_id == last.msg_id)]
            left += [each for each in rivals if each not in kept]
    return left


def with_completion(sample: Sample, ids: Sequence[int]) -> Sample:
    """The sample with another reply, which the policy did not sample: its log-probabilities are 0."""
    return msgspec.structs.replace(
        sample,
        completion_ids=np.array(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        temperature=1.0,
        finish_reason="stop",
        grammar=None,
        allowed=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences as tensors. `lengths_B` counts the tokens of prompt and reply.

    `held_BR` exists if a grammar or truncation restricted a reply: at each token its set in `allowed_KW` or, from -2
    down, in `left_LS` (padded by -1); -1 where all tokens were allowed. `calls_BR` numbers the replies of the batch per
    token, otherwise -1.
    """

    ids_BT: Tensor
    predicts_BT: Tensor
    replies_BR: Tensor
    mask_BR: Tensor
    sampled_BR: Tensor
    temperatures_BR: Tensor
    calls_BR: Tensor
    lengths_B: Tensor
    held_BR: Tensor | None = None
    allowed_KW: Tensor | None = None
    left_LS: Tensor | None = None

    @property
    def tokens(self) -> int:
        return int(self.mask_BR.sum())

    def rows(self, index_B: Tensor) -> "Batch":
        lengths_B, mask_BR = self.lengths_B[index_B], self.mask_BR[index_B]
        widths = {"T": int(lengths_B.max()), "R": (int(mask_BR.any(0).nonzero().max()) + 1)}
        cut: dict[str, Tensor | None] = {"allowed_KW": self.allowed_KW, "left_LS": self.left_LS}
        for field in fields(self):
            each_B = getattr(self, field.name)
            if each_B is not None and field.name not in cut:
                each_B = each_B[index_B]
                cut[field.name] = each_B if each_B.dim() == 1 else each_B[:, : widths[field.name[-1]]]
        if self.left_LS is not None and (held_BR := cut["held_BR"]) is not None:  # nearly each token has its own set
            used_L, at = torch.unique(-2 - held_BR[held_BR < -1], return_inverse=True)
            cut["held_BR"] = held_BR.masked_scatter(held_BR < -1, -2 - at)
            cut["left_LS"] = self.left_LS[used_L] if len(used_L) else None
        return Batch(**cut)  # type: ignore[arg-type]


def collate(sequences: Sequence[TokenSequence]) -> Batch:
    """The sequences as one batch on the CPU. Each has a prompt and a reply."""
    starts = [sequence.start for sequence in sequences]
    before = [0, *accumulate(len(sequence.calls) for sequence in sequences)]
    predicts = [np.append(sequence.of[1:] >= 0, False) for sequence in sequences]
    ends = list(zip(sequences, starts, strict=True))
    tails = [sequence.of[start:] for sequence, start in ends]
    numbered = [np.where(of >= 0, of + first, -1) for of, first in zip(tails, before, strict=False)]
    held_BR, allowed_KW, left_LS = _grammar_tensors(sequences, tails)
    return Batch(
        ids_BT=_pad(sequence.ids for sequence in sequences).long(),
        predicts_BT=_pad(predicts),
        replies_BR=_pad(each.ids[start:] for each, start in ends).long(),
        mask_BR=_pad(of >= 0 for of in tails),
        sampled_BR=_pad(each.sampled[start:] for each, start in ends).float(),
        temperatures_BR=_pad((each.temperatures[start:] for each, start in ends), filler=1.0).float(),
        calls_BR=_pad(numbered, filler=-1).long(),
        lengths_B=torch.tensor([len(sequence.ids) for sequence in sequences]),
        held_BR=held_BR,
        allowed_KW=allowed_KW,
        left_LS=left_LS,
    )


def all_but_first(ids: Sequence[int]) -> Batch:
    """One sequence whose tokens but the first count as a reply at temperature 1."""
    ids_BT = torch.tensor([ids])
    like_BR = torch.zeros(1, len(ids) - 1)
    return Batch(
        ids_BT=ids_BT,
        predicts_BT=torch.arange(len(ids))[None] != len(ids) - 1,
        replies_BR=ids_BT[:, 1:],
        mask_BR=like_BR == 0,
        sampled_BR=like_BR,
        temperatures_BR=like_BR + 1,
        calls_BR=like_BR.long(),
        lengths_B=torch.tensor([len(ids)]),
    )


def _grammar_tensors(
    sequences: Sequence[TokenSequence], tails: Sequence[Int32s]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`held_BR`, `allowed_KW` and `left_LS`. Replies to one agent share most of their sets."""
    if all(call.allowed is None for sequence in sequences for call in sequence.calls):
        return None, None, None
    sets: dict[bytes, int] = {}
    lists: list[Int32s] = []
    held = []
    for sequence, of in zip(sequences, tails, strict=True):
        at = np.full(len(of), -1, np.int64)
        for number, call in enumerate(sequence.calls):
            if call.allowed is not None and call.allowed.listed:
                at[of == number] = -2 - len(lists) - call.allowed.at
                lists += list(call.allowed.rows)
            elif call.allowed is not None:
                known = [sets.setdefault(row.tobytes(), len(sets)) for row in call.allowed.rows]
                at[of == number] = np.array([*known, -1])[call.allowed.at]
        held.append(at)
    rows = [torch.from_numpy(np.frombuffer(each, np.int32).copy()) for each in sets]
    return (
        _pad(held, filler=-1).long(),
        torch.stack(rows) if rows else None,
        _pad(lists, filler=-1) if lists else None,
    )


def micro_batches(
    lengths_B: Tensor, budget: int, units_B: Tensor | None = None, *, padded: bool = False
) -> list[Tensor]:
    """Indices of sequences in groups of at most `budget` tokens; a longer sequence is alone.

    First fit, longest first. Sequences of one unit stay together. With `padded` the budget includes padding, and
    similar lengths are grouped.
    """
    groups: list[list[int]] = []
    sizes: list[int] = []
    widest = 0
    for unit in _longest_first(lengths_B, units_B):
        longest, tokens = int(lengths_B[unit].max()), int(lengths_B[unit].sum())
        if padded:
            # Sorted by length, so later sequences are no wider than the group's first.
            at = len(groups) - 1 if groups and (len(groups[-1]) + len(unit)) * widest <= budget else None
            widest = longest if at is None else widest
        else:
            at = next((index for index, size in enumerate(sizes) if size + tokens <= budget), None)
        if at is None:
            groups.append([])
            sizes.append(0)
            at = -1
        groups[at] += unit
        sizes[at] += tokens
    return [torch.tensor(group) for group in groups]


def share_of(rank: int, size: int, lengths_B: Tensor, units_B: Tensor | None = None, *, width: int) -> Tensor:
    """Indices of one rank's sequences, possibly none, so that `size` ranks have similar work.

    The costliest unit goes first, to the least loaded rank. In a model of this `width` attention takes as long as all
    else at 12 x width tokens.
    """
    if size == 1:
        return torch.arange(len(lengths_B))
    costs = (lengths_B * (1 + lengths_B / (12 * width))).tolist()
    units = [(sum(costs[row] for row in unit), unit) for unit in _longest_first(lengths_B, units_B)]
    given: list[list[int]] = [[] for _ in range(size)]
    loads = [0.0] * size
    for cost, unit in sorted(units, key=lambda each: -each[0]):
        least = loads.index(min(loads))
        given[least] += unit
        loads[least] += cost
    return torch.tensor(sorted(given[rank]), dtype=torch.long)


def mini_batches(rows: int, count: int, units_B: Tensor | None, generator: torch.Generator) -> list[Tensor]:
    """Shuffled indices in `count` parts; a unit's sequences stay together."""
    units = rows if units_B is None else int(units_B.max()) + 1
    parts = torch.randperm(units, generator=generator).tensor_split(min(count, units))
    if units_B is None:
        return list(parts)
    return [torch.cat([(units_B == unit).nonzero()[:, 0] for unit in part]) for part in parts]


def scatter_tokens(flat_N: Tensor, mask_BR: Tensor) -> Tensor:
    """Put a value per reply token back in place; a mask on the CPU avoids waiting."""
    places_N = hand_over(mask_BR.flatten().nonzero()[:, 0], flat_N.device)
    return flat_N.new_zeros(mask_BR.numel()).index_copy(0, places_N, flat_N).view(mask_BR.shape)


def _longest_first(lengths_B: Tensor, units_B: Tensor | None) -> list[list[int]]:
    order = torch.argsort(lengths_B, descending=True, stable=True).tolist()
    if units_B is None:
        return [[row] for row in order]
    units: dict[int, list[int]] = {}
    for row in order:
        units.setdefault(int(units_B[row]), []).append(row)
    return list(units.values())


def _pad(rows: Iterable[npt.NDArray[np.generic]], filler: float = 0) -> Tensor:
    tensors = [torch.from_numpy(np.array(row)) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=filler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A model's input: `ids_BT` and their positions, in one row if packed.

    `predicts_N` are the flat places whose next token is a reply token; `lengths` are those of the packed sequences,
    empty if padded.
    """

    ids_BT: Tensor
    positions_BT: Tensor
    predicts_N: Tensor
    lengths: tuple[int, ...]

    @property
    def processed(self) -> int:
        return self.ids_BT.numel()

    def part(self, place: int, count: int) -> tuple["Rows", slice]:
        """Part `place` of `count` equal parts of a row, padded by a sequence in `lengths`, and its reply tokens."""
        missing = -self.processed % count
        ids_T = torch.nn.functional.pad(self.ids_BT[0], (0, missing))
        positions_T = torch.cat([self.positions_BT[0], torch.arange(missing)])
        width = len(ids_T) // count
        here, bounds = slice(place * width, (place + 1) * width), torch.tensor([place * width, (place + 1) * width])
        first, last = torch.searchsorted(self.predicts_N, bounds).tolist()
        part = Rows(
            ids_BT=ids_T[here][None],
            positions_BT=positions_T[here][None],
            predicts_N=self.predicts_N[first:last] - here.start,
            lengths=(*self.lengths, missing) if missing else self.lengths,
        )
        return part, slice(first, last)


@dataclass(slots=True)
class Positions:
    """Counts positions read, and those with a token of a sequence."""

    processed: int = 0
    useful: int = 0

    def add(self, rows: Rows, batch: Batch, place: int = 0) -> None:
        """Of ranks that share a row, only the first counts the useful positions."""
        self.processed += rows.processed
        self.useful += int(batch.lengths_B.sum()) if place == 0 else 0


def count_positions(counts: Iterable[Positions]) -> dict[str, float]:
    counted = list(counts)
    return {"processed": sum(each.processed for each in counted), "useful": sum(each.useful for each in counted)}


def packed_rows(batch: Batch) -> Rows:
    positions_T = torch.arange(batch.ids_BT.shape[1])
    real_BT = positions_T < batch.lengths_B[:, None]
    return Rows(
        ids_BT=batch.ids_BT[real_BT][None],
        positions_BT=positions_T.expand(real_BT.shape)[real_BT][None],
        predicts_N=batch.predicts_BT[real_BT].nonzero()[:, 0],
        lengths=tuple(batch.lengths_B.tolist()),
    )


def padded_rows(batch: Batch) -> Rows:
    return Rows(
        ids_BT=batch.ids_BT,
        positions_BT=torch.arange(batch.ids_BT.shape[1]).expand(batch.ids_BT.shape),
        predicts_N=batch.predicts_BT.flatten().nonzero()[:, 0],
        lengths=(),
    )


def calls_of(
    algorithm: AlgorithmSettings, sequences: Sequence[TokenSequence], batch: Batch, limit: int | None
) -> CallRewards:
    """The calls of a batch, credited and punished for length. `limit`: the most tokens of a reply, if known."""
    calls = [call for sequence in sequences for call in sequence.calls]
    runs: dict[tuple[str, ...], list[int]] = {}
    for number in sorted(range(len(calls)), key=lambda number: when_sampled(calls[number])):
        runs.setdefault(run_of(calls[number]), []).append(number)
    own = np.array([call.reward for call in calls])
    credited, last, run_numbers = own.copy(), np.zeros(len(calls), bool), np.zeros(len(calls), np.int64)
    for number, members in enumerate(runs.values()):
        run_numbers[members] = number
        last[members[-1]] = True
        if algorithm.credit != "call":
            discount = algorithm.turn_discount if algorithm.credit == "discounted" else 1.0
            later = np.arange(len(members))[::-1]
            credited[members] = own[members[-1]] * discount**later
    groups = [call.group_id if call.group_id is not None else -1 - call.id for call in calls]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    judged, soft = credited.copy(), algorithm.overlong.buffer
    if soft and limit is not None:
        # DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13).
        beyond = np.array([len(call.completion_ids) for call in calls]) - (limit - soft)
        judged -= algorithm.overlong.penalty * np.clip(beyond / soft, 0.0, 1.0)
    return CallRewards(
        rewards_C=torch.from_numpy(judged).float(),
        rows_C=torch.repeat_interleave(torch.tensor([len(sequence.calls) for sequence in sequences])),
        runs_C=torch.from_numpy(run_numbers),
        groups_C=torch.tensor([numbers[name] for name in groups]),
        last_C=torch.from_numpy(last),
        tasks=tuple(f"{call.tenant}/{call.task_id}" if call.task_id is not None else "" for call in calls),
        of_BR=batch.calls_BR,
        ends_BR=_ends(batch, whole=algorithm.credit == "trajectory"),
    )


def _ends(batch: Batch, *, whole: bool) -> Tensor:
    """The last token of each call or, of `whole` sequences, the last trained token."""
    calls_BR = batch.calls_BR
    positions_R = torch.arange(calls_BR.shape[1])
    if not whole:
        # A redacted call has holes. The last entry is for tokens of no call.
        last_C = torch.full((int(calls_BR.max()) + 2,), -1)
        last_C.scatter_reduce_(0, calls_BR.flatten() % len(last_C), positions_R.expand_as(calls_BR).flatten(), "amax")
        return batch.mask_BR & (positions_R == last_C[calls_BR])
    final_B1 = torch.where(batch.mask_BR, positions_R, -1).max(1, keepdim=True).values
    return positions_R == final_B1


Metrics = dict[str, float]


def of_samples(samples: Sequence[Sample], *, version: int, group_size: int = 0) -> Metrics:
    """Metrics of rewards, lengths and staleness relative to `version`, and the share of partial groups."""
    groups: dict[int | None, set[tuple[str, ...]]] = {}
    for sample in samples if group_size else ():
        groups.setdefault(sample.group_id, set()).add(run_of(sample))
    partial = [len(each) < group_size for each in groups.values()]
    rewards = np.array([sample.reward for sample in samples])
    replies = np.array([len(sample.completion_ids) for sample in samples])
    prompts = np.array([len(sample.prompt_ids) for sample in samples])
    ages = np.array([version - sample.version_min for sample in samples])
    return {
        "critic/rewards/mean": float(rewards.mean()),
        "critic/rewards/std": float(rewards.std()),
        "critic/rewards/max": float(rewards.max()),
        "critic/rewards/min": float(rewards.min()),
        "response_length/mean": float(replies.mean()),
        "response_length/max": float(replies.max()),
        "prompt_length/mean": float(prompts.mean()),
        "off_policy/staleness_mean": float(ages.mean()),
        "off_policy/staleness_max": float(ages.max()),
    } | ({"groups/partial": sum(partial) / len(partial)} if partial else {})
