"""The ranks as workers of Ray Train, on whichever machines of a cluster have room.

Ray starts all of them again when one dies. What they and their driver tell each other goes through an actor: the driver
says when to stop, and a rank why it refuses to start, which starting again would not change.
"""

import os
import signal
import sys
import threading
import time
from typing import Any

import structlog

from tuneloop.shared.errors import EnvironmentRefused, StaleEpoch, StartupError
from tuneloop.shared.logging import clean_error, configure_logging
from tuneloop.shared.privacy.crash_reports import redact_crash_reports
from tuneloop.shared.ray_cluster import LOCAL, keep_to_this_machine, require_token
from tuneloop.shared.settings.hardware import trainer_on_gpu
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.types import umask_of
from tuneloop.trainer.stop import Stop

_log = structlog.get_logger()

_LOOK_S = 0.5
_NAMESPACE = "tuneloop"


class NoticeBoard:
    """The Ray actor. `refusal` is an exit code and its sentence."""

    def __init__(self) -> None:
        self._stopped = False
        self._refusal: tuple[int, str] | None = None

    def stop(self) -> None:
        """Tell rank 0 to stop."""
        self._stopped = True

    def is_stopped(self) -> bool:
        """Whether it is to stop."""
        return self._stopped

    def refuse(self, code: int, sentence: str) -> None:
        """Say why a rank ended for good; the first says it."""
        self._refusal = self._refusal or (code, sentence)

    def refusal(self) -> tuple[int, str] | None:
        """What was said."""
        return self._refusal


class NoticedStop:
    """What the board says, for the training loop."""

    def __init__(self, board: Any) -> None:
        self._board, self._set = board, False

    def is_set(self) -> bool:
        """Whether to stop."""
        import ray

        self._set = self._set or bool(ray.get(self._board.is_stopped.remote()))
        return self._set

    def wait(self, timeout: float) -> bool:
        """Sleep for so many seconds, or until told to stop; whether to stop."""
        deadline = time.monotonic() + timeout
        while not self.is_set() and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))
        return self._set

    def set(self) -> None:
        """Stop, from another thread."""
        self._set = True


def train_on_ray(settings: Settings, stop: Stop) -> int:
    """Train on the Ray cluster of the settings until all is done or `stop` is set; the exit code.

    Raises EnvironmentRefused without Ray, and where Ray answers strangers.
    """
    address = settings.cluster.ray_address
    if address == LOCAL:
        keep_to_this_machine()
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        from tuneloop.trainer.workers.local_ranks import LocalTorchConfig
    except ImportError as error:
        raise EnvironmentRefused(
            f"cluster: workers on several machines need Ray Train ({error}): in a clone, pip install ./runner "
            '".[trainer,ray]"'
        ) from None
    folder = os.getcwd()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(address=address, namespace=_NAMESPACE)
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        raise EnvironmentRefused(f"cluster.ray_address: {address}: {error}") from None
    for number, handler in handlers.items():
        signal.signal(number, handler)  # Ray's own ends this process with a dump of its stack.
    on_gpu = trainer_on_gpu(settings)
    config = LocalTorchConfig if address == LOCAL else TorchConfig
    try:
        require_token(ray.get_runtime_context().gcs_address, insecure=settings.explorer.insecure)
        board: Any = ray.remote(NoticeBoard).options(num_cpus=0).remote()
        trainer = TorchTrainer(
            work,
            train_loop_config={"settings": settings, "board": board, "folder": folder},
            torch_config=config("cpu:gloo,cuda:nccl" if on_gpu else "gloo"),
            scaling_config=ScalingConfig(num_workers=settings.trainer_workers, use_gpu=on_gpu),
            run_config=RunConfig(
                name="trainer",
                storage_path=str(settings.job_dir / "ray"),
                failure_config=FailureConfig(max_failures=-1),
            ),
        )
        return _watch(trainer, board, stop)
    finally:
        ray.shutdown()  # ends the actors


def _watch(trainer: Any, board: Any, stop: Stop) -> int:
    import ray

    failed: list[Exception] = []

    def fit() -> None:
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as error:
            failed.append(error)

    # A thread of its own, which does not keep this process from ending: `fit` knows no end but its own.
    job, stopping = threading.Thread(target=fit, daemon=True), False
    job.start()
    while job.is_alive():
        if stop.is_set() and not stopping:
            board.stop.remote()
            stopping = True
        if (refusal := ray.get(board.refusal.remote())) is not None:
            sys.stderr.write(f"trainer: {refusal[1]}\n")
            return int(refusal[0])
        job.join(_LOOK_S)
    if failed:
        _log.error("ray_train_failed", reason=str(failed[0]))
    return 1 if failed else 0


def work(given: dict[str, Any]) -> None:
    """What a worker of Ray Train does, within the process group that Ray has made."""
    import ray

    from tuneloop.trainer.models.model import device_of
    from tuneloop.trainer.ranks.ranks import JoinedRanks
    from tuneloop.trainer.workers.rank import serve

    settings, board = given["settings"], given["board"]
    os.chdir(given["folder"])  # The settings' paths may be relative.
    os.umask(umask_of(settings.trainer.checkpoint_mode))
    configure_logging()
    redact_crash_reports(settings.privacy)
    try:
        together = settings.trainer.ulysses_sequence_parallel_size
        serve(settings, JoinedRanks(device_of(settings), together=together), NoticedStop(board))
    except (StartupError, StaleEpoch) as error:
        ray.get(board.refuse.remote(error.exit_code, clean_error(error)))
        raise
