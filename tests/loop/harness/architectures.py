"""Tiny models of all architectures that the documentation names, and what engines make of versions of them."""

import asyncio
import dataclasses
import json
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

from examples.sums.model import save, tokenizer
from tests.loop.harness.oracle import Oracle
from tuneloop.explorer.engines import vllm
from tuneloop.explorer.engines.proof.reload_trial import ServedWeights, reload_fault
from tuneloop.explorer.engines.vllm import control_of
from tuneloop.explorer.versions.verifier import verify
from tuneloop.shared.checkpoints import ACTOR, PROBE_LENGTH, CheckpointStore, Manifest, Probe
from tuneloop.shared.errors import CheckpointRejected, EngineError
from tuneloop.shared.settings.settings import Settings

_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 512, "tie_word_embeddings": True}
_GLM_MOE = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True}
_QWEN35 = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
_EYES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "patch_size": 14}

#: Of a model that also sees, what its configuration has beside that of its text.
_VISION: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5": {
        "vision_config": {**_EYES, "depth": 1, "out_hidden_size": 128, "num_position_embeddings": 16},
        **{f"{name}_token_id": 10 + at for at, name in enumerate(("image", "video", "vision_start", "vision_end"))},
    },
    "gemma3": {
        "vision_config": {**_EYES, "num_hidden_layers": 1, "image_size": 28},
        "mm_tokens_per_image": 4,
        **{f"{name}_token_index": 10 + at for at, name in enumerate(("image", "boi", "eoi"))},
    },
}

#: By name: the model type as transformers knows it, and what its configuration has beside that of all of them.
ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Llama": ("llama", {}),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {"head_dim": 32}),
    "Qwen3 (tied)": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Phi-3": ("phi3", {}),
    "Granite": ("granite", {}),
    "OLMo 2": ("olmo2", {}),
    "Gemma 2 (tied)": ("gemma2", _GEMMA),
    "Gemma 3 (tied)": ("gemma3_text", _GEMMA),
    "Gemma 3 (tied, sees)": ("gemma3", _GEMMA),
    "Qwen3.5": ("qwen3_5_text", _QWEN35),
    "Qwen3.5 (sees)": ("qwen3_5", _QWEN35),
    "GLM-4": ("glm4", {"head_dim": 32}),
    "GLM-4-MoE": ("glm4_moe", {"head_dim": 32, **_GLM_MOE, **_MOE}),
    "Qwen3-MoE": ("qwen3_moe", {"head_dim": 32, "num_experts": 4, **_MOE}),
    "Mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}

ROW = [(37 * i * i + 11 * i) % 250 for i in range(PROBE_LENGTH)]
_START_S = 600.0

#: Several may be examined at once, in threads, which torch's random numbers and transformers' imports do not bear.
_BUILDING = threading.Lock()


@dataclasses.dataclass
class Findings:
    """Distances of an engine from transformers, in nats: started `fresh`, loaded `in_place`, and as an `adapter`."""

    name: str
    allowed: float
    fresh: float | None = None
    in_place: float | None = None
    adapter: float | None = None
    trial: bool | None = None
    reason: str = ""

    def row(self) -> str:
        """A line of the table."""
        chosen = {True: "in place", False: "fresh engine", None: "?"}[self.trial]
        cells = [self.name, *(self._cell(each) for each in (self.in_place, self.fresh, self.adapter)), chosen]
        return f"|{'|'.join(cells)}|"

    def _cell(self, distance: float | None) -> str:
        if distance is None:
            return "no"
        return f"{'yes' if distance <= self.allowed else 'no'} ({distance:.1g})"


def make_architecture(name: str, folder: Path, seed: int) -> Path:
    """An untrained tiny model in a folder, float32, the same for the same seed."""
    kind, more = ARCHITECTURES[name]
    words = tokenizer()
    ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id, "bos_token_id": None}
    text = {
        "vocab_size": len(words),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        # Far from uniform, so that other weights are far from these.
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        **ends,
        **more,
    }
    sees = _VISION.get(kind)
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    config = AutoConfig.for_model(kind, **({"text_config": text, **sees, **tied, **ends} if sees else text))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(config).to(torch.float32)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, **ends)
    save(model, words, folder)
    return folder


def make_architecture_adapter(base: Path, folder: Path, merged: Path) -> Path:
    """A version that is an adapter to the attention of a model: its actor, below a folder.

    The model that it makes of the base is written to `merged`.
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    names = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    targets = sorted(name for name in names if name in {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"})
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(std=0.1)
    store = CheckpointStore(folder)
    staging = store.stage(1)
    adapted.save_pretrained(staging / ACTOR)
    manifest = Manifest(
        version=1,
        parent=0,
        step=1,
        epoch=1,
        base_model=str(base),
        created_at=time.time(),
        dtype="float32",
        probe=Probe(prompt_ids=(1,), logprobs=(), tolerance=0.0),
        files=store.seal(staging),
        kind="lora",
    )
    path, _ = store.publish(staging, manifest)
    adapted.merge_and_unload().save_pretrained(merged)
    return path / ACTOR


def settings_of(name: str, folder: Path, base: Path, *, gpu: bool, rank: int = 0) -> Settings:
    """Settings of an explorer that serves a model."""
    rollout: dict[str, Any] = {"dtype": "bfloat16" if gpu else "float32", "enforce_eager": True}
    rollout |= {"kv_cache_memory_bytes": 64 << 20, "single_process": True, "gpu_memory_utilization": 0.05}
    model: dict[str, Any] = {"model_path": base, "max_model_len": 1024, "served_model_name": name}
    model["lora"] = {"rank": rank, "targets": attention_of(base)}
    return Settings.model_validate(
        {
            "mode": "serve",
            "checkpoint_root_dir": folder,
            "model": model,
            "cluster": {"gpu_per_node": int(gpu)},
            "explorer": {"rollout_model": rollout},
        }
    )


def attention_of(base: Path) -> list[str]:
    phi = json.loads((base / "config.json").read_text())["model_type"] == "phi3"
    return ["qkv_proj", "o_proj"] if phi else ["q_proj", "k_proj", "v_proj", "o_proj"]


@asynccontextmanager
async def control_of_started(settings: Settings, model: Path, log: Path) -> AsyncIterator[vllm.EngineControl]:
    """The routes of an engine that runs until the block ends. Raises EngineError if it does not start."""
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as output:
        socket = Path(folder) / "engine"  # its name must be short
        command = vllm.command(settings, model=model, socket=socket)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tuneloop.explorer.engines.guard", *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=vllm.environment(settings, 0),
        )
        async with _control(settings, socket, process, log) as control:
            yield control


@asynccontextmanager
async def _control(
    settings: Settings, socket: Path, process: asyncio.subprocess.Process, log: Path
) -> AsyncIterator[vllm.EngineControl]:
    assert process.stdin is not None
    try:
        async with vllm.open_session(url=None, socket=str(socket), key=None) as session:
            control = control_of(settings, session, tolerance=vllm.tolerance(settings))
            deadline = time.monotonic() + _START_S
            while not await control.healthy():
                if process.returncode is not None or time.monotonic() > deadline:
                    raise EngineError(f"it does not start: {_last_error(log)}")
                await asyncio.sleep(0.25)
            yield control
    finally:
        process.stdin.close()
        await process.wait()


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    return lines[-1].strip()[-200:] if lines else "no reason"


def examine(name: str, folder: Path, *, gpu: bool = False, adapters: bool = True) -> Findings:
    """Start engines of an architecture, one after the other, and compare them with transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    with _BUILDING:
        one, two = (make_architecture(name, folder / str(seed), seed) for seed in (1, 2))
        probes = probe_of(one, gpu=gpu), probe_of(two, gpu=gpu)
    found = Findings(name, vllm.tolerance(settings_of(name, folder / "all", one, gpu=gpu)))
    asyncio.run(_examine_weights(found, folder, (one, two), probes, gpu=gpu))
    if adapters:
        with _BUILDING:
            adapter = make_architecture_adapter(one, folder / "adapter", folder / "merged")
            probe = probe_of(folder / "merged", gpu=gpu)
        asyncio.run(_examine_adapter(found, folder, adapter, probe, gpu=gpu))
    return found


async def _examine_weights(
    found: Findings, folder: Path, models: tuple[Path, Path], probes: tuple[Probe, Probe], *, gpu: bool
) -> None:
    (one, two), (first, second) = models, probes
    settings = settings_of(found.name, folder / "all", one, gpu=gpu)
    try:
        async with control_of_started(settings, one, folder / "weights.log") as control:
            found.fresh = (await control.measure_probe(first)).weights
            held = verify(one, manifest_sha256="", version=0, base=one)
            weights = ServedWeights(one, held, head_is_seen=gpu or "tied" not in found.name)
            fault = await reload_fault(control, weights)
            found.trial, found.reason = fault is None, fault or ""
            await control.cache_probe(second)
            await control.pause("keep")
            await control.load(two)
            await control.reset_prefix_cache()
            await control.resume()
            after = await control.measure_probe(second)
            found.in_place = max(after.weights, after.cache)
    except (EngineError, CheckpointRejected) as error:
        found.reason = found.reason or str(error)


async def _examine_adapter(found: Findings, folder: Path, adapter: Path, probe: Probe, *, gpu: bool) -> None:
    base = folder / "1"
    settings = settings_of(found.name, folder / "lora", base, gpu=gpu, rank=8)
    try:
        async with control_of_started(settings, base, folder / "adapter.log") as control:
            await control.load(adapter)
            found.adapter = (await control.measure_probe(probe)).weights
    except (EngineError, CheckpointRejected) as error:
        found.reason = "; ".join(filter(None, [found.reason, f"adapters: {error}"]))


def probe_of(model: Path, *, gpu: bool) -> Probe:
    """What transformers says of a model, in float32; of what bfloat16 makes of it where engines serve that."""
    if gpu:
        rounded = model.parent / f"{model.name}-rounded"
        if not rounded.exists():
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).float().save_pretrained(rounded)
        model = rounded
    return Oracle(model).probe(ROW)
