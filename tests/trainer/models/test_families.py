"""Every architecture of docs/architectures.md is loaded, trained and published, or refused at the start."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.house.documents.page_files import DOCS, blocks_of
from tests.loop.harness.architectures import ARCHITECTURES, attention_of, make_architecture
from tests.loop.harness.oracle import Oracle
from tests.loop.test_architectures import documented
from tests.trainer.factories import sample
from tuneloop.explorer.versions.verifier import verify
from tuneloop.shared.checkpoints import ACTOR, CheckpointStore, Manifest
from tuneloop.shared.errors import SettingsError
from tuneloop.shared.settings.base_model import require_trainable
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.learner import recompute


def settings_of(base: Path, rank: int = 0) -> Settings:
    values: dict[str, Any] = {
        "mode": "train",
        "model": {"model_path": base, "lora": {"rank": rank, "targets": attention_of(base)}},
        "algorithm": {"optimizer": {"lr": 0.05}, "kl_coef": 0.01},
        "trainer": {"device": "cpu", "micro_batch_tokens": 64, "allow_routing_mismatch": True},
    }
    return Settings.model_validate(values)


def train_and_publish(settings: Settings, folder: Path) -> float:
    """Make a step, publish it, and have it verified; how far transformers is from its probe, 0 for an adapter."""
    base, store = settings.model.model_path, CheckpointStore(folder)
    require_trainable(settings)
    learner = snapshot.load(settings, None)
    before = {name: each.clone() for name, each in learner.actor.tensors().items()}
    learner.step([sample(i) for i in range(8)])
    assert any(not torch.equal(each, before[name]) for name, each in learner.actor.tensors().items())
    staging = store.stage(1)
    snapshot.save(learner, staging, base=base)
    probe = snapshot.probe(learner, settings)()
    manifest = Manifest(
        version=1,
        parent=0,
        step=1,
        epoch=1,
        base_model=str(base),
        created_at=time.time(),
        dtype="float32",
        probe=probe,
        files=store.seal(staging),
        kind="lora" if settings.model.lora.rank else "full",
    )
    path, sha256 = store.publish(staging, manifest)
    verify(path, manifest_sha256=sha256, version=1, base=base)
    if settings.model.lora.rank:
        return 0.0
    found = Oracle(path / ACTOR).logprobs(list(probe.prompt_ids[:1]), list(probe.prompt_ids[1:]))
    return float(np.abs(np.subtract(found, probe.logprobs)).max())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_trained_and_published_as_the_page_says(name: str, tmp_path: Path) -> None:
    base = make_architecture(name, tmp_path / "base", 1)
    for rank, said in enumerate(documented()[name][:2]):
        if said == "refused":
            with pytest.raises(SettingsError):
                require_trainable(settings_of(base, 4 * rank))
        else:
            assert train_and_publish(settings_of(base, 4 * rank), tmp_path / str(rank)) < 1e-4


def test_the_text_of_a_model_that_sees_is_trained_from_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What docs/architectures.md says to do."""
    monkeypatch.chdir(tmp_path)
    base, text = make_architecture("Qwen3.5 (sees)", tmp_path / "Qwen3.5-4B", 1), tmp_path / "Qwen3.5-4B-text"
    [block] = blocks_of(DOCS / "architectures.md")
    exec(block.text, {})  # noqa: S102 - the page's own words
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base / name, text)
    assert json.loads((text / "config.json").read_text())["architectures"] == ["Qwen3_5ForCausalLM"]
    for rank in (0, 4):
        assert train_and_publish(settings_of(text, rank), tmp_path / str(rank)) < 1e-4


def test_other_experts_than_the_engine_s_show_in_mismatch_kl_fresh(tmp_path: Path) -> None:
    learner = snapshot.load(settings_of(make_architecture("Qwen3-MoE", tmp_path / "base", 1)), None)
    samples = [sample(i, version_min=3, version_max=3, temperature=1.0) for i in range(8)]
    routers = [each for name, each in learner.actor.network.named_parameters() if name.endswith("mlp.gate.weight")]
    apart = []
    for turned in (0, 1):  # The engine's choice of experts: the trainer's, and another.
        for router in routers:
            router.data.copy_(router.roll(turned, 0))
        told = recompute(learner, learner.actor, samples)
        for router in routers:
            router.data.copy_(router.roll(-turned, 0))
        sampled = [sample(i, version_min=3, version_max=3, temperature=1.0, logprobs=told[i]) for i in range(8)]
        state = {name: each.clone() for name, each in learner.actor.network.state_dict().items()}
        apart.append(learner.step(sampled, version=3)["mismatch_kl/fresh"])
        learner.actor.network.load_state_dict(state)
    assert len(routers) == 2
    assert apart[0] < 1e-6
    assert apart[1] > 0.01
