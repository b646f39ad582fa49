"""What tune() is told, as settings that our services take; and what makes no sense, which is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.explorer.checkpoints import write_model
from tuneloop.runner.errors import TuneRefused
from tuneloop.runner.models.bound_model import CallDefaults
from tuneloop.runner.trinity import OF_GROUPS
from tuneloop.runner.tuning.config import (
    ALGORITHMS,
    MONITORS,
    AlgorithmConfig,
    ServicePlace,
    TinkerConfig,
    TunerModelConfig,
    count_gpus,
    merge_settings,
    service_settings,
)
from tuneloop.runner.tuning.config_file import read_tune_file
from tuneloop.shared.settings.loader import load_settings
from tuneloop.shared.settings.settings import Settings

SEEDS_MODEL = {"max_model_len": 16384, "max_tokens": 512, "temperature": 0.7, "top_p": 0.9, "enable_thinking": False}


def loaded(tmp_path: Path, made: dict[str, Any]) -> Settings:
    """The settings, by way of a file and our own loader."""
    file = tmp_path / "made.yaml"
    file.write_text(yaml.safe_dump(made))
    return load_settings(file)


@pytest.fixture
def model(tmp_path: Path) -> TunerModelConfig:
    return TunerModelConfig(str(write_model(tmp_path / "model")), **SEEDS_MODEL)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_every_algorithm_makes_settings_that_load(tmp_path: Path, model: TunerModelConfig, kind: str) -> None:
    algorithm = AlgorithmConfig(kind, learning_rate=3e-5, group_size=4, batch_size=6)
    place = ServicePlace(project="AgentScope", name="my-exp", checkpoint_root_dir=tmp_path / "kept", port=8123)
    found = loaded(tmp_path, service_settings(model, algorithm, place, monitor_type="tensorboard", gpus=0))
    assert (found.project, found.name, found.explorer.proxy_port) == ("AgentScope", "my-exp", 8123)
    assert found.job_dir == tmp_path / "kept" / "AgentScope" / "my-exp"
    assert (found.algorithm.algorithm_type, found.algorithm.optimizer.lr) == (kind, 3e-5)
    assert found.buffer.train_batch_size == 24
    compared = kind in OF_GROUPS
    assert found.buffer.group_by == ("task" if compared else "run")
    assert not compared or found.buffer.group_size == 4
    assert (found.model.temperature, found.model.max_response_tokens) == (0.7, 512)
    assert found.explorer.rollout_model.tool_call_parser == "hermes"
    assert found.explorer.rollout_model.enable_auto_tool_choice
    assert found.trainer.save_interval == 1


def test_gpus_and_engines(tmp_path: Path, model: TunerModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model.inference_engine_num = model.tensor_parallel_size = 2
    found = loaded(tmp_path, service_settings(model, AlgorithmConfig(), ServicePlace(), gpus=4))
    rollout = found.explorer.rollout_model
    assert (rollout.engine_num, rollout.tensor_parallel_size, found.cluster.gpu_per_node) == (2, 2, 4)
    assert rollout.gpu_memory_utilization == 0.4  # the trainer is on one of them too
    with pytest.raises(TuneRefused, match="num 2 x tensor_parallel_size 2 is more than the 1 available GPUs"):
        service_settings(model, AlgorithmConfig(), ServicePlace(), gpus=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert count_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_gpus() == 0


def test_an_adapter_and_changes_of_ones_own(tmp_path: Path, model: TunerModelConfig) -> None:
    model.tinker_config = TinkerConfig(rank=8, train_mlp=False)
    model.tool_call_parser = None
    over = {"buffer": {"group_timeout": 5}, "trainer": {"seed": 7}, "model": {"lora": {"alpha": 4}}}
    found = loaded(tmp_path, service_settings(model, AlgorithmConfig(), ServicePlace(), gpus=0, over=over))
    assert (found.model.lora.rank, found.model.lora.alpha) == (8, 4)
    assert list(found.model.lora.targets) == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert (found.buffer.group_timeout, found.buffer.group_by, found.trainer.seed) == (5, "task", 7)
    assert not found.explorer.rollout_model.enable_auto_tool_choice
    assert merge_settings({"a": {"b": 1}}, {"a": 2}) == {"a": 2}


def test_sampling_that_the_peer_ignores_is_in_every_call(model: TunerModelConfig) -> None:
    assert model.call_defaults("tiny") == CallDefaults(
        model_name="tiny", temperature=0.7, top_p=0.9, max_tokens=512, enable_thinking=False
    )
    assert TunerModelConfig("m", max_model_len=4096).call_defaults() == CallDefaults(
        model_name="m", temperature=1.0, top_p=1.0, max_tokens=None
    )


@pytest.mark.parametrize(
    ("but", "why"),
    [
        ({"model_path": ""}, "model_path is empty"),
        ({"max_model_len": -1}, "max_model_len must be a whole number"),
        ({"temperature": 3}, "temperature must be a number from 0 to 2"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be a whole number"),
        ({"inference_engine_num": "2"}, "inference_engine_num must be a whole number"),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(but: dict[str, Any], why: str) -> None:
    with pytest.raises(TuneRefused, match=why):
        TunerModelConfig(**{"model_path": "m", "max_model_len": 10} | but)


def test_a_trained_model_must_not_always_say_the_same(model: TunerModelConfig) -> None:
    model.temperature = 0
    with pytest.raises(TuneRefused, match="temperature 0 gives the same reply every time"):
        service_settings(model, AlgorithmConfig(), ServicePlace(), gpus=0)


def test_names_of_others_for_our_algorithms_and_monitors(model: TunerModelConfig) -> None:
    assert AlgorithmConfig("reinforceplusplus", group_size=1).algorithm_type == "reinforce++"
    with pytest.raises(TuneRefused, match="there is no 'swanlab' here; there are tensorboard, wandb, mlflow"):
        service_settings(model, AlgorithmConfig(), ServicePlace(), monitor_type="swanlab", gpus=0)


@pytest.mark.parametrize("tracker", MONITORS)
def test_a_tracker_is_the_trainers(tmp_path: Path, model: TunerModelConfig, tracker: str) -> None:
    found = loaded(tmp_path, service_settings(model, AlgorithmConfig(), ServicePlace(), monitor_type=tracker, gpus=0))
    assert found.monitor.monitor_type == tracker
    file = tmp_path / "trinity.yaml"
    file.write_text(TRINITY.format(root=tmp_path).replace("monitor_type: swanlab", f"monitor_type: {tracker}"))
    assert read_tune_file(file).monitor_type == tracker


TRINITY = """
mode: both
project: AgentScope
name: MathAgent
checkpoint_root_dir: {root}
algorithm:
  algorithm_type: multi_step_grpo
  repeat_times: 4
  optimizer: {{lr: 3.0e-6, lr_warmup_steps: -1}}
  kl_loss_fn: none
model: {{model_path: {root}/model, max_response_tokens: 512, max_model_len: 4096, temperature: 0.8}}
cluster: {{node_num: 1, gpu_per_node: 0}}
buffer:
  total_epochs: 3
  batch_size: 16
  explorer_input:
    taskset:
      {{name: gsm8k, storage_type: file, path: {root}/tasks, subset_name: main, split: train,
       format: {{prompt_key: question, response_key: answer}}, rollout_args: {{temperature: 1.0}}}}
    eval_tasksets:
      - {{name: test, path: {root}/tasks, subset_name: main, split: test, rollout_args: {{temperature: 0.1}}}}
    default_workflow_type: agentscope_workflow_adapter_v1
  trainer_input:
    experience_buffer: {{name: exp_buffer, storage_type: queue}}
explorer:
  eval_interval: 50
  runner_per_model: 16
  max_timeout: 3600
  rollout_model:
    {{engine_num: 2, tensor_parallel_size: 1, enable_prefix_caching: false, enable_openai_api: true,
     enable_history: true, enable_auto_tool_choice: true, tool_call_parser: hermes, dtype: float32, seed: 42}}
  auxiliary_models:
    - {{model_path: {root}/judge, max_model_len: 2048, engine_num: 1, tool_call_parser: hermes}}
synchronizer: {{sync_style: dynamic_by_explorer, sync_method: nccl, sync_interval: 1, sync_timeout: 1200}}
trainer: {{save_interval: 100, total_steps: 7, grad_clip: 0.5}}
monitor:
  monitor_type: swanlab
"""


def test_a_file_for_trinity_is_all_that_tune_needs(tmp_path: Path) -> None:
    pathlike = write_model(tmp_path / "model")
    file = tmp_path / "config.yaml"
    file.write_text(TRINITY.format(root=tmp_path))
    found = read_tune_file(file)
    assert found.model == TunerModelConfig(
        str(pathlike), 4096, temperature=1.0, max_tokens=512, inference_engine_num=2, tool_call_parser="hermes"
    )
    assert found.algorithm == AlgorithmConfig(
        "multi_step_grpo", learning_rate=3e-6, group_size=4, batch_size=16, eval_interval_steps=50
    )
    assert found.train_dataset is not None
    assert (found.train_dataset.path, found.train_dataset.name) == (str(tmp_path / "tasks"), "main")
    assert (found.train_dataset.split, found.train_dataset.total_epochs, found.train_dataset.total_steps) == (
        "train",
        3,
        7,
    )
    assert found.eval_dataset is not None
    assert (found.eval_dataset.split, found.eval_temperature) == ("test", 0.1)
    assert (found.project_name, found.experiment_name, found.run_timeout) == ("AgentScope", "MathAgent", 3600)
    assert found.concurrency == 16
    assert found.checkpoint_root_dir == str(tmp_path)
    assert list(found.auxiliary_models) == ["auxiliary_0"]
    assert found.warning is not None
    for word in ("synchronizer", "monitor_type: swanlab", "storage_type: queue", "taskset.format", "default_workflow"):
        assert word in found.warning
    place = ServicePlace(project="AgentScope", name="MathAgent", checkpoint_root_dir=tmp_path)
    settings = loaded(tmp_path, service_settings(found.model, found.algorithm, place, gpus=0, over=found.settings))
    assert settings.explorer.rollout_model.engine_num == 2
    assert settings.buffer.group_size == 4
    assert settings.cluster.gpu_per_node == 0


@pytest.mark.parametrize("seed", ["explorer", "trainer"])
def test_the_files_of_the_online_training_load(tmp_path: Path, seed: str) -> None:
    written = Path(__file__).parents[2] / "fixtures" / "trinity" / f"{seed}.yaml"
    text = written.read_text().replace("/path/to/your/model", str(write_model(tmp_path / "model")))
    file = tmp_path / "config.yaml"
    file.write_text(text)
    found = read_tune_file(file)
    assert found.model is not None
    assert found.algorithm is not None
    assert (found.model.temperature, found.algorithm.algorithm_type) == (0.7, "ppo")
    made = service_settings(found.model, found.algorithm, ServicePlace(), gpus=4, over=found.settings)
    assert loaded(tmp_path, made).model.max_model_len == 8192


def test_our_own_file_keeps_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(
        f"model: {{model_path: {write_model(tmp_path / 'model')}, lora: {{rank: 4}}}}\n"
        "algorithm: {algorithm_type: rloo, kl_coef: 0.01}\n"
        "buffer: {group_by: task, group_size: 4, train_batch_size: 32}\n"
        "explorer: {rollout_model: {dtype: float32}, on_reload: wait}\n"
    )
    found = read_tune_file(file)
    assert found.algorithm == AlgorithmConfig("rloo", group_size=4, batch_size=8)
    assert found.model is not None
    settings = loaded(
        tmp_path, service_settings(found.model, found.algorithm, ServicePlace(), gpus=0, over=found.settings)
    )
    assert (settings.model.lora.rank, settings.algorithm.kl_coef, settings.explorer.on_reload) == (4, 0.01, "wait")
    assert settings.buffer.train_batch_size == 32


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [", r"config\.yaml: this is not YAML"),
        ("- a", "this is not a mapping of options"),
        ("buffer: {explorer_input: {taskset: {split: train}}}", "taskset: path is missing"),
        ("name: ${algorithm.name}", "only .* and the name of another option are known here"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(TuneRefused, match=why):
        read_tune_file(file)


def test_numbers_and_variables_are_read_as_trinity_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OmegaConf's `1e-6` is a number, which PyYAML takes for text; its `${oc.env:…}` is in every file of Trinity's."""
    monkeypatch.setenv("TRINITY_MODEL_PATH", "/models/qwen")
    monkeypatch.delenv("TRINITY_BATCH", raising=False)
    file = tmp_path / "trinity.yaml"
    file.write_text(
        "checkpoint_root_dir: ${oc.env:TRINITY_ROOT,./checkpoints}\n"
        "algorithm: {algorithm_type: multi_step_grpo, optimizer: {lr: 1e-6}, kl_coef: 2.5E-3}\n"
        "buffer: {batch_size: '${oc.env:TRINITY_BATCH,16}'}\n"
        "model: {model_path: '${oc.env:TRINITY_MODEL_PATH}/0.6b', temperature: 1}\n"
    )
    found = read_tune_file(file)
    assert found.algorithm is not None
    assert found.model is not None
    assert (found.algorithm.learning_rate, found.algorithm.batch_size) == (1e-6, 16)
    assert (found.model.model_path, found.checkpoint_root_dir) == ("/models/qwen/0.6b", "./checkpoints")
    assert found.settings["algorithm"] == {"kl_coef": 2.5e-3}
