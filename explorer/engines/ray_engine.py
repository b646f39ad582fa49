"""`python -m tuneloop.explorer.engines.ray_engine`: an engine where a Ray cluster has room, its socket carried here.

The engine is a process of a Ray actor, in a placement group of its own. It ends with its actor, the actor with this
process, and this process with the engine. What is to be done comes in the environment variable ORDER.
"""

import asyncio
import hmac
import os
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

_NONCE = 32
_PROVE_S = 10.0
_BLOCK = 1 << 16


def proof(secret: bytes, nonce: bytes) -> bytes:
    """What only those who know the secret can say about a nonce."""
    return hmac.digest(secret, nonce, "sha256")


async def open_far_end(socket: Path, secret: bytes, host: str) -> asyncio.Server:
    """Carry on to `socket` whoever comes to a free port of `host` and knows the secret."""
    return await asyncio.start_server(partial(_let_in, socket, secret), host, 0)


async def open_near_end(socket: Path, secret: bytes, far_end: tuple[str, int]) -> asyncio.Server:
    """Carry whoever comes to `socket` to the far end."""
    return await asyncio.start_unix_server(partial(_carry, secret, far_end), socket)


async def _let_in(socket: Path, secret: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        nonce = secrets.token_bytes(_NONCE)
        writer.write(nonce)
        async with asyncio.timeout(_PROVE_S):
            said = await reader.readexactly(len(proof(secret, nonce)))
        if hmac.compare_digest(said, proof(secret, nonce)):
            await _join(reader, writer, *await asyncio.open_unix_connection(socket))
    except (OSError, EOFError, TimeoutError):
        pass  # whoever came sees that it ends: the engine is gone, or he is a stranger
    finally:
        writer.close()


async def _carry(
    secret: bytes, far_end: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        async with asyncio.timeout(_PROVE_S):
            far_reader, far_writer = await asyncio.open_connection(*far_end)
            far_writer.write(proof(secret, await far_reader.readexactly(_NONCE)))
        await _join(reader, writer, far_reader, far_writer)
    except (OSError, EOFError, TimeoutError):
        pass
    finally:
        writer.close()


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader,
    other_writer: asyncio.StreamWriter,
) -> None:
    """Give each what the other says, until either ends."""
    await asyncio.gather(_pour(reader, other_writer), _pour(other_reader, writer))


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while block := await reader.read(_BLOCK):
            writer.write(block)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


SPEC_VARIABLE = "TUNELOOP_RAY_ORDER"


class RayEngineSpec(msgspec.Struct, frozen=True):
    """An engine to run: its command, which listens on `socket`, what its environment has more, and the GPUs it needs.

    `socket` is one of this machine. The command's own one is another, on the machine where it runs.
    """

    ray_address: str
    gpus: int
    socket: str
    log: str
    command: list[str]
    environment: dict[str, str]


class EngineActor:
    """The actor: an engine and the far end of the tunnel to it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes]

    def start(self, order: bytes, secret: bytes) -> tuple[str, int]:
        """Start the engine; the address and port at which it answers."""
        import ray

        host = ray.util.get_node_ip_address()
        what = msgspec.json.decode(order, type=RayEngineSpec)
        socket = Path(tempfile.mkdtemp(prefix="tuneloop-")) / "engine.sock"
        command = [str(socket) if part == what.socket else part for part in what.command[1:]]
        Path(what.log).parent.mkdir(parents=True, exist_ok=True)
        with Path(what.log).open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tuneloop.explorer.engines.guard", sys.executable, *command],
                # It closes with the actor, by whatever death, and then the guard ends the engine.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **what.environment},
                start_new_session=True,
            )
        port: list[int] = []
        listening = threading.Event()

        async def carry() -> None:
            server = await open_far_end(socket, secret, host)
            port.append(server.sockets[0].getsockname()[1])
            listening.set()
            await server.serve_forever()

        threading.Thread(target=asyncio.run, args=(carry(),), daemon=True).start()
        if not listening.wait(30):
            raise OSError(f"no port of {host} can be listened on")
        return host, port[0]

    def wait(self) -> int:
        """Wait for the engine's end; its exit code."""
        return self._process.wait()


async def run(order: RayEngineSpec) -> int:
    """Run the engine to its end; its exit code."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init(address=order.ray_address, namespace="tuneloop", log_to_driver=False)
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, this.cancel)
    needed = {"CPU": 1.0} | ({"GPU": float(order.gpus)} if order.gpus else {})
    sys.stderr.write(f"waiting for {needed} on one machine of the Ray cluster\n")
    try:
        group = placement_group([needed], strategy="STRICT_PACK")
        await group.ready()
        placed = {"num_cpus": 1, "num_gpus": order.gpus, "max_restarts": 0}
        where = PlacementGroupSchedulingStrategy(group)
        actor: Any = ray.remote(EngineActor).options(scheduling_strategy=where, **placed).remote()
        secret = secrets.token_bytes(32)
        far_end = await actor.start.remote(msgspec.json.encode(order), secret)
        async with await open_near_end(Path(order.socket), secret, far_end):
            return int(await actor.wait.remote())
    except ray.exceptions.RayError as error:
        sys.stderr.write(f"Error: {type(error).__name__}: {str(error).strip().splitlines()[0]}\n")
        return 1
    finally:
        ray.shutdown()  # ends the actor, and it the engine


def main() -> int:
    """Run the engine that is ordered."""
    order = msgspec.json.decode(os.environ.pop(SPEC_VARIABLE), type=RayEngineSpec)
    # Ray's workers import from the folder in which their driver was started before they import from anywhere else: that
    # must be one of ours, with nothing to import in it.
    os.chdir(Path(order.socket).parent)
    try:
        return asyncio.run(run(order))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


if __name__ == "__main__":
    from tuneloop.explorer.engines import ray_engine  # by its name: the actor's process must find it

    sys.exit(ray_engine.main())
