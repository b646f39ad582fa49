"""The curves that TensorBoard shows, one point a step."""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX import SummaryWriter


class Curves:
    """Writes points after the step `after`; those that an earlier run wrote there are purged, not drawn twice."""

    def __init__(self, folder: Path, *, after: int) -> None:
        # Without the suffix, two runs begun in the same second would write into the same file.
        self._writer = SummaryWriter(str(folder), purge_step=after + 1, filename_suffix=f".{time.time_ns()}")

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Put the metrics on disk as points at `step`."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """No more points."""
        self._writer.close()
