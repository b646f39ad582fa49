"""What clients notice of a version that is being published beside them, on one disk.

    .venv/bin/python -m benchmarks.publishing [--size 0.6b|tiny] [--gpu] [--seconds 300] [--work FOLDER]

Starts `tuneloop run` on the settings of the README (a random model of that size), keeps streams, feedback and commits
going, and divides what they took by whether the trainer was writing a checkpoint at that moment: seconds between two
pieces of a stream, of a POST /feedback, of a POST /commit. Also prints the versions published, what the job's folder
takes on disk at most, and every request that failed. The model is made and everything is written below --work.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.sums.model import tokenizer

_READY_S = 600.0
_LOOK_S = 0.02
_RUN = "from tuneloop.cli.main import main; main()"
_DONE = b"data: [DONE]"

_SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
}


@dataclass
class Findings:
    """What the clients and a look at the disk found; seconds are those of time.monotonic."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    feedbacks: list[tuple[float, float]] = field(default_factory=list)
    commits: list[tuple[float, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    replies: int = 0
    #: When a checkpoint was being written: (from, until).
    writing: list[tuple[float, float]] = field(default_factory=list)
    most_bytes: int = 0
    most_dirty: int = 0


def make_model(folder: Path, size: str) -> None:
    """A random Qwen3 with the tokenizer of the example, in bfloat16 if it is large."""
    torch.manual_seed(7)
    words = tokenizer()
    large = size != "tiny"
    config = Qwen3Config(
        vocab_size=151_936 if large else len(words),
        num_key_value_heads=8 if large else 2,
        head_dim=128 if large else 32,
        max_position_embeddings=8192,
        tie_word_embeddings=large,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        **_SIZES[size],
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16 if large else torch.float32).save_pretrained(folder)
    words.save_pretrained(folder)


def write_settings(folder: Path, model: Path, *, gpu: bool, port: int) -> Path:
    """The README's settings, with this machine's paths; on a CPU with what a tiny engine needs."""
    values: dict[str, Any] = {
        "mode": "both",
        "project": "shop",
        "name": "assistant",
        "checkpoint_root_dir": str(folder / "job"),
        "model": {"model_path": str(model), "max_model_len": 8192, "served_model_name": "shop"},
        "cluster": {"gpu_per_node": int(gpu)},
        "explorer": {"proxy_port": port, "service_status_check_interval": 1, "rollout_model": {}},
        "buffer": {"train_batch_size": 32},
    }
    if gpu:
        values["explorer"]["rollout_model"]["gpu_memory_utilization"] = 0.4
    else:
        values["model"]["max_model_len"] = 1024
        values["explorer"]["rollout_model"] |= {
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 << 20,
            "single_process": True,
        }
        values["trainer"] = {"device": "cpu"}
    path = folder / "tuneloop.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def stagings(job: Path) -> list[Path]:
    """The folders that checkpoints are being written into."""
    return [each for each in job.rglob(".staging-*") if any(each.iterdir())]


def size_of(folder: Path) -> int:
    """The bytes of all files below a folder."""
    sizes = 0
    for top, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it may be pruned meanwhile
                sizes += os.stat(Path(top, name)).st_size
    return sizes


def dirty_bytes() -> int:
    """What the kernel has not yet written to any disk."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Dirty:", "Writeback:")))


async def watch(job: Path, found: Findings, over: asyncio.Event) -> None:
    """Note when checkpoints are written, and how much is on the disk."""
    since, sized = None, 0.0
    while not over.is_set():
        now = time.monotonic()
        try:
            busy = bool(stagings(job))
        except OSError:
            busy = True  # renamed while it was listed
        if busy and since is None:
            since = now
        if not busy and since is not None:
            found.writing.append((since, now))
            since = None
        found.most_dirty = max(found.most_dirty, dirty_bytes())
        if now - sized > 1:
            sized, found.most_bytes = now, max(found.most_bytes, await asyncio.to_thread(size_of, job))
        await asyncio.sleep(_LOOK_S)
    if since is not None:
        found.writing.append((since, time.monotonic()))


async def lane(http: httpx.AsyncClient, number: int, found: Findings, over: asyncio.Event) -> None:
    """Ask for a stream, give feedback on it, commit at intervals."""
    body = {
        "model": "shop",
        "messages": [{"role": "user", "content": f"tell me about {number}"}],
        "max_tokens": 128,
        "stream": True,
    }
    asked = 0
    while not over.is_set():
        asked += 1
        try:
            msg_id, text = await _stream(http, body, found)
            reward = sum(each.isalpha() for each in text) / max(1, len(text))
            await _time(http, "/feedback", {"msg_ids": [msg_id], "reward": reward}, found.feedbacks)
            if number == 0 and asked % 2 == 0:
                await _time(http, "/commit", {}, found.commits)
        except (httpx.HTTPError, RuntimeError) as error:
            found.failures.append(f"{time.strftime('%H:%M:%S')} {error!r}")
            await asyncio.sleep(0.5)


async def _stream(http: httpx.AsyncClient, body: dict[str, Any], found: Findings) -> tuple[str, str]:
    text, last, complete = "", None, False
    async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {(await reply.aread())[:200]!r}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            now = time.monotonic()
            if last is not None:
                found.gaps.append((now, now - last))
            last = now
            if line.encode() == _DONE:
                complete = True
                break
            chunk = json.loads(line.removeprefix("data: "))
            msg_id = chunk.get("id")
            if chunk.get("choices"):
                text += chunk["choices"][0]["delta"].get("content") or ""
    if not complete:
        raise RuntimeError("a stream ended without [DONE]")
    found.replies += 1
    return msg_id, text


async def _time(http: httpx.AsyncClient, path: str, body: dict[str, Any], into: list[tuple[float, float]]) -> None:
    began = time.monotonic()
    reply = await http.post(path, json=body)
    now = time.monotonic()
    into.append((now, now - began))
    if reply.status_code != 200:
        raise RuntimeError(f"{path} {reply.status_code}: {reply.text[:200]}")


async def use(url: str, job: Path, found: Findings, *, lanes: int, seconds: float) -> None:
    """Load it for that long."""
    over = asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=120) as http, asyncio.TaskGroup() as group:
        group.create_task(watch(job, found, over))
        for number in range(lanes):
            group.create_task(lane(http, number, found, over))
        await asyncio.sleep(seconds)
        over.set()


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Raise RuntimeError if it does not serve within _READY_S."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"it does not serve: {log.read_text()[-3000:]}")


def row(name: str, seconds: Sequence[tuple[float, float]], writing: Sequence[tuple[float, float]]) -> str:
    """A line of the table: p50, p99 and the worst, in ms, while a checkpoint is written and otherwise."""
    during, beside = [], []
    for at, took in seconds:
        overlaps = any(at > begin and at - took < end for begin, end in writing)
        (during if overlaps else beside).append(1000 * took)
    cells, tails = [name], []
    for each in (beside, during):
        if not each:
            return f"| {name} | too few: {len(beside)} without, {len(during)} while one is written | | |"
        p50, p99 = np.percentile(each, [50, 99])
        tails.append(p99)
        cells.append(f"{p50:.1f} / {p99:.1f} / {max(each):.0f} ({len(each)})")
    return "| " + " | ".join([*cells, f"{tails[1] / tails[0]:.2f}"]) + " |"


def main() -> int:
    """Run it and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publishing", description=__doc__)
    parser.add_argument("--size", choices=sorted(_SIZES), default="tiny")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--port", type=int, default=8010)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="tuneloop-publishing-"))
    work.mkdir(parents=True, exist_ok=True)
    make_model(work / "model", options.size)
    config = write_settings(work, work / "model", gpu=options.gpu, port=options.port)
    url, log = f"http://127.0.0.1:{options.port}", work / "both.log"
    command = [sys.executable, "-P", "-c", _RUN, "run", "--config", str(config)]
    found = Findings()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            wait_until_ready(url, process, log)
            asyncio.run(use(url, work / "job", found, lanes=options.lanes, seconds=options.seconds))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    published = log.read_text().count("version_published")
    print(f"{found.replies} streams, {published} versions published in {options.seconds:.0f} s;", end=" ")
    print(f"checkpoints were being written for {sum(end - begin for begin, end in found.writing):.1f} s")
    print(
        f"most on disk {found.most_bytes / 1e9:.2f} GB of job folder; most dirty pages {found.most_dirty / 1e9:.2f} GB;"
    )
    print(f"free on that disk {shutil.disk_usage(work).free / 1e9:.1f} GB; {len(found.failures)} requests failed")
    for each in found.failures[:10]:
        print("   ", each)
    print("| ms: p50 / p99 / worst (count) | without | while a checkpoint is written | p99 ratio |")
    print("|---|---|---|---|")
    for name, seconds in (("gap", found.gaps), ("feedback", found.feedbacks), ("commit", found.commits)):
        print(row(name, seconds, found.writing))
    return 0


if __name__ == "__main__":
    sys.exit(main())
