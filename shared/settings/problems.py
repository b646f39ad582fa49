"""Says in a sentence what is wrong with a setting, and what to write instead."""

import difflib
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import get_args

from pydantic_core import ErrorDetails

from tuneloop.shared.settings.settings import SECRETS, constants, holds_secret, options
from tuneloop.shared.settings.sources import ENV_PREFIX, Keys, SettingsProblem, SourceLocation, dotted_name

_OTHER_ALGORITHMS = (
    "asymre cispo cpt dapo gigpo grpo_verl gspo jsd mix mix_chord on_policy_distill opmd orpo rec"
    " reinforce_pp reinforce_plus_plus reinforceplusplus sapo sppo topr"
)
_TRINITYS_VALUES: Mapping[str, tuple[Sequence[object], str]] = {
    "mode": (("explore", "bench", "colocate"), "tuneloop serves, trains or does both: write 'both'"),
    "algorithm.algorithm_type": (
        _OTHER_ALGORITHMS.split(),
        "tuneloop's names are reinforce++, grpo (with DAPO's options too), distill, and those of docs/methods.md",
    ),
    "algorithm.optimizer.lr_warmup_steps": ((-1,), "Trinity's -1 means no warm-up: write 0"),
    "buffer.trainer_input.experience_buffer.storage_type": (
        ("queue", "file"),
        "tuneloop keeps experiences in a database: write 'sql'",
    ),
    "cluster.node_num": ((0,), "Trinity's 0 asks Ray: write the number of machines"),
    "monitor.monitor_type": (
        ("swanlab",),
        "tuneloop writes TensorBoard files, and for two trackers: write 'tensorboard', 'wandb' or 'mlflow'",
    ),
    "synchronizer.sync_method": (
        ("nccl", "memory", "online", "offline"),
        "tuneloop hands weights over by checkpoints: write 'checkpoint'",
    ),
    "trainer.save_interval": ((0,), "Trinity's 0 means only at the end: write after how many steps to publish, e.g. 1"),
}


#: Options that there were, and what to do without them.
_REMOVED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "algorithm.group.drop_constant",
            "algorithm.merge_calls",
            "buffer.fair_share",
            "explorer.train_on_grammars",
        ),
        "removed: it is always true. Delete the line",
    ),
    "algorithm.reward_clip": "removed: reward.clip bounds rewards. Delete the line",
    "algorithm.reward_normalization": "removed: each method scales its advantages by itself. Delete the line",
    "explorer.max_stored_bytes_per_key": "removed: what a key stores is not bounded. Delete the line",
    "monitor.evaluation.samples": "removed: all tasks of the file are asked. Shorten it, and delete the line",
    "trainer.longest_yield": "removed: what yields waits until there is no traffic. Delete the line",
    "gate.kl": "removed: scores, lengths and refusals are compared. Delete the line",
    "gate.replay": "removed: a candidate is compared on the tasks of monitor.evaluation.path. Delete the section",
    "reward.demonstration_value": "removed: sft learns edited answers, whatever the reward. Delete the line",
    **dict.fromkeys(
        ("feedback.quarantine_after", "feedback.quarantine_below"),
        "removed: raters are not compared any more. Delete the line; `tuneloop raters quarantine` puts one into"
        " quarantine",
    ),
}


def problems_of(locations: Mapping[Keys, SourceLocation], error: ErrorDetails) -> Iterator[SettingsProblem]:
    """What pydantic found, at the location where it was written."""
    at: Keys = error["loc"]
    if error["type"] != "value_error":
        yield _problem(locations, at, _sentence(at, error))
    elif at:
        value = "" if holds_secret(dotted_name(at)) else f", not {reprlib.repr(error['input'])}"
        yield _problem(locations, at, f"{error['ctx']['error']}{value}")
    else:
        for line in str(error["ctx"]["error"]).splitlines():
            key, _, what = line.partition(": ")
            yield _problem(locations, tuple(key.split(".")), what)


def sort_unknown(
    locations: Mapping[Keys, SourceLocation], at: Keys, value: object, trinity_only: list[str]
) -> Iterator[SettingsProblem]:
    """The problems with what stands at an unknown key; what Trinity knows of it goes into `trinity_only`."""
    names = [str(key) for key in at]
    name = ".".join(names)
    if (constant := dict(constants()).get(name)) is not None:
        yield _problem(locations, at, f"removed: it is always {reprlib.repr(constant)}. Delete the line")
    elif (removed := _REMOVED.get(name)) is not None:
        yield _problem(locations, at, removed)
    elif _is_trinity_key(names):
        trinity_only.append(dotted_name(at))
    elif name in _SECTIONS and isinstance(value, dict | None):
        for key, inner in (value or {}).items():
            yield from sort_unknown(locations, (*at, key), inner, trinity_only)
    else:
        yield _problem(locations, at, f"unknown key.{_nearest_name(names)}")


def _problem(locations: Mapping[Keys, SourceLocation], keys: Keys, what: str) -> SettingsProblem:
    """A problem at `keys`, or at the nearest section around it that was written."""
    around = (keys[:length] for length in range(len(keys), -1, -1))
    return SettingsProblem(
        location=next(locations[each] for each in around if each in locations), key=dotted_name(keys), what=what
    )


def _sentence(at: Keys, error: ErrorDetails) -> str:
    key, value = dotted_name(at), error["input"]
    if error["type"] == "missing":
        return "is required and missing"
    if isinstance(value, str) and value.startswith("${"):
        variable = ENV_PREFIX + key.upper().replace(".", "__")
        return f"{value} is not expanded here: write the value, or set the environment variable {variable}"
    message = error["msg"] if error["type"] == "literal_error" else error["msg"].split(",")[0]
    must = _MUST.get(error["type"], message.replace("Input should be", "must be"))
    given = "the value given" if _may_show_secret(key, value) else reprlib.repr(value)
    return f"{must}, not {given}{_cure(key, error['type'], value)}"


def _may_show_secret(key: str, value: object) -> bool:
    """Whether a value is a secret, or stands in the place of a section that has one."""
    return holds_secret(key) and (key in SECRETS or not isinstance(value, int | float | None))


def _cure(key: str, kind: str, value: object) -> str:
    trinitys, sentence = _TRINITYS_VALUES.get(key, ((), ""))
    if value in trinitys:
        return f". {sentence}"
    if kind == "literal_error":
        choices = [str(each) for each in get_args(dict(options())[key].annotation)]
        near = difflib.get_close_matches(str(value).lower(), choices, n=1)
        return f". Did you mean '{near[0]}'?" if near else ""
    return ". Write it in quotes" if kind == "string_type" and isinstance(value, int | float | date) else ""


_MUST = {
    "model_type": "must be a section (`key: value` lines)",
    "string_type": "must be text",
    "path_type": "must be a path",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "tuple_type": "must be a list, such as [a, b]",
    "dict_type": "must be a section (`key: value` lines)",
}


def _nearest_name(names: Sequence[str]) -> str:
    """` Did you mean '…'?` for an unknown key, or nothing if no option is near."""
    section, wrong = ".".join(names[:-1]), names[-1]
    ours = [name for name, _ in options()]
    prefix = f"{section}." if section else ""
    siblings = {name.removeprefix(prefix).split(".")[0] for name in ours if name.startswith(prefix)}
    near = difflib.get_close_matches(wrong, sorted(siblings) or _trinity_names_under(names[:-1]), n=1)
    near = near or [name for name in ours if name.rpartition(".")[2] == wrong]
    near = near or difflib.get_close_matches(".".join(names), ours, n=1, cutoff=0.75)
    return f" Did you mean '{near[0]}'?" if near else ""


_TABLE = """
: group checkpoint_job_dir ray_namespace continue_from_checkpoint ignore_validator_suggestions stages*
algorithm: repeat_times sample_strategy advantage_fn kl_penalty_fn policy_loss_fn kl_loss_fn entropy_loss_fn
  loss_agg_mode enable_router_replay bypass_old_logprobs sample_strategy_args* advantage_fn_args* kl_penalty_fn_args*
  policy_loss_fn_args* kl_loss_fn_args* entropy_loss_fn_args* rollout_correction*
algorithm.optimizer: lr_warmup_steps_ratio min_lr_ratio warmup_style lr_scheduler_type optimizer_type clip_grad
buffer: batch_size total_epochs total_steps tokenizer_path cache_dir
buffer.explorer_input: default_workflow_type default_eval_workflow_type default_reward_fn_type tasksets*
  eval_tasksets*
buffer.explorer_input.taskset data_processor.task_pipeline.output: name storage_type path default_workflow_type
  default_reward_fn_type split subset_name max_retry_times max_retry_interval enable_progress_bar repeat_times index
  is_eval batch_size total_epochs total_steps ray_namespace workflow_args* reward_fn_args*
buffer.explorer_input.taskset.data_selector buffer.explorer_input.taskset.task_selector
  buffer.explorer_output.data_selector buffer.trainer_input.experience_buffer.data_selector
  data_processor.experience_pipeline.output.data_selector data_processor.task_pipeline.output.data_selector
  data_processor.task_pipeline.output.task_selector: selector_type seed feature_keys* kwargs*
buffer.explorer_input.taskset.format buffer.explorer_output.format buffer.trainer_input.experience_buffer.format
  data_processor.experience_pipeline.output.format data_processor.task_pipeline.output.format: prompt_type prompt_key
  response_key system_prompt_key system_prompt messages_key tools_key image_key video_key reply_prefix workflow_key
  reward_fn_key chosen_key rejected_key enable_concatenated_multi_turn chat_template enable_thinking
buffer.explorer_input.taskset.rollout_args buffer.explorer_output.rollout_args
  data_processor.task_pipeline.output.rollout_args: temperature top_p top_k logprobs max_tokens n
buffer.explorer_output: name storage_type path repeat_times index split subset_name capacity max_read_timeout
  max_retry_times max_retry_interval default_workflow_type default_reward_fn_type enable_progress_bar ray_namespace
  wrap_in_ray schema_type total_epochs total_steps batch_size tokenizer_path is_eval workflow_args* reward_fn_args*
buffer.explorer_output.replay_buffer buffer.trainer_input.experience_buffer.replay_buffer
  data_processor.experience_pipeline.output.replay_buffer: enable priority_fn reuse_cooldown_time priority_fn_args*
buffer.trainer_input: auxiliary_buffers*
buffer.trainer_input.experience_buffer: capacity max_read_timeout max_retry_times max_retry_interval split subset_name
  enable_progress_bar schema_type index batch_size tokenizer_path total_epochs total_steps ray_namespace
cluster: ray_address total_gpu_num rollout_gpu_num auxiliary_model_gpu_num explorer_gpu_num trainer_gpu_num
  trainer_node_num trainer_gpu_num_per_node
data_processor.experience_pipeline: save_input input_save_path operators* inputs*
data_processor.experience_pipeline.output: name storage_type path capacity max_read_timeout max_retry_times
  max_retry_interval split subset_name enable_progress_bar schema_type index batch_size tokenizer_path total_epochs
  total_steps ray_namespace
data_processor.task_pipeline: num_process config_path top_k operators* inputs* target_fields* priority_weights*
explorer: name runner_per_model runner_prepare_concurrency runner_prepare_max_retries max_timeout max_retry_times
  concurrent_mode max_repeat_times_per_runner runner_num eval_interval eval_on_startup bench_on_latest_checkpoint
  db_url runner_state_report_interval max_inflight_batches env_vars* auxiliary_models*
explorer.dynamic_timeout: enable warmup_min_steps ratio
explorer.over_rollout: ratio wait_after_min return_partial_tasks
explorer.rollout_model: model_path name trust_remote_code engine_type data_parallel_size pipeline_parallel_size
  enable_expert_parallel gpu_per_engine use_v1 enable_prefix_caching enable_chunked_prefill temperature top_p top_k
  logprobs max_model_len max_prompt_tokens max_response_tokens min_response_tokens enable_prompt_truncation
  repetition_penalty ignore_eos enable_multimodal chat_template enable_thinking enable_log_requests base_port api_key
  nnodes node_rank enable_return_routed_experts weight_sync_buffer_size bundle_indices engine_id ray_namespace
  ray_actor_name sync_method checkpoint_job_dir cuda_visible_devices enable_lora enable_runtime_lora_updating
  rope_theta extra_engine_args* lora_modules* lora_kwargs* rope_scaling*
explorer.rollout_model.external_model_config model.external_model: enable base_url_env api_key_env model_name
log: level group_by_node save_dir
model: custom_chat_template chat_template_path top_p top_k logprobs max_prompt_tokens min_response_tokens
  enable_prompt_truncation repetition_penalty enable_thinking fully_sharded_loras max_cpu_loras rope_theta
  lora_configs* rope_scaling*
model.tinker: enable rank seed train_mlp train_attn train_unembed base_url
monitor: detailed_stats enable_ray_timeline cache_dir monitor_args*
service.data_juicer: server_url auto_start port
synchronizer: sync_style explorer_sync_interval trainer_sync_interval sync_offset sync_timeout group_name
  wait_for_checkpoint explorer_world_size ray_namespace
trainer: name trainer_type trainer_strategy enable_preview grad_clip use_dynamic_bsz use_remove_padding balance_batch
  critic_warmup max_token_len_per_gpu fix_actor_microbatch_loss_scale param_offload optimizer_offload grad_offload
  offload_policy save_strategy trust_remote_code trainer_config_path
trainer.megatron: tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
  expert_model_parallel_size expert_tensor_parallel_size context_parallel_size sequence_parallel
"""


def _read(table: str) -> tuple[frozenset[str], frozenset[str]]:
    keys: set[str] = set()
    free: set[str] = set()
    for line in table.strip().replace("\n  ", " ").splitlines():
        sections, _, names = line.partition(":")
        for section in sections.split() or [""]:
            for name in names.split():
                (free if name.endswith("*") else keys).add(f"{section}.{name.rstrip('*')}".lstrip("."))
    return frozenset(keys), frozenset(free)


_KEYS, _FREE = _read(_TABLE)
_SECTIONS = frozenset(key[:at] for key in _KEYS | _FREE for at, char in enumerate(key) if char == ".")


def _is_trinity_key(path: Sequence[str]) -> bool:
    """Whether Trinity has an option of this name, or lets anything stand there."""
    return ".".join(path) in _KEYS or any(".".join(path[:n]) in _FREE for n in range(1, len(path) + 1))


def _trinity_names_under(section: Sequence[str]) -> list[str]:
    """Trinity's names directly under `section`."""
    depth = len(section)
    split = (key.split(".") for key in _KEYS | _FREE)
    return sorted({key[depth] for key in split if len(key) > depth and key[:depth] == list(section)})
