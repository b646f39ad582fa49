"""Attention as engines compute it, where transformers' faster kernels compute something else."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.loop.harness.architectures import ROW, make_architecture
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.models.model import Actor


def test_attention_whose_logits_are_capped_is_trained_with_the_cap(tmp_path: Path) -> None:
    folder = make_architecture("Gemma 2 (tied)", tmp_path / "model", seed=1)
    settings = Settings.model_validate(
        {"model": {"model_path": folder}, "trainer": {"device": "cpu", "dtype": "float32"}}
    )
    ours = Actor.load(settings, folder).network
    kinds = ("eager", "sdpa")
    capped, uncapped = (AutoModelForCausalLM.from_pretrained(folder, attn_implementation=kind) for kind in kinds)
    with torch.no_grad():
        found, exact, other = (each(torch.tensor([ROW])).logits for each in (ours, capped, uncapped))
    assert torch.allclose(found, exact, atol=1e-5)
    assert not torch.allclose(found, other, atol=1e-3)
