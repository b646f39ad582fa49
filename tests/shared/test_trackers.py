"""Curves in a tracker: the real libraries, in a virtual environment of their own, and what a failing one costs."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from tests.explorer.running import settings_for
from tests.trainer.factories import points
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry import trackers
from tuneloop.shared.telemetry.trackers import OpenedRun, open_curves

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "clients" / "trackers" / "bin" / "python"

WRITE = """
import sys
from pathlib import Path
from types import SimpleNamespace
sys.path.append(sys.argv[3])  # what tuneloop needs, behind the tracker's own
from tuneloop.shared.telemetry.trackers import OPENERS
settings = SimpleNamespace(project="project", name="name", tensorboard_dir=Path(sys.argv[2]).parent / "tensorboard")
(Path(sys.argv[2])).mkdir(exist_ok=True)
send, end = OPENERS[sys.argv[1]](settings, "trainer")
for step in (1, 2):
    send(step, {"actor/pg_loss": step / 2})
    send(step, {"time/save_checkpoint": 3.0})
end()
"""

READ = {
    "mlflow": """
import json, os, sys
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
from mlflow import MlflowClient
client = MlflowClient("file://" + sys.argv[1])
[run] = client.search_runs([client.get_experiment_by_name("project/name").experiment_id])
assert run.info.status == "FINISHED", run
found = {
    name: [[each.step, each.value] for each in client.get_metric_history(run.info.run_id, name)]
    for name in ("actor/pg_loss", "time/save_checkpoint")
}
print(json.dumps(found))
""",
    # A log in LevelDB's format: after 7 bytes, records with a checksum, their length and kind; none is cut in two here.
    "wandb": """
import json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2
[file] = Path(sys.argv[1]).rglob("*.wandb")
data, at, found = file.read_bytes(), 7, {}
assert data[:4] == b":W&B" and len(data) < 32768
while at < len(data):
    length, kind = struct.unpack_from("<HB", data, at + 4)
    assert kind == 1
    record = wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + length])
    at += 7 + length
    values = {(each.key or each.nested_key[0]): json.loads(each.value_json) for each in record.history.item}
    for name, value in values.items():
        if "/" in name:
            found.setdefault(name, []).append([values["step"], value])
print(json.dumps(found))
""",
}


def said(code: str, *arguments: object) -> str:
    if not PYTHON.exists():
        pytest.skip("THE TRACKERS ARE NOT INSTALLED: scripts/install-clients")
    environment = {"PYTHONPATH": str(ROOT / "build" / "links"), "HOME": "/nonexistent", "PATH": "/usr/bin:/bin"}
    command = [str(PYTHON), "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["mlflow", "wandb"])
def test_a_tracker_has_every_point(kind: str, tmp_path: Path) -> None:
    said(WRITE, kind, tmp_path / kind, Path(structlog.__file__).parents[1])
    assert json.loads(said(READ[kind], tmp_path / kind)) == {
        "actor/pg_loss": [[1, 0.5], [2, 1.0]],
        "time/save_checkpoint": [[1, 3.0], [2, 3.0]],
    }


def with_tracker(tmp_path: Path, kind: str) -> Settings:
    settings = settings_for(tmp_path)
    return settings.model_copy(update={"monitor": settings.monitor.model_copy(update={"monitor_type": kind})})


def test_a_tracker_that_fails_costs_no_point_of_tensorboards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def send(step: int, values: Mapping[str, float]) -> None:
        sent.append(step)
        if step > 1:
            raise ConnectionError("gone")

    def refuses(settings: Settings, run: str) -> OpenedRun:
        raise OSError("no room")

    monkeypatch.setattr(trackers, "OPENERS", {"wandb": lambda *_: (send, lambda: None), "mlflow": refuses})
    for kind in ("wandb", "mlflow"):
        settings = with_tracker(tmp_path / kind, kind)
        with capture_logs() as logs:
            curves = open_curves(settings, "trainer", after=0)
            assert [curves.add(step, {"actor/pg_loss": 1.0}) for step in (1, 2, 3)] == [True, True, True]
            curves.close()
        assert [each["event"] for each in logs] == ["tracker_failed"]
        assert points(settings.tensorboard_dir / "trainer", "actor/pg_loss") == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert sent == [1, 2, 3]
