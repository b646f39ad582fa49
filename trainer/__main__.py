"""Runs the command `python -m tuneloop.trainer --config trainer.yaml`."""

import argparse
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tuneloop.shared.errors import EnvironmentRefused, RankFailed, StaleEpoch, StartupError, TuneloopError
from tuneloop.shared.logging import LOG, clean_error, configure_logging
from tuneloop.shared.operations.job_folder import require_file_systems
from tuneloop.shared.privacy.detection import redact_crash_reports
from tuneloop.shared.settings.base_model import require_folders
from tuneloop.shared.settings.hardware import count_gpus, fit_to_machine, log_placement
from tuneloop.shared.settings.loader import load_settings
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.types import umask_of
from tuneloop.trainer.models.folders import disk_errors_as_refusals
from tuneloop.trainer.rendezvous import RENDEZVOUS_VARIABLE
from tuneloop.trainer.stop import SignalStop, Stop
from tuneloop.trainer.workers.launching import launch
from tuneloop.trainer.workers.ray_workers import train_on_ray

_STOPPING = "trainer: stopping after the current step or publication\n"  # printed at Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Train until a signal; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tuneloop.trainer", description="Turn rewarded experiences into better weights."
    )
    parser.add_argument("--config", type=Path, required=True, help="the settings file (YAML)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set one option")
    given = parser.parse_args(arguments)
    stop = SignalStop(signal.SIGTERM, signal.SIGINT, answer=_STOPPING)
    configure_logging()
    try:
        settings = load_settings(given.config, given.set)
        os.umask(umask_of(settings.trainer.checkpoint_mode))
        redact_crash_reports(settings.privacy)
        settings = fit_to_machine(settings, gpus_here=count_gpus())
        with disk_errors_as_refusals(settings):
            require_folders(settings)
        if RENDEZVOUS_VARIABLE not in os.environ:
            require_file_systems(settings)
        on_ray = settings.cluster.node_num > 1 or settings.cluster.ray_address != "auto"
        if settings.trainer_workers > 1 and RENDEZVOUS_VARIABLE not in os.environ:
            # The launcher runs this command again as each worker, and returns their exit code.
            log_placement(settings)
            flags = [part for override in given.set for part in ("--set", override)]
            command = [sys.executable, "-P", "-m", "tuneloop.trainer", "--config", str(given.config), *flags]
            return launch(command, 1 if on_ray else settings.trainer_workers, stop)
        if settings.trainer_workers > 1 and on_ray:
            return train_on_ray(settings, stop)
        _train(settings, stop)
    except RankFailed:
        return 1  # the launcher reports it; the other rank logs why
    except TuneloopError as error:
        LOG.write(f"trainer: {clean_error(error)}\n")
        return error.exit_code if isinstance(error, StartupError | StaleEpoch) else 1
    return 0


def _train(settings: Settings, stop: Stop) -> None:
    """Train in this process: alone, or as the worker that the environment names."""
    alone = RENDEZVOUS_VARIABLE not in os.environ
    if alone:
        log_placement(settings)
    run, train_as_worker = _import_training()
    if stop.is_set() and alone:
        return
    with disk_errors_as_refusals(settings):
        if alone:
            run(settings, stop)
        else:
            train_as_worker(settings, stop)


def _import_training() -> tuple[Callable[[Settings, Stop], None], Callable[[Settings, Stop], None]]:
    """The functions that train alone, and as a worker.

    The imports take seconds, so invalid settings are reported first. They are an extra. Garbage collection would take a
    fifth of the time, and the modules live to the end anyway.
    """
    gc.disable()
    try:
        from tuneloop.trainer.loop import run
        from tuneloop.trainer.workers.rank import train_as_worker
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"torch", "transformers", "safetensors"}:
            raise
        raise EnvironmentRefused(
            f'the trainer needs {error.name}: in a clone, pip install ./runner ".[trainer]"'
        ) from None
    finally:
        gc.freeze()
        gc.enable()
    return run, train_as_worker


if __name__ == "__main__":
    code = main()
    if code and RENDEZVOUS_VARIABLE in os.environ:
        # At once: its sockets' closing stops the others, and torch's shutdown may exceed the launcher's grace period.
        sys.stdout.flush()
        LOG.finish()
        os._exit(code)
    sys.exit(code)
