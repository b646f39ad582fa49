"""What a job is trained with: its policy's options, and its hyperparameters with `auto` resolved."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tuneloop.shared.errors import JobRefused, PolicyRefused
from tuneloop.shared.settings.policies import settings_of_policy
from tuneloop.shared.settings.settings import Settings


class JobPlan(NamedTuple):
    """A job's policy `options` by dotted name, and `hyperparameters` as the API returns them.

    `rows_in_all` counts the lines of all epochs, `total_steps` the steps at one answer a line.
    """

    options: dict[str, Any]
    hyperparameters: dict[str, Any]
    rows_in_all: int
    total_steps: int


#: The least learning rate that `auto` chooses: adapters learn little with those of reinforcement.
_LEAST_LR = {"supervised": 1e-4, "dpo": 1e-5}

#: The lines up to which `auto` chooses so many epochs.
_EPOCHS = ((1_000, 3), (10_000, 2))

#: The part of the lines that `auto` makes a batch, and the largest that it chooses.
_LINES_OF_A_BATCH, _LARGEST_AUTO = 25, 32

#: Samples a prompt with `compute_multiplier` 1.
_SAMPLES = 4

#: Of each number, the least and the most.
_BOUNDS: Mapping[str, tuple[float, float, type]] = {
    "n_epochs": (1, 50, int),
    "batch_size": (1, 256, int),
    "learning_rate_multiplier": (0, 10_000, float),
    "beta": (0, 2, float),
    "compute_multiplier": (0, 10, float),
    "eval_interval": (1, 1_000_000, int),
    "eval_samples": (1, 10, int),
}
_EFFORTS = ("default", "low", "medium", "high")
_COMMON = ("n_epochs", "batch_size", "learning_rate_multiplier")
_NAMES = {
    "supervised": _COMMON,
    "dpo": (*_COMMON, "beta"),
    "reinforcement": (*_COMMON, "compute_multiplier", "eval_interval", "eval_samples", "reasoning_effort"),
}

#: What a policy that learns from a file has, whatever the service's own method is set to.
_OF_FILES: Mapping[str, Any] = {
    "algorithm.credit": "call",
    "algorithm.loss_agg_mode": "token-mean",
    "algorithm.epochs": 1,
    "algorithm.mini_batches": 1,
    "algorithm.optimizer.lr_warmup_steps": 0,
    "buffer.order": "oldest",
    # A batch that is not full is the last of its epoch: it waits for nothing.
    "buffer.batch_timeout": 0.001,
}
_OF_ALL: Mapping[str, Any] = {
    "rollout.mode": "all",
    "gate.mode": "off",
    "buffer.max_backlog": None,
    "trainer.max_staleness": None,
    # The end of the rows ends the job: conversations may have more answers than lines, lines may be left out.
    "trainer.total_steps": None,
}


def plan_job(settings: Settings, method: str, asked: Mapping[str, Any], *, lines: int, seed: int) -> JobPlan:
    """The plan of a job over a file of so many lines. Raises JobRefused for a hyperparameter that cannot be."""
    if method not in _NAMES:
        raise JobRefused(f"method: {method} is none of {', '.join(_NAMES)}")
    if lines < 1:
        raise JobRefused("training_file: it has no lines")
    for name in asked:
        if name not in _NAMES[method]:
            raise JobRefused(f"{name}: {method} has no such hyperparameter; it has {', '.join(_NAMES[method])}")
    if not settings.model.lora.rank:
        raise JobRefused(
            "all weights are trained here, and an engine has one set of these: a job needs an adapter; set "
            "model.lora.rank"
        )
    lr = settings.algorithm.optimizer.lr
    chosen = {name: _value(name, asked.get(name, "auto")) for name in _NAMES[method]}
    auto = {
        "n_epochs": next((epochs for most, epochs in _EPOCHS if lines <= most), 1),
        "batch_size": min(_LARGEST_AUTO, max(1, lines // _LINES_OF_A_BATCH)),
        "learning_rate_multiplier": max(1.0, float(f"{_LEAST_LR.get(method, lr) / lr:.6g}")),
        "beta": 0.1,
        "compute_multiplier": 1.0,
        "eval_samples": 1,
        "reasoning_effort": "default",
    }
    chosen |= {name: auto[name] for name, value in chosen.items() if value == "auto" and name in auto}
    size, epochs = chosen["batch_size"], chosen["n_epochs"]
    steps = math.ceil(lines / size)
    if chosen.get("eval_interval") == "auto":
        chosen["eval_interval"] = steps
    options = dict(_OF_ALL) | {
        "algorithm.optimizer.lr": float(f"{lr * chosen['learning_rate_multiplier']:.9g}"),
        "trainer.seed": seed % (1 << 31),
    }
    if method == "reinforcement":
        # The service's own method, if it learns from rewards of samples; else grpo. Each step has a version.
        own, samples = settings.algorithm, max(2, round(_SAMPLES * chosen["compute_multiplier"]))
        learns = not own.of_any_reply and own.algorithm_type != "distill"
        options |= {
            "algorithm.algorithm_type": own.algorithm_type if learns else "grpo",
            "buffer.commit": "manual",
            "buffer.group_by": "task",
            "buffer.group_size": samples,
            "buffer.whole_groups_only": False,
            "buffer.train_batch_size": size * samples,
            "trainer.save_interval": 1,
        }
    elif method == "dpo":
        options |= dict(_OF_FILES) | {
            "algorithm.algorithm_type": "dpo",
            "algorithm.dpo.beta": chosen["beta"],
            # The two answers of a line are a group, whatever reward.weights say of preferences.
            "buffer.group_by": "task",
            "buffer.group_size": 2,
            "buffer.whole_groups_only": False,
            "buffer.train_batch_size": 2 * size,
            "trainer.save_interval": steps,
        }
    else:
        options |= dict(_OF_FILES) | {
            "algorithm.algorithm_type": "sft",
            "algorithm.sft.targets": "replies",
            "algorithm.sft.least_reward": 0.5,
            "buffer.group_by": "none",
            "buffer.train_batch_size": size,
            "trainer.save_interval": steps,
        }
    try:
        settings_of_policy(settings, options)
    except PolicyRefused as error:
        raise JobRefused(f"{method}: {error}") from None
    return JobPlan(options, chosen, lines * epochs, steps * epochs)


def _value(name: str, value: Any) -> Any:
    if value is None or value == "auto":
        return "auto"
    if name == "reasoning_effort":
        if value not in _EFFORTS:
            raise JobRefused(f"reasoning_effort: {value} is none of {', '.join(_EFFORTS)}")
        return value
    least, most, kind = _BOUNDS[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (kind is int and value != int(value)) or not least <= value <= most or value == 0:
        range_ = f"a whole number from {least} to {most}" if kind is int else f"a number above 0, up to {most:g}"
        raise JobRefused(f"{name}: must be {range_}, or auto")
    return kind(value)
