"""Translates options of Trinity-RFT's files to ours in mappings, for services and tune(), and lists unused ones."""

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

Keys = tuple[str | int, ...]

Unexpanded = list[tuple[Keys, str]]  # values that cannot be expanded: their place, and the reason

#: Algorithms that compare the runs of a task.
OF_GROUPS = ("multi_step_grpo", "grpo", "dapo", "gspo", "cispo", "rloo", "dpo")

#: Trinity's algorithms without an equal here, by the nearest one.
_NEAREST = {
    "grpo": "remax opmd asymre sppo topr m2po rec mix mix_chord",
    "gspo": "sapo",
    "dpo": "orpo",
    "multi_step_grpo": "gigpo",
    "distill": "on_policy_distill jsd",
}
#: Other names of our algorithms.
ALIASES = dict.fromkeys(("reinforceplusplus", "reinforce_pp", "reinforce_plus_plus"), "reinforce++")
ALIASES |= {"grpo_verl": "grpo", "multi-step-grpo": "multi_step_grpo"}

A_TRAINING_SET = (
    "this names a training set, and tuneloop trains on its own traffic. Train on the set with TRL, and start from that"
    " model"
)

ONE_MACHINE = (
    "tune() starts its services on one machine, not on {}: write 1, or start them yourself, and name them by service="
)

VERLS_FORMAT = (
    "this is veRL's format, which Trinity-RFT before 0.2 used too. tuneloop reads Trinity-RFT's"
    " options and its own: docs/settings.md"
)


def instead_of(algorithm: str) -> str | None:
    """The replacement of an algorithm of Trinity's; None for an unknown name."""
    near = next((ours for ours, others in _NEAREST.items() if algorithm in others.split()), None)
    if near is None:
        return None
    return f"write {near}" if algorithm == "on_policy_distill" else f"there is none here; the nearest is {near}"


_VARIABLE = re.compile(r"\$\{oc\.env:\s*(?P<name>\w+)\s*(?:,(?P<default>[^${}]*))?\}")
_REFERENCE = re.compile(r"\$\{(?P<name>[\w.]+)\}")


def expand(values: Mapping[str, Any], read_scalar: Callable[[str], Any] = str) -> tuple[dict[str, Any], Unexpanded]:
    """Expand `${oc.env:NAME[,default]}`, read by `read_scalar` if alone, and `${an.option}`; report what stays."""
    left: Unexpanded = []

    def walk(value: Any, at: Keys) -> Any:
        if isinstance(value, dict):
            return {key: walk(each, (*at, key)) for key, each in value.items()}
        if isinstance(value, list):
            return [walk(each, (*at, place)) for place, each in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            return _expand_text(value, values, read_scalar)
        except LookupError as error:
            left.append((at, str(error.args[0])))
            return value

    return walk(values, ()), left


def _expand_text(
    text: str, values: Mapping[str, Any], read_scalar: Callable[[str], Any], seen: tuple[str, ...] = ()
) -> Any:
    def value_of(found: re.Match[str]) -> str:
        value = os.environ.get(found["name"], found["default"])
        if value is None:
            raise LookupError(f"{found[0]}: there is no environment variable {found['name']}")
        return value.strip().strip("'\"")

    def option_of(found: re.Match[str]) -> Any:
        name, named = found["name"], find(values, found["name"])
        if named is None or name in seen:
            return found[0]
        return _expand_text(named, values, read_scalar, (*seen, name)) if isinstance(named, str) else named

    alone, expanded = text.startswith("${oc.env:") and text.endswith("}"), text
    while _VARIABLE.search(expanded):
        expanded = _VARIABLE.sub(value_of, expanded)
    if (option := _REFERENCE.fullmatch(expanded)) and (named := option_of(option)) != expanded:
        return named
    expanded = _REFERENCE.sub(lambda found: str(option_of(found)), expanded)
    if unknown := re.search(r"\$\{[^}]*\}?", expanded):
        known = "only ${oc.env:NAME}, ${oc.env:NAME,default} and the name of another option are known here"
        raise LookupError(f"{unknown[0]}: {known}")
    if alone and expanded == "null":
        return None
    return read_scalar(expanded) if alone else expanded


def find(values: Mapping[str, Any], name: str) -> Any:
    place: Any = values
    for each in name.split("."):
        place = place.get(each) if isinstance(place, Mapping) else None
    return place


def pop_option(values: dict[str, Any], name: str) -> Any:
    """Remove an option, and its section if that becomes empty; its value or None."""
    section, _, last = name.rpartition(".")
    place = find(values, section) if section else values
    if not isinstance(place, dict) or last not in place:
        return None
    found = place.pop(last)
    if section and not place:
        pop_option(values, section)
    return found


def write(values: dict[str, Any], name: str, value: Any) -> None:
    """Set an option unless it is set."""
    *sections, last = name.split(".")
    for each in sections:
        inner = values.get(each)
        values[each] = values = inner if isinstance(inner, dict) else {}
    if values.get(last) is None:
        values[last] = value


def number(value: Any) -> float | None:
    """The value as a number, also from text."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def is_verls(values: Mapping[str, Any]) -> bool:
    """Whether the file has veRL's format, or that of Trinity-RFT before 0.2."""
    marks = ("actor_rollout_ref", "buffer.max_retry_times", "data_processor.source_data_path", "buffer.db_url")
    return any(find(values, each) is not None for each in marks)


def names_tasks(values: Mapping[str, Any]) -> bool:
    """Whether the file names tasks to run, as for `trinity run`; tune() then reads it."""
    inputs = find(values, "buffer.explorer_input") or {}
    return bool(isinstance(inputs, Mapping) and (inputs.get("taskset") or inputs.get("tasksets")))


def translate(values: dict[str, Any], *, tasks: bool) -> tuple[list[str], list[tuple[str, str]]]:
    """Rename Trinity's options to ours; options without effect, and problems. `tasks`: the file names tasks."""
    reading = _Translation(values, tasks=tasks)
    for read in (reading.batches, reading.intervals, reading.losses, reading.divergence):
        read()
    for read in (reading.optimizer, reading.adapter, reading.pipelines):
        read()
    return reading.ignored, reading.problems


_ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}  # divergence estimators by Trinity's names

#: Advantages that an algorithm implies, by Trinity's names.
_OWN_ADVANTAGES = {"multi_step_grpo": "step_wise_grpo", "reinforce++": "reinforceplusplus"}
_OWN_ADVANTAGES |= dict.fromkeys(("dapo", "gspo", "cispo", "raft"), "grpo")


class _Translation:
    def __init__(self, values: dict[str, Any], *, tasks: bool) -> None:
        self._values = values
        self.ignored: list[str] = []
        self.problems: list[tuple[str, str]] = []
        self._tasks, self._mode = tasks, values.get("mode") or "both"
        kind = str(find(values, "algorithm.algorithm_type") or "ppo")
        self._kind = ALIASES.get(kind, kind)
        if self._kind != kind:
            values["algorithm"]["algorithm_type"] = self._kind
        self._is_trinitys = tasks or "synchronizer" in values or find(values, "algorithm.repeat_times") is not None

    def batches(self) -> None:
        """Batch and group sizes, and the source of the experiences."""
        values = self._values
        tasks, repeat = number(pop_option(values, "buffer.batch_size")), pop_option(values, "algorithm.repeat_times")
        runs = int(number(repeat) or 1)
        if repeat is not None and self._kind in OF_GROUPS and find(values, "buffer.group_by") is None:
            if runs < 2:
                sentence = f"{self._kind} compares the runs of a task with each other and needs at least 2; not {runs}"
                self.problems.append(("algorithm.repeat_times", sentence))
            write(values, "buffer.group_by", "task")
            write(values, "buffer.group_size", max(runs, 2))
        if tasks is not None:
            write(values, "buffer.train_batch_size", int(tasks) * runs)
        if (steps := pop_option(values, "buffer.total_steps")) is not None:
            write(values, "trainer.total_steps", steps)
        store = "buffer.trainer_input.experience_buffer."
        kind, path = find(values, f"{store}storage_type"), find(values, f"{store}path")
        of_set = kind == "file" and (self._mode not in {"both", "colocate"} or self._kind in {"sft", "dpo"})
        if of_set or (kind is None and path and "://" not in str(path) and find(values, f"{store}format")):
            self.problems.append((f"{store}{'path' if kind is None else 'storage_type'}", A_TRAINING_SET))
            pop_option(values, f"{store}path")
            write(values, "buffer.group_by", "task" if self._kind == "dpo" else "none")
        if kind in {"queue", "file"} and pop_option(values, f"{store}path") is not None:  # the place of Trinity's copy
            self.ignored.append(f"{store}path")
        if kind == "queue" and pop_option(values, f"{store}storage_type"):
            self.ignored.append(f"{store}storage_type: queue")
        prompt, reply = (number(find(values, f"model.max_{each}_tokens")) for each in ("prompt", "response"))
        if prompt and reply:
            write(values, "model.max_model_len", int(prompt + reply))

    def intervals(self) -> None:
        """Trinity synchronises and saves weights at separate intervals."""
        values = self._values
        handed, method = (pop_option(values, f"synchronizer.sync_{each}") for each in ("interval", "method"))
        if method not in {None, "checkpoint"}:
            self.ignored.append(f"synchronizer.sync_method: {method} (versions are handed over as checkpoints)")
        if handed is None and self._tasks:
            handed = 1
        if handed is not None:
            kept = pop_option(values, "trainer.save_interval")
            write(values, "trainer.save_interval", handed)
            if (number(kept) or 0) > 0:
                write(values, "trainer.keep_interval", kept)

    def losses(self) -> None:
        """The policy loss, the entropy, and advantages."""
        values, kind = self._values, self._kind
        loss, own_loss = pop_option(values, "algorithm.policy_loss_fn"), {"raft": "sft"}.get(kind, "ppo")
        if kind == "grpo" and loss in {"gspo", "cispo"}:
            self._kind = values["algorithm"]["algorithm_type"] = loss
        elif loss not in {None, kind, own_loss}:
            self.ignored.append(f"algorithm.policy_loss_fn: {loss}")
        clips = find(values, "algorithm.policy_loss_fn_args")
        if isinstance(clips, dict) and {"clip_range", "clip_range_low"} <= clips.keys():
            clips.setdefault("clip_range_high", clips.pop("clip_range"))
        ours = {each: each for each in ("clip_range", "clip_range_high", "loss_agg_mode")}
        ours |= {"clip_range_low": "clip_range", "clip_ratio_c": "dual_clip"}
        self._arguments("algorithm.policy_loss_fn_args", ours)
        if pop_option(values, "algorithm.entropy_loss_fn") == "none":
            pop_option(values, "algorithm.entropy_loss_fn_args")
            write(values, "algorithm.entropy_coef", 0)
        self._arguments("algorithm.entropy_loss_fn_args", {"entropy_coef": "entropy_coef"})
        advantage = pop_option(values, "algorithm.advantage_fn")
        if advantage not in {None, kind, _OWN_ADVANTAGES.get(kind)}:
            self.ignored.append(f"algorithm.advantage_fn: {advantage}")
        if find(values, "algorithm.advantage_fn_args.std_cal_level") in {"batch", "group"}:
            write(values, "algorithm.group.scale", pop_option(values, "algorithm.advantage_fn_args.std_cal_level"))
        self._arguments("algorithm.advantage_fn_args", {"gamma": "gamma", "lam": "lam"})
        most = pop_option(values, "algorithm.sample_strategy_args.max_staleness")
        if most is not None and pop_option(values, "algorithm.sample_strategy") == "staleness_control":
            write(values, "trainer.max_staleness", most)
        critic = pop_option(values, "trainer.trainer_config.critic.optim.lr")
        if critic is not None and kind == "ppo":
            write(values, "algorithm.critic_optimizer.lr", critic)

    def divergence(self) -> None:
        """The divergence from the base model, in the loss or in the reward."""
        values = self._values
        penalty, divergence = (pop_option(values, f"algorithm.kl_{each}_fn") for each in ("penalty", "loss"))
        in_reward = penalty not in {None, "none"}
        counting, other = ("penalty", "loss") if in_reward else ("loss", "penalty")
        if in_reward:
            write(values, "algorithm.kl_in", "reward")
            self.ignored += [f"algorithm.kl_loss_fn: {divergence}"] * (divergence not in {None, "none"})
        estimator = penalty if in_reward else divergence
        pop_option(values, f"algorithm.kl_{other}_fn_args")
        if estimator == "none":
            write(values, "algorithm.kl_coef", 0)
            pop_option(values, "algorithm.kl_loss_fn_args")
        elif estimator in _ESTIMATORS:
            write(values, "algorithm.kl_estimator", _ESTIMATORS[estimator])
        elif estimator is not None:
            self.ignored.append(f"algorithm.kl_{counting}_fn: {estimator}")
        self._arguments(f"algorithm.kl_{counting}_fn_args", {"kl_coef": "kl_coef"})
        if self._is_trinitys and self._kind in {"gspo", "cispo"}:  # Trinity's default; the papers have none
            write(values, "algorithm.kl_coef", 0.001)

    def _arguments(self, name: str, ours: Mapping[str, str]) -> None:
        """Map the arguments of one of Trinity's functions to our options of `algorithm`."""
        given = pop_option(self._values, name)
        for argument, value in given.items() if isinstance(given, dict) else ():
            if argument in ours and value is not None:
                write(self._values, f"algorithm.{ours[argument]}", value)
            elif value is not None and value is not False and (argument, number(value)) != ("epsilon", 1e-6):
                self.ignored.append(f"{name}.{argument}")

    def optimizer(self) -> None:
        """The schedule of the learning rate: tuneloop has a warm-up and no decay."""
        values, at = self._values, "algorithm.optimizer."
        warmup = number(find(values, f"{at}lr_warmup_steps"))
        ratio = number(pop_option(values, f"{at}lr_warmup_steps_ratio"))
        if warmup is not None and warmup < 0:
            pop_option(values, f"{at}lr_warmup_steps")
            warmup = None
        if ratio and warmup is None:
            steps = number(find(values, "trainer.total_steps"))
            if steps is None:
                self.ignored.append(f"{at}lr_warmup_steps_ratio (trainer.total_steps is not written)")
            else:
                write(values, f"{at}lr_warmup_steps", int(ratio * steps))
        courses = [pop_option(values, f"{at}{each}") for each in ("warmup_style", "lr_scheduler_type")]
        course = next((each for each in courses if each is not None), "constant")
        least = pop_option(values, f"{at}min_lr_ratio")
        if course != "constant":
            self.ignored.append(f"{at}lr_scheduler_type: {course}")
            self.ignored += [f"{at}min_lr_ratio"] * (least is not None)
        for name, same in ((f"{at}weight_decay", 0.0), (f"{at}clip_grad", 1.0), ("trainer.grad_clip", 1.0)):
            written = pop_option(values, name)
            if written is not None and number(written) != same:
                self.ignored.append(f"{name}: {written}")

    def adapter(self) -> None:
        """A low-rank adapter, in Trinity's or Tinker's options."""
        values = self._values
        adapters, tinker = pop_option(values, "model.lora_configs"), pop_option(values, "model.tinker")
        if isinstance(tinker, dict) and tinker.get("enable") not in {None, False, "false"}:
            write(values, "model.lora.rank", tinker.get("rank") or 16)
            attention, mlp = (tinker.get(each) is not False for each in ("train_attn", "train_mlp"))
            write(values, "model.lora.targets", [*ATTENTION * attention, *MLP * mlp])
            known = {"enable", "rank", "train_attn", "train_mlp"}
            self.ignored += [f"model.tinker.{each}" for each in tinker if each not in known]
        elif isinstance(adapters, list) and adapters and isinstance(adapters[0], dict):
            first = adapters[0]
            write(values, "model.lora.rank", first.get("lora_rank") or 32)
            write(values, "model.lora.alpha", first.get("lora_alpha") or 32)
            if (targets := first.get("target_modules") or "all-linear") != "all-linear":
                write(values, "model.lora.targets", targets if isinstance(targets, list) else [targets])
            known = {"name", "lora_rank", "lora_alpha", "target_modules"}
            self.ignored += [f"model.lora_configs.{each}" for each in first if each not in known]

    def pipelines(self) -> None:
        """Trinity's processing of tasks and replies before a step; most of it has no effect here."""
        for kind, unchanged in (("task", "tasks are run"), ("experience", "replies are trained on")):
            at = f"data_processor.{kind}_pipeline"
            steps = find(self._values, f"{at}.operators")
            steps = steps if isinstance(steps, list) else []
            named = [str(each.get("name")) for each in steps if isinstance(each, dict)]
            if "mask_response_truncated" in named:  # our default, unless the reward's rule differs
                named.remove("mask_response_truncated")
                write(self._values, "reward.unfinished_runs", "ignore")
            if (
                "dapo_dynamic_sampling" in named and self._kind in OF_GROUPS[:-1]
            ):  # these skip groups with equal rewards anyway
                named.remove("dapo_dynamic_sampling")
            self.ignored += [f"{at}: {', '.join(named)} ({unchanged} without)"] * bool(named)


#: Names of the linear layers of attention and of the feed-forward part.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")

#: Options and whole sections of Trinity-RFT without effect in tuneloop.
IGNORED = frozenset(
    f"{section}.{name}".lstrip(".")
    for section, names in {
        "": "group checkpoint_job_dir ray_namespace continue_from_checkpoint ignore_validator_suggestions stages"
        " data_processor log service synchronizer",
        "algorithm": "sample_strategy enable_router_replay bypass_old_logprobs sample_strategy_args rollout_correction",
        "algorithm.optimizer": "optimizer_type",
        "buffer": "total_epochs tokenizer_path cache_dir explorer_input explorer_output",
        "buffer.trainer_input": "auxiliary_buffers sft_warmup_dataset sft_warmup_steps",
        "buffer.trainer_input.experience_buffer": "storage_type capacity max_read_timeout max_retry_times"
        " max_retry_interval split subset_name enable_progress_bar schema_type index batch_size tokenizer_path"
        " total_epochs total_steps ray_namespace data_selector format replay_buffer use_priority_queue"
        " replay_buffer_kwargs reuse_cooldown_time",
        "cluster": "total_gpu_num rollout_gpu_num auxiliary_model_gpu_num explorer_gpu_num trainer_gpu_num"
        " trainer_node_num trainer_gpu_num_per_node",
        "explorer": "name runner_per_model runner_prepare_concurrency runner_prepare_max_retries max_timeout"
        " max_retry_times concurrent_mode max_repeat_times_per_runner runner_num eval_interval eval_on_startup"
        " bench_on_latest_checkpoint db_url runner_state_report_interval max_inflight_batches env_vars"
        " auxiliary_models dynamic_timeout over_rollout",
        "explorer.rollout_model": "model_path name trust_remote_code engine_type data_parallel_size"
        " pipeline_parallel_size enable_expert_parallel gpu_per_engine use_v1 enable_prefix_caching"
        " enable_chunked_prefill temperature top_p top_k logprobs max_model_len max_prompt_tokens max_response_tokens"
        " min_response_tokens enable_prompt_truncation repetition_penalty ignore_eos enable_multimodal chat_template"
        " enable_thinking enable_log_requests base_port api_key nnodes node_rank enable_return_routed_experts"
        " weight_sync_buffer_size bundle_indices engine_id ray_namespace ray_actor_name sync_method checkpoint_job_dir"
        " cuda_visible_devices enable_lora enable_runtime_lora_updating rope_theta extra_engine_args lora_modules"
        " lora_kwargs rope_scaling external_model_config enable_openai_api enable_history api_base_url_env api_key_env"
        " api_model_name api_max_concurrent_requests",
        "model": "custom_chat_template chat_template_path top_p top_k logprobs max_prompt_tokens min_response_tokens"
        " enable_prompt_truncation repetition_penalty enable_thinking fully_sharded_loras max_cpu_loras rope_theta"
        " rope_scaling external_model",
        "monitor": "detailed_stats enable_ray_timeline cache_dir monitor_args",
        "trainer": "name trainer_type trainer_strategy enable_preview use_dynamic_bsz use_remove_padding"
        " balance_batch critic_warmup max_token_len_per_gpu ppo_max_token_len_per_gpu"
        " fix_actor_microbatch_loss_scale param_offload grad_offload offload_policy save_strategy save_hf_checkpoint"
        " trust_remote_code trainer_config trainer_config_path"
        " megatron",
    }.items()
    for name in names.split()
)


def is_ignored(name: str) -> bool:
    """Whether an option is Trinity's and has no effect in a service."""
    names = name.split(".")
    return any(".".join(names[:depth]) in IGNORED for depth in range(1, len(names) + 1))
