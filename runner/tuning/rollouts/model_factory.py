"""The models that workflows get: each bound to its run, with what the model's settings say as defaults."""

from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from tuneloop.runner.models.bound_model import CallDefaults, make_model, wanted_client
from tuneloop.runner.models.run import Run
from tuneloop.runner.models.transport import close_connections
from tuneloop.runner.tuning.config import TunerModelConfig, WorkflowType


class ModelFactory:
    """Makes models for one workflow. `defaults` are by model; `eval_temperature`, if given, holds in evaluations."""

    def __init__(
        self, workflow: WorkflowType, defaults: Mapping[str, CallDefaults], *, eval_temperature: float | None = None
    ) -> None:
        self._client, self._sync = wanted_client(workflow)
        self._training = dict(defaults)
        self._evaluation = self._training
        if eval_temperature is not None:
            self._evaluation = {name: replace(each, temperature=eval_temperature) for name, each in defaults.items()}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await close_connections()

    def model_for(self, name: str, run: Run) -> Any:
        """The model that the workflow gets for the trained model `name`."""
        defaults = (self._training if run.train else self._evaluation)[name]
        return make_model(run, defaults, client=self._client, sync=self._sync)


def call_defaults(served_as: str, config: TunerModelConfig | None, *, timeout_s: float) -> CallDefaults:
    """What a model's calls say by default; without settings of the model, the service's own defaults hold."""
    if config is None:
        return CallDefaults(model_name=served_as, timeout_s=timeout_s)
    return replace(config.call_defaults(served_as), timeout_s=timeout_s)
