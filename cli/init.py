"""This file is `tuneloop init`: three questions, and a settings file that starts."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import yaml

from tuneloop.cli.capacity_plan import GpuMemoryOption, disk_speed, make_plan
from tuneloop.cli.options import JsonOption, echo, tell
from tuneloop.shared.capacity.memory import gpu_memory
from tuneloop.shared.capacity.model_shape import ModelShape, read_shape
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.hardware import count_gpus
from tuneloop.shared.settings.hub_cache import cached_folder
from tuneloop.shared.settings.settings import Settings


class Parsers(NamedTuple):
    """Names as vLLM knows them; None: none is known to fit, or the chat template has no use for one."""

    tool_calls: str | None
    reasoning: str | None


#: By the beginning of `model_type` in config.json, longer ones first; as vLLM's documentation of tool calling and of
#: reasoning outputs has them (0.26 to 0.32).
FAMILIES: dict[str, Parsers] = {
    "qwen3": Parsers("hermes", "qwen3"),
    "qwen2": Parsers("hermes", "deepseek_r1"),  # its reasoning models are distilled from DeepSeek-R1
    "llama4": Parsers("llama4_pythonic", None),
    "llama": Parsers("llama3_json", "deepseek_r1"),
    "ministral": Parsers("mistral", "mistral"),
    "mistral": Parsers("mistral", "mistral"),
    "gpt_oss": Parsers("openai", "openai_gptoss"),
    "deepseek_v3": Parsers("deepseek_v3", "deepseek_r1"),
    "gemma4": Parsers("gemma4", "gemma4"),
    "glm4_moe": Parsers("glm45", "glm45"),
    "granite": Parsers("granite", "granite"),
    "phi3": Parsers("phi4_mini_json", None),
    "olmo3": Parsers("olmo3", "olmo3"),
    "seed_oss": Parsers("seed_oss", "seed_oss"),
    "hunyuan_v1": Parsers("hunyuan_a13b", "hunyuan_a13b"),
    "minimax_m2": Parsers("minimax_m2", "minimax_m2"),
    "kimi_k2": Parsers("kimi_k2", "kimi_k2"),
}

_OTHERS = Parsers(None, None)

#: How chat templates begin what is thought.
_THOUGHTS = ("<think>", "enable_thinking", "[THINK]", "reasoning_content", "<|channel|>analysis")


def parsers_of(shape: ModelShape) -> Parsers:
    names = sorted((name for name in FAMILIES if shape.family.startswith(name)), key=len)
    known = FAMILIES[names[-1]] if names else _OTHERS
    thinks = any(each in shape.template for each in _THOUGHTS)
    return Parsers(known.tool_calls if "tools" in shape.template else None, known.reasoning if thinks else None)


_MOST_TOKENS = 8192
_CPU_CACHE = 256 << 20

#: Where one GPU does not hold all: what is left out, one after the other.
_METHODS: tuple[dict[str, Any], ...] = (
    {},
    {"algorithm_type": "reinforce"},
    {"algorithm_type": "reinforce", "rank": 16},
)
_MICRO_BATCHES = (16384, 8192, 4096, 2048)
#: Shares of a GPU's memory for an engine beside the trainer, and for one that has it alone.
_SHARES, _WHOLE = (0.4, 0.3, 0.25, 0.2, 0.15), 0.9


class Setup(NamedTuple):
    shape: ModelShape
    where: Path
    gpus: int
    engines: int
    tensor_parallel: int
    share: float
    micro_batch: int
    method: dict[str, Any]
    parsers: Parsers
    interval: int = 1


def init(
    file: Annotated[Path, typer.Argument(metavar="[X.yaml]", help="The file to write.")] = Path("tuneloop.yaml"),
    model: Annotated[Path | None, typer.Option(help="A Hugging Face model: its folder or Hub name.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs of this machine; 0: none.")] = None,
    where: Annotated[Path | None, typer.Option(help="Folder for checkpoints, database and logs.")] = None,
    gpu_memory_gb: GpuMemoryOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Ask for a model's folder, GPUs, and where to keep things, and write a settings file that starts.

    What an option says is not asked. A file that is there is never written over.
    """
    if file.exists():
        raise EnvironmentRefused(f"{file} is there already; name another file, or move that one away")
    while True:
        folder = (model or Path(_ask("Model: its folder, or its name on the Hub", "--model"))).expanduser()
        found = cached_folder(folder)
        try:
            shape = read_shape(found.absolute() if found.exists() else found)
            break
        except EnvironmentRefused as error:
            if model is not None:
                raise
            echo(str(error), err=True)
    count = int(_ask("GPUs", "--gpus", str(count_gpus()))) if gpus is None else gpus
    place = (where or Path(_ask("Folder for checkpoints, database and logs", "--where", "tuneloop-data"))).expanduser()
    bytes_ = gpu_memory() if gpu_memory_gb is None else int(gpu_memory_gb * 1e9)
    if count and bytes_ is None:
        raise EnvironmentRefused(
            "nvidia-smi shows no GPU here; give --gpus 0 for the CPU, or --gpu-memory, such as 80, for one that it"
            " does not see"
        )
    text = settings_text(shape, place.absolute(), gpus=count, gpu_bytes=bytes_ if count else None)
    if found != folder:  # The file names the model as the Hub does: a download of other weights is then noticed.
        text = text.replace(_quote(shape.folder), _quote(folder))
    try:
        with file.open("x") as opened:
            opened.write(text)
    except FileExistsError:
        raise EnvironmentRefused(f"{file} is there already; name another file, or move that one away") from None
    except OSError as error:
        raise EnvironmentRefused(f"{file} cannot be written: {error.strerror}") from None
    tell(
        {"file": str(file), "settings": yaml.safe_load(text)},
        f"{file} is written. Look at what it takes, and start it:\n  tuneloop plan {file}\n  tuneloop run {file}",
        f"Programs on other hosts need a key, and then all do:\n  tuneloop keys create {file} --name me",
        for_programs=for_programs,
    )


def _ask(question: str, option: str, default: str | None = None) -> str:
    if not sys.stdin.isatty():
        raise EnvironmentRefused(f"there is no terminal to ask on: give {option}")
    answer: str = typer.prompt(question, default=default, err=True)
    return answer


def settings_text(shape: ModelShape, where: Path, *, gpus: int, gpu_bytes: int | None) -> str:
    """The text of a settings file for this machine. Raises EnvironmentRefused if no method fits."""
    speed = disk_speed(where)
    for choice in _choices(shape, where, gpus):
        settings = Settings.model_validate(yaml.safe_load(_text(choice)))
        plan = make_plan(settings, gpu_bytes=gpu_bytes, speed=speed)
        if all(each.startswith("checkpoint_root_dir") for each in plan.problems):
            break
    else:
        if not gpus:
            raise EnvironmentRefused("\n".join(plan.problems))
        held = f"{(gpu_bytes or 0) / 1e9:.0f} GB"
        raise EnvironmentRefused(
            f"one GPU of {held} is too small for {shape.folder}: neither all {shape.weights / 1e9:.1f} B weights nor an"
            " adapter of rank 16 can be trained beside an engine, or on a GPU of their own; choose a smaller model, or"
            " more GPUs"
        )
    # A step: replies of 850 tokens, at the rate measured on an H200, or on one CPU core.
    tokens = settings.buffer.train_batch_size * 850 * (2 if settings.algorithm.algorithm_type == "ppo" else 1)
    step_s = tokens * shape.weights / (32_500 * 6e8 if gpus else 2_000 * 6e6)
    interval = max(1, min(50, math.ceil(plan.publish_s / step_s)))
    return _text(choice._replace(interval=interval))


def _choices(shape: ModelShape, where: Path, gpus: int) -> Iterator[Setup]:
    parsers = parsers_of(shape)
    if not gpus:
        yield Setup(shape, where, 0, 1, 1, _WHOLE, 2048, {"algorithm_type": "reinforce"}, parsers)
        return
    sizes = [size for size in (1, 2, 4, 8) if size <= max(1, gpus - 1) and shape.key_value_heads % size == 0]
    for method in _METHODS:
        for tokens in _MICRO_BATCHES:
            for size in sizes:
                engines = max(1, (gpus - 1) // size)
                shares = (_WHOLE,) if gpus > engines * size else _SHARES
                for share in shares:
                    yield Setup(shape, where, gpus, engines, size, share, tokens, method, parsers)


def _text(choice: Setup) -> str:
    shape, parsers = choice.shape, choice.parsers
    length = min(shape.max_length or _MOST_TOKENS, _MOST_TOKENS)
    rank, kind = choice.method.get("rank"), choice.method.get("algorithm_type", "ppo")
    more = "as much time again" if rank else "as much again"
    why = "with a critic" if kind == "ppo" else f"without a critic, which would take {more}"
    if choice.gpus:
        alone = choice.share == _WHOLE
        whose = "the engines have their GPUs to themselves" if alone else "the trainer shares the GPU"
        engine = [
            f"    engine_num: {choice.engines}",
            f"    tensor_parallel_size: {choice.tensor_parallel}",
            f"    gpu_memory_utilization: {choice.share:g}  # {whose}",
        ]
    else:
        engine = [
            "    # vLLM for CPUs: one process, float32",
            "    dtype: float32",
            "    single_process: true",
            "    enforce_eager: true",
            f"    kv_cache_memory_bytes: {max(_CPU_CACHE, length * shape.cache_bytes(4))}",
        ]
    if parsers.tool_calls:
        engine += ["    enable_auto_tool_choice: true", f"    tool_call_parser: {parsers.tool_calls}"]
    else:
        engine += [
            "    # no tool_call_parser: the model's chat template knows no tools, or none is known for its family"
        ]
    if parsers.reasoning:
        engine += [f"    reasoning_parser: {parsers.reasoning}"]
    adapter = f"  lora: {{rank: {rank}}}              # an adapter: there is no room to train all weights"
    rate = "  optimizer: {lr: 1.0e-5}      # adapters want a higher rate than all weights do"
    lines = [
        "# Written by `tuneloop init`. Every option: docs/settings.md; what this takes: `tuneloop plan`.",
        "mode: both                       # serve and train on this machine; serve or train: one of the two",
        "project: tuneloop",
        "name: default                    # an experiment; another model needs another name",
        f"checkpoint_root_dir: {_quote(choice.where)}",
        "model:",
        f"  model_path: {_quote(shape.folder)}  # {shape.family}, {shape.weights / 1e6:.1f} M weights",
        f"  max_model_len: {length}            # tokens of prompt and reply together",
        *([adapter] if rank else []),
        "cluster:",
        f"  gpu_per_node: {choice.gpus}",
        "explorer:",
        "  proxy_port: 8010",
        "  service_status_check_interval: 10  # seconds between two looks for a new version",
        "  rollout_model:",
        *engine,
        "algorithm:",
        f"  algorithm_type: {kind}  # {why}; docs/methods.md compares them",
        *([rate] if rank else []),
        "buffer:",
        "  train_batch_size: 32           # rewarded replies to a step",
        "  commit: auto                   # trained on 30 s after the last feedback; manual: after POST /commit",
        "trainer:",
        f"  save_interval: {choice.interval}               # steps to a version: publishing takes no longer",
        f"  micro_batch_tokens: {choice.micro_batch}       # tokens at once: less memory, more time with fewer",
        "  max_checkpoints_to_keep: 5",
    ]
    return "\n".join(lines) + "\n"


def _quote(path: Path) -> str:
    return str(yaml.safe_dump(str(path), default_style='"', allow_unicode=True, width=1 << 20)).strip()
