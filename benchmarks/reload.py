"""What a reload costs those who are being answered: the explorer in front of vLLM beside a bare vLLM, in one run.

    .venv/bin/python -m benchmarks.reload [--reloads 20] [--rounds 4] [--streams 8] [--wholes 2] [--work FOLDER]
    … --model FOLDER --gpus 1 --rollout '{"dtype": "bfloat16", "gpu_memory_utilization": 0.4}'      on one GPU

Two engines with the same flags run side by side and take turns under the same steady load of streamed and whole chats;
the other one is idle. The bare one is reloaded by its own routes, as its manual says: pause (keep), reload_weights,
reset_prefix_cache, resume. In front of the other stands the explorer, which takes up registered versions of the same
weights: read by a verifier, loaded in place, proved by a probe. A gap is the time between two pieces of one stream; the
longest is looked for in windows of the same length for both, 2.5 s before a reload is complete to 0.5 s after.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

import httpx
from safetensors.torch import load_file, save_file

from benchmarks.reload_load import Lanes, Seen, under_load
from tests.loop.harness.oracle import Oracle
from tests.loop.harness.services import Service, free_port, ledger_of, make_model, wait_for, write_settings
from tuneloop.explorer.engines import vllm
from tuneloop.shared.checkpoints import CheckpointStore, Manifest, Probe
from tuneloop.shared.experience import VersionState
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings

#: So long the load goes on before, between and after reloads.
_QUIET_S = 3.0
#: Where the gaps of a reload are looked for: so long before it is complete, and so long after.
_BEFORE_S, _AFTER_S = 2.5, 0.5
_STARTED_S = 600.0
_NORM = "model.norm.weight"


@dataclass
class Subject:
    """A system and its readings; `spans` are the begins and ends of reloads."""

    name: str
    system: "System"
    seen: Seen = field(default_factory=Seen)
    spans: list[tuple[float, float]] = field(default_factory=list)


class System(Protocol):
    """Answers chats and can load other weights."""

    def client(self) -> httpx.AsyncClient:
        """A client of it."""
        ...

    async def reload(self, number: int) -> None:
        """Return when it serves the weights of that number."""
        ...


class Bare:
    """A vLLM of its own, on a socket."""

    def __init__(self, settings: Settings, socket: Path, weights: list[Path]) -> None:
        self._settings, self._socket, self._weights = settings, socket, weights

    def client(self) -> httpx.AsyncClient:
        """A client of it."""
        transport = httpx.AsyncHTTPTransport(uds=str(self._socket))
        return httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=600)

    async def reload(self, number: int) -> None:
        """By its own routes."""
        async with vllm.open_session(url=None, socket=str(self._socket), key=None) as session:
            control = vllm.EngineControl(session, model_name=self._settings.served_model_name)
            await control.pause("keep")
            await control.load(self._weights[number])
            await control.reset_prefix_cache()
            await control.resume()


class Ours:
    """The explorer, with versions registered by hand."""

    def __init__(self, service: Service, ledger: Ledger, weights: list[Path], probes: list[Probe]) -> None:
        self._service, self._ledger = service, ledger
        self._weights, self._probes = weights, probes

    def client(self) -> httpx.AsyncClient:
        """A client of it."""
        return httpx.AsyncClient(base_url=self._service.url, timeout=600)

    async def reload(self, number: int) -> None:
        """Register the weights as the next version and wait until it is served."""
        version = await asyncio.to_thread(self._register, number)
        while (found := await asyncio.to_thread(self._ledger.versions.get, version)) is not None:
            if found.state is VersionState.CHAMPION:
                return
            if found.state is not VersionState.CANDIDATE:
                raise RuntimeError(f"version {version} is {found.state}: {found.reason}")
            await asyncio.sleep(0.02)

    def _register(self, number: int) -> int:
        settings, ledger = self._service.settings, self._ledger
        store, epoch = CheckpointStore(settings.job_dir), ledger.training.take_epoch("benchmark")
        staging = store.stage(epoch)
        shutil.copytree(self._weights[number], staging / "actor", copy_function=os.link)
        files = store.seal(staging)

        def publish(version: int) -> tuple[Path, str]:
            manifest = Manifest(
                version=version,
                parent=version - 1,
                step=version,
                epoch=epoch,
                base_model=str(settings.model.model_path),
                created_at=time.time(),
                dtype=settings.explorer.rollout_model.dtype,
                probe=self._probes[number],
                files=files,
            )
            return store.publish(staging, manifest)

        return ledger.training.register(epoch, [], step=1, publish=publish)


def main() -> int:
    """Measure and print the table; 1 if a request failed or was cut off."""
    options = _options()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reload-", dir=options.work)))
        subjects = _start(folder, options, stack)
        asyncio.run(_measure(subjects, options))
    _report(subjects)
    return 1 if any(each.seen.failed or each.seen.cut_off for each in subjects) else 0


async def _measure(subjects: list[Subject], options: argparse.Namespace) -> None:
    lanes = Lanes(options.streams, options.wholes, options.tokens)
    share = -(-options.reloads // options.rounds)
    for begun in range(0, options.reloads, share):
        for subject in subjects:
            await _round(subject, range(begun, min(begun + share, options.reloads)), lanes, options.name)
            print(f"{subject.name}: {len(subject.spans)} reloads, load {os.getloadavg()[0]:.1f}", file=sys.stderr)


async def _round(subject: Subject, numbers: range, lanes: Lanes, model: str) -> None:
    async with subject.system.client() as http, under_load(http, model, lanes, subject.seen):
        for number in numbers:
            await asyncio.sleep(_QUIET_S)
            started = time.perf_counter()
            await subject.system.reload(number)
            subject.spans.append((started, time.perf_counter()))
        await asyncio.sleep(_QUIET_S)


def _start(folder: Path, options: argparse.Namespace, stack: ExitStack) -> list[Subject]:
    """Both, ready, with the weights that they will be given."""
    model = options.model or make_model(folder / "model")
    weights = [_vary(model, folder / f"weights-{number}", number) for number in range(options.reloads)]
    probes = [Oracle(each).probe(list(range(40, 72))) for each in weights]
    config = _settings(folder, model, options)
    service = Service(config, "explorer")
    stack.callback(service.stop)
    service.wait_until_ready()
    ledger = ledger_of(service.settings)
    stack.callback(ledger.close)
    socket = stack.enter_context(_bare_engine(service.settings, model, folder))
    options.name = service.settings.served_model_name
    return [
        Subject("bare vLLM", Bare(service.settings, socket, weights)),
        Subject("explorer", Ours(service, ledger, weights, probes)),
    ]


def _settings(folder: Path, model: Path, options: argparse.Namespace) -> Path:
    rollout = {
        "dtype": "float32",
        "enforce_eager": not options.gpus,
        **({} if options.gpus else {"kv_cache_memory_bytes": 64 << 20}),
        "engine_args": ["--distributed-executor-backend", "uni"],
        **json.loads(options.rollout),
    }
    explorer = {
        "listen_address": "127.0.0.1",
        "proxy_port": free_port(),
        "service_status_check_interval": 0.25,
        "rollout_model": rollout,
    }
    return write_settings(folder, model, explorer=explorer, cluster={"gpu_per_node": options.gpus})


@contextmanager
def _bare_engine(settings: Settings, model: Path, folder: Path) -> Iterator[Path]:
    """The socket of a vLLM started as the explorer starts its own."""
    socket, output = folder / "bare.sock", folder / "bare.log"
    with output.open("wb") as log:
        engine = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tuneloop.explorer.engines.guard",
                *vllm.command(settings, model=model, socket=socket),
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=vllm.environment(settings, 0),
        )
    try:
        wait_for(lambda: _answers(engine, socket, output), timeout_s=_STARTED_S, why=f"it did not start: {output}")
        yield socket
    finally:
        assert engine.stdin is not None
        engine.stdin.close()
        engine.wait(60)


def _answers(engine: "subprocess.Popen[bytes]", socket: Path, output: Path) -> bool:
    if engine.poll() is not None:
        raise RuntimeError(output.read_text()[-4000:])
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://engine") as http:
            return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def _vary(model: Path, folder: Path, number: int) -> Path:
    """A copy of the model whose last norm is a little louder: other weights, other answers."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        if _NORM in tensors:
            tensors[_NORM] = tensors[_NORM] * (1 + (number + 1) / 50)
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
    return folder


def _report(subjects: list[Subject]) -> None:
    print(
        "| system | requests | failed | cut off | longest gap | median of the longest | without a reload | a reload |"
    )
    print("|---|---|---|---|---|---|---|---|")
    longest = []
    for each in subjects:
        windows = [(end - _BEFORE_S, end + _AFTER_S) for _, end in each.spans]
        gaps = [each.seen.longest(*window) for window in windows]
        quiet = max(gap for at, gap in each.seen.gaps if not _within(at, gap, windows))
        seconds = median(end - begun for begun, end in each.spans)
        longest.append((max(gaps), median(gaps)))
        print(
            f"| {each.name} | {each.seen.requests} | {each.seen.failed} | {each.seen.cut_off} | {max(gaps):.3f} s | "
            f"{median(gaps):.3f} s | {quiet:.3f} s | {seconds:.2f} s |"
        )
        print(f"{each.name}: {' '.join(f'{gap:.2f}' for gap in gaps)}")
        for why, times in each.seen.why.items():
            print(f"{each.name}: {times} x {why}")
    (bare, bare_median), (ours, our_median) = longest
    print(f"ratio of the longest {ours / bare:.2f}, of the medians {our_median / bare_median:.2f}")


def _within(at: float, gap: float, spans: list[tuple[float, float]]) -> bool:
    return any(at > begun and at - gap < end for begun, end in spans)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reload", description=__doc__)
    parser.add_argument("--reloads", type=int, default=20, help="of each system")
    parser.add_argument("--rounds", type=int, default=4, help="in which the systems take turns")
    parser.add_argument("--streams", type=int, default=8, help="chats streamed side by side")
    parser.add_argument("--wholes", type=int, default=2, help="whole ones beside them")
    parser.add_argument("--tokens", type=int, default=600, help="of each reply")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder instead of the tiny model")
    parser.add_argument("--gpus", type=int, default=0, help="of this machine; both engines share the first")
    parser.add_argument("--rollout", default="{}", metavar="JSON", help="more of explorer.rollout_model")
    parser.add_argument("--work", type=Path, help="where to put the weights")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
