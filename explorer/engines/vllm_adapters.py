"""The weight routes of vLLM 0.26 to 0.33 for versions that are LoRA adapters: side by side, each under its own name.

A name never means another adapter, so its cached keys and values are always right, and nothing changes under what is in
flight: a request ends with the adapter that it began with. So nothing is paused, and no prefix cache is reset.
"""

from pathlib import Path

import httpx
import structlog

from tuneloop.explorer.engines.adapter_names import ModelRenaming, adapter_name_of, is_adapter
from tuneloop.explorer.engines.vllm import EngineControl
from tuneloop.shared import engine_flags
from tuneloop.shared.errors import CheckpointRejected, EngineError
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: Adapters that stay loaded: the version served and those before it, for a rollback.
_KEPT = 4


def control_of(settings: Settings, session: httpx.AsyncClient, *, tolerance: float) -> EngineControl:
    """The weight routes of an engine, for full weights or adapters as the settings say."""
    name, rollout = settings.served_model_name, settings.explorer.rollout_model
    if settings.model.lora.rank:
        base = settings.model.model_path.absolute()
        control: EngineControl = AdapterControl(session, model_name=name, tolerance=tolerance, base=base)
    else:
        control = EngineControl(session, model_name=name, tolerance=tolerance)
    control.rebuilds_grammars = settings.explorer.rebuilds_grammars
    control.drafts = engine_flags.drafts(rollout.engine_args)
    # Of an engine of ours it is known; of another one it is asked.
    extended = None if rollout.engine_urls else "--worker-extension-cls" not in " ".join(rollout.engine_args)
    control.has_fingerprint = control.is_extended = extended
    return control


class AdapterControl(EngineControl):
    """The same methods where versions are adapters of the weights in `base`, with which the engine was started."""

    loads_in_place = False

    def __init__(self, session: httpx.AsyncClient, *, model_name: str, tolerance: float, base: Path) -> None:
        super().__init__(session, model_name=model_name, tolerance=tolerance)
        self._public_name, self._base = model_name, base
        self._loaded: list[str] = []

    def reset(self) -> None:
        """Forget which adapters were loaded."""
        super().reset()
        self._loaded.clear()
        self._use(None)

    def initial_weights(self, actor: Path) -> Path:
        """The base model: adapters are added to it."""
        self.reset()
        return self._base

    async def finish_start(self, actor: Path) -> None:
        """Load the adapter."""
        await self.load(actor)

    async def pause(self, mode: str) -> None:
        """Nothing to do: a new adapter changes nothing that is in flight or cached."""

    async def reset_prefix_cache(self) -> None:
        """Nothing to do: a new adapter changes nothing that is in flight or cached."""

    async def resume(self) -> None:
        """Nothing to do: nothing was paused."""

    async def load(self, actor: Path) -> None:
        """Make the engine answer with the adapter in `actor`, or with the base model. Verify it first."""
        if is_adapter(actor):
            name = adapter_name_of(actor)
            await self._load(name, actor)
            self._loaded = [*(each for each in self._loaded if each != name), name]
            while len(self._loaded) > _KEPT:
                oldest = self._loaded.pop(0)
                try:
                    await self._post("/v1/unload_lora_adapter", json={"lora_name": oldest})
                except EngineError as error:
                    log.warning("adapter_not_unloaded", adapter=oldest, reason=str(error))
            self._use(name)
        elif actor == self._base:
            self._use(None)
        else:
            raise CheckpointRejected("the checkpoint holds full weights, and model.lora.rank is not 0")

    def _use(self, name: str | None) -> None:
        self._model_name = name or self._public_name
        self.renaming = ModelRenaming(public_name=self._public_name, adapter_name=name) if name else None

    async def _load(self, name: str, actor: Path) -> None:
        try:
            await self._post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(actor)})
        except EngineError as error:
            if '"Not Found"' in str(error):
                raise EngineError(
                    "the engine accepts no adapters; start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                ) from error
            if "already been loaded" not in str(error):  # by an explorer before us, and it is the same
                raise
