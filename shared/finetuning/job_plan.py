"""What a job is trained with: its policy's options, and its hyperparameters with `auto` resolved."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tuneloop.shared.settings.settings import Settings


class JobPlan(NamedTuple):
    """`options` are the policy's, by dotted names; `hyperparameters` as the API answers them."""

    options: dict[str, Any]
    hyperparameters: dict[str, Any]
    rows_in_all: int
    total_steps: int


def plan_job(settings: Settings, method: str, asked: Mapping[str, Any], *, lines: int, seed: int) -> JobPlan:
    """The plan of a job over a file of so many lines. Raises JobRefused for a hyperparameter that cannot be."""
    raise NotImplementedError
