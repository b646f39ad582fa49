"""What the explorer and the trainer would be wrong to disagree about."""

from importlib.metadata import PackageNotFoundError, version

try:
    #: The release that is installed, as the git tag named it when it was built.
    VERSION = version("tuneloop")
except PackageNotFoundError:  # run from a folder that nothing was installed from
    VERSION = "0.1.0"
