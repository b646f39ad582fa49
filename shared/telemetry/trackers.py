"""Curves in Weights & Biases or MLflow, beside TensorBoard's files. One that fails costs points, never a step."""

import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import structlog

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.held_files import make_below
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.tensorboard import Curves

log = structlog.get_logger()


#: How points at a step get there, and how the run ends. Both may raise anything that the library raises.
OpenedRun = tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]


def open_wandb(settings: Settings, run: str) -> OpenedRun:
    """A run of Weights & Biases, offline unless WANDB_MODE says otherwise: `wandb sync` brings it to the server."""
    import wandb

    opened = wandb.init(
        project=settings.project,
        name=f"{settings.name}/{run}",
        group=settings.name,
        dir=str(settings.tensorboard_dir.parent / "wandb"),
        mode="online" if os.environ.get("WANDB_MODE") == "online" else "offline",
        settings=wandb.Settings(silent=True, disable_git=True, console="off"),
    )
    opened.define_metric("*", step_metric="step")
    # Not as wandb's own step: it drops what comes for one that is over, and several calls are about one.
    return lambda step, values: opened.log({**values, "step": step}), opened.finish


def open_mlflow(settings: Settings, run: str) -> OpenedRun:
    """A run of MLflow in files below the job folder, or where MLFLOW_TRACKING_URI says."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer releases ask for it
    from mlflow import MlflowClient

    folder, name = settings.tensorboard_dir.parent / "mlflow", f"{settings.project}/{settings.name}"
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or folder.absolute().as_uri())
    found = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name) if found is None else found.experiment_id
    opened = client.create_run(experiment, run_name=run).info.run_id

    def send(step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            client.log_metric(opened, key, value, step=step)

    return send, lambda: client.set_terminated(opened)


#: By what `monitor.monitor_type` says, which is the name of the module and of our extra too.
OPENERS: Mapping[str, Callable[[Settings, str], OpenedRun]] = {"wandb": open_wandb, "mlflow": open_mlflow}


class CurveWriter(Protocol):
    def add(self, step: int, values: Mapping[str, float]) -> bool:
        """Write the values as points at `step`; whether they were. Never raises."""
        ...

    def close(self) -> None: ...


class TrackedCurves:
    """TensorBoard's files, and what a tracker gets besides."""

    def __init__(self, curves: Curves, opened: OpenedRun) -> None:
        self._curves, (self._send, self._end) = curves, opened
        self._failing = False

    def add(self, step: int, values: Mapping[str, float]) -> bool:
        """Write the values as points at `step`; whether TensorBoard's file has them."""
        self._try(self._send, step, values)
        return self._curves.add(step, values)

    def close(self) -> None:
        self._try(self._end)
        self._curves.close()

    def _try(self, act: Callable[..., None], *arguments: Any) -> None:
        try:
            act(*arguments)
            self._failing = False
        except Exception as error:  # noqa: BLE001 - of a library that may raise anything: no step is lost for a curve
            if not self._failing:
                log.warning("tracker_failed", reason=str(error))
            self._failing = True


def check_tracker(settings: Settings) -> None:
    """Raise EnvironmentRefused if the tracker that the settings name is not installed."""
    name = settings.monitor.monitor_type
    if name in OPENERS and importlib.util.find_spec(name) is None:
        raise EnvironmentRefused(
            f"monitor.monitor_type: {name} is not installed here; pip install '.[{name}]' in tuneloop's folder, or "
            "write tensorboard"
        )


def open_curves(settings: Settings, run: str, *, after: int) -> CurveWriter:
    """The curves of a service named `run`, which resume after a step. Requires a successful `check_tracker`."""
    curves, kind = Curves(settings.tensorboard_dir / run, after=after), settings.monitor.monitor_type
    if kind == "tensorboard":
        return curves
    try:
        make_below(settings.tensorboard_dir.parent / kind)
        return TrackedCurves(curves, OPENERS[kind](settings, run))
    except Exception as error:  # noqa: BLE001 - as above
        log.warning("tracker_failed", reason=str(error))
        return curves
