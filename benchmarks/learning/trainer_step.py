"""What one optimiser step of PPO costs on a CPU, this checkout beside another, step by step in turns.

    .venv/bin/python -m benchmarks.learning.trainer_step --against CHECKOUT [--steps 20]

Prints CPU seconds of each checkout's steps (median) and the median of the ratios, pair by pair. Both checkouts make the
same step: the same weights, batch and seed.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parent.parent.parent
SEQUENCES, VOCABULARY = 32, 512


def make_model(folder: Path) -> None:
    """A random Qwen3 of 1.2 M parameters."""
    torch.manual_seed(7)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = Qwen3Config(
        vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, eos_token_id=1, **shape
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def serve_steps(model: Path) -> None:
    """Make a step for each line of standard input, and print the CPU seconds that it took."""
    from tuneloop.shared.experience import Sample
    from tuneloop.shared.settings.settings import Settings
    from tuneloop.trainer.checkpoints import snapshot

    torch.set_num_threads(1)
    settings = Settings.model_validate(
        {
            "mode": "train",
            "checkpoint_root_dir": model.parent,
            "model": {"model_path": model},
            "algorithm": {"algorithm_type": "ppo", "kl_coef": 0.01},
            "trainer": {"device": "cpu", "micro_batch_tokens": 4096},
        }
    )
    learner = snapshot.load(settings, None)
    samples = [_sample(Sample, number) for number in range(SEQUENCES)]
    for _ in sys.stdin:
        before = time.process_time()
        learner.step(samples)
        sys.stdout.write(f"{time.process_time() - before}\n")
        sys.stdout.flush()


def _sample(kind: type, number: int) -> object:
    random = np.random.default_rng(number)
    prompt, reply = int(random.integers(20, 120)), int(random.integers(20, 200))
    return kind(
        id=number,
        prompt_ids=random.integers(2, VOCABULARY, prompt, dtype=np.int32),
        completion_ids=random.integers(2, VOCABULARY, reply, dtype=np.int32),
        logprobs=random.normal(-6.2, 0.1, reply).astype(np.float32),
        reward=float(random.integers(0, 2)),
        temperature=1.0,
        version_min=0,
        version_max=0,
        tenant="default",
        task_id=None,
        run_id=None,
        group_id=None,
        rewarded_at=0.0,
        committed_at=0.0,
    )


def start(checkout: Path, model: Path, links: Path) -> "subprocess.Popen[str]":
    """A process that makes steps with a checkout's trainer."""
    subprocess.run([checkout / "scripts" / "links", links], check=True)
    environment = {**os.environ, "PYTHONPATH": f"{links}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "benchmarks.learning.trainer_step", "--model", str(model)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def step(process: "subprocess.Popen[str]") -> float:
    """The CPU seconds of the next step."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> int:
    """Measure in turns and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning.trainer_step", description=__doc__)
    parser.add_argument("--against", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        serve_steps(options.model)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        here, there = (
            start(checkout.absolute(), model, Path(folder) / name)
            for name, checkout in (("here", ROOT), ("there", options.against))
        )
        with here, there:
            step(here), step(there)  # the first allocates
            pairs = [(step(here), step(there)) for _ in range(options.steps)]
    ours, theirs = ([pair[at] for pair in pairs] for at in (0, 1))
    ratio = statistics.median(one / other for one, other in pairs)
    print(f"this checkout {statistics.median(ours):.3f} s, {options.against} {statistics.median(theirs):.3f} s")
    print(f"ratio {ratio:.3f} over {len(pairs)} pairs of steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
