"""How vLLM 0.26 to 0.33 serves versions that are adapters: each beside the others, under a name of its own.

A name never means another adapter, so its cached keys and values are always right, and nothing changes under what is in
flight: a request ends with the adapter that it began with. So nothing is paused, and nothing forgotten.
"""

from pathlib import Path

import httpx
import structlog

from tuneloop.explorer.engines.adapter_names import ModelRenaming, is_adapter, name_of
from tuneloop.explorer.engines.vllm import EngineControl
from tuneloop.shared.errors import CheckpointRejected, EngineError
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: Names that an engine is kept ready for: the version served and those before it, which may be gone back to.
_KEPT = 4


def control_of(settings: Settings, session: httpx.AsyncClient, *, tolerance: float) -> EngineControl:
    """The weight routes of an engine, as the settings want them used."""
    name = settings.served_model_name
    if settings.model.lora.rank:
        base = settings.model.model_path.absolute()
        return AdapterControl(session, model_name=name, tolerance=tolerance, base=base)
    return EngineControl(session, model_name=name, tolerance=tolerance)


class AdapterControl(EngineControl):
    """The same verbs where versions are adapters to the weights in `base`, with which the engine was started."""

    in_place = False

    def __init__(self, session: httpx.AsyncClient, *, model_name: str, tolerance: float, base: Path) -> None:
        super().__init__(session, model_name=model_name, tolerance=tolerance)
        self._public, self._base = model_name, base
        self._loaded: list[str] = []

    def begin_anew(self) -> None:
        """Forget which adapters were loaded."""
        self._loaded.clear()
        self._use(None)

    def starts_with(self, actor: Path) -> Path:
        """The base model: adapters are added to it."""
        self.begin_anew()
        return self._base

    async def complete(self, actor: Path) -> None:
        """Load the adapter."""
        await self.load(actor)

    async def pause(self, mode: str) -> None:
        """Nothing needs to."""

    async def forget_prefixes(self) -> None:
        """Nothing needs to."""

    async def resume(self) -> None:
        """Nothing was paused."""

    async def load(self, actor: Path) -> None:
        """Have the engine ready to answer with the adapter in `actor`, or with the base model. Verify it first."""
        if is_adapter(actor):
            name = name_of(actor)
            await self._load(name, actor)
            await self._unload_oldest(name)
            self._use(name)
        elif actor == self._base:
            self._use(None)
        else:
            raise CheckpointRejected("it holds all weights, and model.lora.rank is not 0 here")

    def _use(self, name: str | None) -> None:
        self._model_name = name or self._public
        self.renaming = ModelRenaming(public=self._public, adapter=name) if name else None

    async def _load(self, name: str, actor: Path) -> None:
        try:
            await self._post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(actor)})
        except EngineError as error:
            if '"Not Found"' in str(error):
                raise EngineError(
                    "the engine takes no adapters; start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                ) from error
            if "already been loaded" not in str(error):  # by an explorer before us: what has the name is the same
                raise

    async def _unload_oldest(self, newest: str) -> None:
        """Forget the names that nobody will ask for. What is in flight there still comes to its end."""
        self._loaded = [*(each for each in self._loaded if each != newest), newest]
        while len(self._loaded) > _KEPT:
            oldest = self._loaded.pop(0)
            try:
                await self._post("/v1/unload_lora_adapter", json={"lora_name": oldest})
            except EngineError as error:
                log.warning("adapter_not_unloaded", adapter=oldest, reason=str(error))
