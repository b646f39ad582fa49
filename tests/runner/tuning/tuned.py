"""tune() with a service double."""

from pathlib import Path
from typing import Any

from tests.doubles.serving import serving
from tuneloop.runner import AlgorithmConfig, TuneResult, tune


def tuned(double: Any, folder: Path, workflow: Any, tasks: Any, **how: Any) -> TuneResult:
    """What came of it: steps of four tasks, each with two runs, unless `how` says otherwise."""
    given = {"algorithm": AlgorithmConfig(group_size=2, batch_size=4), "checkpoint_root_dir": folder} | how
    with serving(double) as url:
        return tune(workflow_func=workflow, train_dataset=tasks, service=url, **given)
