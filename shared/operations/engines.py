"""What the explorer of a settings file says of its engines."""

from typing import NamedTuple

import httpx
from pydantic import TypeAdapter, ValidationError

from tuneloop.shared.settings.settings import Settings

_TIMEOUT_S = 2.0
#: Where one listens on all addresses, it is asked at this machine's own.
_OWN = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


_WITHOUT_PLUGIN = (
    "Without our vLLM plugin an engine loses 28 to 51 % of its tokens/s to capturing all log-probabilities. To load it,"
    " run `pip install --no-deps .` in a clone where the engine runs, or take the image of"
    " deploy/images/explorer.Dockerfile; then start the engine with TUNELOOP_ENGINE_PACKS=1. Or capture a part:"
    " explorer.capture.logprobs"
)


def plugin_sentence(*, of_others: bool) -> str:
    """What it costs that an engine, of `engine_urls` if it is `of_others`, has not our plugin, and the cure."""
    whose = "An engine of explorer.rollout_model.engine_urls is not started by tuneloop. " if of_others else ""
    return whose + _WITHOUT_PLUGIN


class EngineSummary(NamedTuple):
    """One engine: the version that it serves, and what its weights were last proven by, "" before any proof.

    `packs`: whether it has our plugin, which packs log-probabilities; None: it is not known.
    """

    engine: int
    state: str
    version: int
    proof: str
    packs: bool | None = None

    @property
    def sentence(self) -> str:
        """It for people."""
        proof = f"its weights proven by {self.proof}" if self.proof else "its weights not proven yet"
        plugin = {None: "", False: ", without our vLLM plugin", True: ", with our vLLM plugin"}[self.packs]
        return f"engine {self.engine} {self.state}, version {self.version}, {proof}{plugin}"


_ENGINES = TypeAdapter(list[EngineSummary])


def read_engines(settings: Settings) -> list[EngineSummary] | None:
    """The engines of the explorer that listens where the settings say; None if none answers there."""
    address = _OWN.get(settings.explorer.listen_address, settings.explorer.listen_address)
    host = f"[{address}]" if ":" in address else address
    try:
        ready = httpx.get(
            f"http://{host}:{settings.explorer.proxy_port}/health/ready", timeout=_TIMEOUT_S, trust_env=False
        )
        return _ENGINES.validate_python(ready.json()["engines"])
    except (httpx.HTTPError, LookupError, TypeError, ValueError, ValidationError):
        return None
