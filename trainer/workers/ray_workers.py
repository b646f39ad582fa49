"""Runs the ranks as workers of Ray Train, on machines of a cluster, which restarts all when one dies.

An actor passes messages: the driver's stop, and a rank's reason for refusing to start, which no restart changes.
"""

import fcntl
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import structlog

from tuneloop.shared.errors import EnvironmentRefused, StaleEpoch, StartupError
from tuneloop.shared.logging import clean_error, configure_logging
from tuneloop.shared.privacy.detection import redact_crash_reports
from tuneloop.shared.ray_cluster import LOCAL, keep_to_this_machine, require_token
from tuneloop.shared.settings.base_model import require_folders
from tuneloop.shared.settings.hardware import trainer_on_gpu
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.types import umask_of
from tuneloop.trainer.models.folders import disk_errors_as_refusals
from tuneloop.trainer.rendezvous import RENDEZVOUS_VARIABLE
from tuneloop.trainer.stop import Stop

_log = structlog.get_logger()

_LOOK_S = 0.5
#: Ray Train would log all libraries' info messages. A preempted node is handled like a lost one.
_NOT_WANTED = ("CONTROLLER_STRUCTURED_LOGGING", "WORKER_STRUCTURED_LOGGING", "PREEMPTION_WATCHER")
_SIOCGIFADDR = 0x8915  # Linux's request code for an interface's address
_NAMESPACE = "tuneloop"


class StopActor:
    """A Ray actor by which the driver stops rank 0. `refusal` is an exit code and its sentence."""

    def __init__(self) -> None:
        self._stopped = False
        self._refusal: tuple[int, str] | None = None

    def stop(self) -> None:
        self._stopped = True

    def is_stopped(self) -> bool:
        return self._stopped

    def refuse(self, code: int, sentence: str) -> None:
        """Record why a rank exited for good; the first reason stays."""
        self._refusal = self._refusal or (code, sentence)

    def refusal(self) -> tuple[int, str] | None:
        return self._refusal


class ActorStop:
    """A Stop that polls the actor."""

    def __init__(self, board: Any) -> None:
        self._board, self._set = board, False

    def is_set(self) -> bool:
        import ray

        self._set = self._set or bool(ray.get(self._board.is_stopped.remote()))
        return self._set

    def wait(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not self.is_set() and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))
        return self._set

    def set(self) -> None:
        self._set = True


def train_on_ray(settings: Settings, stop: Stop) -> int:
    """Train on the Ray cluster until done or stopped; the exit code. Raises EnvironmentRefused."""
    address = settings.cluster.ray_address
    if address == LOCAL:
        keep_to_this_machine()
    else:
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")  # one try of half a minute instead of twenty
    os.environ |= {f"RAY_TRAIN_ENABLE_{what}": "0" for what in _NOT_WANTED}
    try:
        import ray
        from ray.train import RunConfig, ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError as error:
        raise EnvironmentRefused(
            f"cluster: workers on several machines need Ray Train ({error}): in a clone, pip install ./runner "
            '".[trainer,ray]"'
        ) from None
    folder = os.getcwd()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(address=address, namespace=_NAMESPACE)
    except (ConnectionError, RuntimeError, ray.exceptions.AuthenticationError) as error:
        raise EnvironmentRefused(
            f"cluster.ray_address: {address}: no Ray cluster to join: start Ray on its head and here (ray"
            f" start), then the trainer; nothing is lost ({str(error).partition('. ')[0]})"
        ) from None
    for number, handler in handlers.items():
        signal.signal(number, handler)  # Ray's own handlers end this process with a stack dump
    on_gpu = trainer_on_gpu(settings)
    here = ray.get_runtime_context()
    try:
        require_token(here.gcs_address, insecure=settings.explorer.insecure)
        on_this_node = NodeAffinitySchedulingStrategy(here.get_node_id(), soft=False)  # as Ray's controller
        board: Any = ray.remote(StopActor).options(num_cpus=0, scheduling_strategy=on_this_node).remote()
        trainer = DataParallelTrainer(
            work,
            train_loop_config={"settings": settings, "board": board, "folder": folder},
            scaling_config=ScalingConfig(num_workers=settings.trainer_workers, use_gpu=on_gpu),
            run_config=RunConfig(name="trainer", storage_path=str(settings.job_dir / "ray")),
        )
        # The cleaner is an actor that outlives this process and polls for what only a dashboard knows. Ray removes a
        # dead process's placement groups with its job.
        callbacks = trainer._create_default_callbacks()
        used = [each for each in callbacks if type(each).__name__ != "PlacementGroupCleanerCallback"]
        trainer._create_default_callbacks = lambda: used
        return _watch(trainer, board, stop)
    finally:
        ray.shutdown()  # ends the actors


def _watch(trainer: Any, board: Any, stop: Stop) -> int:
    import ray

    failed: list[Exception] = []

    def fit() -> None:
        try:
            trainer.fit()
        except Exception as error:  # noqa: BLE001 - logged below
            failed.append(error)

    # A daemon thread, since `fit` cannot be interrupted and must not block the exit.
    job, stopping, room = threading.Thread(target=fit, daemon=True), False, -1.0
    wanted, resource = trainer.scaling_config.num_workers, "GPU" if trainer.scaling_config.use_gpu else "CPU"
    job.start()
    try:
        while True:
            is_over = not job.is_alive()  # before the refusal is read
            if stop.is_set() and not stopping:
                board.stop.remote()
                stopping = True
            if (refusal := ray.get(board.refusal.remote())) is not None:
                sys.stderr.write(f"trainer: {refusal[1]}\n")
                return int(refusal[0])
            if is_over:
                break
            before, room = room, ray.cluster_resources().get(resource, 0.0)
            if room < wanted and room != before:
                cure = "start Ray on one more, or lower trainer.workers"
                _log.warning("workers_wait", workers=wanted, needed=f"a {resource} each", cluster_has=room, cure=cure)
            job.join(_LOOK_S)
    except ray.exceptions.RayError as error:
        failed.append(error)
    if failed:
        _log.error("ray_train_failed", reason=reason_of(failed[0]))
    return 1 if failed else 0


def reason_of(error: Exception) -> str:
    """Ray's error in one line: the last line of each failed worker, and its node if named."""
    reasons = []
    for rank, each in (getattr(error, "worker_failures", None) or {None: error}).items():
        node = re.search(r"node_ip='(.*?)'", text := str(each).strip() or repr(each))
        worker = "" if rank is None else f"worker {rank}{f' on {node[1]}' if node else ''}: "
        reasons.append(worker + text.splitlines()[-1])
    return "; ".join(reasons)


def work(given: dict[str, Any]) -> None:
    import ray

    from tuneloop.trainer.workers.rank import train_as_worker

    settings, board = given["settings"], given["board"]
    os.chdir(given["folder"])  # paths in settings may be relative
    os.umask(umask_of(settings.trainer.checkpoint_mode))
    configure_logging()
    redact_crash_reports(settings.privacy)
    try:
        require_folders(settings)
        with _rendezvous(is_local=settings.cluster.ray_address == LOCAL), disk_errors_as_refusals(settings):
            train_as_worker(settings, ActorStop(board))
    except (StartupError, StaleEpoch) as error:
        sentence = f"on {ray.util.get_node_ip_address()}: {clean_error(error)}"
        ray.get(board.refuse.remote(error.exit_code, sentence))
        raise


@contextmanager
def _rendezvous(*, is_local: bool) -> Iterator[None]:
    """Set the environment by which workers find each other: locally a file, since a port would be open to others."""
    import ray
    from ray.train.collective import broadcast_from_rank_zero

    context, address, url = ray.train.get_context(), ray.util.get_node_ip_address(), None
    with tempfile.TemporaryDirectory(prefix="tuneloop-") as folder, socket.socket() as port:
        if context.get_world_rank() == 0 and is_local:
            url = f"file://{folder}/rendezvous"
        elif context.get_world_rank() == 0:
            port.bind((address, 0))
            url = f"tcp://{address}:{port.getsockname()[1]}"
        port.close()
        os.environ |= {
            RENDEZVOUS_VARIABLE: broadcast_from_rank_zero(url),
            "RANK": str(context.get_world_rank()),
            "WORLD_SIZE": str(context.get_world_size()),
        }
        if interface := interface_of(address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        yield


def interface_of(address: str) -> str | None:
    """The network interface with an IPv4 address: torch's default, by host name, is often loopback."""
    with socket.socket() as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # no address
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, name.encode().ljust(40, b"\0"))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
