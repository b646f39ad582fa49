"""Lets those who are being answered have the GPU: training waits between two micro-batches while there is traffic.

The explorer touches a mark in the job folder while requests are in flight (`tuneloop.shared.job_marks`).
"""

import time

import torch

from tuneloop.shared.job_marks import TRAFFIC_S, traffic_stamp
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.models.model import device_of
from tuneloop.trainer.stop import Stop

#: A mark that has not been touched for so long says that nobody is being answered: three touches may be late.
QUIET_S = 3 * TRAFFIC_S
_LOOK_S = 0.05


class TrafficYield:
    """To be called before each pass through a model, if `trainer.yield_to_traffic`.

    The clock of the mark is never compared with ours: what counts is that it was touched since the last look.
    """

    def __init__(self, settings: Settings, stop: Stop) -> None:
        self._job_dir, self._stop = settings.job_dir, stop
        self._on_gpu = device_of(settings).type == "cuda"
        self._stamp = traffic_stamp(self._job_dir)
        self._touched = float("-inf")
        self._seconds = 0.0

    def __call__(self) -> None:
        """Wait until there has been no traffic for `QUIET_S`, or until told to stop."""
        if self._on_gpu:
            torch.cuda.synchronize()  # Else passes that were begun long ago would go on while this one waits.
        began = time.monotonic()
        while not self._stop.is_set():
            if (stamp := traffic_stamp(self._job_dir)) != self._stamp:
                self._stamp, self._touched = stamp, time.monotonic()
            if time.monotonic() - self._touched >= QUIET_S:
                break
            self._stop.wait(_LOOK_S)
        self._seconds += time.monotonic() - began

    def take_seconds(self) -> float:
        """The seconds waited since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
