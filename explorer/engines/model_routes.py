"""What a request's `model` may ask for, a policy and a version of it, and what is known of policies to answer it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from tuneloop.explorer.engines.adapter_names import ModelRenaming
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import JobState
from tuneloop.shared.ledger.policies import CHECKPOINT

#: Of a version's number, at most.
_DIGITS = 9


class _Serving(Protocol):
    version: int


_Engine = TypeVar("_Engine", bound=_Serving)


def no_model(reason: str) -> RequestRefused:
    return RequestRefused(f"the model does not exist: {reason}", status=404, code="model_not_found", param="model")


class VersionPin(NamedTuple):
    version: int

    def filter(self, engines: Iterable[_Engine]) -> list[_Engine]:
        return [each for each in engines if each.version == self.version]

    def not_served_error(self, served: Sequence[int]) -> RequestRefused:
        versions = ", ".join(map(str, served)) or "none"
        return no_model(f"version {self.version} is not served; these are: {versions}")


class JobStatus(msgspec.Struct, frozen=True):
    """The fine-tuning job of a policy, and which versions may be asked under which names: none before it is over."""

    id: str
    name: str
    state: JobState
    models: dict[str, int]


class ModelUnknown(RequestRefused):
    """No model that the workers know has the name; the ledger may know one by now."""

    def __init__(self, reason: str) -> None:
        super().__init__(str(no_model(reason)), status=404, code="model_not_found", param="model")


class PolicyView(msgspec.Struct, frozen=True):
    """A policy other than the default one, as the workers know it. An empty `tenant`: every key may use it.

    `versions` are those that answer, each with whether it is the base model: the champion, a canary, which answers its
    `share` of the keys, and what its `job` has made. A job's policy is asked by the job's names alone.
    """

    id: int
    name: str
    tenant: str
    champion: int
    versions: dict[int, bool]
    canary: int | None = None
    share: float = 0.0
    job: JobStatus | None = None

    @property
    def names(self) -> list[str]:
        return [self.name] if self.job is None else list(self.job.models)


class PolicyTable(dict[int, PolicyView]):
    def __init__(self, policies: Iterable[PolicyView] = ()) -> None:
        super().__init__({each.id: each for each in policies})
        self._named = {(each.tenant, each.job.name if each.job else each.name): each for each in self.values()}

    def find(self, name: str, tenant: str) -> PolicyView | None:
        name = name.partition(CHECKPOINT)[0]
        return self._named.get(("", name)) or self._named.get((tenant, name))

    def of_tenant(self, tenant: str) -> list[PolicyView]:
        return [each for each in self.values() if each.tenant in {"", tenant}]


class AdapterView(msgspec.Struct, frozen=True):
    version: int
    renaming: ModelRenaming
    proof: str


class ModelRoute(NamedTuple):
    """A policy (None: the default one), perhaps one version, and its `name` in replies unless it is the model's."""

    policy: PolicyView | None
    pin: VersionPin | None
    name: str | None


def pin_of(number: str) -> VersionPin | None:
    return VersionPin(int(number)) if number.isascii() and number.isdigit() and len(number) <= _DIGITS else None


class PolicyKey(NamedTuple):
    policy: int
    key: str
    pin: VersionPin | None


#: What the engine of a request is chosen by: the key of its user or task, or the version that must answer it.
RoutingKey = str | VersionPin | PolicyKey
