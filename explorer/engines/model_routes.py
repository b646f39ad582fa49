"""What a request's `model` may ask for, a policy and a version of it, and what is known of policies to answer it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from tuneloop.explorer.auth import Caller
from tuneloop.explorer.engines.adapter_names import ModelRenaming
from tuneloop.explorer.http.bodies import wrong_type
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import JobState
from tuneloop.shared.ledger.policies import CHECKPOINT
from tuneloop.shared.privacy.detection import api_keys
from tuneloop.shared.settings.settings import Settings

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


class _Policies(Protocol):
    policies: PolicyTable | None

    async def learn_policies(self) -> bool:
        """Have them be those of the ledger by now; whether they are."""


class PinParser:
    def __init__(self, settings: Settings) -> None:
        #: The model's own name, as engines know it.
        self.model_name = settings.served_model_name
        #: Whether clients may pin a version.
        self.allowed = settings.explorer.version_pins
        #: Its other names, and whether what is asked under them may be trained on.
        self.aliases = {name: alias.train for name, alias in settings.model.aliases.items()}
        self._serves_adapters = settings.model.lora.rank > 0

    async def route(self, body: Mapping[str, Any], caller: Caller, known: _Policies) -> ModelRoute:
        """What a body asks for; the ledger is asked for a model that is not known. Raises RequestRefused."""
        try:
            return self._route(body, caller, known.policies or PolicyTable())
        except ModelUnknown:  # or it is by now
            if not await known.learn_policies() or known.policies is None:
                raise RequestRefused(
                    "no policy of that name is known, and the database cannot be asked for new ones now",
                    status=503,
                    code="policies_unknown",
                    retry_after_s=1.0,
                ) from None
            return self._route(body, caller, known.policies)

    def _route(self, body: Mapping[str, Any], caller: Caller, policies: PolicyTable) -> ModelRoute:
        """The model's own names are the policy of the key. Raises ModelUnknown, and RequestRefused as `parse` does."""
        pin, alias, model = self.parse(body), self.alias(body), body.get("model") or self.model_name
        is_own, tenant = bool(pin or alias) or model == self.model_name, caller.tenant
        if is_own and not caller.policy:
            return ModelRoute(None, pin, alias)
        if is_own:
            policy, route = policies.get(caller.policy or 0), ModelRoute(None, pin, alias)
            policy = policy if policy is not None and policy.tenant in {"", tenant} else None
        elif (policy := policies.find(model, tenant)) is not None and policy.job is not None:
            if model not in policy.job.models:
                raise ModelUnknown(f"the fine-tuning job {policy.job.id} is {policy.job.state}")
            route = ModelRoute(None, VersionPin(policy.job.models[model]), model)
        else:
            name, at, number = model.partition("@")
            pin = pin_of(number) if self.allowed else None
            route = ModelRoute(None, pin, name if pin or not at else "")
            policy = policies.find(route.name or "", tenant)
            policy = policy if policy is not None and policy.job is None else None
        if policy is not None and self._serves_adapters:
            return route._replace(policy=policy)
        if policy is not None:
            reason = "with model.lora.rank 0 an engine has one set of weights"
            raise no_model(f"policy {policy.name} needs adapters: {reason}")
        if not is_own and route.name == _DEFAULT_POLICY:
            return route
        if not is_own and not self._serves_adapters:
            return ModelRoute(None, None, None)  # the engine says that it does not know it
        gone = "the policy of this key was deleted; " if is_own else ""
        names = [self.model_name, *self.aliases, *(name for each in policies.of_tenant(tenant) for name in each.names)]
        raise ModelUnknown(f"{gone}this key may use {', '.join(names)}")

    def alias(self, body: Mapping[str, Any]) -> str | None:
        model = body.get("model")
        return model if isinstance(model, str) and model in self.aliases else None

    def parse(self, body: Mapping[str, Any]) -> VersionPin | None:
        """The version that a body is pinned to. Raises RequestRefused for no number, or a key in the model's place."""
        model = body.get("model")
        if not isinstance(model, str | None):
            raise wrong_type("model", "a string")
        if model and model != self.model_name and any(api_keys(model)):
            raise no_model("a key stands in the place of its name")
        if not self.allowed or not isinstance(model, str) or not model.startswith(f"{self.model_name}@"):
            return None
        number = model.removeprefix(f"{self.model_name}@")
        if (pin := pin_of(number)) is None:
            raise no_model(f"{self.model_name}@ must be followed by the number of a version")
        return pin


class PolicyKey(NamedTuple):
    policy: int
    key: str
    pin: VersionPin | None


#: What the engine of a request is chosen by: the key of its user or task, or the version that must answer it.
RoutingKey = str | VersionPin | PolicyKey
