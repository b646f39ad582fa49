"""Prometheus and promtool, Debian's: `scripts/install-clients` gets them where they are not installed."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.explorer.running import eventually
from tests.loop.harness.services import free_port

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"

_UNPACKED = ROOT / ".venv" / "clients" / "prometheus" / "usr" / "bin"


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`. Skips the test where it is not to be had."""
    found = shutil.which(name, path=os.pathsep.join((os.environ["PATH"], str(_UNPACKED))))
    if found is None:
        pytest.skip(f"{name} IS NOT INSTALLED, and scripts/install-clients could not get it: nothing is tested with it")
    return found


def promtool(
    *arguments: str | Path, text: str | None = None, folder: Path = FOLDER
) -> "subprocess.CompletedProcess[str]":
    """What promtool says."""
    command = [program("promtool"), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, input=text, capture_output=True, text=True, timeout=120, check=False)


class RunningPrometheus:
    """A Prometheus that scrapes every two seconds."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples that an expression has now. Asserts that Prometheus takes it."""
        answer = self._http.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def value(self, expression: str) -> float | None:
        """The value of the only sample, None if there is none."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if len(found) == 1 else None

    def alerts(self) -> list[dict[str, Any]]:
        """The alerts that are pending or fire."""
        found: list[dict[str, Any]] = self._http.get("/api/v1/alerts").json()["data"]["alerts"]
        return found


@contextmanager
def prometheus_running(
    folder: Path, target: str, *, key_file: Path | None = None, patience: str | None = None
) -> Iterator[RunningPrometheus]:
    """A Prometheus with the rules of `deploy/prometheus`; with `patience`, alerts fire after so many seconds."""
    executable = program("prometheus")
    folder.mkdir()
    rules = (FOLDER / "alerts.yml").read_text()
    if patience:  # `> 300` and `> 1800` are seconds that something may take
        rules = re.sub(r"_seconds > \d{3,}", "_seconds > 4", re.sub(r"for: \w+", f"for: {patience}", rules))
    (folder / "alerts.yml").write_text(rules)
    settings = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    pace = "5s" if patience else "2s"
    settings["global"] = {"scrape_interval": pace, "evaluation_interval": "1s"}
    [scraped] = settings["scrape_configs"]
    scraped["scrape_timeout"] = pace
    scraped["authorization"]["credentials_file"] = str(key_file)
    if key_file is None:
        del scraped["authorization"]
    scraped["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    port, log = free_port(), folder / "log"
    command = [executable, "--config.file", folder / "prometheus.yml", "--storage.tsdb.path", folder / "data"]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=output, stderr=output)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            eventually(lambda: _is_ready(http) or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            yield RunningPrometheus(http)
    finally:
        process.kill()
        process.wait()


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False
