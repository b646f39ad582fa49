"""Requests for one version by its number: `model: "<name>@<version>"`, where `explorer.version_pins` allows it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from shared.config import Settings
from shared.errors import RequestRefused

_DIGITS = 9


class Serving(Protocol):
    """What there is to know of an engine."""

    @property
    def version(self) -> int:
        """What it serves."""


_Engine = TypeVar("_Engine", bound=Serving)


class Pin(NamedTuple):
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


class Pins:
    """Understands which version a request names."""

    def __init__(self, settings: Settings) -> None:
        #: The model's own name, as engines know it.
        self.name = settings.served_model_name
        #: Whether clients may name a version.
        self.allowed = settings.explorer.version_pins

    def of(self, body: Mapping[str, Any]) -> Pin | None:
        """The version that a body names. Raises RequestRefused if it is no number."""
        model = body.get("model")
        if not self.allowed or not isinstance(model, str) or not model.startswith(f"{self.name}@"):
            return None
        number = model.removeprefix(f"{self.name}@")
        if not (number.isascii() and number.isdigit() and len(number) <= _DIGITS):
            message = f"the model does not exist: after {self.name}@ comes the number of a version"
            raise RequestRefused(message, status=404, code="model_not_found", param="model")
        return Pin(int(number))

    def listed(self, models: Iterable[dict[str, Any]], served: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The models that an engine tells, and the versions that may be named."""
        for model in models:
            yield model
            if self.allowed and model.get("id") == self.name:
                yield from (model | {"id": f"{self.name}@{version}"} for version in served)
