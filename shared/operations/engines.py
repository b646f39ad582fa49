"""What the explorer of a settings file says of its engines."""

from typing import NamedTuple

import httpx
from pydantic import TypeAdapter, ValidationError

from tuneloop.shared.settings.settings import Settings

_TIMEOUT_S = 2.0
#: Where one listens on all addresses, it is asked at this machine's own.
_OWN = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class EngineSummary(NamedTuple):
    """One engine: the version that it serves, and what its weights were last proven by, "" before any proof."""

    engine: int
    state: str
    version: int
    proof: str

    @property
    def sentence(self) -> str:
        """It for people."""
        proof = f"its weights proven by {self.proof}" if self.proof else "its weights not proven yet"
        return f"engine {self.engine} {self.state}, version {self.version}, {proof}"


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
