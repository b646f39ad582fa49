"""What the examples' main() tells tune()."""

from pathlib import Path
from typing import Any

import pytest

import examples.math_agent.main as math_agent


class Tuned(Exception):
    """Raised in place of tune(), with what that was told."""


def tune(**given: Any) -> None:
    raise Tuned(given)


@pytest.mark.parametrize("gpu", [False, True])
def test_the_settings_of_an_example_are_settings_of_the_services(
    gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math_agent, "tune", tune)
    given = ["--dir", str(tmp_path), "--model", "there", "--steps", "2", "--held-out", "8", *["--gpu"] * gpu]
    with pytest.raises(Tuned) as told:
        math_agent.main(given)
    settings = told.value.args[0]["settings"]
    assert settings["cluster"]["gpu_per_node"] == int(gpu)
    assert settings["model"]["served_model_name"] == "math_agent"
    assert settings["explorer"]["rollout_model"].get("enforce_eager", False) is not gpu
