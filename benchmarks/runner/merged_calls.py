"""How many tokens does merging save? Chains of ten calls through the service, by a vLLM on the CPU.

    python -m benchmarks.runner.merged_calls [--runs 20] [--client openai agentscope1 agentscope2]

The model is taught here, in a minute or two, to speak plain text and to call a tool. What it says, sampled at
temperature 1, goes back to vLLM as messages, is rendered by the chat template and read as tokens again; only where
these are the tokens that were sampled do calls become one sequence.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.on_gpu.services import await_ready, rollout_of, service, write_settings
from benchmarks.runner.lookups import HOPS, LookUps
from examples.sums.model import save
from examples.worlds import model as models
from examples.worlds.warmup import learn, lessons
from tuneloop.runner.models.run import StoredCalls

MODEL, PORT = "walker", 21_620
ROOT = Path(__file__).parent.parent.parent
#: Steps of so many conversations each: it learns by heart how it is talked here.
STEPS, BATCH, CONVERSATIONS, RATE = 250, 8, 400, 3e-3


def teach(folder: Path) -> Path:
    """The folder of a model that answers like the task's agents."""
    task, chance = LookUps(), random.Random(1)
    torch.set_num_threads(1)
    words = models.tokenizer(task)
    model = models.build(words, hidden=96, layers=2, seed=1)
    runs = [lessons(task, words, each, None) for each in task.questions()[:CONVERSATIONS]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), fused=True)
    for step in range(STEPS):
        batch = [row for run in chance.choices(runs, k=BATCH) for row in run]
        loss = learn(batch, model, words, optimizer, RATE * min(1.0, (step + 1) / 20, 1.1 - step / STEPS))
        if step % 25 == 24:
            print(f"step {step + 1}: loss {loss:.3f}", flush=True)
    save(model, words, folder)
    return folder


def run_agents(client: str, runs: int) -> list[dict[str, Any]]:
    """Runs of an agent, in the environment of its package."""
    python = sys.executable if client == "openai" else str(ROOT / ".venv" / "clients" / client / "bin" / "python")
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'build' / 'links'}:{environment.get('PYTHONPATH', '')}"
    words = [python, "-m", "benchmarks.runner.lookups", f"http://127.0.0.1:{PORT}", MODEL, str(runs)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def read_stored(run: dict[str, Any]) -> StoredCalls:
    """The service's counts of the run's tokens."""
    query = {"task_id": run["task_id"], "run_id": run["run_id"], "tokens": "true"}
    answer = httpx.get(f"http://127.0.0.1:{PORT}/training/calls", params=query, timeout=30, trust_env=False)
    return StoredCalls.of(answer.raise_for_status().json())


def main() -> None:
    """Teach, serve, run, and print the tokens call by call and merged."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--client", nargs="+", default=["openai", "agentscope1", "agentscope2"])
    parser.add_argument("--model", type=Path, help="the folder of another model; else one is taught")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = options.model or teach(folder / "model")
        write_settings(folder / "explorer.yaml", _settings(folder, model))
        explorer = stack.enter_context(service(folder / "explorer.yaml", "explorer", folder / "explorer.log"))
        await_ready(f"http://127.0.0.1:{PORT}/health/ready", explorer, folder / "explorer.log", timeout_s=300)
        for client in options.client:
            _report(client, run_agents(client, options.runs))


def _settings(folder: Path, model: Path) -> dict[str, Any]:
    rollout = rollout_of(on_gpu=False, memory=0, api_servers=None) | {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    }
    return {
        "mode": "serve",
        "project": "bench",
        "name": "merged",
        "checkpoint_root_dir": str(folder),
        "model": {"model_path": str(model), "max_model_len": 2048, "served_model_name": MODEL},
        "cluster": {"gpu_per_node": 0},
        "explorer": {"proxy_port": PORT, "rollout_model": rollout},
    }


def _report(client: str, runs: list[dict[str, Any]]) -> None:
    found = [read_stored(run) for run in runs]
    whole = [each for each in found if each.calls > HOPS]
    ratios = sorted(each.tokens / each.merged_tokens for each in found)
    tokens, merged = sum(each.tokens for each in found), sum(each.merged_tokens for each in found)
    sequences = [each.sequences for each in found]
    print(
        f"{client}: {len(found)} runs, {len(whole)} of more than {HOPS} calls, "
        f"calls {min(each.calls for each in found)}-{max(each.calls for each in found)}; "
        f"{tokens} tokens call by call, {merged} merged: {tokens / merged:.2f} times fewer "
        f"(a run {ratios[0]:.2f}-{ratios[-1]:.2f}, median {statistics.median(ratios):.2f}); "
        f"sequences of a run: {statistics.mean(sequences):.2f} (most {max(sequences)}), "
        f"{sum(each == 1 for each in sequences)} runs of one",
        flush=True,
    )


if __name__ == "__main__":
    main()
