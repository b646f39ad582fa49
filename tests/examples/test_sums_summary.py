"""The demo's summary and folder: the keys, the verdict, the settings, and what is never deleted."""

import json
from pathlib import Path

from examples.sums.folder import Folder
from examples.sums.summary import Summary


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
