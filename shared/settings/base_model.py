"""What the base model's files say: whether the trainer trains it, and where replies end. Nothing of it is loaded."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tuneloop.shared.errors import EnvironmentRefused, SettingsError
from tuneloop.shared.experience import ReplyLimit
from tuneloop.shared.settings.hub_cache import download_sentence
from tuneloop.shared.settings.settings import Settings

#: How many experts there are, as configurations call it.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")

#: What says how a model is quantised: keys of its config.json, and files beside it.
_QUANTISED = ("quantization_config", "compression_config")
_QUANTISED_BESIDE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")

#: Models that also see, of which transformers loads the text alone.
TEXT_ALONE = frozenset({"emu3", "llama4", "mllama", "qwen3_5", "qwen3_5_moe", "qwen4_exp"})

#: The layers of the text; and those that only draft tokens, which transformers loads none of.
_LAYER = re.compile(r"(?:model\.|language_model\.)+layers\.(\d+)\.")
_LARGEST_HEADER = 100 << 20
_DRAFTS = re.compile(r"(?:model\.)?mtp\.")


def require_folders(settings: Settings) -> None:
    """Raise EnvironmentRefused unless the models to start from are there, SettingsError if the base is not trained."""
    require_downloads(settings)
    for setting, folder in named_folders(settings).items():
        if not ((folder / "config.json").is_file() and any(folder.glob("*.safetensors"))):
            what = "is not a model folder" if folder.is_dir() else "is not there"
            raise EnvironmentRefused(
                f"{setting}: {folder} {what}; name a local folder that holds config.json and *.safetensors"
            )
    require_trainable(settings)


def named_folders(settings: Settings) -> dict[str, Path]:
    named, distill = {"model.model_path": settings.model.model_path}, settings.algorithm.distill
    if settings.algorithm.algorithm_type == "distill" and distill.teacher_path is not None:
        named["algorithm.distill.teacher_path"] = distill.teacher_path
    return named


def missing_downloads(settings: Settings) -> list[str]:
    """What is to be downloaded before these settings start, and by which command."""
    named = named_folders(settings).items()
    return [f"{setting}: {sentence}" for setting, folder in named if (sentence := download_sentence(folder))]


def require_downloads(settings: Settings) -> None:
    """Raise SettingsError, after which no service is started again, for names of the Hub that are in no cache."""
    if missing := missing_downloads(settings):
        raise SettingsError("\n".join(missing))


def require_trainable(settings: Settings) -> None:
    """Raise SettingsError if the trainer refuses the base model; a folder without config.json passes."""
    if settings.mode != "serve" and (problems := [*_problems(settings, settings.model.model_path)]):
        raise SettingsError("\n".join(problems))


def routing_note(settings: Settings) -> str | None:
    """What is to be watched where a mixture of experts is trained all the same."""
    if settings.mode == "serve" or not _has_experts(_config(settings.model.model_path)):
        return None
    return (
        "trainer.allow_routing_mismatch: engine and trainer may choose other experts for the same tokens; the metric"
        " mismatch_kl/fresh says how far their log-probabilities are apart"
    )


def _problems(settings: Settings, folder: Path) -> Iterator[str]:
    config = _config(folder)
    if how := _quantisation(config, folder):
        yield (
            f"model.model_path: {folder} is quantised ({how}), and the trainer would train and publish other weights"
            " than engines serve; name the folder of the same model in bfloat16 (model.lora.base_bits saves the"
            " trainer's memory)"
        )
    kind = str(config.get("model_type"))
    left_out = "its vision" if kind in TEXT_ALONE else _first_draft(config, _names(folder))
    if left_out:
        yield (
            f"model.model_path: {folder} has {left_out}, which transformers does not load and versions would lack; save"
            " what transformers loads as a folder of its own (docs/architectures.md says how), and name that"
        )
    elif "vision_config" in config and settings.model.lora.rank:
        yield (
            f"model.lora.rank: {folder} also sees ({kind}), and adapters to such models are not served; write 0, which"
            " trains all weights"
        )
    on_cpu = not settings.cluster.gpu_per_node and not settings.explorer.rollout_model.engine_urls
    if settings.mode == "both" and on_cpu and "linear_attention" in (config.get("layer_types") or ()):
        yield (
            f"cluster.gpu_per_node: {folder} has linear attention, which vLLM's build for CPUs computes otherwise than"
            " the trainer; serve it on a GPU"
        )
    if _has_experts(config) and not settings.trainer.allow_routing_mismatch:
        yield (
            f"trainer.allow_routing_mismatch: {folder} is a mixture of experts, and training changes its routers or"
            " what they read, by adapters too; engine and trainer may then choose other experts for the same tokens,"
            " and their log-probabilities differ. Write true to train it all the same, and watch mismatch_kl/fresh"
        )


def _config(folder: Path) -> Mapping[str, Any]:
    """The configuration of the text; empty where there is none that can be read."""
    config = _read(folder / "config.json")
    return (config.get("text_config") or {}) | config


def _names(folder: Path) -> Iterator[str]:
    """The names of a model's tensors, except those of unreadable files."""
    for file in sorted(folder.glob("*.safetensors")):
        with suppress(OSError, ValueError), file.open("rb") as opened:
            yield from json.loads(opened.read(min(int.from_bytes(opened.read(8), "little"), _LARGEST_HEADER)))


def _first_draft(config: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The first tensor that belongs to no layer of the text; None if there is none."""
    layers = config.get("num_hidden_layers")
    for name in names:
        layer = _LAYER.match(name)
        if _DRAFTS.match(name) or (layer and isinstance(layers, int) and int(layer[1]) >= layers):
            return name
    return None


def _has_experts(config: Mapping[str, Any]) -> bool:
    sections = [config, *(each for each in config.values() if isinstance(each, dict))]
    counts = (section.get(name) for section in sections for name in _EXPERTS)
    each_layers = (each if isinstance(each, list) else [each] for each in counts)
    return any(isinstance(each, int) and each > 1 for layers in each_layers for each in layers)


def _quantisation(config: Mapping[str, Any], folder: Path) -> str | None:
    for name in _QUANTISED:
        if section := config.get(name):
            return str(section.get("quant_method", name) if isinstance(section, dict) else name)
    return next((name for name in _QUANTISED_BESIDE if (folder / name).exists()), None)


def limit_of(settings: Settings) -> ReplyLimit:
    """What the model's folder and the settings say of every reply."""
    folder, ends = settings.model.model_path, set[int]()
    config, length = _read(folder / "config.json"), settings.model.max_model_len
    for each in (config, config.get("text_config") or {}, _read(folder / "generation_config.json")):
        named = each.get("eos_token_id")
        ends |= {number for number in (named if isinstance(named, list) else [named]) if isinstance(number, int)}
    tokenizer = _read(folder / "tokenizer_config.json")
    token = tokenizer.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = [(int(number), each) for number, each in (tokenizer.get("added_tokens_decoder") or {}).items()]
    added = added or [(each["id"], each) for each in _read(folder / "tokenizer.json").get("added_tokens") or ()]
    ends |= {number for number, each in added if each.get("content") == text}
    context = length or (config.get("text_config") or config).get("max_position_embeddings")
    return ReplyLimit(frozenset(ends), context if isinstance(context, int) else None)


def _read(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        if isinstance(found := json.loads(file.read_bytes()), dict):
            return found
    return {}
