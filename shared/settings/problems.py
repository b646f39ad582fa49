"""Writes the sentence for a problem with a setting, and its cure."""

import difflib
import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import get_args

from pydantic_core import ErrorDetails

import tuneloop.runner.trinity as trinity
from tuneloop.shared.settings.settings import SECRETS, constants, holds_secret, options

ENV_PREFIX = "TUNELOOP__"

Keys = tuple[str | int, ...]

_TRINITYS_VALUES: Mapping[str, tuple[Sequence[object], str]] = {
    "cluster.node_num": ((0,), "Trinity's 0 asks Ray: write the number of machines"),
    "monitor.monitor_type": (
        ("swanlab",),
        "tuneloop writes TensorBoard files, and for two trackers: write 'tensorboard', 'wandb' or 'mlflow'",
    ),
    "rollout.mode": (("shadow",), "copies of requests were removed: write canary, with a small rollout.share"),
    "trainer.save_interval": ((0,), "Trinity's 0 means only at the end: write after how many steps to publish, e.g. 1"),
}

_NO_MODES = {
    "explore": "'explore' runs tasks for the trainer of another file. Write 'serve' if that file has `mode: train` and"
    " clients ask for replies; else write 'both': `tuneloop tune FILE` runs the tasks, and trains",
    "bench": "there is no 'bench' here. Name tasks with known answers in monitor.evaluation.path: held-out evaluation",
    "colocate": "'colocate' is 'both' with explorer.rollout_model.gpu_memory_utilization: 0.4",
}


#: Options that there were, by what to do without them.
_REMOVED: Mapping[str, str] = {
    name: f"removed: {instead}"
    for names, instead in (
        (
            "algorithm.group.drop_constant algorithm.merge_calls algorithm.overlong.train algorithm.whiten_advantages"
            " buffer.fair_share explorer.train_on_grammars",
            "it is always true. Delete the line",
        ),
        ("algorithm.dpo.reference_free algorithm.group.step_norm", "it is always false. Delete the line"),
        ("algorithm.kto.desirable_weight algorithm.kto.undesirable_weight", "it is always 1. Delete the line"),
        ("algorithm.dpo.label_smoothing", "it is always 0. Delete the line"),
        ("algorithm.baseline.scale", "it is always 'batch'. Delete the line"),
        ("algorithm.off_policy.level", "it is always 'token'. Delete the line"),
        ("algorithm.reward_clip", "reward.clip bounds rewards. Delete the line"),
        ("algorithm.reward_normalization", "each method scales its advantages by itself. Delete the line"),
        ("algorithm.critic_optimizer.bits", "algorithm.optimizer.bits counts for the critic too. Delete the line"),
        ("algorithm.negative_scale", "use algorithm.dual_clip, which bounds what late feedback does"),
        ("monitor.evaluation.samples", "all tasks of the file are asked. Shorten it, and delete the line"),
        ("explorer.max_stored_bytes_per_key", "retention bounds what is stored. Delete the line"),
        ("explorer.min_running_model_num", "use rollout.mode: rolling, which keeps an engine answering"),
        ("explorer.allowed_media_domains", "clients send files as data: URLs. Delete the line"),
        (
            "cluster.gpu_turn",
            "write explorer.rollout_model.gpu_memory_utilization: 0.4, by which they share the GPU",
        ),
        ("explorer.durability", "it is always 'fsync'. Delete the line"),
        ("algorithm.critic_warmup_steps", "actor and critic learn from the first step on. Delete the line"),
        ("trainer.state_interval", "the newest version alone keeps critic and optimiser. Delete the line"),
        ("explorer.spool_max_age", "it is always a day. Delete the line"),
        ("explorer.spool_dir", "use explorer.outbox_dir, a folder of its own"),
        ("explorer.spool_max_bytes", "use explorer.outbox_max_bytes"),
        ("trainer.max_age", "use trainer.max_staleness, which counts versions"),
        ("trainer.longest_yield", "what yields waits until there is no traffic. Delete the line"),
        ("judge.scale judge.weights", "use judge.rubric, a file with both"),
        ("model.critic_model_path", "the critic starts from model.model_path. Delete the line"),
        ("gate.kl", "scores, lengths and refusals are compared. Delete the line"),
        ("gate.replay", "a candidate is compared on the tasks of monitor.evaluation.path. Delete the section"),
        ("reward.demonstration_value", "sft learns edited answers, whatever the reward. Delete the line"),
        (
            "feedback.quarantine_after feedback.quarantine_below monitor.drift.rater_outliers",
            "raters are not compared any more. Delete the line; `tuneloop raters quarantine` puts one into quarantine",
        ),
    )
    for name in names.split()
}


def sentences_of(error: ErrorDetails) -> Iterator[tuple[Keys, str]]:
    """What pydantic found: which option it is about, and a sentence."""
    at: Keys = error["loc"]
    if error["type"] != "value_error":
        yield at, _sentence(at, error)
    elif at:
        value = "" if holds_secret(dotted_name(at)) else f", not {reprlib.repr(error['input'])}"
        yield at, f"{error['ctx']['error']}{value}"
    else:
        for line in str(error["ctx"]["error"]).splitlines():
            key, _, what = line.partition(": ")
            yield tuple(key.split(".")), what


def sort_unknown(at: Keys, value: object, ignored: list[str]) -> Iterator[tuple[Keys, str]]:
    """The problems with an unknown key; keys of Trinity below it go into `ignored`."""
    names = [str(key) for key in at]
    name = ".".join(names)
    if (removed := _REMOVED.get(name)) is not None:
        yield at, removed
    elif name in (fixed := dict(constants())):
        yield at, f"removed: it is always {json.dumps(fixed[name], default=dict)}. Delete the line"
    elif trinity.is_ignored(name):
        ignored.append(name)
    else:
        yield at, f"unknown key.{_nearest_name(names)}"


def _sentence(at: Keys, error: ErrorDetails) -> str:
    key, value, kind = dotted_name(at), error["input"], error["type"]
    if kind == "missing":
        return "is required and missing"
    message = error["msg"] if kind == "literal_error" else error["msg"].split(",")[0]
    must = _MUST.get(kind, message.replace("Input should be", "must be"))
    if key == "algorithm.algorithm_type" and (instead := trinity.instead_of(str(value))):
        return f"{value!r}: {instead} (docs/methods.md)"
    if key == "mode" and str(value) in _NO_MODES:
        return _NO_MODES[value]
    is_hidden = holds_secret(key) and (key in SECRETS or not isinstance(value, int | float | None))
    cure = ""
    trinitys, instead = _TRINITYS_VALUES.get(key, ((), ""))
    if value in trinitys:
        cure = f". {instead}"
    elif kind == "literal_error":
        choices = [str(each) for each in get_args(dict(options())[key].annotation)]
        near = difflib.get_close_matches(str(value).lower(), choices, n=1)
        cure = f". Did you mean '{near[0]}'?" if near else ""
    elif kind == "string_type" and isinstance(value, int | float | date):
        cure = ". Write it in quotes"
    return f"{must}, not {'the value given' if is_hidden else reprlib.repr(value)}{cure}"


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
    near = difflib.get_close_matches(wrong, sorted(siblings), n=1)
    near = near or [name for name in ours if name.rpartition(".")[2] == wrong]
    near = near or difflib.get_close_matches(".".join(names), ours, n=1, cutoff=0.75)
    return f" Did you mean '{near[0]}'?" if near else ""


def dotted_name(keys: Keys) -> str:
    """`a.b[0]` for ("a", "b", 0)."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")
