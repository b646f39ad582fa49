"""What the tests of tasks share: explorers over engine doubles."""

from tests.explorer.conftest import double, doubles, explorer, places, running_explorer

__all__ = ["double", "doubles", "explorer", "places", "running_explorer"]
