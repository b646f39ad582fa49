import os
from pathlib import Path

import pytest

SERVICE = """
import json, os, signal, sys, time
name = os.path.basename(os.path.dirname(__file__))
say = lambda word: os.write(1, f"{name} {word}\\n".encode())
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: (say(signal.Signals(number).name), sys.exit(0)))
say(json.dumps(sys.argv[1:]))
say(os.getpid())
script = os.environ.get(name.upper() + "_DOES", "wait")
if script == "wait":
    while True: time.sleep(0.05)
if script == "die":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1)
sys.exit(int(script))
"""


@pytest.fixture
def services(tmp_path: Path) -> Path:
    for name in ("explorer", "trainer"):
        (tmp_path / "services" / "tuneloop" / name).mkdir(parents=True)
        (tmp_path / "services" / "tuneloop" / name / "__main__.py").write_text(SERVICE)
        (tmp_path / "services" / "tuneloop" / name / "__init__.py").touch()
    return tmp_path / "services"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TUNELOOP__")]:
        monkeypatch.delenv(name)
