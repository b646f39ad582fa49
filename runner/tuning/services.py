"""Connects tune() to its services: joins or starts them, sends requests, and waits until a step is trained."""

import asyncio
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any, Self

import httpx

from tuneloop.runner.errors import ServiceAway, TuneFailed, TuneRefused
from tuneloop.runner.http_client import header_of_key
from tuneloop.runner.models.bound_model import CallDefaults, ModelEndpoint, make_model, wanted_client
from tuneloop.runner.models.run import StoredCalls
from tuneloop.runner.private_files import make_private_folder, private_opener, write_private_text
from tuneloop.runner.trinity import OF_GROUPS
from tuneloop.runner.tuning.config import (
    MAIN,
    AlgorithmConfig,
    ServicePlace,
    TunerModelConfig,
    WorkflowType,
    merge_settings,
    service_settings,
)
from tuneloop.runner.tuning.experiment import ExperimentFolder

_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # seconds before a retry: the first, and the most, doubling in between

_REFUSED_FOR_NOW = {429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStatus:
    """A service's progress. `settled`: it has no further step to make, and serves its newest version.

    `served` is the version that answers, `newest` the last one made, `step` the trainer's. `sentences` say why no step
    is running, `held` why the newest version is not served.
    """

    served: int
    newest: int
    step: int
    settled: bool
    states: Mapping[str, int]
    sentences: tuple[str, ...] = ()
    trainer_up: bool = True
    held: str | None = None


class ServiceClient:
    """Calls one service, or one `policy` of it, and retries for up to `timeout_s` seconds.

    `check` runs before each try, and raises if retries are useless. `stage` describes how far a starting service is.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "none",
        policy: str | None = None,
        timeout_s: float = 300.0,
        check: Callable[[], None] = lambda: None,
        stage: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.api_key, self.policy = api_key, policy
        self._status_of = {} if policy is None else {"policy": policy}
        self._timeout_s, self._check, self._stage = timeout_s, check, stage
        headers = header_of_key(api_key)
        self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=httpx.Timeout(60.0, connect=5.0))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def until_reached(self, timeout_s: float) -> None:
        """Return when the URL answers, with any status. Raises ServiceAway."""
        since = time.monotonic()
        while True:
            try:
                await self._http.get("/health/ready", timeout=10.0)
                return
            except (httpx.TransportError, httpx.InvalidURL) as error:
                why = f"{type(error).__name__} {error}".strip()
            if time.monotonic() - since > timeout_s:
                raise ServiceAway(f"nothing answers at {self.url} for {timeout_s:g} s: {why}; is that its URL?")
            await asyncio.sleep(_LONGEST_PAUSE_S / 10)

    async def until_ready(self, timeout_s: float | None = None, say: Callable[[str], None] | None = None) -> None:
        """Return when it is ready; `say` gets each new stage of its start."""
        await self._patiently(lambda: self._http.get("/health/ready", timeout=10.0), timeout_s, say)

    async def until_answers(self, timeout_s: float) -> None:
        """Return when it lists its models, as each OpenAI-compatible service does."""
        await self._patiently(lambda: self._http.get("/v1/models", timeout=10.0), timeout_s)

    async def is_ready(self) -> bool:
        try:
            return (await self._http.get("/health/ready", timeout=10.0)).is_success
        except httpx.TransportError:
            return False

    def task_id(self, task_id: str) -> str:
        """The task's id in the service: policies of one service must not share tasks."""
        return task_id if self.policy is None else f"{task_id}@{self.policy}"

    async def make_policy(self, options: Mapping[str, Any]) -> bool:
        """Create the policy unless it exists; whether it was created. Raises TuneRefused."""
        found = await self._patiently(lambda: self._http.get("/training", params=self._status_of), also={404})
        if found.is_success:
            return False
        draft = {"name": self.policy, "options": dict(options)}
        made = await self._patiently(lambda: self._http.post("/admin/policies", json=draft), also={401, 403, 404})
        if not made.is_success:
            flags = " ".join(f"--option {name}={value}" for name, value in options.items())
            raise TuneRefused(
                f"the service at {self.url} has no policy {self.policy}, and makes none for this api_key: give that of"
                f" an administrator, or make it there by tuneloop policies create {self.policy} {flags}"
            )
        return True

    async def model_name(self) -> str:
        if self.policy is not None:
            return self.policy
        answer = await self._patiently(lambda: self._http.get("/v1/models"))
        return str(answer.json()["data"][0]["id"])

    async def options(self) -> dict[str, Any]:
        """The service's training options; empty if it is too old to report them."""
        answer = await self._patiently(lambda: self._http.get("/training", params=self._status_of))
        return dict(answer.json().get("configured") or {})

    async def feedback(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Send the entries; the outcome of each run by `task_id/run_id`."""
        answer = await self._patiently(lambda: self._http.post("/feedback", json={"feedback": list(entries)}))
        return dict(answer.json().get("outcomes", {}))

    async def commit(self, task_ids: Sequence[str]) -> int:
        """Release the rewarded experiences of these tasks to the trainer; their number."""
        body = {"task_ids": [self.task_id(each) for each in task_ids]}
        answer = await self._patiently(lambda: self._http.post("/commit", json=body))
        return int(answer.json()["committed"])

    async def calls(self, task_id: str, run_id: str) -> StoredCalls:
        query = {"task_id": task_id, "run_id": run_id, "tokens": "true"}
        answer = await self._patiently(lambda: self._http.get("/training/calls", params=query))
        return StoredCalls.of(answer.json())

    async def status(self) -> TrainingStatus:
        found = (await self._patiently(lambda: self._http.get("/training", params=self._status_of))).json()
        return TrainingStatus(
            served=found["served"],
            newest=found["newest"],
            step=found["step"],
            settled=found["settled"],
            states=found["experiences"],
            sentences=tuple(reason["sentence"] for reason in found["reasons"]),
            trainer_up=found["trainer_up"],
            held=next((each["sentence"] for each in found["reasons"] if each.get("code") == "promotion_held"), None),
        )

    async def _patiently(
        self,
        ask: Callable[[], Awaitable[httpx.Response]],
        timeout_s: float | None = None,
        say: Callable[[str], None] | None = None,
        *,
        also: Collection[int] = (),
    ) -> httpx.Response:
        """Retry until success or a status in `also`. Raises TuneFailed, ServiceAway."""
        allowed_s = self._timeout_s if timeout_s is None else timeout_s
        since, pause_s, reported = time.monotonic(), _PAUSE_S, ""
        while True:
            self._check()
            try:
                answer = await ask()
                if answer.is_success or answer.status_code in also:
                    return answer
                try:
                    body = answer.json()
                    sentence = str((body.get("error") or {}).get("message") or body.get("reason") or body)
                except (ValueError, AttributeError):
                    sentence = answer.text
                why = f"{answer.status_code} {sentence[:300]}"
                if answer.status_code not in _REFUSED_FOR_NOW:
                    raise TuneFailed(f"the service at {self.url} refuses {answer.request.url.path}: {why}")
            except httpx.TransportError as error:
                why = f"{type(error).__name__} {error}".strip()
            if say is not None and (stage := self._stage()) not in {None, reported}:
                reported = str(stage)
                say(f"the service loads, {time.monotonic() - since:.0f} s: {reported}")
            if time.monotonic() - since > allowed_s:
                raise ServiceAway(f"the service at {self.url} did not answer for {allowed_s:g} s: {why}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


_LOOK_S = 0.1  # seconds between two requests for the status


class TrainingWait:
    """Waits for the versions that a service makes of commits."""

    def __init__(
        self, service: ServiceClient, say: Callable[[str], None], *, step_s: float = 3600.0, trainer_s: float = 300.0
    ) -> None:
        """`step_s`: longest time without progress; `trainer_s`: longest time without a trainer."""
        self._service, self._say, self._step_s, self._trainer_s = service, say, step_s, trainer_s
        self._expected = 0
        self.served = 0
        self._held: str | None = None

    async def until_served(self, before: TrainingStatus, *, settled: bool = False) -> bool:
        """Wait for the version of the last commit; False if the commit made none. Raises TuneFailed."""
        expected = self._expected = max(self._expected, before.newest) + 1
        since, last, url = time.monotonic(), before, self._service.url
        absent_since: float | None = None
        while True:
            status = await self._service.status()
            if (status.served >= expected and not settled) or status.settled:
                self._expected = max(status.served, before.newest)
                self.served = max(self.served, status.served)
                return status.served > before.served
            if status.trainer_up:
                if absent_since is not None:
                    self._say(f"the service at {url} has a trainer again")
                absent_since = None
            elif absent_since is None:
                absent_since = time.monotonic()
                self._say(
                    f"the service at {url} has no trainer, and commits wait: see its log, or `tuneloop run` "
                    f"with mode train; stopping after {self._trainer_s:g} s without one"
                )
            elif time.monotonic() - absent_since > self._trainer_s:
                raise ServiceAway(f"the service at {url} had no trainer for {self._trainer_s:g} s")
            if status.held and status.held != self._held:
                self._held = status.held
                self._say(f"the next step waits, because the service at {url} holds a version: {status.held}")
            if (status.newest, status.served, status.states) != (last.newest, last.served, last.states):
                since, last = time.monotonic(), status
            if time.monotonic() - since > self._step_s:
                why = "; ".join(status.sentences)
                raise TuneFailed(f"the service at {url} made no progress on the commit for {self._step_s:g} s: {why}")
            await asyncio.sleep(_LOOK_S)


Configured = Mapping[str, Any]  # a service's training options by our names; empty from an older service


def compare_options(
    url: str, configured: Configured, algorithm: AlgorithmConfig | None, model: TunerModelConfig | None
) -> list[str]:
    """A sentence per option without effect on the service. Raises TuneRefused if algorithm or adapter differ."""
    if not configured:
        return []
    refused = []
    here = configured["algorithm_type"]
    if algorithm is not None and here != algorithm.algorithm_type:
        refused.append(
            f"trains by {here}, not by {algorithm.algorithm_type}: say AlgorithmConfig(algorithm_type={here!r}), or "
            f"start it with algorithm.algorithm_type: {algorithm.algorithm_type}"
        )
    rank = model.tinker_config.rank if model and model.tinker_config else None
    if model is not None and rank != (served := configured["lora_rank"]):
        refused.append(
            f"trains {_weights(served)}, not {_weights(rank)}: say so in tinker_config, or start it with "
            f"model.lora.rank: {rank or 0}"
        )
    if refused:
        raise TuneRefused(f"the service at {url} {'; and it '.join(refused)}")
    return [f"the service at {url} {each}" for each in _differences(configured, algorithm, model)]


def _weights(rank: int | None) -> str:
    return f"an adapter of rank {rank}" if rank else "all weights"


def _differences(
    configured: Configured, algorithm: AlgorithmConfig | None, model: TunerModelConfig | None
) -> Iterator[str]:
    if algorithm is not None:
        rate, runs = algorithm.learning_rate, algorithm.batch_size * algorithm.group_size
        rows = configured["train_batch_size"]
        if configured["learning_rate"] != rate:
            yield f"has the learning rate {configured['learning_rate']:g}: learning_rate {rate:g} has no effect"
        if algorithm.algorithm_type in OF_GROUPS and configured["group_size"] != algorithm.group_size:
            yield (
                f"compares {configured['group_size'] or 'no'} runs of a task (buffer.group_size), and group_size is "
                f"{algorithm.group_size}: groups are cut, or wait for buffer.group_timeout"
            )
        if configured["batch_timeout"] is None and rows > runs:
            yield (
                f"waits for {rows} experiences (buffer.train_batch_size), and a step has {runs} runs: it may make one "
                "version of several steps; set buffer.batch_timeout"
            )
        if rows < runs:
            yield f"makes several versions of a step of {runs} runs: its buffer.train_batch_size is {rows}"
        if configured["save_interval"] > 1:
            yield f"publishes every {configured['save_interval']}th of its steps (trainer.save_interval)"
    if model is not None:
        if configured["model"] != (folder := PurePath(model.model_path).name):
            yield f"trains {configured['model']}: model_path {folder} has no effect"
        here = configured["max_model_len"]
        if here is not None and model.max_model_len is not None and here < model.max_model_len:
            yield f"takes {here} tokens: max_model_len {model.max_model_len} has no effect"


_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None, use_errno=True).prctl if sys.platform.startswith("linux") else None
_STOP_S = 120.0

_STAGE = re.compile(r"engine_start_goes_on.*?stage\W+([A-Za-z ]+)")  # the engine's stage in a service's log
_REFUSES_SETTINGS = 2  # exit code of a command with invalid settings
_TAIL = 20

_MISSING = (
    "tune() starts a service, and the command `tuneloop` is not installed here: put it into PATH from any environment "
    "(`make install` in its repository), or start `tuneloop run --config …` elsewhere and pass service='http://HOST:8010'"
)


class ServiceProcess:
    """A `tuneloop run --config …` in its own session, with its output in `log`."""

    def __init__(self, config: Path, log: Path, *, command: list[str] | None = None) -> None:
        self._log, self._config = log, config
        make_private_folder(log.parent, exist_ok=True)
        parent = os.getpid()

        def end_with_parent() -> None:
            if _PRCTL is not None:
                _PRCTL(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
                if os.getppid() != parent:
                    os._exit(1)

        with open(log, "ab", opener=private_opener) as output:
            self._process = subprocess.Popen(
                [*(command or find_command()), "run", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent if _PRCTL is not None else None,
            )

    def check(self) -> None:
        """Raise TuneRefused if the service refused its settings, ServiceAway if it exited otherwise."""
        if (code := self._process.poll()) is not None:
            lines = self._log.read_text(errors="replace").splitlines()[-_TAIL:]
            if code == _REFUSES_SETTINGS:
                reasons = [each for each in lines if each.startswith(f"{self._config}:")] or lines[-3:]
                refused = [each.removeprefix(f"{self._config}:").lstrip("0123456789: ") for each in reasons]
                raise TuneRefused("the service refuses its settings: " + "; ".join(refused))
            ending = "\n".join([f"its log is {self._log} and ends with:", *(f"    {line}" for line in lines)])
            raise ServiceAway(f"the service ended with exit code {code}; {ending}")

    def stage(self) -> str | None:
        found = _STAGE.findall(self._log.read_text(errors="replace"))
        return found[-1].strip() if found else None

    def stop(self) -> None:
        """Terminate it; kill it after a timeout."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def find_command() -> list[str]:
    """The command `tuneloop`, from this Python or from PATH. Raises TuneRefused."""
    with suppress(ModuleNotFoundError):
        if find_spec("tuneloop.cli.main") is not None:
            return [sys.executable, "-P", "-c", "from tuneloop.cli.main import main; main()"]
    if found := shutil.which("tuneloop"):
        return [found]
    raise TuneRefused(_MISSING)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def call_defaults(served_as: str, config: TunerModelConfig | None, *, timeout_s: float) -> CallDefaults:
    """Defaults of a model's calls; without a `config` the service's own apply."""
    if config is None:
        return CallDefaults(model_name=served_as, timeout_s=timeout_s)
    return replace(config.call_defaults(served_as), timeout_s=timeout_s)


_CALLS = 256  # rows per run in one step of a started service; more rows make a further step
_AUXILIARY_S = 600.0  # timeout of an auxiliary model's reply, in seconds

#: Seconds after a commit when incomplete groups, and then an incomplete batch, are trained.
_GROUP_S, _BATCH_S = 0.1, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How to start and call services. `over` wins over the generated settings."""

    api_key: str = "none"
    timeout_s: float = 300.0
    start_timeout_s: float = 1800.0
    join_timeout_s: float = 60.0
    over: Mapping[str, Any] = field(default_factory=dict)
    monitor_type: str | None = None


class ServiceOpener:
    """Joins and starts services; `stack` stops them."""

    def __init__(
        self, folder: ExperimentFolder, options: ServiceOptions, stack: AsyncExitStack, *, say: Callable[[str], None]
    ) -> None:
        self._folder, self._options, self._stack, self._say = folder, options, stack, say

    async def open_trained(
        self,
        configs: Mapping[str, TunerModelConfig],
        urls: Mapping[str, str],
        algorithm: AlgorithmConfig | None,
        policies: Mapping[str, str],
    ) -> dict[str, ServiceClient]:
        """Services of the trained models: one with a URL is joined, others are started. Raises TuneRefused."""
        wanted = algorithm or AlgorithmConfig()
        joined = {name: await self._join(url, policies.get(name)) for name, url in urls.items()}
        for name, client in joined.items():
            await client.until_ready(self._options.start_timeout_s)
            if client.policy is not None and await client.make_policy(policy_options(wanted)):
                self._say(f"made the policy {client.policy} at {client.url}")
            for sentence in compare_options(client.url, await client.options(), algorithm, configs.get(name)):
                self._say(sentence)
        if joined and self._options.over and joined.keys() >= configs.keys():
            self._say(f"settings have no effect on a running service: {', '.join(self._options.over)}")
        found = {
            name: joined.get(name) or await self._start(name, configs[name], wanted, step_settings(wanted))
            for name in dict.fromkeys([*configs, *urls])
        }
        for client in found.values():
            await client.until_ready(self._options.start_timeout_s, self._say)
        return found

    async def open_auxiliary(self, models: Mapping[str, Any], workflow: WorkflowType) -> dict[str, Any]:
        """Auxiliary models: a TunerModelConfig starts a service, a URL joins one, others stay as they are."""
        client, sync = wanted_client(workflow)
        found = dict(models)
        for name, model in models.items():
            if not isinstance(model, str | TunerModelConfig):
                continue
            config = model if isinstance(model, TunerModelConfig) else None
            service = (
                await self._join(model)
                if isinstance(model, str)
                else await self._start(name, model, AlgorithmConfig(), {"mode": "serve"})
            )
            await service.until_answers(self._options.start_timeout_s)
            endpoint = ModelEndpoint(base_url=f"{service.url}/v1", api_key=self._options.api_key)
            defaults = call_defaults(await service.model_name(), config, timeout_s=_AUXILIARY_S)
            found[name] = make_model(endpoint, defaults, client=client, sync=sync)
        return found

    async def _join(self, url: str, policy: str | None = None) -> ServiceClient:
        """Raises ServiceAway unless the URL answers within `join_timeout_s`; the service need not be ready."""
        options = self._options
        client = ServiceClient(url, api_key=options.api_key, policy=policy, timeout_s=options.timeout_s)
        await self._stack.enter_async_context(client)
        self._say(f"joining the service at {client.url}")
        await client.until_reached(options.join_timeout_s)
        return client

    async def _start(
        self, name: str, model: TunerModelConfig, algorithm: AlgorithmConfig, changes: Mapping[str, Any]
    ) -> ServiceClient:
        port, path, log = free_port(), self._folder.settings(name), self._folder.log(name)
        place = ServicePlace(
            project=self._folder.path.parent.name,
            name=self._folder.name if name == MAIN else f"{self._folder.name}-{name}",
            checkpoint_root_dir=self._folder.path.parent.parent,
            port=port,
        )
        settings = service_settings(
            model,
            algorithm,
            place,
            monitor_type=self._options.monitor_type,
            over=merge_settings(changes, self._options.over),
        )
        write_private_text(path, json.dumps(settings, indent=2))
        process = ServiceProcess(path, log)
        self._stack.callback(process.stop)
        self._say(f"starting the service of {name}: its log is {log}")
        client = ServiceClient(
            f"http://127.0.0.1:{port}",
            api_key=self._options.api_key,
            timeout_s=self._options.timeout_s,
            check=process.check,
            stage=process.stage,
        )
        return await self._stack.enter_async_context(client)


def step_settings(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Settings with which one commit makes one step, whatever the number of failed runs and calls."""
    return {
        "explorer": {"service_status_check_interval": 0.25},
        "trainer": {"keep_interval": algorithm.save_interval_steps, "poll_interval": 0.1},
        "buffer": {
            "group_timeout": _GROUP_S,
            "batch_timeout": _BATCH_S,
            "train_batch_size": algorithm.batch_size * algorithm.group_size * _CALLS,
        },
    }


def policy_options(algorithm: AlgorithmConfig) -> dict[str, Any]:
    compared = algorithm.algorithm_type in OF_GROUPS
    options = {
        "algorithm.algorithm_type": algorithm.algorithm_type,
        "algorithm.optimizer.lr": algorithm.learning_rate,
        "buffer.group_by": "task" if compared else "run",
        "buffer.commit": "manual",
        "trainer.save_interval": 1,
    }
    options |= {f"buffer.{name}": value for name, value in step_settings(algorithm)["buffer"].items()}
    return options | ({"buffer.group_size": algorithm.group_size} if compared else {})
