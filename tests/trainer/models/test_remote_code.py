"""Programs that lie beside a model's weights."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.tokenizer import _load
from tuneloop.trainer.models.model import Actor

_PROGRAM = """
from pathlib import Path
from transformers import Qwen3Config, Qwen3ForCausalLM

Path({marker!r}).touch()


class Config(Qwen3Config):
    model_type = "ours"


class Model(Qwen3ForCausalLM):
    config_class = Config
"""


@pytest.fixture
def model(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that can be loaded only by the program beside it, which leaves `ran` there."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_bytes())
    config |= {
        "model_type": "ours",
        "auto_map": {"AutoConfig": "program.Config", "AutoModelForCausalLM": "program.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "program.py").write_text(_PROGRAM.format(marker=str(folder / "ran")))
    return folder


def test_it_is_not_run(model: Path, settings: Callable[..., Settings]) -> None:
    with pytest.raises(EnvironmentRefused, match=r"model\.model_path"):
        Actor.load(settings(model={"model_path": model}), model)
    _load(model, False, "model.model_path")
    assert not (model / "ran").exists()


def test_it_is_run_where_the_settings_say_so(model: Path, settings: Callable[..., Settings]) -> None:
    Actor.load(settings(model={"model_path": model, "trust_remote_code": True}), model)
    assert (model / "ran").exists()
