"""How requests are divided while a version is being tried: who gets its replies, and of whose requests it gets copies.

Every worker decides by itself and all decide alike: by a hash, so that who has a key meets the same version every time.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.settings.settings import Settings

_WHOLE = 2**64


class TrafficSplit(msgspec.Struct, frozen=True):
    """What a version that is being tried gets: the share of the keys it answers, and of those it gets copies of."""

    version: int
    share: float = 0.0
    copies: float = 0.0

    def answers(self, key: str) -> bool:
        """Whether it answers the requests of a key."""
        return bucket_of(self.version, key) < self.share

    def copied(self, key: str) -> bool:
        """Whether it gets copies of the requests of a key."""
        return bucket_of(self.version, key) < self.copies

    def withdrawn(self) -> "TrafficSplit":
        """The same version without any requests."""
        return TrafficSplit(self.version)


def bucket_of(version: int, key: str) -> float:
    """Where in [0, 1) a key lies. Each version has an order of its own, so that not the same users try them all."""
    return _bucket(b"%d" % version, key)


def _bucket(salt: bytes, key: str) -> float:
    digest = hashlib.blake2b(b"%b:%b" % (salt, key.encode("utf-8", "surrogatepass")), digest_size=8).digest()
    return int.from_bytes(digest) / _WHOLE


def is_held_out(key: str, share: float) -> bool:
    """Whether the replies to a key are held out of training, where so much of the traffic is.

    What is held out by a share is by a larger one too.
    """
    return _bucket(b"held out", key) < share


def split_of(mode: str, version: int, share: float) -> TrafficSplit:
    """The split of a rollout in that mode."""
    return TrafficSplit(version, copies=share) if mode == "shadow" else TrafficSplit(version, share=share)


_DIGITS = 9


class ServesVersion(Protocol):
    """What there is to know of an engine."""

    @property
    def version(self) -> int:
        """What it serves."""


_Engine = TypeVar("_Engine", bound=ServesVersion)


class VersionPin(NamedTuple):
    """The version that must answer a request."""

    version: int

    def able(self, engines: Iterable[_Engine]) -> list[_Engine]:
        """The engines that have it."""
        return [each for each in engines if each.version == self.version]

    def refused(self, served: Sequence[int]) -> RequestRefused:
        """What a client is told when no engine has it."""
        versions = ", ".join(map(str, served)) or "none"
        message = f"the model does not exist: version {self.version} is not served; served are: {versions}"
        return RequestRefused(message, status=404, code="model_not_found", param="model")


class PinParser:
    """Understands which version a request names."""

    def __init__(self, settings: Settings) -> None:
        #: The model's own name, as engines know it.
        self.name = settings.served_model_name
        #: Whether clients may name a version.
        self.allowed = settings.explorer.version_pins

    def of(self, body: Mapping[str, Any]) -> VersionPin | None:
        """The version that a body names. Raises RequestRefused if it is no number."""
        model = body.get("model")
        if not self.allowed or not isinstance(model, str) or not model.startswith(f"{self.name}@"):
            return None
        number = model.removeprefix(f"{self.name}@")
        if not (number.isascii() and number.isdigit() and len(number) <= _DIGITS):
            message = f"the model does not exist: after {self.name}@ comes the number of a version"
            raise RequestRefused(message, status=404, code="model_not_found", param="model")
        return VersionPin(int(number))

    def listed(self, models: Iterable[dict[str, Any]], served: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The models that an engine tells, and the versions that may be named."""
        for model in models:
            yield model
            if self.allowed and model.get("id") == self.name:
                yield from (model | {"id": f"{self.name}@{version}"} for version in served)
