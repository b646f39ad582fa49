"""What a step of each method costs, how much of the machine it uses, and what it takes of its memory.

    python -m benchmarks.train_step [--size 0.6b|1.7b|4b|8b|tiny] [--methods ppo,grpo,reinforce,sft]
        [--settings micro_batch_tokens=32768,compile=true] [--bits 8] [--lora 16] [--base-bits 4]
        [--sequences 64] [--steps 3] [--card 79] [--plain]

Random weights of the shape of Qwen3, made on the spot; random replies whose lengths are log-normal, prompt and reply
half each. One process, the learner alone (`Learner.step`): no ledger, no engine, no disk; what `--settings` leave open
is chosen for the GPU's memory, as a trainer does that has it alone. Prints for each method the best of some steps after
one to warm up:

    tokens/s       tokens of all sequences / seconds of a step
    of its floor   the seconds that the method's matmuls and attention would take at this machine's own peak, / seconds
    of the peak    the floating-point operations of an actor's update alone / seconds / peak, as others report it
    memory         the most that was allocated (GPU), or the most that the process had (CPU)
    reckoned       what `tuneloop plan` says that it takes, and its ratio to that

`--card` lets torch allocate so many GiB, as on a smaller card; settings are chosen for these.

`--plain` does the same update by hand beside them: transformers' forward, padded, all logits in float32. The peak is
that of a large square matmul of the models' type, measured in the same run. For the tiny shape on a CPU all numbers are
small; that run shows only that everything runs.
"""

import argparse
import gc
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from tuneloop.shared.capacity.memory import GIB, reckon, shapes_of
from tuneloop.shared.experience import Sample
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.micro_batch import fit_to_memory

#: Width, inner width, layers, heads, key-value heads, width of a head, vocabulary, tied head.
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "tiny": (64, 192, 2, 4, 2, 16, 512, True),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151_936, True),
    "1.7b": (2048, 6144, 28, 16, 8, 128, 151_936, True),
    "4b": (2560, 9728, 36, 32, 8, 128, 151_936, True),
    "8b": (4096, 12_288, 36, 32, 8, 128, 151_936, False),
    "14b": (5120, 17_408, 40, 40, 8, 128, 151_936, False),
    "32b": (5120, 25_600, 64, 64, 8, 128, 151_936, False),
}
#: By method: what it needs beside its type; a reference where the table of docs/methods has one by default here.
METHODS: dict[str, dict[str, Any]] = {
    "ppo": {"kl_coef": 0.001},
    "reinforce": {"kl_coef": 0.001},
    "grpo": {"kl_coef": 0.001},
    "sft": {"kl_coef": 0.0},
    "dpo": {},
    "kto": {},
}
#: The rest of a method's passes: of the actor, forward and backward three times a forward; of the critic; forward only.
PASSES = {
    "ppo": (3, 4, 1),
    "reinforce": (3, 0, 1),
    "grpo": (3, 0, 1),
    "sft": (3, 0, 0),
    "dpo": (3, 0, 1),
    "kto": (3, 0, 3),
}
GROUP = 8


class Figures(NamedTuple):
    """A row of the table."""

    name: str
    tokens: int
    seconds: float
    floor_flops: float
    update_flops: float
    bytes: int
    useful: float
    reckoned: int = 0

    def line(self, peak: float) -> str:
        """As Markdown."""
        rate = self.tokens / self.seconds
        floor, share = (flops / self.seconds / peak for flops in (self.floor_flops, self.update_flops))
        memory = f"{self.bytes / GIB:.1f} GiB | "
        memory += f"{self.reckoned / GIB:.1f} GiB, {self.reckoned / self.bytes:.2f}" if self.reckoned else "–"
        speed = f"{self.seconds:.3f} s | {rate:,.0f} | {floor:.1%} | {share:.1%}"
        return f"| {self.name} | {speed} | {memory} | {self.useful:.3f} |"


def make_model(size: str, folder: Path, dtype: torch.dtype, device: torch.device) -> Qwen3Config:
    """Random weights of a shape in a folder."""
    return write_random(SHAPES[size], folder, dtype, device, eos_token_id=1)


def write_random(
    shape: tuple[int, int, int, int, int, int, int, bool],
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    **tokens: int | None,
) -> Qwen3Config:
    """Random weights in a folder, and a configuration that also says which `tokens` are special."""
    width, inner, layers, heads, kv_heads, head, vocabulary, tied = shape
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        max_position_embeddings=40_960,
        tie_word_embeddings=tied,
        **tokens,
    )
    torch.manual_seed(7)
    with torch.device(device):
        network = Qwen3ForCausalLM._from_config(config, dtype=dtype)  # Float32 of 32 B does not fit one GPU.
    network.save_pretrained(folder)
    del network
    _forget(device)
    return config


def made_samples(count: int, mean: float, longest: int, vocabulary: int) -> list[Sample]:
    """Replies of log-normal lengths, prompts included: at 64, 675 and 2 475 they are 43 thousand tokens."""
    random = np.random.default_rng(3)
    lengths = np.clip(random.lognormal(np.log(mean) - 0.32, 0.8, count).astype(int), 16, longest)
    return [_sample(number, int(length), vocabulary) for number, length in enumerate(lengths)]


def _sample(number: int, length: int, vocabulary: int) -> Sample:
    random = np.random.default_rng(number)
    group, reply = number // GROUP, max(1, length // 2)
    prompt = np.random.default_rng(10_000 + group).integers(2, vocabulary, 40_960, dtype=np.int32)
    # Pairs need the same prompt; elsewhere replies of a group share the beginning of one.
    return Sample(
        id=number,
        prompt_ids=prompt[: max(1, length - reply)],
        completion_ids=random.integers(2, vocabulary, reply, dtype=np.int32),
        logprobs=random.normal(-np.log(vocabulary), 0.1, reply).astype(np.float32),
        reward=float(number % 2),
        temperature=1.0,
        version_min=0,
        version_max=0,
        tenant="default",
        task_id=f"t{group}",
        run_id=str(number),
        group_id=group,
        rewarded_at=0.0,
        committed_at=0.0,
    )


def forward_flops(config: Qwen3Config, lengths: Sequence[int], head_tokens: int) -> tuple[float, float]:
    """Of one forward over sequences: the body's with causal attention, and the head's at so many tokens."""
    width, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = width * (2 * queries + 2 * keys) + 3 * width * inner
    body = 2.0 * config.num_hidden_layers * layer * sum(lengths)
    attention = 2.0 * config.num_hidden_layers * queries * sum(length**2 for length in lengths)
    return body + attention, 2.0 * config.vocab_size * width * head_tokens


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a square matmul, the best of some."""
    size = 8192 if device.type == "cuda" else 1024
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def multiply() -> None:
        one @ other

    return 2.0 * size**3 / best_of(multiply, 6, device)


def best_of(work: Callable[[], Any], times: int, device: torch.device) -> float:
    """Seconds of the fastest, after one to warm up."""
    taken = []
    for _ in range(times + 1):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def limit_memory(gib: float) -> None:
    """Let this process allocate no more of the GPU, and find no more there."""
    free_and_total, card = torch.cuda.mem_get_info, int(gib * GIB)
    torch.cuda.set_per_process_memory_fraction(card / free_and_total()[1])
    torch.cuda.mem_get_info = lambda device=None: (min(card, free_and_total(device)[0]), card)


@contextmanager
def peak_memory(device: torch.device, found: list[int]) -> Iterator[None]:
    """Add the most bytes that are taken within to `found`."""
    _forget(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    yield
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    found.append(torch.cuda.max_memory_allocated() if device.type == "cuda" else rss)


def measure_method(
    method: str, folder: Path, config: Qwen3Config, samples: Sequence[Sample], options: argparse.Namespace
) -> Figures:
    """Steps of the learner."""
    chosen: dict[str, Any] = dict(each.split("=") for each in options.settings.split(",") if each)
    settings = Settings.model_validate(
        {
            "mode": "train",
            "checkpoint_root_dir": folder.parent,
            "model": {"model_path": folder, "lora": {"rank": options.lora, "base_bits": options.base_bits}},
            "algorithm": {
                "algorithm_type": method,
                "mini_batches": options.mini_batches,
                "optimizer": {"bits": options.bits},
                **METHODS[method],
            },
            "buffer": {"group_by": "task", "group_size": GROUP},
            "trainer": {"device": options.device, "dtype": options.dtype, **chosen},
            "cluster": {"gpu_per_node": int(options.device == "cuda")},
        }
    )
    settings = fit_to_memory(settings)
    device, memory = torch.device(options.device), []
    rows = list(samples)
    if method == "dpo":  # Pairs of a group, with one prompt.
        rows = [_like(each, samples[number - number % 2]) for number, each in enumerate(samples)]
    with peak_memory(device, memory):
        seconds, useful = _steps(settings, rows, options.steps)
    _forget(device)
    lengths = [len(each.prompt_ids) + len(each.completion_ids) for each in rows]
    body, head = forward_flops(config, lengths, sum(len(each.completion_ids) for each in rows))
    actor, critic, reference = PASSES[method]
    floor = actor * (body + head) + critic * body + reference * (body + head)
    name = f"{method}, {settings.trainer.tokens_at_once:,} at once"
    reckoned = reckon(settings, shapes_of(settings)).total
    return Figures(name, sum(lengths), seconds, floor, 3 * (body + head), memory[0], useful, reckoned)


def _steps(settings: Settings, rows: Sequence[Sample], count: int) -> tuple[float, float]:
    """Seconds of the best step, and the share of its tokens that were of sequences."""
    learner, useful = snapshot.load(settings, None), []
    device = learner.actor.network.device
    seconds = best_of(lambda: useful.append(learner.step(rows)["perf/useful_tokens"]), count, device)
    return seconds, useful[-1]


def _forget(device: torch.device) -> None:
    """Free memory, which decides the tokens per pass of the next model."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _like(sample: Sample, other: Sample) -> Sample:
    values = {name: getattr(sample, name) for name in sample.__struct_fields__}
    return Sample(**(values | {"prompt_ids": other.prompt_ids}))


def measure_plain(folder: Path, config: Qwen3Config, samples: Sequence[Sample], options: argparse.Namespace) -> Figures:
    """The update of sft by hand: sorted by length, padded, eight at a time, all logits of the replies in float32."""
    device, memory = torch.device(options.device), []
    ids = sorted((np.concatenate([each.prompt_ids, each.completion_ids]) for each in samples), key=len)
    replies = sorted((len(each.prompt_ids) + len(each.completion_ids), len(each.completion_ids)) for each in samples)
    with peak_memory(device, memory):
        network = Qwen3ForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype)).to(device)
        adamw = torch.optim.AdamW(network.parameters(), lr=1e-6, fused=True)

        def step() -> None:
            for start in range(0, len(ids), 8):
                part = [torch.from_numpy(each).long() for each in ids[start : start + 8]]
                ids_BT = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).to(device)
                logprobs_BT = network(input_ids=ids_BT, use_cache=False).logits[:, :-1].float().log_softmax(-1)
                said_BT = logprobs_BT.gather(-1, ids_BT[:, 1:, None])[..., 0]
                mask_BT = torch.zeros_like(said_BT)
                for row, (whole, reply) in enumerate(replies[start : start + 8]):
                    mask_BT[row, whole - reply - 1 : whole - 1] = 1
                (-(said_BT * mask_BT).sum() / sum(reply for _, reply in replies)).backward()
            adamw.step()
            adamw.zero_grad()

        seconds = best_of(step, options.steps, device)
    lengths = [whole for whole, _ in replies]
    body, head = forward_flops(config, lengths, sum(reply for _, reply in replies))
    padded = sum(max(lengths[at : at + 8]) * len(lengths[at : at + 8]) for at in range(0, len(lengths), 8))
    flops = 3 * (body + head)
    return Figures("sft by hand, padded", sum(lengths), seconds, flops, flops, memory[0], sum(lengths) / padded)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--size", choices=SHAPES, default="0.6b" if on_gpu else "tiny")
    parser.add_argument("--methods", default="ppo,reinforce,grpo,sft")
    parser.add_argument(
        "--settings", default="", help="of `trainer`, with commas: compile=true,micro_batch_tokens=32768"
    )
    parser.add_argument("--bits", type=int, choices=[8, 32], default=32, help="of AdamW's moments")
    parser.add_argument("--lora", type=int, default=0, help="the rank of an adapter; 0: all weights are trained")
    parser.add_argument("--base-bits", type=int, choices=[4, 8], help="of the weights below an adapter")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--mean", type=int, default=675, help="tokens of a sequence")
    parser.add_argument("--longest", type=int, default=2475)
    parser.add_argument("--mini-batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--card", type=float, help="GiB of GPU memory, fewer than the GPU has")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16" if on_gpu else "float32")
    return parser.parse_args()


def main() -> int:
    """Measure and print the table."""
    transformers.utils.logging.disable_progress_bar()
    options = _options()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "a CPU"
    with tempfile.TemporaryDirectory(prefix="train-step-") as folder:
        model = Path(folder) / "model"
        config = make_model(options.size, model, dtype, device)
        samples = made_samples(options.sequences, options.mean, options.longest, config.vocab_size)
        lengths = [len(each.prompt_ids) + len(each.completion_ids) for each in samples]
        peak = peak_flops(device, dtype)
        print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {options.dtype}")
        print("parts of tuneloop: the learner; no ledger, explorer or engine, so that our vLLM plugin is not loaded")
        print(f"Qwen3 {options.size}, {len(lengths)} sequences, {sum(lengths):,} tokens, longest {max(lengths):,}")
        print(f"peak of a square matmul {peak / 1e12:,.1f} TFLOP/s; trainer: {options.settings or 'as by default'}\n")
        print("| method | a step | tokens/s | of its floor | of the peak | memory | reckoned | useful |")
        print("|---|---|---|---|---|---|---|---|")
        if options.card:
            limit_memory(options.card)
        for method in options.methods.split(","):
            print(measure_method(method, model, config, samples, options).line(peak), flush=True)
        if options.plain:
            print(measure_plain(model, config, samples, options).line(peak), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
