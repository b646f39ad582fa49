"""The client packages under test: where each lives, how it is run, and what it can tell."""

import json
import os
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.doubles.engine import MODEL

ROOT = Path(__file__).parent.parent.parent
PLACES = ROOT / ".venv" / "clients"
DRIVERS = Path(__file__).parent / "drivers"
EXAMPLES = ROOT / "examples" / "clients"

#: A package that does not answer within this has hung.
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Package:
    """One client package. `place` is its folder below .venv/clients, `not_found` and `late` its own exceptions."""

    name: str
    place: str
    driver: str
    example: str | None
    not_found: str = "NotFoundError"
    late: str = "APITimeoutError"
    args: tuple[str, ...] = ()
    prefix: str = "chatcmpl-"
    retries: bool = True
    #: What its reader can stop at, beside the end.
    stops: tuple[str, ...] = ("middle",)

    @property
    def missing(self) -> str | None:
        """Why it cannot be tested here, if it cannot."""
        if self.place == "node" and not shutil.which("node"):
            return "node is not in PATH: the tests of JavaScript clients need Node.js 20 or newer"
        installed = (PLACES / self.place / ".installed").exists()
        return None if installed else f"{self.name} is not installed: run scripts/install-clients"

    def command(self, node_folder: Path, url: str) -> list[str]:
        """What runs its driver. Node finds packages beside the file that wants them only."""
        if self.place == "node":
            return ["node", str(node_folder / self.driver), url, MODEL, *self.args]
        return [str(PLACES / self.place / "bin" / "python"), str(DRIVERS / self.driver), url, MODEL, *self.args]


_BOTH = ("middle", "finish")

PACKAGES = [
    Package("openai-python 1.x", "openai1", "openai_sync.py", "with_openai.py", stops=_BOTH),
    Package("openai-python 1.x async", "openai1", "openai_async.py", "with_openai_async.py", stops=_BOTH),
    Package("openai-python 2.x", "litellm", "openai_sync.py", "with_openai.py"),
    Package("openai-python 2.x async", "litellm", "openai_async.py", "with_openai_async.py"),
    Package("openai-python 3.x", "openai3", "openai_sync.py", "with_openai.py", stops=_BOTH),
    Package("openai-python 3.x async", "openai3", "openai_async.py", "with_openai_async.py", stops=_BOTH),
    Package("openai-node", "node", "openai_node.mjs", "with_openai.mjs", late="APIConnectionTimeoutError", stops=_BOTH),
    Package(
        "LangChain",
        "langchain",
        "langchain_chat.py",
        "with_langchain.py",
        not_found="OpenAIModelNotFoundError",
        late="OpenAITimeoutError",
        stops=_BOTH,
    ),
    Package("LiteLLM", "litellm", "litellm_completion.py", "with_litellm.py", late="Timeout"),
    Package("AgentScope 1.x", "agentscope1", "agentscope1.py", "with_agentscope1.py"),
    Package("AgentScope 2.x", "agentscope2", "agentscope2.py", "with_agentscope2.py"),
    Package(
        "AI SDK",
        "node",
        "ai_sdk.mjs",
        "with_ai_sdk.mjs",
        args=("chat",),
        not_found="AI_APICallError 404",
        late="TimeoutError",
    ),
    Package(
        "AI SDK responses",
        "node",
        "ai_sdk.mjs",
        "with_ai_sdk_responses.mjs",
        args=("responses",),
        not_found="AI_APICallError 404",
        late="TimeoutError",
        prefix="resp_",
    ),
    Package("Anthropic Python", "openai3", "anthropic_messages.py", "with_anthropic.py", prefix="msg_"),
    Package(
        "Anthropic JS",
        "node",
        "anthropic_node.mjs",
        "with_anthropic.mjs",
        late="APIConnectionTimeoutError",
        prefix="msg_",
    ),
    Package(
        "httpx",
        "openai3",
        "plain_httpx.py",
        "with_httpx.py",
        not_found="HTTPStatusError",
        late="ReadTimeout",
        retries=False,
        stops=_BOTH,
    ),
    Package(
        "curl",
        "openai3",
        "curl.py",
        None,
        not_found="CalledProcessError",
        late="exit 28",
        stops=("middle", "done"),
    ),
]


def node_folder(folder: Path) -> Path:
    """A folder with our JavaScript and the packages that it imports."""
    for file in (*DRIVERS.glob("*.mjs"), *EXAMPLES.glob("*.mjs")):
        shutil.copy(file, folder)
    (folder / "node_modules").symlink_to(PLACES / "node" / "node_modules")
    return folder


class Driver:
    """A package's driver while it runs. Of a package that is missing, each use fails."""

    def __init__(self, package: Package, folder: Path, url: str) -> None:
        self.package = package
        self._process: subprocess.Popen[str] | None = None
        if package.missing:
            return
        # No proxy of this machine's, and nothing asked of the network: LiteLLM would load a list of prices.
        environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
        environment |= {"TUNELOOP_URL": url, "TUNELOOP_MODEL": MODEL, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._folder = folder
        self._log = folder / f"{package.name}.log"
        command, pipe = package.command(folder, url), subprocess.PIPE
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=log, text=True)

    def ask(self, do: str, **how: Any) -> None:
        """Have something done; `answer` waits for it."""
        assert self._process, self.package.missing
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": do, **how}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """What came of the last thing that was asked."""
        assert self._process
        assert self._process.stdout
        hung = threading.Timer(_PATIENCE_S, self._process.kill)
        hung.start()
        line = self._process.stdout.readline()
        hung.cancel()
        told = json.loads(line or "{}")
        assert "told" in told, told.get("failed") or self._log.read_text()
        return told["told"]

    def do(self, do: str, **how: Any) -> Any:
        """Both."""
        self.ask(do, **how)
        return self.answer()

    def example(self) -> str:
        """What the package's example prints."""
        where = self._folder if self.package.place == "node" else EXAMPLES
        said: str = self.do("example", path=str(where / str(self.package.example)))
        return said

    def stop(self) -> None:
        """End it."""
        if self._process:
            self._process.terminate()
            self._process.communicate(timeout=_PATIENCE_S)
