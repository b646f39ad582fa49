"""Traffic splitting by version: canary share, shadow share, hold-out share, and requests pinned to a version.

Every worker decides by itself and all decide alike: by a hash, so that the same key gets the same version every time.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.settings.settings import Settings

_WHOLE = 2**64


class TrafficSplit(msgspec.Struct, frozen=True):
    """What a canary version gets: the share of the keys that it answers, and of those it gets shadow requests of."""

    version: int
    share: float = 0.0
    shadow_share: float = 0.0

    def answers(self, key: str) -> bool:
        """Whether the version answers the requests of a key."""
        return bucket_of(self.version, key) < self.share

    def shadows(self, key: str) -> bool:
        """Whether the version gets shadow copies of the requests of a key."""
        return bucket_of(self.version, key) < self.shadow_share

    def without_traffic(self) -> "TrafficSplit":
        """The same version without any requests."""
        return TrafficSplit(self.version)


def bucket_of(version: int, key: str) -> float:
    """Where in [0, 1) a key lies. Each version has an order of its own, so that the canary users change with it."""
    return _bucket(b"%d" % version, key)


def _bucket(salt: bytes, key: str) -> float:
    digest = hashlib.blake2b(b"%b:%b" % (salt, key.encode("utf-8", "surrogatepass")), digest_size=8).digest()
    return int.from_bytes(digest) / _WHOLE


def in_share(purpose: bytes, msg_id: str, share: float) -> bool:
    """Whether a reply is one of the share that is taken for a purpose; always the same for the same reply."""
    return _bucket(purpose, msg_id) < share


def split_of(mode: str, version: int, share: float) -> TrafficSplit:
    """The split of a rollout in a mode: shadow or canary."""
    return TrafficSplit(version, shadow_share=share) if mode == "shadow" else TrafficSplit(version, share=share)


_DIGITS = 9


class ServesVersion(Protocol):
    """What has a version: an engine."""

    @property
    def version(self) -> int:
        """The version that it serves."""


_Engine = TypeVar("_Engine", bound=ServesVersion)


class VersionPin(NamedTuple):
    """A request for one version, `model@version`."""

    version: int

    def filter(self, engines: Iterable[_Engine]) -> list[_Engine]:
        """The engines that serve the version."""
        return [each for each in engines if each.version == self.version]

    def not_served_error(self, served: Sequence[int]) -> RequestRefused:
        """The error of a request for a version that no engine serves."""
        versions = ", ".join(map(str, served)) or "none"
        message = f"the model does not exist: version {self.version} is not served; these are: {versions}"
        return RequestRefused(message, status=404, code="model_not_found", param="model")


class PinParser:
    """Reads the version that a request is pinned to."""

    def __init__(self, settings: Settings) -> None:
        #: The model's own name, as engines know it.
        self.model_name = settings.served_model_name
        #: Whether clients may pin a version.
        self.allowed = settings.explorer.version_pins

    def parse(self, body: Mapping[str, Any]) -> VersionPin | None:
        """The version that a body is pinned to. Raises RequestRefused if it is not a number."""
        model = body.get("model")
        if not self.allowed or not isinstance(model, str) or not model.startswith(f"{self.model_name}@"):
            return None
        number = model.removeprefix(f"{self.model_name}@")
        if not (number.isascii() and number.isdigit() and len(number) <= _DIGITS):
            message = f"the model does not exist: {self.model_name}@ must be followed by the number of a version"
            raise RequestRefused(message, status=404, code="model_not_found", param="model")
        return VersionPin(int(number))

    def with_versions(self, models: Iterable[dict[str, Any]], served: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The models of an engine's list, and behind each the versions that may be requested."""
        for model in models:
            yield model
            if self.allowed and model.get("id") == self.model_name:
                yield from (model | {"id": f"{self.model_name}@{version}"} for version in served)
