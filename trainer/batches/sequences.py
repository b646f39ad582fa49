"""Token sequences: what a model reads in training, and which of its tokens are learnt from.

The calls of a run that extend each other's prompt become one sequence, in which the first prompt is read once: user's
turns and tools' results lie between the replies, and are not learnt from. Nor is what was redacted: another token
stands in the place of each, so that all others keep their position.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Self

import msgspec
import numpy as np

from tuneloop.shared.experience import REDACTED, Float32s, Int32s, Sample
from tuneloop.shared.ledger.training.merged_calls import merge_calls

#: Is read where a token was redacted. Every vocabulary has it.
_STAND_IN = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSequence:
    """Some calls in one row of tokens.

    Four arrays of the same length: token ids; for each token the index in `calls` of the reply that it is of, -1 if of
    none; log-probability as sampled (0 if of none); temperature (1 if of none).
    """

    ids: Int32s
    of: Int32s
    sampled: Float32s
    temperatures: Float32s
    calls: tuple[Sample, ...]

    @classmethod
    def alone(cls, sample: Sample) -> Self:
        """One call."""
        nothing = cls(
            ids=np.zeros(0, np.int32),
            of=np.zeros(0, np.int32),
            sampled=np.zeros(0, np.float32),
            temperatures=np.zeros(0, np.float32),
            calls=(),
        )
        return nothing.then(sample)

    def goes_on_in(self, sample: Sample) -> bool:
        """Whether the call's prompt begins with all of this."""
        length = len(self.ids)
        return len(sample.prompt_ids) >= length and np.array_equal(_readable(sample.prompt_ids[:length]), self.ids)

    def then(self, sample: Sample) -> Self:
        """This, and then a call that it goes on in."""
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
        """Where the first reply begins."""
        return int(np.argmax(self.of >= 0))


def _readable(ids: Int32s) -> Int32s:
    return np.where(ids == REDACTED, np.int32(_STAND_IN), ids)


def run_of(sample: Sample) -> tuple[str, ...]:
    """What the calls of one run have in common; a reply that names no run is a run of its own."""
    if sample.task_id is None or sample.run_id is None:
        return (str(sample.id),)
    return (sample.tenant, sample.task_id, sample.run_id)


def when_sampled(sample: Sample) -> tuple[float, int]:
    """The order of calls: by the time of their requests, for their rows may be numbered in another."""
    return sample.sampled_at, sample.id


def assemble(samples: Iterable[Sample], *, merge: bool) -> list[TokenSequence]:
    """Sequences of the samples; with `merge`, calls of one run that extend each other's prompt share one."""
    if not merge:
        return [TokenSequence.alone(sample) for sample in samples]
    merged = [calls for run in runs(samples).values() for calls in merge_calls(run)]
    return [reduce(TokenSequence.then, calls[1:], TokenSequence.alone(calls[0])) for calls in merged]


def runs(samples: Iterable[Sample]) -> dict[tuple[str, ...], list[Sample]]:
    """The samples by their run, in the order in which they were sampled."""
    found: defaultdict[tuple[str, ...], list[Sample]] = defaultdict(list)
    for sample in samples:
        found[run_of(sample)].append(sample)
    return {run: sorted(calls, key=when_sampled) for run, calls in found.items()}


def superseded_calls(calls: Sequence[Sample]) -> list[Sample]:
    """Those calls of a run that were repeated, and whose replies no later call continues.

    Of replies to one and the same prompt those are kept that a later prompt of the run contains; if there is none,
    those of the last request. Several choices of one request are all kept unless a later prompt contains one of them.
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
                if any(TokenSequence.alone(each).goes_on_in(other) for other in calls if other is not each)
            ]
            last = max(rivals, key=when_sampled)
            kept = chosen or [each for each in rivals if each is last or (each.msg_id and each.msg_id == last.msg_id)]
            left += [each for each in rivals if each not in kept]
    return left


def with_completion(sample: Sample, ids: Sequence[int]) -> Sample:
    """The sample with another reply, which nobody sampled from the policy: its log-probabilities are 0."""
    return msgspec.structs.replace(
        sample,
        completion_ids=np.array(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        temperature=1.0,
        finish_reason="stop",
        grammar=None,
        allowed=None,
    )
