"""The engines, and which of them answers a request. Decisions are synchronous: no lock is needed."""

import asyncio
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tuneloop.explorer.auth import Caller
from tuneloop.explorer.engines.adapter_names import ModelRenaming
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.model_routes import (
    AdapterView,
    ModelRoute,
    ModelUnknown,
    PolicyKey,
    PolicyTable,
    PolicyView,
    RoutingKey,
    VersionPin,
    no_model,
    pin_of,
)
from tuneloop.explorer.engines.movement import EngineMovement
from tuneloop.explorer.engines.prefix_affinity import PrefixAffinity, rendezvous
from tuneloop.explorer.engines.vllm import EngineControl
from tuneloop.explorer.http.bodies import wrong_type
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.privacy.detection import api_keys
from tuneloop.shared.settings.settings import Settings

#: So many more requests than the least busy one an engine that has a prefix may have, and one that may have it, beside
#: a quarter more. The latter is of each worker: all of them prefer the same engine for the same beginning.
_SLACK, _RENDEZVOUS_SLACK = 8, 1

_WHOLE = 2**64

#: How often a request has a version of a policy loaded: what was loaded may have made room for others by then.
_LOADS = 3

#: The name of the policy of all that names none.
_DEFAULT_POLICY = "default"

#: How long a request waits for the policies that the ledger has now, in seconds.
_LEARN_S = 1.0

#: Less is how long ago a version was asked that is being asked: such versions make room last.
_BEING_ASKED = 1e9


class TrafficSplit(msgspec.Struct, frozen=True):
    """The share of the keys that a canary version answers."""

    version: int
    share: float = 0.0

    def answers(self, key: str) -> bool:
        return bucket_of(self.version, key) < self.share

    def without_traffic(self) -> "TrafficSplit":
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


class PinParser:
    def __init__(self, settings: Settings) -> None:
        #: The model's own name, as engines know it.
        self.model_name = settings.served_model_name
        #: Whether clients may pin a version.
        self.allowed = settings.explorer.version_pins
        #: Its other names, and whether what is asked under them may be trained on.
        self.aliases = {name: alias.train for name, alias in settings.model.aliases.items()}
        self._serves_adapters = settings.model.lora.rank > 0

    async def route(self, body: Mapping[str, Any], caller: Caller, known: "Fleet") -> ModelRoute:
        """What a body asks for; the ledger is asked for a model that is not known. Raises RequestRefused."""
        try:
            return self._route(body, caller, known.policies)
        except ModelUnknown:  # or it is by now
            if not await known.learn_policies() or known.policies is None:
                reason = "no policy of that name is known, and the database cannot be asked for new ones now"
                raise RequestRefused(reason, status=503, code="policies_unknown", retry_after_s=1.0) from None
            return self._route(body, caller, known.policies)

    def _route(self, body: Mapping[str, Any], caller: Caller, known: PolicyTable | None) -> ModelRoute:
        """The model's own names are the policy of the key. Raises ModelUnknown, and RequestRefused as `parse` does."""
        pin, alias, model = self.parse(body), self.alias(body), body.get("model") or self.model_name
        is_own, tenant = bool(pin or alias) or model == self.model_name, caller.tenant
        if is_own and not caller.policy:
            return ModelRoute(None, pin, alias)
        policies = PolicyTable() if known is None else known
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


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RELOADING = "reloading"
    DOWN = "down"
    #: Nothing runs there: room for a new engine beside the one that it will replace.
    SPARE = "spare"


class EngineStarter(Protocol):
    """Starts and ends the process of an engine of our own, for who has taken the engine out of rotation."""

    async def start_anew(self, actor: Path) -> None:
        """Start it with the weights in a folder, after its end if it runs. Raises EngineError."""

    async def stop(self) -> None:
        """End it."""

    def has_room(self) -> bool:
        """Whether one more engine can be started now beside those that run."""


class Engine:
    """One vLLM server: where it answers, what it serves, and how much this process has in flight there.

    `loads` counts how often its weights changed, so that a reply shows whether they did while it was sampled.
    `swaps` counts what begins and ends with another version, be it an adapter beside those that are in flight.
    """

    def __init__(self, number: int, http: EngineHttp, control: EngineControl | None = None) -> None:
        """`control` is for the process that runs the engine and swaps its weights."""
        self.number = number
        self.http = http
        self._control = control
        #: Of an engine of our own; None: it is of others.
        self.starter: EngineStarter | None = None
        #: Whether it gets other weights by a start with them; otherwise it can load them in place.
        self.restarts = False
        self.state = EngineState.STARTING
        self.movement = EngineMovement()
        self.version = 0
        self.in_flight = 0
        self.loads = 0
        self.swaps = 0
        self._proof = ""
        self._packs: bool | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        #: The engine behind this one, where this is what requests of a policy see of it.
        self.host: Engine | None = None
        #: What requests of policies see of this one, by the version that answers them.
        self.guests: dict[int, PolicyEngine] = {}

    @property
    def control(self) -> EngineControl:
        assert self._control is not None
        return self._control

    @property
    def renaming(self) -> ModelRenaming | None:
        return self.http.renaming

    @property
    def proof(self) -> str:
        """What its weights were proven by when they were last proven right; empty if they never were."""
        return self._control.proof if self._control is not None else self._proof

    @proof.setter
    def proof(self, proof: str) -> None:
        self._proof = proof

    @property
    def packs(self) -> bool | None:
        """Whether it packs log-probabilities; None: it is not known."""
        return self._control.packs if self._control is not None else self._packs

    @packs.setter
    def packs(self, packs: bool | None) -> None:
        self._packs = packs

    async def look(self, quiet: Sequence[float | None]) -> None:
        """See whether it works. `quiet`: how long each worker's requests have had nothing of it, if any wait."""
        quiet_s = min((each for each in quiet if each is not None), default=None)
        await self.movement.look(self.state.value, self.control, quiet_s=quiet_s)

    def begin_load(self) -> None:
        self.swaps += 1
        if self._control is None or self._control.loads_in_place:
            self.loads += 1

    def end_load(self, version: int) -> None:
        self.swaps += 1
        self.version = version
        if self._control is not None:
            self.http.renaming = self._control.renaming


class PolicyEngine(Engine):
    """An engine as the requests of a policy see it: with one version, whose weights never change under them."""

    def __init__(self, host: Engine, version: int) -> None:
        super().__init__(host.number, host.http.under(None))
        self.host, self.version = host, version
        #: When it was asked last; and whether it may be asked.
        self.asked_at, self.answers = time.monotonic(), False


class EngineView(msgspec.Struct, frozen=True):
    number: int
    url: str | None
    socket: str | None
    state: EngineState
    version: int
    loads: int
    renaming: ModelRenaming | None = None
    proof: str = ""
    packs: bool | None = None
    adapters: tuple[AdapterView, ...] = ()


class FleetReplicas(Protocol):
    """Copies of this fleet in other processes: they must have a change before its author goes on."""

    async def publish(self, engine: Engine) -> None:
        """Return when all have the engine's present state."""

    async def set_split(self, split: TrafficSplit | None) -> None:
        """Return when all split their requests so."""

    async def set_policies(self, policies: Sequence[PolicyView] | None) -> None:
        """Return when all know the policies."""

    async def wait_until_idle(self, engine: Engine, version: int | None = None) -> None:
        """Return when none has a request in flight on the engine, or on what it has of a policy's version."""

    async def idle_times(self, engine: Engine) -> Mapping[int, float]:
        """For how many seconds each version of a policy was not asked there; far below 0: it is being asked."""


#: Has a version of a policy loaded by an engine that is ready; why that cannot be, empty where it can.
LoadVersion = Callable[[int, int], Awaitable[str]]


class Fleet:
    """All engines. With a `split`, those that serve the canary version get its share of the requests and no others."""

    def __init__(
        self,
        engines: Iterable[Engine],
        *,
        wait_timeout_s: float,
        replicas: FleetReplicas | None = None,
        is_alone: bool = True,
        load_version: LoadVersion | None = None,
    ) -> None:
        """`is_alone`: no other process sends requests of the same conversations to the engines."""
        self._load_version = load_version
        #: None: they are not known yet.
        self.policies: PolicyTable | None = PolicyTable()
        self._learning, self._learn_began, self._has_learnt = asyncio.Lock(), -math.inf, False
        self.engines = list(engines)
        self._is_alone = is_alone
        self.split: TrafficSplit | None = None
        self._wait_timeout_s = wait_timeout_s
        self._replicas = replicas
        self._affinity = PrefixAffinity()
        self._changed = asyncio.Condition()

    @property
    def ready(self) -> bool:
        return self._will_be_ready(self.engines)

    @property
    def served_versions(self) -> list[int]:
        return sorted({each.version for each in self.engines if each.state is EngineState.READY})

    @staticmethod
    def _will_be_ready(engines: Iterable[Engine]) -> bool:
        will = {EngineState.READY, EngineState.RELOADING}
        return any(engine.state in will for engine in engines)

    async def set_state(self, engine: Engine, state: EngineState) -> None:
        engine.state = state
        await self._publish(engine)

    async def begin_load(self, engine: Engine) -> None:
        engine.begin_load()
        await self._publish(engine)

    async def end_load(self, engine: Engine, version: int) -> None:
        engine.end_load(version)
        await self._publish(engine)

    async def set_split(self, split: TrafficSplit | None) -> None:
        """Split the requests between the champion and a canary version; None: there is no canary."""
        self.split = split
        if self._replicas is not None:
            await self._replicas.set_split(split)
        async with self._changed:
            self._changed.notify_all()

    async def set_policies(self, policies: Sequence[PolicyView] | None) -> None:
        self.policies = None if policies is None else PolicyTable(policies)
        if self._replicas is not None:
            await self._replicas.set_policies(policies)

    async def apply(self, status: Sequence[EngineView]) -> None:
        for each in status:
            engine = self.engines[each.number]
            engine.state, engine.version, engine.loads = each.state, each.version, each.loads
            engine.http.renaming, engine.proof, engine.packs = each.renaming, each.proof, each.packs
            held = {adapter.version: adapter for adapter in each.adapters}
            for version, guest in [*engine.guests.items()]:
                guest.answers = version in held
                if not (guest.answers or guest.in_flight):
                    del engine.guests[version]
            for version, adapter in held.items():
                guest = engine.guests.setdefault(version, PolicyEngine(engine, version))
                guest.http.renaming, guest.proof, guest.answers = adapter.renaming, adapter.proof, True
        async with self._changed:
            self._changed.notify_all()

    async def _publish(self, engine: Engine) -> None:
        if self._replicas is not None:
            await self._replicas.publish(engine)
        async with self._changed:
            self._changed.notify_all()

    async def wait_until_idle(self, engine: Engine, version: int | None = None) -> None:
        """Wait until no process has a request in flight on the engine, or on what it has of a policy's version."""
        asked = engine if version is None else engine.guests.get(version)
        if asked is not None:
            await asked.idle.wait()
        if self._replicas is not None:
            await self._replicas.wait_until_idle(engine, version)

    async def idle_times(self, engine: Engine) -> Mapping[int, float]:
        """For how many seconds no process asked each version of a policy there; far below 0: it is being asked."""
        now = time.monotonic()
        if self._replicas is not None:
            return await self._replicas.idle_times(engine)
        return {
            each.version: now - each.asked_at - (_BEING_ASKED if each.in_flight else 0)
            for each in engine.guests.values()
        }

    async def wait_for_state(self, engine: Engine, *states: EngineState) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: engine.state in states)

    async def acquire(self, key: RoutingKey | None = None, prefix_hashes: Sequence[int] = ()) -> Engine:
        """The engine that answers a key, counted as busy until its release; without a key one of the champion's."""
        engine = self._choose(self.engines, key, prefix_hashes)
        return self._mark_busy(engine or await self._wait_for_one(self.engines, key, prefix_hashes), prefix_hashes)

    def _version_of(self, key: PolicyKey) -> tuple[int, bool]:
        """The version of a policy that answers a key, and whether it is the base model. Raises RequestRefused."""
        policy = self.policies.get(key.policy) if self.policies else None
        if policy is None:
            raise no_model("its policy was deleted")
        if key.pin is not None and key.pin.version not in policy.versions:
            raise key.pin.not_served_error(sorted(policy.versions))
        version = policy.champion if key.pin is None else key.pin.version
        if key.pin is None and policy.canary is not None and bucket_of(policy.canary, key.key) < policy.share:
            version = policy.canary
        return version, policy.versions[version]

    def acquire_another(
        self, than: Engine, key: RoutingKey | None = None, prefix_hashes: Sequence[int] = ()
    ) -> Engine | None:
        """The same, but another engine than this one, of another version if that may answer; None if none is ready."""
        others = self._others(than)
        engine = self._choose([each for each in others if each.version != than.version], key, prefix_hashes)
        engine = engine or self._choose(others, key, prefix_hashes)
        return self._mark_busy(engine, prefix_hashes) if engine else None

    async def wait_for_another(
        self, than: Engine, key: RoutingKey | None = None, prefix_hashes: Sequence[int] = ()
    ) -> Engine | None:
        """The same, but wait for an engine that is being reloaded; None if no other is ready or will be."""
        others = self._others(than)
        engine = self._choose(others, key, prefix_hashes)
        if engine is None and self._will_be_ready(eligible_engines(others, key)):
            engine = await self._wait_for_one(others, key, prefix_hashes)
        return self._mark_busy(engine, prefix_hashes) if engine else None

    def _others(self, than: Engine) -> list[Engine]:
        return [each for each in self.engines if each is not (than.host or than)]

    def _choose(self, engines: Sequence[Engine], key: RoutingKey | None, prefix_hashes: Sequence[int]) -> Engine | None:
        version, is_base = self._version_of(key) if isinstance(key, PolicyKey) else (None, True)
        if version is not None and not is_base:
            engines = [each for each in engines if version in each.guests and each.guests[version].answers]
        with_prefix = self._affinity.engines_with_prefix(prefix_hashes, engines) if prefix_hashes else ()
        rendezvous_order = rendezvous(prefix_hashes, engines) if prefix_hashes and not self._is_alone else ()
        found = choose_engine(engines, self.split, key, with_prefix, rendezvous_order)
        if found is None or version is None:
            return found
        guest = found.guests.setdefault(version, PolicyEngine(found, version))
        guest.asked_at, guest.proof = time.monotonic(), found.proof if is_base else guest.proof
        return guest

    def release(self, engine: Engine) -> None:
        for each in (engine, engine.host):
            if each is not None:
                each.in_flight -= 1
                if not each.in_flight:
                    each.idle.set()

    def _mark_busy(self, engine: Engine, prefix_hashes: Sequence[int] = ()) -> Engine:
        if prefix_hashes:
            self._affinity.record(prefix_hashes, engine)
        for each in (engine, engine.host):
            if each is not None:
                each.in_flight += 1
                each.idle.clear()
        return engine

    async def _wait_for_one(
        self, engines: Sequence[Engine], key: RoutingKey | None, prefix_hashes: Sequence[int]
    ) -> Engine:
        loads = 0
        try:
            async with asyncio.timeout(self._wait_timeout_s), self._changed:
                while (engine := self._choose(engines, key, prefix_hashes)) is None:
                    lacks = isinstance(key, PolicyKey) and any(each.state is EngineState.READY for each in engines)
                    if isinstance(key, PolicyKey) and lacks and loads < _LOADS:
                        loads += 1
                        await self._load(key)
                        continue
                    if lacks or not self._will_be_ready(eligible_engines(engines, key)):
                        break
                    await self._changed.wait()
        except TimeoutError:
            engine = None
        if (
            engine is None
            and isinstance(key, VersionPin)
            and self.ready
            and not self._will_be_ready(key.filter(self.engines))
        ):
            raise key.not_served_error(self.served_versions)
        if engine is None:
            raise RequestRefused("no engine is ready", status=503, code="engine_unavailable", retry_after_s=2.0)
        return engine

    async def learn_policies(self) -> bool:
        """Have all workers know the policies that the ledger has now, asked once for all who wait; whether they do."""
        came = time.monotonic()
        async with self._learning:
            if self._learn_began < came and self._load_version is not None:
                self._learn_began, self._has_learnt = time.monotonic(), False
                with suppress(TimeoutError):
                    reason = await asyncio.wait_for(self._load_version(0, 0), _LEARN_S)
                    self._has_learnt = not reason
            return self._has_learnt or self._load_version is None

    async def _load(self, key: PolicyKey) -> None:
        """Have an engine load what answers a key. Raises RequestRefused. To be called with `_changed` held."""
        version, _ = self._version_of(key)
        self._changed.release()  # for what says that it is loaded
        try:
            reason = await self._load_version(key.policy, version) if self._load_version else "no reload can load it"
        finally:
            await self._changed.acquire()
        if reason:
            raise RequestRefused(reason, status=503, code="policy_unavailable", retry_after_s=2.0)


def choose_engine(
    engines: Sequence[Engine],
    split: TrafficSplit | None,
    key: RoutingKey | None,
    with_prefix: Sequence[Container[int]] = (),
    rendezvous_order: Sequence[int] = (),
) -> Engine | None:
    """The ready engine that answers, if any. The champion's stand in for the canary's, never the other way round."""
    pick = partial(pick_engine, with_prefix=with_prefix, rendezvous_order=rendezvous_order)
    if isinstance(key, VersionPin):
        return pick(key.filter(engines))
    if split is None or isinstance(key, PolicyKey):
        return pick(engines)
    if key is not None and split.answers(key):
        canary = pick(each for each in engines if each.version == split.version)
        if canary is not None:
            return canary
    return pick(each for each in engines if each.version != split.version)


def eligible_engines(engines: Sequence[Engine], key: RoutingKey | None) -> Sequence[Engine]:
    return key.filter(engines) if isinstance(key, VersionPin) else engines


def pick_engine(
    engines: Iterable[Engine], with_prefix: Sequence[Container[int]] = (), rendezvous_order: Sequence[int] = ()
) -> Engine | None:
    """Of the ready engines one that has a prefix of the conversation cached, or where all workers would send it, unless
    that is too busy; else the least busy one.

    `with_prefix` are the numbers of the engines that have one, the longest prefix first; `rendezvous_order` those of
    all, the preferred one first.
    """
    ready = [engine for engine in engines if engine.state is EngineState.READY]
    least = least_busy(ready)
    if least is None:
        return None
    for numbers in with_prefix:
        preferred = least_busy(engine for engine in ready if engine.number in numbers)
        # Where it has so much more in flight, a cold prefix elsewhere is faster.
        if preferred and preferred.in_flight <= least.in_flight + _SLACK + least.in_flight // 4:
            return preferred
    by_number = {engine.number: engine for engine in ready}
    preferred_first = (by_number[number] for number in rendezvous_order if number in by_number)
    most = least.in_flight + _RENDEZVOUS_SLACK + least.in_flight // 4
    return next((engine for engine in preferred_first if engine.in_flight <= most), least)


def least_busy(engines: Iterable[Engine]) -> Engine | None:
    ready = [engine for engine in engines if engine.state is EngineState.READY]
    return min(ready, key=lambda engine: engine.in_flight, default=None)
