"""`python -m tuneloop.explorer.engines.ray_engine`: an engine on a node of a Ray cluster, its socket forwarded here.

The engine is a process of a Ray actor, in a placement group of its own. It ends with its actor, the actor with this
process, and this process with the engine. Its RayEngineSpec comes in the environment variable SPEC_VARIABLE.
"""

import asyncio
import hmac
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.ray_cluster import LOCAL, keep_to_this_machine, require_token

_NONCE_BYTES = 32
_AUTH_TIMEOUT_S = 10.0
_BLOCK_BYTES = 1 << 16


def proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, nonce, "sha256")


async def open_remote_end(socket: Path, secret: bytes, host: str) -> asyncio.Server:
    return await asyncio.start_server(partial(_accept, socket, secret), host, 0)


async def open_local_end(socket: Path, secret: bytes, remote_address: tuple[str, int]) -> asyncio.Server:
    return await asyncio.start_unix_server(partial(_forward, secret, remote_address), socket)


async def _accept(socket: Path, secret: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        writer.write(nonce)
        async with asyncio.timeout(_AUTH_TIMEOUT_S):
            received = await reader.readexactly(len(proof(secret, nonce)))
        if hmac.compare_digest(received, proof(secret, nonce)):
            await _relay(reader, writer, *await asyncio.open_unix_connection(socket))
    except (OSError, EOFError, TimeoutError):
        pass  # the connection just ends: the engine is gone, or the proof was wrong
    finally:
        writer.close()


async def _forward(
    secret: bytes, remote_address: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        async with asyncio.timeout(_AUTH_TIMEOUT_S):
            remote_reader, remote_writer = await asyncio.open_connection(*remote_address)
            remote_writer.write(proof(secret, await remote_reader.readexactly(_NONCE_BYTES)))
        await _relay(reader, writer, remote_reader, remote_writer)
    except (OSError, EOFError, TimeoutError):
        pass
    finally:
        writer.close()


async def _relay(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader,
    other_writer: asyncio.StreamWriter,
) -> None:
    await asyncio.gather(_copy(reader, other_writer), _copy(other_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while block := await reader.read(_BLOCK_BYTES):
            writer.write(block)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


SPEC_VARIABLE = "TUNELOOP_RAY_ENGINE_SPEC"


class RayEngineSpec(msgspec.Struct, frozen=True):
    """An engine to run. Its `socket` is on this machine; the command gets another one, and `umask`, where it runs."""

    ray_address: str
    insecure: bool
    gpus: int
    socket: str
    log: str
    command: list[str]
    environment: dict[str, str]
    umask: int


class EngineActor:
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes]

    def start(self, encoded_spec: bytes, secret: bytes) -> tuple[str, int]:
        import ray

        host = ray.util.get_node_ip_address()
        spec = msgspec.json.decode(encoded_spec, type=RayEngineSpec)
        socket = Path(tempfile.mkdtemp(prefix="tuneloop-")) / "engine.sock"
        command = [str(socket) if part == spec.socket else part for part in spec.command[1:]]
        os.umask(spec.umask)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # all of the memory
        Path(spec.log).parent.mkdir(parents=True, exist_ok=True)
        with Path(spec.log).open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tuneloop.explorer.engines.guard", sys.executable, *command],
                # It closes with the actor, however that ends, and then the guard ends the engine.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **spec.environment},
                start_new_session=True,
            )
        port: list[int] = []
        listening = threading.Event()

        async def forward() -> None:
            server = await open_remote_end(socket, secret, host)
            port.append(server.sockets[0].getsockname()[1])
            listening.set()
            await server.serve_forever()

        threading.Thread(target=asyncio.run, args=(forward(),), daemon=True).start()
        if not listening.wait(30):
            raise OSError(f"no port of {host} can be listened on")
        return host, port[0]

    def wait(self) -> int:
        return self._process.wait()


async def run(spec: RayEngineSpec) -> int:
    if spec.ray_address == LOCAL:
        keep_to_this_machine()
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init(address=spec.ray_address, namespace="tuneloop", log_to_driver=False)
    loop, main_task = asyncio.get_running_loop(), asyncio.current_task()
    assert main_task is not None
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, main_task.cancel)
    resources = {"CPU": 1.0} | ({"GPU": float(spec.gpus)} if spec.gpus else {})
    sys.stderr.write(f"waiting for {resources} on one node of the Ray cluster\n")
    try:
        require_token(ray.get_runtime_context().gcs_address, insecure=spec.insecure)
        group = placement_group([resources], strategy="STRICT_PACK")
        await group.ready()
        options = {"num_cpus": 1, "num_gpus": spec.gpus, "max_restarts": 0}
        strategy = PlacementGroupSchedulingStrategy(group)
        actor: Any = ray.remote(EngineActor).options(scheduling_strategy=strategy, **options).remote()
        secret = secrets.token_bytes(32)
        remote_address = await actor.start.remote(msgspec.json.encode(spec), secret)
        async with await open_local_end(Path(spec.socket), secret, remote_address):
            return int(await actor.wait.remote())
    except (ray.exceptions.RayError, EnvironmentRefused) as error:
        sys.stderr.write(f"Error: {type(error).__name__}: {str(error).strip().splitlines()[0]}\n")
        return 1
    finally:
        ray.shutdown()  # ends the actor, and it the engine


def main() -> int:
    spec = msgspec.json.decode(os.environ.pop(SPEC_VARIABLE), type=RayEngineSpec)
    # Ray's workers import from the folder in which their driver was started before they import from anywhere else: that
    # must be one of ours, with nothing to import in it.
    os.chdir(Path(spec.socket).parent)
    try:
        return asyncio.run(run(spec))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


if __name__ == "__main__":
    from tuneloop.explorer.engines import ray_engine  # imported by name: the actor's process must find it

    sys.exit(ray_engine.main())
