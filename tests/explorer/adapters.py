"""Makes versions that are adapters to the tiny model of the explorer's tests, as a trainer would leave them."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests import factories
from tests.doubles.engine import EngineDouble
from tests.explorer import checkpoints
from tests.explorer.checkpoints import CONFIG, tensors
from tests.explorer.running import settings_for
from tuneloop.shared.checkpoints import CheckpointStore, Probe
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.settings.serving import LoraSettings
from tuneloop.shared.settings.settings import Settings

RANK = 2
LAYERS = {"model.layers.0.self_attn.q_proj": (6, 4), "model.layers.0.mlp.up_proj": (8, 4)}


def write_base(folder: Path, seed: int = 0) -> Path:
    """A model that has layers to which adapters are added, whose numbers depend on `seed`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    layers = {f"{name}.weight": np.full(shape, 1 + seed, np.float32) for name, shape in LAYERS.items()}
    save_file(tensors() | layers, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def config_of(base: Path) -> dict[str, Any]:
    """What adapter_config.json says."""
    return {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "up_proj"],
        "bias": "none",
        "base_model_name_or_path": str(base.absolute()),
    }


def halves(seed: int = 0) -> dict[str, np.ndarray]:
    """The matrices of an adapter."""
    random = np.random.default_rng(seed)
    shapes = {}
    for name, (outputs, inputs) in LAYERS.items():
        shapes[f"base_model.model.{name}.lora_A.weight"] = (RANK, inputs)
        shapes[f"base_model.model.{name}.lora_B.weight"] = (outputs, RANK)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_adapter(folder: Path, base: Path, seed: int = 0) -> Path:
    """What a version's actor/ holds."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config_of(base)))
    save_file(halves(seed), folder / "adapter_model.safetensors")
    return folder


#: Publish what lies in a staging folder, good or not, as an adapter.
seal = partial(checkpoints.seal, kind="lora")


def adapted(tmp_path: Path, *doubles: EngineDouble, rank: int = RANK, resident: int = 8, **explorer: Any) -> Settings:
    """Settings of an explorer of adapters."""
    settings = settings_for(tmp_path, [each.url for each in doubles], **explorer)
    write_base(settings.model.model_path)
    model = settings.model.model_copy(update={"lora": LoraSettings(rank=rank, resident=resident)})
    return settings.model_copy(update={"model": model})


def register(
    ledger: Ledger, job_dir: Path, base: Path, *, probe: Probe | None = None, policy: int = 0, step: int = 1
) -> int:
    """A new candidate of a policy: a good adapter, trained on one experience made for it, and registered."""
    factories.committed(ledger, policy=policy)
    epoch = ledger.training.take_epoch("trainer")
    samples = ledger.training.lease(epoch, 1, BatchRules(policy=policy))
    store = CheckpointStore(job_dir)

    def publish(version: int) -> tuple[Path, str]:
        staging = store.stage(version)
        write_adapter(staging / "actor", base, seed=version)
        return seal(store, staging, version, probe=probe)

    return ledger.training.register(epoch, factories.ids(samples), step=step, publish=publish, policy=policy)
