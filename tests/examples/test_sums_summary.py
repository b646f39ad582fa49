"""The demo's summary and folder: the keys, the verdict, the settings, and what is never deleted."""

import json
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from examples.sums.folder import BATCH, Folder, FolderRefused
from examples.sums.summary import Summary
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import digest_of
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.loader import load_settings

ROOT = Path(__file__).parents[2]


def summary(**changes: object) -> Summary:
    values: dict[str, object] = {
        "seed": 0,
        "reward": "judge",
        "reward_before": 0.3,
        "reward_after": 0.9,
        "versions": 60,
        "steps": 60,
        "trained": 3840,
        "requests": 9000,
        "requests_failed": 0,
        "last_failure": "",
        "feedback_to_served_s": 1.5,
        "seconds": 95.0,
        "curve": [(0, 0.3, 64)],
    }
    return Summary(**(values | changes))  # type: ignore[arg-type]


def test_the_json_has_the_promised_keys() -> None:
    written = json.loads(summary().to_json())
    promised = {
        "reward_before",
        "reward_after",
        "versions",
        "requests",
        "requests_failed",
        "feedback_to_served_s",
        "seconds",
    }
    assert promised <= written.keys()
    assert written["curve"] == [[0, 0.3, 64]]


def test_the_page_says_where_everything_is_and_what_to_try(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "demo")
    folder.start_afresh().close()
    settings = folder.write_settings(seed=3)
    page = summary(feedback_to_served_s=None).page(settings, folder.settings)
    for said in (
        str(settings.job_dir),
        f"tensorboard --logdir {settings.tensorboard_dir}",
        settings.database_url,
        f"tuneloop run --config {folder.settings}",
        f"http://127.0.0.1:{settings.explorer.proxy_port}/ui   log in with the key in {folder.page_key}",
        f"curl http://127.0.0.1:{settings.explorer.proxy_port}/v1/chat/completions",
    ):
        assert said in page


def test_the_demo_opens_with_the_page_and_a_key_for_it(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "demo")
    command = [sys.executable, "-m", "examples.sums", "--dir", str(folder.root)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        first = demo.stdout.readline()
        demo.send_signal(signal.SIGINT)
    settings = load_settings(folder.settings)
    page = f"http://127.0.0.1:{settings.explorer.proxy_port}/ui"
    assert first == f"The page: {page}   log in with the key in {folder.page_key}, once vLLM serves\n"
    with closing(Ledger.of(settings)) as ledger:
        found = {each.name: each for each in ledger.keys.all()}
    assert found["page"].scopes == (Scope.ADMIN,)
    assert found["page"].digest == digest_of(folder.page_key.read_text())
    assert found["agent"].digest == digest_of(folder.key.read_text())
    assert folder.page_key.stat().st_mode & 0o077 == 0


def test_the_settings_are_those_of_one_small_machine(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.start_afresh().close()
    settings = folder.write_settings(seed=3)
    assert (settings.mode, settings.served_model_name, settings.trainer.seed) == ("both", "sums", 3)
    assert settings.explorer.listen_address == "127.0.0.1"
    assert settings.buffer.train_batch_size == BATCH
    assert settings.job_dir.is_relative_to(tmp_path)


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for _ in range(2):
        with pytest.raises(FolderRefused, match="not this demo's"):
            Folder(tmp_path).start_afresh()
    assert (tmp_path / "model").exists()
