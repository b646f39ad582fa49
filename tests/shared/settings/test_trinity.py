"""Files of Trinity-RFT: each option that changes what is learnt means the same here, for services and tune().

The base has the shape of Trinity-RFT's examples (Apache-2.0), and each row is what an example writes beside it. The
rows of tests/fixtures/trinity/examples.jsonl say of each example of 0.5.2 what Trinity's own validator makes of it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.explorer.checkpoints import write_model
from tuneloop.runner.errors import TuneRefused
from tuneloop.runner.tasks.dataset import DatasetConfig
from tuneloop.runner.trinity import find, pop_option
from tuneloop.runner.tuning.config import ServicePlace, merge_settings, service_settings
from tuneloop.runner.tuning.config_file import TuneFile, read_tune_file
from tuneloop.shared.settings.loader import SettingsReport, read_settings

EXAMPLE = """
project: Trinity-RFT-gsm8k
name: qwen2.5-1.5B-gsm8k
checkpoint_root_dir: ${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}
algorithm: {algorithm_type: grpo, repeat_times: 8, optimizer: {lr: 1e-5}}
model:
  model_path: ${oc.env:TRINITY_MODEL_PATH,Qwen/Qwen2.5-1.5B-Instruct}
  max_response_tokens: 1024
  max_model_len: 2048
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  total_epochs: 1
  batch_size: 96
  explorer_input:
    taskset:
      name: gsm8k
      storage_type: file
      path: ${oc.env:TRINITY_TASKSET_PATH,openai/gsm8k}
      subset_name: main
      split: train
      format: {prompt_key: question, response_key: answer}
    eval_tasksets: []
    default_workflow_type: math_workflow
  trainer_input:
    experience_buffer: {name: gsm8k_buffer, storage_type: queue, path: 'sqlite:///gsm8k.db'}
explorer:
  eval_interval: 50
  runner_per_model: 8
  rollout_model: {engine_num: 4, tensor_parallel_size: 1, enable_prefix_caching: false, dtype: bfloat16, seed: 42}
synchronizer: {sync_method: nccl, sync_interval: 1, sync_timeout: 1200}
trainer: {trainer_type: verl, save_interval: 100, grad_clip: 1.0, use_dynamic_bsz: true}
"""


def written(folder: Path, changes: dict[str, Any]) -> Path:
    values = yaml.safe_load(EXAMPLE)
    for name, value in changes.items():
        if value is None:
            pop_option(values, name)
            continue
        for key in reversed(name.split(".")):
            value = {key: value}
        values = merge_settings(values, value)
    file = folder / "trinity.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def service(folder: Path, changes: dict[str, Any] | None = None) -> SettingsReport:
    return read_settings(written(folder, changes or {}), environment={})


def tuned(folder: Path, changes: dict[str, Any] | None = None) -> tuple[TuneFile, SettingsReport]:
    file = read_tune_file(written(folder, changes or {}))
    assert file.model is not None
    assert file.algorithm is not None
    made = folder / "made.yaml"
    settings = service_settings(file.model, file.algorithm, ServicePlace(), gpus=8, over=file.settings)
    made.write_text(yaml.safe_dump(settings))
    return file, read_settings(made, environment={})


KL, CLIP = "algorithm.kl_loss_fn", "algorithm.policy_loss_fn_args"
OPTIMIZER, LORA, SUMS = "algorithm.optimizer", "model.lora_configs", "seq-mean-token-sum"

#: What a file writes, and what it is here.
SAME = [
    ({KL: "none"}, {"algorithm.kl_coef": 0}),
    ({f"{KL}_args": {"kl_coef": "${oc.env:KL,0.25}"}}, {"algorithm.kl_coef": 0.25}),
    ({KL: "low_var_kl", f"{KL}_args": {"kl_coef": 0.1}}, {"algorithm.kl_coef": 0.1, "algorithm.kl_estimator": "k3"}),
    (
        {"algorithm.kl_penalty_fn": "k3", "algorithm.kl_penalty_fn_args": {"kl_coef": 0.2}, KL: "none"},
        {"algorithm.kl_in": "reward", "algorithm.kl_estimator": "k3", "algorithm.kl_coef": 0.2},
    ),
    ({CLIP: {"clip_range": 0.1}}, {"algorithm.clip_range": 0.1, "algorithm.clip_range_high": None}),
    (
        {
            CLIP: {
                "clip_range_low": 0.2,
                "clip_range_high": 0.28,
                "clip_ratio_c": 5,
                "loss_agg_mode": "seq-mean-token-sum",
            }
        },
        {
            "algorithm.clip_range": 0.2,
            "algorithm.clip_range_high": 0.28,
            "algorithm.dual_clip": 5,
            "algorithm.loss_agg_mode": SUMS,
        },
    ),
    ({"algorithm.entropy_loss_fn_args": {"entropy_coef": 0.01}}, {"algorithm.entropy_coef": 0.01}),
    ({"algorithm.entropy_loss_fn": "none"}, {"algorithm.entropy_coef": 0}),
    ({"algorithm.advantage_fn_args": {"std_cal_level": "batch", "epsilon": 1e-6}}, {"algorithm.group.scale": "batch"}),
    (
        {"algorithm.algorithm_type": "ppo", "algorithm.advantage_fn_args": {"gamma": 0.9, "lam": 0.95}},
        {"algorithm.gamma": 0.9, "algorithm.lam": 0.95, "algorithm.algorithm_type": "ppo"},
    ),
    ({f"{OPTIMIZER}.lr_warmup_steps": -1}, {"algorithm.optimizer.lr_warmup_steps": 0}),
    ({f"{OPTIMIZER}.betas": [0.0, 0.95]}, {"algorithm.optimizer.betas": (0.0, 0.95)}),
    (
        {LORA: [{"name": "lora", "lora_rank": 16, "lora_alpha": 8, "target_modules": "q_proj"}]},
        {"model.lora.rank": 16, "model.lora.alpha": 8, "model.lora.targets": ("q_proj",)},
    ),
    ({LORA: [{"name": "lora"}]}, {"model.lora.rank": 32, "model.lora.alpha": 32}),
    (
        {"model.tinker": {"enable": True, "rank": 8, "train_mlp": False}},
        {"model.lora.rank": 8, "model.lora.targets": ("q_proj", "k_proj", "v_proj", "o_proj")},
    ),
    ({"model.tinker": {"enable": False}}, {"model.lora.rank": 0}),
    (
        {"algorithm.sample_strategy": "staleness_control", "algorithm.sample_strategy_args": {"max_staleness": 3}},
        {"trainer.max_staleness": 3},
    ),
    ({"algorithm.algorithm_type": "grpo_verl"}, {"buffer.group_by": "task", "buffer.group_size": 8}),
    ({"algorithm.algorithm_type": "reinforceplusplus"}, {"algorithm.algorithm_type": "reinforce++"}),
    ({"algorithm.algorithm_type": "gspo"}, {"algorithm.clip_range": 3e-4, "algorithm.clip_range_high": 4e-4}),
    ({"algorithm.policy_loss_fn": "cispo"}, {"algorithm.algorithm_type": "cispo", "algorithm.clip_range_high": 0.28}),
    ({"model.max_model_len": None, "model.max_prompt_tokens": 512}, {"model.max_model_len": 1536}),
]


EXAMPLES = [json.loads(line) for line in Path("tests/fixtures/trinity/examples.jsonl").read_text().splitlines()]
PUBLISHED = ("buffer.train_batch_size", "trainer.save_interval", "trainer.keep_interval")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each["name"])
def test_an_example_of_trinitys_loads_and_means_the_same_or_is_refused_in_one_sentence(tmp_path, example):
    found = service(tmp_path, example["writes"])
    if "told" in example:
        [problem] = found.problems
        assert f" {example['told']}: " in problem
        return
    assert found.problems == ()
    assert found.is_of_tune is bool(example["tasks"])
    values = [found.settings.model_dump()]
    assert [find(values[0], each) for each in PUBLISHED] == example["step"]
    if example["tasks"]:
        file, of_tune = tuned(tmp_path, example["writes"])
        assert of_tune.problems == ()
        assert [file.algorithm.batch_size, file.algorithm.group_size] == example["tasks"]
        assert file.algorithm.save_interval_steps == example["step"][-1]
        values.append(of_tune.settings.model_dump())
    for each in values:
        assert json.loads(json.dumps({name: find(each, name) for name in example["means"]})) == example["means"]


@pytest.mark.parametrize(("changes", "means"), SAME)
def test_an_option_that_changes_what_is_learnt_means_the_same(tmp_path, changes, means):
    _, of_tune = tuned(tmp_path, changes)
    for found in (service(tmp_path, changes), of_tune):
        assert found.problems == ()
        values = found.settings.model_dump()
        assert {name: find(values, name) for name in means} == means


#: What a file writes, and what a service alone makes of it.
STEPS = [
    ({"synchronizer": None}, {"trainer.save_interval": 1, "trainer.keep_interval": 100}),
    ({"trainer.save_interval": 0}, {"trainer.save_interval": 1, "trainer.keep_interval": None}),
    ({"buffer.total_steps": 40, f"{OPTIMIZER}.lr_warmup_steps_ratio": 0.1}, {"trainer.total_steps": 40}),
    ({"buffer.total_steps": 40, f"{OPTIMIZER}.lr_warmup_steps_ratio": 0.1}, {f"{OPTIMIZER}.lr_warmup_steps": 4}),
    ({}, {"buffer.trainer_input.experience_buffer.path": None, "model.lora.rank": 0}),
]


@pytest.mark.parametrize(("changes", "means"), STEPS)
def test_a_step_and_what_is_published_and_kept(tmp_path, changes, means):
    found = service(tmp_path, changes)
    assert found.problems == ()
    values = found.settings.model_dump()
    assert {name: find(values, name) for name in means} == means


def test_tune_takes_the_steps_as_arguments(tmp_path):
    file, found = tuned(tmp_path, {"algorithm.repeat_times": 4, "synchronizer.sync_interval": 10})
    algorithm = file.algorithm
    assert (algorithm.batch_size, algorithm.group_size, algorithm.save_interval_steps) == (96, 4, 100)
    assert (found.settings.buffer.train_batch_size, found.settings.trainer.save_interval) == (384, 1)
    assert "synchronizer.sync_interval: 10 (there is a version after each step)" in file.warning


def test_variables_stand_for_themselves_everywhere(tmp_path, monkeypatch):
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path / "kept"))
    monkeypatch.setenv("SET", "7")
    changes = {"trainer.seed": "${oc.env:SET}", "name": "a-${oc.env:SET}-${oc.env:NOBODY_SET_IT,${oc.env:SET}}"}
    changes |= {"project": "p-${name}", "trainer.trainer_config": {"critic": {"x": "${actor_rollout_ref.y}"}}}
    found = service(tmp_path, changes).valid_settings()
    assert found.job_dir == tmp_path / "kept" / "p-a-7-7" / "a-7-7"
    assert (found.trainer.seed, str(found.model.model_path)) == (7, "Qwen/Qwen2.5-1.5B-Instruct")
    _, of_tune = tuned(tmp_path, changes)
    assert of_tune.settings.trainer.seed == 7
    [problem] = service(tmp_path, {"model.model_path": "${oc.env:NOBODY_SET_IT}"}).problems
    assert problem.endswith("model.model_path: ${oc.env:NOBODY_SET_IT}: there is no environment variable NOBODY_SET_IT")
    unset = {"buffer.explorer_input": {"taskset": {"path": "${oc.env:NOBODY_SET_IT}"}}}
    assert service(tmp_path, unset).problems == ()
    with pytest.raises(TuneRefused, match=r"taskset.path: .* no environment variable NOBODY_SET_IT"):
        tuned(tmp_path, unset)


def test_all_that_is_ignored_stands_in_one_warning(tmp_path):
    changes = {
        f"{OPTIMIZER}.lr_scheduler_type": "cosine",
        f"{OPTIMIZER}.weight_decay": 0.1,
        "algorithm.advantage_fn": "clipb",
        "trainer.grad_clip": 0.5,
        "trainer.ppo_max_token_len_per_gpu": 16384,
        "buffer.trainer_input.experience_buffer.replay_buffer": {"enable": True},
    }
    wanted = {
        "algorithm.optimizer.lr_scheduler_type: cosine",
        "algorithm.optimizer.weight_decay: 0.1",
        "algorithm.advantage_fn: clipb",
        "trainer.grad_clip: 0.5",
        "buffer.trainer_input.experience_buffer.storage_type: queue",
        "synchronizer.sync_method: nccl (versions are handed over as checkpoints)",
        "trainer.use_dynamic_bsz",
        "trainer.ppo_max_token_len_per_gpu",
    }
    found = service(tmp_path, changes)
    assert wanted | {"buffer.trainer_input.experience_buffer.replay_buffer"} <= {*found.ignored}
    assert "grad_clip" not in service(tmp_path).warning, "1.0 is what it is here"
    file, of_tune = tuned(tmp_path, changes)
    assert of_tune.ignored == ()
    assert [each for each in wanted if each not in file.warning] == []


STORE = "buffer.trainer_input.experience_buffer"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"algorithm.algorithm_type": "sft", f"{STORE}.storage_type": "file"}, "this names a training set"),
        ({f"{STORE}": {"storage_type": None, "path": "a/set", "format": {"x": 1}}}, "this names a training set"),
        ({"algorithm.algorithm_type": "mix_chord"}, "'mix_chord': there is none here; the nearest is grpo"),
        ({"algorithm.algorithm_type": "on_policy_distill"}, "'on_policy_distill': write distill"),
        ({"algorithm.repeat_times": 1}, "grpo compares the runs of a task with each other and needs at least 2"),
        ({"cluster.node_num": 4}, "cluster.node_num: tune() starts its services on one machine, not on 4"),
        ({"data": {}, "actor_rollout_ref": {"model": 1}}, "this is veRL's format"),
        ({"buffer.max_retry_times": 3}, "this is veRL's format"),
    ],
)
def test_what_there_is_not_is_told_in_one_sentence(tmp_path, changes, sentence):
    [problem] = service(tmp_path, changes).problems
    assert sentence in problem


@pytest.mark.parametrize("mode", ["both", None])
def test_a_file_with_tasks_is_for_tune(tmp_path, mode):
    assert service(tmp_path, {"mode": mode} if mode else {}).is_of_tune


@pytest.mark.parametrize("changes", [{"buffer.explorer_input": None}, {"mode": "serve"}, {"mode": "train"}])
def test_other_files_are_for_services(tmp_path, changes):
    found = service(tmp_path, changes)
    assert (found.problems, found.is_of_tune) == ((), False)


def test_what_a_task_set_says_reaches_the_tasks(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"seed": 1, "rate": 0.1}\n{"seed": 2, "rate": 0.9}\n')
    inputs = {"path": str(tmp_path / "tasks.jsonl"), "workflow_args": {"trainable_target": "good_guy"}}
    inputs |= {"subset_name": None, "rollout_args": {"temperature": 0.85, "top_p": 0.95, "top_k": 25}}
    inputs |= {"task_selector": {"selector_type": "offline_easy2hard", "feature_keys": ["rate"]}}
    file, _ = tuned(tmp_path, {"buffer.explorer_input.taskset": inputs, "model.model_path": str(tmp_path)})
    assert [task["seed"] for task in file.train_dataset.tasks()] == [2, 1]
    assert file.train_dataset.tasks()[0]["workflow_args"] == {"trainable_target": "good_guy"}
    assert (file.model.temperature, file.model.top_p) == (0.85, 0.95)
    assert "taskset.rollout_args.top_k" in file.warning
    with pytest.raises(TuneRefused, match="there is no 'difficulty_based' here; there are sequential, shuffle"):
        DatasetConfig("x", task_selector={"selector_type": "difficulty_based"})


def test_a_model_folder_of_ones_own_is_served(tmp_path):
    folder = write_model(tmp_path / "model")
    assert service(tmp_path, {"model.model_path": str(folder)}).valid_settings().served_model_name == str(folder)


def test_what_pipelines_would_make_of_tasks_and_replies_is_named(tmp_path):
    def step(*names: str) -> dict[str, Any]:
        return {"operators": [{"name": each} for each in names]}

    made = step("dapo_dynamic_sampling", "mask_response_truncated", "reward_filter", "reward_shaping_mapper")
    changes = {"data_processor": {"task_pipeline": step("llm_difficulty_score_filter"), "experience_pipeline": made}}
    file, of_tune = tuned(tmp_path, changes)
    found = service(tmp_path, changes)
    tasks = "data_processor.task_pipeline: llm_difficulty_score_filter (tasks are run without)"
    replies = "data_processor.experience_pipeline: reward_filter, reward_shaping_mapper"
    for warning in (found.warning, file.warning):
        assert tasks in warning
        assert f"{replies} (replies are trained on without)" in warning
    assert found.settings.reward.unfinished_runs == of_tune.settings.reward.unfinished_runs == "ignore"
    assert file.settings["reward"] == {"unfinished_runs": "ignore"}
    assert "data_processor." not in service(tmp_path, {"data_processor": {}}).warning
