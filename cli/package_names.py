"""This file makes sure that no other installed distribution has our import name."""

from collections.abc import Mapping, Sequence
from importlib.metadata import packages_distributions

from tuneloop.shared.errors import EnvironmentRefused

PACKAGES = ("tuneloop",)
OWNERS = {"tuneloop", "tuneloop-runner"}


def refuse_foreign_packages(owners: Mapping[str, Sequence[str]] | None = None) -> None:
    """Raise EnvironmentRefused if another installed distribution has a package named as one of ours."""
    installed = packages_distributions() if owners is None else owners
    for package in PACKAGES:
        for other in sorted(set(installed.get(package, ())) - OWNERS):
            raise EnvironmentRefused(
                f"the installed distribution {other} also has a package named '{package}', and Python may import that "
                f"one: remove it (pip uninstall {other}), or install tuneloop into an environment of its own"
            )
