"""Which base models the trainer refuses by their files, and what is said of one that it trains all the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.cli.test_main import tuneloop
from tuneloop.shared.errors import SettingsError
from tuneloop.shared.logging import LOG
from tuneloop.shared.settings.base_model import TEXT_ALONE, require_trainable, routing_note
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.__main__ import main


def settings_of(folder: Path, config: dict[str, Any], **but: Any) -> Settings:
    (folder / "config.json").write_text(json.dumps({"model_type": "any", **config}))
    (folder / "model.safetensors").touch()
    return Settings.model_validate({"model": {"model_path": folder}, "checkpoint_root_dir": folder} | but)


MIXTURES: list[dict[str, Any]] = [
    {"num_experts": 128, "num_experts_per_tok": 8},  # Qwen3-MoE
    {"num_local_experts": 8},  # Mixtral
    {"n_routed_experts": 64, "n_shared_experts": 2},  # GLM-4-MoE, DeepSeek
    {"text_config": {"num_experts": 256}},  # Qwen3.5-MoE
    {"ffn_config": {"moe_num_experts": 16}},  # DBRX
    {"moe_num_experts": [64, 64]},  # ERNIE 4.5 VL
]


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("config", MIXTURES, ids=str)
def test_a_mixture_of_experts_is_refused_unless_told_otherwise(
    tmp_path: Path, config: dict[str, Any], rank: int
) -> None:
    model = {"model_path": tmp_path, "lora": {"rank": rank}}
    with pytest.raises(SettingsError, match=r"^trainer\.allow_routing_mismatch: .* choose other experts for the same"):
        require_trainable(settings_of(tmp_path, config, model=model))
    require_trainable(settings_of(tmp_path, config, model=model, mode="serve"))
    told = settings_of(tmp_path, config, model=model, trainer={"allow_routing_mismatch": True})
    require_trainable(told)
    assert "mismatch_kl/fresh" in str(routing_note(told))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_experts": None},
        {"num_experts": 0},
        {"num_local_experts": 1},
        {"n_shared_experts": 2},
        {"experts": "a"},
    ],
    ids=str,
)
def test_a_dense_model_is_trained(tmp_path: Path, config: dict[str, Any]) -> None:
    settings = settings_of(tmp_path, config)
    require_trainable(settings)
    assert routing_note(settings) is None


@pytest.mark.parametrize(
    ("config", "beside", "how"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, None, "fp8"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, None, "awq"),
        ({"text_config": {"quantization_config": {"quant_method": "compressed-tensors"}}}, None, "compressed-tensors"),
        ({}, "hf_quant_config.json", "hf_quant_config.json"),
    ],
)
def test_a_quantised_base_is_refused(tmp_path: Path, config: dict[str, Any], beside: str | None, how: str) -> None:
    if beside:
        (tmp_path / beside).write_text("{}")
    with pytest.raises(SettingsError) as refused:
        require_trainable(settings_of(tmp_path, config))
    assert str(refused.value).startswith(f"model.model_path: {tmp_path} is quantised ({how}), and the trainer would")
    require_trainable(settings_of(tmp_path, config, mode="serve"))


@pytest.mark.parametrize("name", ["mtp.fc.weight", "model.layers.2.eh_proj.weight"])
def test_layers_that_only_draft_tokens_are_refused_with_their_name(tmp_path: Path, name: str) -> None:
    settings = settings_of(tmp_path, {"num_hidden_layers": 2})
    names = ["model.layers.1.mlp.up_proj.weight", "vision_tower.encoder.layers.7.weight"]
    save_file({each: torch.zeros(1) for each in names}, tmp_path / "model.safetensors")
    require_trainable(settings)
    save_file({each: torch.zeros(1) for each in [*names, name]}, tmp_path / "model.safetensors")
    with pytest.raises(SettingsError, match=f"^model.model_path: .* has {name}, which transformers does not load"):
        require_trainable(settings)


def test_a_model_that_sees_is_refused_with_adapters_or_where_its_text_alone_is_loaded(tmp_path: Path) -> None:
    lora = {"model_path": tmp_path, "lora": {"rank": 4}}
    sees: dict[str, Any] = {"model_type": "gemma3", "text_config": {}, "vision_config": {}}
    require_trainable(settings_of(tmp_path, sees))
    with pytest.raises(SettingsError, match=r"^model\.lora\.rank: .* also sees \(gemma3\), and adapters"):
        require_trainable(settings_of(tmp_path, sees, model=lora))
    with pytest.raises(SettingsError, match=r"^model\.model_path: .* has its vision, which transformers does not load"):
        require_trainable(settings_of(tmp_path, sees | {"model_type": "qwen3_5"}))


def test_linear_attention_is_not_trained_beside_an_engine_on_a_cpu(tmp_path: Path) -> None:
    hybrid = {"layer_types": ["linear_attention", "full_attention"]}
    with pytest.raises(SettingsError, match=r"^cluster\.gpu_per_node: .* has linear attention"):
        require_trainable(settings_of(tmp_path, hybrid))
    for but in ({"mode": "train"}, {"cluster": {"gpu_per_node": 2}}):
        require_trainable(settings_of(tmp_path, hybrid, **but))


def test_of_these_models_transformers_loads_the_text_alone() -> None:
    sees = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    text = {kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if kind in sees and sees[kind] != name}
    assert text <= TEXT_ALONE


def test_a_folder_that_is_not_there_is_not_judged(tmp_path: Path) -> None:
    require_trainable(Settings.model_validate({"model": {"model_path": tmp_path / "none"}}))


def test_the_commands_and_the_trainer_refuse_it_and_say_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings_of(tmp_path, {"num_experts": 4, "quantization_config": {"quant_method": "fp8"}})
    config = tmp_path / "tuneloop.yaml"
    config.write_text(yaml.safe_dump({"model": {"model_path": str(tmp_path)}, "checkpoint_root_dir": str(tmp_path)}))
    for command in ("validate", "run", "plan"):
        ended = tuneloop(command, "-c", config)
        assert ended.code == 2, command
        assert "is quantised (fp8)" in ended.errors
        assert "is a mixture of experts" in ended.errors
    told = json.loads(tuneloop("validate", "-c", config, "--json").output)
    assert [each.partition(":")[0] for each in told["problems"]] == [
        "model.model_path",
        "trainer.allow_routing_mismatch",
    ]
    assert main(["--config", str(config), "--set", "mode=train"]) == 2
    LOG.finish()
    assert "is quantised (fp8)" in capfd.readouterr().err
