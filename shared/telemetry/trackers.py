"""Curves in somebody else's tracker, beside TensorBoard's files: Weights & Biases offline, or MLflow in a folder.

A tracker that fails costs points, never a step: the first failure is logged.
"""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import structlog

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.held_files import make_below
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry.tracker_runs import OPENERS, OpenedRun
from tuneloop.shared.tensorboard import Curves

log = structlog.get_logger()


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
    """The curves of a service named `run`, which goes on after a step. `check_tracker` must have passed."""
    curves, kind = Curves(settings.tensorboard_dir / run, after=after), settings.monitor.monitor_type
    if kind == "tensorboard":
        return curves
    try:
        make_below(settings.tensorboard_dir.parent / kind)
        return TrackedCurves(curves, OPENERS[kind](settings, run))
    except Exception as error:  # noqa: BLE001 - as above
        log.warning("tracker_failed", reason=str(error))
        return curves
