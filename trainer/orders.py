"""What rank 0 orders the others to do, as bytes."""

from pathlib import Path
from typing import Any, cast, get_origin

import msgspec
import numpy as np

from tuneloop.shared.experience import Sample


class LoadOrder(msgspec.Struct, frozen=True, tag="load"):
    """Become the learner with the weights in `folder`, None: the base model's, and what `state` holds besides."""

    folder: str | None
    state: str | None

    @property
    def paths(self) -> tuple[Path | None, Path | None]:
        """Both folders."""
        folder, state = (None if each is None else Path(each) for each in (self.folder, self.state))
        return folder, state


class StepOrder(msgspec.Struct, frozen=True, tag="step"):
    """Learn from the samples in micro-batches of `tokens`. `halves`: rank 0 says how many if these do not fit.

    `checkpointing`: activations are made again, since it was found out that they do not fit, or by setting.
    """

    samples: list[Sample]
    version: int | None
    tokens: int
    halves: bool
    checkpointing: bool


class StateOrder(msgspec.Struct, frozen=True, tag="state"):
    """Give rank 0 what you have of the optimisers' state."""


class WeightsOrder(msgspec.Struct, frozen=True, tag="weights"):
    """Give rank 0 what you have of the actor's weights."""


class GatherOrder(msgspec.Struct, frozen=True, tag="gather"):
    """Let rank 0 have the whole of a model, to read something alone: of the actor, or of the reference."""

    reference: bool


class EndOrder(msgspec.Struct, frozen=True, tag="end"):
    """There is nothing more to do."""


Order = LoadOrder | StepOrder | StateOrder | WeightsOrder | GatherOrder | EndOrder


def encode(order: Order) -> bytes:
    """The order as bytes."""
    return _encoder.encode(order)


def decode(data: bytes) -> Order:
    """The order of `encode`'s bytes."""
    return _decoder.decode(data)


def _encode_array(what: Any) -> Any:
    if isinstance(what, np.ndarray):
        return [what.dtype.str, what.shape, what.tobytes()]
    raise NotImplementedError(type(what))


def _decode_array(kind: type, encoded: Any) -> Any:
    if (get_origin(kind) or kind) is np.ndarray:
        dtype, shape, data = encoded
        return np.frombuffer(bytearray(cast(bytes, data)), dtype).reshape(shape)
    raise NotImplementedError(kind)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order, dec_hook=_decode_array)
