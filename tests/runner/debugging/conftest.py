"""The explorer of the models' tests."""

from tests.runner.models.conftest import double, explorer

__all__ = ["double", "explorer"]
