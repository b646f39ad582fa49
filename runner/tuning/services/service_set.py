"""The services of a call of tune(): each model's is joined by its URL, or started from the settings of its model."""

import json
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from tuneloop.runner.models.bound_model import ModelEndpoint, make_model, wanted_client
from tuneloop.runner.private_files import write_private_text
from tuneloop.runner.tuning.config import AlgorithmConfig, TunerModelConfig, WorkflowType
from tuneloop.runner.tuning.experiment import ExperimentFolder
from tuneloop.runner.tuning.rollouts.model_factory import call_defaults
from tuneloop.runner.tuning.service_settings import ServicePlace, merge_settings, service_settings
from tuneloop.runner.tuning.services.joined_options import compare_options
from tuneloop.runner.tuning.services.service_client import ServiceClient
from tuneloop.runner.tuning.services.service_process import ServiceProcess, free_port

#: The name of the model that is trained if there is one only.
MAIN = "model"

#: Rows of a run, at most, that a step of a started service makes room for: what is beyond makes a step of its own.
_CALLS = 256

#: Seconds that a reply of an auxiliary model may take.
_AUXILIARY_S = 600.0

#: Seconds after a step's commit when its groups, and then the step, are taken with what there is.
_GROUP_S, _BATCH_S = 0.1, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How services are started and asked. `over` are settings that win over those that are generated."""

    api_key: str = "none"
    timeout_s: float = 300.0
    start_timeout_s: float = 1800.0
    join_timeout_s: float = 60.0
    over: Mapping[str, Any] = field(default_factory=dict)
    monitor_type: str | None = None


class ServiceOpener:
    """Joins and starts services, which end with `stack`."""

    def __init__(
        self, folder: ExperimentFolder, options: ServiceOptions, stack: AsyncExitStack, *, say: Callable[[str], None]
    ) -> None:
        self._folder, self._options, self._stack, self._say = folder, options, stack, say

    async def open_trained(
        self, configs: Mapping[str, TunerModelConfig], urls: Mapping[str, str], algorithm: AlgorithmConfig | None
    ) -> dict[str, ServiceClient]:
        """The services that train the models: those that have a URL are joined, the others started.

        Raises TuneRefused if one that is joined trains something else than what was asked for.
        """
        joined = {name: await self._join(url) for name, url in urls.items()}
        for name, client in joined.items():
            await client.until_ready(self._options.start_timeout_s)
            for said in compare_options(client.url, await client.options(), algorithm, configs.get(name)):
                self._say(said)
        wanted = algorithm or AlgorithmConfig()
        found = {
            name: joined.get(name) or await self._start(name, configs[name], wanted, step_settings(wanted))
            for name in dict.fromkeys([*configs, *urls])
        }
        for client in found.values():
            await client.until_ready(self._options.start_timeout_s)
        return found

    async def open_auxiliary(self, models: Mapping[str, Any], workflow: WorkflowType) -> dict[str, Any]:
        """The models that are not trained: of a TunerModelConfig a service is started, a URL is joined.

        Any other object is the model itself.
        """
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

    async def _join(self, url: str) -> ServiceClient:
        """Raises ServiceAway unless somebody answers there soon, if only that it is not ready yet."""
        options = self._options
        client = ServiceClient(url, api_key=options.api_key, timeout_s=options.timeout_s)
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
        )
        return await self._stack.enter_async_context(client)


def step_settings(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Settings with which a step is what one commit released, whatever runs failed, however many calls they made."""
    return {
        "explorer": {"service_status_check_interval": 0.25},
        "trainer": {"keep_interval": algorithm.save_interval_steps, "poll_interval": 0.1},
        "buffer": {
            "group_timeout": _GROUP_S,
            "batch_timeout": _BATCH_S,
            "train_batch_size": algorithm.batch_size * algorithm.group_size * _CALLS,
        },
    }
