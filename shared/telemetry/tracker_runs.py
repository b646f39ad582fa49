"""Opens runs in Weights & Biases and MLflow. Their libraries are imported where a run is opened, and nowhere else."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuneloop.shared.settings.settings import Settings

#: How points at a step get there, and how the run ends. Both may raise anything that the library raises.
OpenedRun = tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]


def open_wandb(settings: "Settings", run: str) -> OpenedRun:
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


def open_mlflow(settings: "Settings", run: str) -> OpenedRun:
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
OPENERS: Mapping[str, Callable[["Settings", str], OpenedRun]] = {"wandb": open_wandb, "mlflow": open_mlflow}
