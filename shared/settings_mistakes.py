"""This file says in a sentence what is wrong with a setting, and what to write instead."""

import difflib
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import get_args

from pydantic_core import ErrorDetails

from shared import trinity_keys
from shared.config import options
from shared.yaml_tree import Keys, Mistake, Tree, dotted

ENV_PREFIX = "TUNELOOP__"

_SECRETS = {
    "algorithm.distill.teacher_key",
    "buffer.trainer_input.experience_buffer.path",
    "explorer.admin_key",
    "explorer.rollout_model.engine_key",
    "judge.key",
}
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
        ("wandb", "mlflow", "swanlab"),
        "tuneloop writes TensorBoard files and Prometheus metrics: write 'tensorboard'",
    ),
    "synchronizer.sync_method": (
        ("nccl", "memory", "online", "offline"),
        "tuneloop hands weights over by checkpoints: write 'checkpoint'",
    ),
    "trainer.save_interval": ((0,), "Trinity's 0 means only at the end: write after how many steps to publish, e.g. 1"),
}


def mistakes_of(tree: Tree, error: ErrorDetails) -> Iterator[Mistake]:
    """What pydantic found, at the place where it was written."""
    at: Keys = error["loc"]
    if error["type"] != "value_error":
        yield Mistake(place=tree.place_of(at), key=dotted(at), what=_what(at, error))
    elif at:
        what = f"{error['ctx']['error']}, not {_shown(at, error['input'])}"
        yield Mistake(place=tree.place_of(at), key=dotted(at), what=what)
    else:
        for line in str(error["ctx"]["error"]).splitlines():
            key, _, what = line.partition(": ")
            yield Mistake(place=tree.place_of(tuple(key.split("."))), key=key, what=what)


def _what(at: Keys, error: ErrorDetails) -> str:
    value = error["input"]
    if error["type"] == "missing":
        return "is required and missing"
    if isinstance(value, str) and value.startswith("${"):
        variable = ENV_PREFIX + dotted(at).upper().replace(".", "__")
        return f"{value} is not expanded here: write the value, or set the environment variable {variable}"
    said = error["msg"] if error["type"] == "literal_error" else error["msg"].split(",")[0]
    must = _MUST.get(error["type"], said.replace("Input should be", "must be"))
    return f"{must}, not {_shown(at, value)}{_cure(dotted(at), error['type'], value)}"


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


def _shown(at: Keys, value: object) -> str:
    return "the value given" if dotted(at) in _SECRETS else reprlib.repr(value)


def nearest_name(names: Sequence[str]) -> str:
    """` Did you mean '…'?` for an unknown key, or nothing if no option is near."""
    section, wrong = ".".join(names[:-1]), names[-1]
    ours = [name for name, _ in options()]
    prefix = f"{section}." if section else ""
    siblings = {name.removeprefix(prefix).split(".")[0] for name in ours if name.startswith(prefix)}
    near = difflib.get_close_matches(wrong, sorted(siblings) or trinity_keys.names_under(names[:-1]), n=1)
    near = near or [name for name in ours if name.rpartition(".")[2] == wrong]
    near = near or difflib.get_close_matches(".".join(names), ours, n=1, cutoff=0.75)
    return f" Did you mean '{near[0]}'?" if near else ""
