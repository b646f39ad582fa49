"""What a request's `model` may ask for, a policy and a version of it, and what is known of policies to answer it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from tuneloop.explorer.engines.adapter_names import ModelRenaming
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import JobState
from tuneloop.shared.ledger.policies import CHECKPOINT

#: The name of the policy of all that names none.
_DEFAULT_POLICY = "default"

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


class JobNotOver(RequestRefused):
    def __init__(self, policy: int, job: JobStatus) -> None:
        reason = f"the fine-tuning job {job.id} is {job.state}"
        super().__init__(str(no_model(reason)), status=404, code="model_not_found", param="model")
        self.policy = policy


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


class KnownNames(NamedTuple):
    """The model's own names; whether it is served with adapters, which policies need, and whether clients may pin."""

    names: Sequence[str]
    adapters: bool
    pins: bool


def pin_of(number: str) -> VersionPin | None:
    return VersionPin(int(number)) if number.isascii() and number.isdigit() and len(number) <= _DIGITS else None


def route_to_policy(
    model: str, own: ModelRoute | None, known: KnownNames, table: PolicyTable | None, *, tenant: str, of_key: int | None
) -> ModelRoute:
    """What is asked for by a policy's name, or by the model's `own` with a key of a policy. Raises RequestRefused."""
    policies = table if table is not None else PolicyTable()
    if own is not None:
        policy, route = policies.get(of_key or 0), own
        policy = policy if policy is not None and policy.tenant in {"", tenant} else None
    elif (policy := policies.find(model, tenant)) is not None and policy.job is not None:
        if model not in policy.job.models:
            raise JobNotOver(policy.id, policy.job)
        route = ModelRoute(None, VersionPin(policy.job.models[model]), model)
    else:
        name, at, number = model.partition("@")
        pin = pin_of(number) if known.pins else None
        route = ModelRoute(None, pin, name if pin or not at else "")
        policy = policies.find(route.name or "", tenant)
        policy = policy if policy is not None and policy.job is None else None
    if policy is not None and known.adapters:
        return route._replace(policy=policy)
    if policy is not None:
        raise no_model(f"policy {policy.name} needs adapters: with model.lora.rank 0 an engine has one set of weights")
    if own is None and route.name == _DEFAULT_POLICY:
        return route
    if own is None and not known.adapters:
        return ModelRoute(None, None, None)  # the engine says that it does not know it
    if table is None:
        raise RequestRefused("the policies are not known yet", status=503, code="policies_unknown", retry_after_s=1.0)
    gone = "" if own is None else "the policy of this key was deleted; "
    names = [*known.names, *(name for each in policies.of_tenant(tenant) for name in each.names)]
    raise no_model(f"{gone}this key may use {', '.join(names)}")


class PolicyKey(NamedTuple):
    policy: int
    key: str
    pin: VersionPin | None


#: What the engine of a request is chosen by: the key of its user or task, or the version that must answer it.
RoutingKey = str | VersionPin | PolicyKey
