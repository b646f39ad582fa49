"""What a request's `model` may ask for, a policy and a version of it, and what is known of policies to answer it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from tuneloop.explorer.engines.adapter_names import ModelRenaming
from tuneloop.shared.errors import RequestRefused

#: The name of the policy of all that names none.
_DEFAULT_POLICY = "default"

#: Of a version's number, at most.
_DIGITS = 9


class _Serving(Protocol):
    version: int


_Engine = TypeVar("_Engine", bound=_Serving)


def no_model(reason: str) -> RequestRefused:
    """The error of a request for a model that there is not, or not for this key."""
    return RequestRefused(f"the model does not exist: {reason}", status=404, code="model_not_found", param="model")


class VersionPin(NamedTuple):
    """A request for one version, `model@version`."""

    version: int

    def filter(self, engines: Iterable[_Engine]) -> list[_Engine]:
        """The engines that serve the version."""
        return [each for each in engines if each.version == self.version]

    def not_served_error(self, served: Sequence[int]) -> RequestRefused:
        """The error of a request for a version that no engine serves."""
        versions = ", ".join(map(str, served)) or "none"
        return no_model(f"version {self.version} is not served; these are: {versions}")


class PolicyView(msgspec.Struct, frozen=True):
    """A policy other than the default one, as the workers know it. An empty `tenant`: every key may use it.

    `versions` are those that answer, each with whether it is the base model: the champion, and a canary, which answers
    its `share` of the keys.
    """

    id: int
    name: str
    tenant: str
    champion: int
    versions: dict[int, bool]
    canary: int | None = None
    share: float = 0.0


class PolicyTable(dict[int, PolicyView]):
    """The policies by their ids; also found by their names."""

    def __init__(self, policies: Iterable[PolicyView] = ()) -> None:
        super().__init__({each.id: each for each in policies})
        self._named = {(each.tenant, each.name): each for each in self.values()}

    def find(self, name: str, tenant: str) -> PolicyView | None:
        """The policy of that name that a tenant's keys may use."""
        return self._named.get(("", name)) or self._named.get((tenant, name))

    def of_tenant(self, tenant: str) -> list[PolicyView]:
        """Those that a tenant's keys may use."""
        return [each for each in self.values() if each.tenant in {"", tenant}]


class AdapterView(msgspec.Struct, frozen=True):
    """The adapter of a version that an engine holds for a policy, and what it was proven by there."""

    version: int
    renaming: ModelRenaming
    proof: str


class ModelRoute(NamedTuple):
    """What a request asks for: a policy, None for the default one, perhaps one version, and its `name` in replies.

    Without a name the model has its own there.
    """

    policy: PolicyView | None
    pin: VersionPin | None
    name: str | None


class KnownNames(NamedTuple):
    """The model's own names; whether it is served with adapters, which policies need, and whether clients may pin."""

    names: Sequence[str]
    adapters: bool
    pins: bool


def pin_of(number: str) -> VersionPin | None:
    """The version of that number, if it is one."""
    return VersionPin(int(number)) if number.isascii() and number.isdigit() and len(number) <= _DIGITS else None


def route_to_policy(
    model: str, own: ModelRoute | None, known: KnownNames, table: PolicyTable | None, *, tenant: str, of_key: int | None
) -> ModelRoute:
    """What a request asks for by the name of a policy, or by the model's `own` name with a key that has a policy.

    Raises RequestRefused for what a tenant's keys may not use. Without a table the policies are not known yet.
    """
    policies = table if table is not None else PolicyTable()
    if own is not None:
        policy, route = policies.get(of_key or 0), own
        policy = policy if policy is not None and policy.tenant in {"", tenant} else None
    else:
        name, at, number = model.partition("@")
        pin = pin_of(number) if known.pins else None
        route = ModelRoute(None, pin, name if pin or not at else "")
        policy = policies.find(route.name or "", tenant)
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
    raise no_model(
        f"{gone}this key may use {', '.join([*known.names, *(each.name for each in policies.of_tenant(tenant))])}"
    )


class PolicyKey(NamedTuple):
    """What a version of a policy is chosen by: the key of its user or task, or a pin."""

    policy: int
    key: str
    pin: VersionPin | None


#: What the engine of a request is chosen by: the key of its user or task, or the version that must answer it.
RoutingKey = str | VersionPin | PolicyKey
