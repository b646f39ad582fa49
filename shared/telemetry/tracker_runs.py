"""Opens runs in Weights & Biases and MLflow. Their libraries are imported where a run is opened, and nowhere else."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple


class RunNames(NamedTuple):
    """What a run is called: the experiment's project and name, and the service."""

    project: str
    name: str
    run: str


#: How points at a step get there, and how the run ends. Both may raise anything that the library raises.
OpenedRun = tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]


def open_wandb(folder: Path, names: RunNames) -> OpenedRun:
    """A run of Weights & Biases, offline unless WANDB_MODE says otherwise: `wandb sync` brings it to the server."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    opened = wandb.init(
        project=names.project,
        name=f"{names.name}/{names.run}",
        group=names.name,
        dir=str(folder),
        mode="online" if os.environ.get("WANDB_MODE") == "online" else "offline",
        settings=wandb.Settings(silent=True, disable_git=True, console="off"),
    )
    opened.define_metric("*", step_metric="step")

    def send(step: int, values: Mapping[str, float]) -> None:
        # Not as wandb's own step: it drops what comes for one that is over, and several calls are about one.
        opened.log({**values, "step": step})

    return send, opened.finish


def open_mlflow(folder: Path, names: RunNames) -> OpenedRun:
    """A run of MLflow in files below the folder, or where MLFLOW_TRACKING_URI says."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer releases ask for it
    from mlflow import MlflowClient

    folder.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or folder.absolute().as_uri())
    name = f"{names.project}/{names.name}"
    found = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name) if found is None else found.experiment_id
    opened = client.create_run(experiment, run_name=names.run).info.run_id

    def send(step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            client.log_metric(opened, key, value, step=step)

    return send, lambda: client.set_terminated(opened)


#: By what `monitor.monitor_type` says, which is the name of the module and of our extra too.
OPENERS: Mapping[str, Callable[[Path, RunNames], OpenedRun]] = {"wandb": open_wandb, "mlflow": open_mlflow}
