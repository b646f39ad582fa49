"""What the explorer of a settings file says of its engines."""

from typing import NamedTuple

import httpx
from pydantic import TypeAdapter, ValidationError

from tuneloop.shared.ledger.facts import Standstill
from tuneloop.shared.operations.diagnosis import Code
from tuneloop.shared.settings.settings import Settings

_TIMEOUT_S = 5.0
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
    """One engine: the version that it serves, and what its weights were last proven by, "" before any proof."""

    engine: int
    state: str
    version: int
    proof: str
    packs: bool | None = None

    @property
    def sentence(self) -> str:
        proof = f"its weights proven by {self.proof}" if self.proof else "its weights not proven yet"
        plugin = {None: "", False: ", without our vLLM plugin", True: ", with our vLLM plugin"}[self.packs]
        return f"engine {self.engine} {self.state}, version {self.version}, {proof}{plugin}"


class ExplorerView(NamedTuple):
    """A running explorer's report: its engines (None: not reported) and its stalled parts."""

    engines: list[EngineSummary] | None
    stops: tuple[Standstill, ...] = ()


_VIEW = TypeAdapter(ExplorerView)


def explorer_url(settings: Settings) -> str:
    address = _OWN.get(settings.explorer.listen_address, settings.explorer.listen_address)
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{settings.explorer.proxy_port}"


def read_explorer(settings: Settings) -> ExplorerView:
    """What the explorer says of itself that listens where the settings say, if one does."""
    url = explorer_url(settings)
    try:
        told = httpx.get(f"{url}/health/ready", timeout=_TIMEOUT_S, trust_env=False).json()
        stops = [Standstill(**each) for each in told.get("stops", ())]
        if (reason := told.get("reason")) not in [None, *(stop.sentence for stop in stops)]:
            stops.append(Standstill(Code.NOT_READY, f"the explorer at {url} is not ready: {reason}", serves=False))
        return _VIEW.validate_python((told["engines"], stops))
    except (httpx.ReadTimeout, httpx.ReadError, httpx.RemoteProtocolError):
        silent = f"the explorer at {url} takes connections and does not answer: end its processes, and start it again,"
        silent += " with a higher limit of open files (`LimitNOFILE=`, `ulimit -n`) if its log names that"
        return ExplorerView(None, (Standstill(Code.EXPLORER_SILENT, silent, serves=False),))
    except (httpx.HTTPError, LookupError, TypeError, ValueError, ValidationError, AttributeError):
        return ExplorerView(None)
