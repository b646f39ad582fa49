"""Makes models and checkpoints of a few numbers, as a trainer would leave them."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests import factories
from tests.doubles.engine import logprobs_of
from tuneloop.shared.checkpoints import CheckpointStore, Kind, Manifest, Probe
from tuneloop.shared.ledger.ledger import Ledger

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "vocab_size": 8,
    "tie_word_embeddings": False,
}
PROMPT = (1, 5, 2, 7)


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,), "lm_head.weight": (8, 4)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_model(folder: Path, seed: int = 0) -> Path:
    """A Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def publish(store: CheckpointStore, version: int, *, probe: Probe | None = None) -> tuple[Path, str]:
    """A good checkpoint in its place; `probe` instead of what the engine double says of it."""
    staging = store.stage(version)
    write_model(staging / "actor", seed=version)
    return seal(store, staging, version, probe=probe)


def seal(
    store: CheckpointStore,
    staging: Path,
    version: int,
    *,
    probe: Probe | None = None,
    dtype: str = "float32",
    kind: Kind = "full",
) -> tuple[Path, str]:
    """Publish what lies in `staging`, good or not; `probe` instead of what the engine double says of it."""
    right = Probe(prompt_ids=PROMPT, logprobs=tuple(logprobs_of(store.path(version) / "actor", PROMPT)), tolerance=0.01)
    manifest = Manifest(
        version=version,
        parent=version - 1,
        step=version,
        epoch=1,
        base_model="tiny",
        created_at=1.0,
        dtype=dtype,
        probe=probe or right,
        files=store.seal(staging),
        kind=kind,
    )
    return store.publish(staging, manifest)


def register(ledger: Ledger, job_dir: Path, *, probe: Probe | None = None) -> int:
    """A new candidate: a good checkpoint, trained on one experience made for it, and registered."""
    epoch, samples = factories.leased(ledger)
    store = CheckpointStore(job_dir)
    return ledger.training.register(
        epoch, factories.ids(samples), step=1, publish=lambda version: publish(store, version, probe=probe)
    )
