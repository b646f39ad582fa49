"""The nouns of the road: an exchange, its experiences, and feedback, as they travel from the explorer to the trainer.

These are also the records of the spool, so they are msgspec structs: `encode` and `decode` are the only serialisation.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


class State(StrEnum):
    """Where an experience stands. The arrows are the only legal transitions."""

    RECORDED = "recorded"  # -> rewarded, dropped, expired
    REWARDED = "rewarded"  # -> committed, expired (the reward may still be corrected)
    COMMITTED = "committed"  # -> leased, expired
    LEASED = "leased"  # -> trained, dropped; -> committed when the lease ends
    TRAINED = "trained"  # final: contained in exactly one registered version
    EXPIRED = "expired"  # final: older than the staleness bound
    DROPPED = "dropped"  # final: not trainable, with the reason


class VersionState(StrEnum):
    """Where a set of weights stands."""

    CANDIDATE = "candidate"  # -> champion, rejected, retired (a newer one came first)
    CHAMPION = "champion"  # -> retired
    REJECTED = "rejected"
    RETIRED = "retired"


class Experience(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a reply, as it was sampled.

    `prompt_ids` and `completion_ids` are little-endian int32 bytes, `logprobs` float32 bytes (natural log, one per
    completion id, under the distribution that was sampled from). Weights may change while a reply is being sampled:
    `version_min` and `version_max` say which versions wrote it. `drop_reason` is set when it must not be trained on.
    """

    choice: int
    prompt_ids: bytes
    completion_ids: bytes
    logprobs: bytes
    version_min: int
    version_max: int
    temperature: float
    finish_reason: str | None
    text: str
    drop_reason: str | None = None


class Exchange(msgspec.Struct, frozen=True, kw_only=True, tag="exchange"):
    """One request and its reply. `request` is the client's JSON body; times are seconds since 1970, UTC."""

    msg_id: str
    tenant: str
    endpoint: str
    request: bytes
    received_at: float
    latency_s: float
    experiences: tuple[Experience, ...]
    task_id: str | None = None
    run_id: str | None = None


class Feedback(msgspec.Struct, frozen=True, kw_only=True, tag="feedback"):
    """One feedback event about one reply. `choice` None means every choice of it."""

    event_id: str
    msg_id: str
    choice: int | None
    tenant: str
    reward: float
    received_at: float
    task_id: str | None = None
    run_id: str | None = None


Record = Exchange | Feedback

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    """The record as bytes, for the spool."""
    return _encoder.encode(record)


def decode(data: bytes) -> Record:
    """The record of `encode`'s bytes. Raises msgspec.MsgspecError on anything else."""
    return _decoder.decode(data)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Log-probabilities as little-endian float32 bytes."""
    return np.asarray(logprobs, dtype="<f4").tobytes()


class Sample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A leased experience as the trainer sees it: `completion_ids` and `logprobs` have the same length, at least 1."""

    id: int
    prompt_ids: Int32s
    completion_ids: Int32s
    logprobs: Float32s
    reward: float
    temperature: float
    version_min: int
    version_max: int
    task_id: str | None
    run_id: str | None
    rewarded_at: float
    committed_at: float
