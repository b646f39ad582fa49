"""Policies on one engine: tokens a second beside bare vLLM, first replies, and commit to served of each.

    python -m benchmarks.policies serve [--size 0.6b] [--policies 64] [--registered 1000] [--rank 16]
        [--at-once 64,256] [--tokens 128] [--rounds 3] [--budget-seconds 420] [--work FOLDER]
    python -m benchmarks.policies train [--size 8b] [--policies 8] [--rank 32] [--batch 16] [--lanes 16]
        [--tokens 128] [--budget-seconds 480] [--work FOLDER]

`serve`: so many policies with random adapters, all resident, behind an explorer with an engine of its own; and "bare",
vLLM with the same flags and the same adapters, loaded by its own route, without our plug-in. Clients ask both by turns,
one adapter after the other, for whole replies; a ratio is tokens a second of ours by those of bare in the same turn.
Then more policies are registered, which begin with versions of the first ones, and some are asked for the first time:
what is told is how long that reply took, beside the same reply once more.

`train`: explorer and trainer share a GPU; lanes of clients ask all policies all the time. One policy after the other
gets a batch of rewards and a commit; told are the seconds from the commit until the version answers, and what it cost
the trainer to change from one policy to another.

On a machine without a GPU everything is tiny, and shows only that it runs.
"""

import argparse
import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import httpx
import torch

from benchmarks.on_gpu.random_model import make_model
from benchmarks.on_gpu.services import (
    Clock,
    await_ready,
    bare_engine,
    log_events,
    plugin_of,
    rollout_of,
    service,
    tell_trouble,
    write_settings,
)
from benchmarks.proxy.load import running
from tuneloop.explorer.engines import vllm
from tuneloop.explorer.engines.vllm_plugin import PACKS
from tuneloop.shared.checkpoints import ACTOR, CheckpointStore
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.versions.versions import RegisteredVersions
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.publication import Publication

_MODEL, _PORT, _BARE_PORT = "random", 21_700, 21_710
#: Of the keys and values of an engine.
_CACHE_BYTES = 16 << 30
_RUN = "from tuneloop.cli.main import main; main()"


def main() -> int:
    """Measure and print; 1 if a request failed."""
    options = _options()
    clock = Clock(options.budget_seconds)
    where = torch.cuda.get_device_name() if options.gpu else "CPU"
    print(
        f"{where}, {len(os.sched_getaffinity(0))} cores, {vllm.installed_version()}, torch {torch.__version__}; Qwen3 "
        f"{options.size}, random, {options.policies} policies of rank {options.rank}",
        flush=True,
    )
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="policies-", dir=options.work)))
        return (_serve if options.what == "serve" else _train)(work, options, clock, stack)


def _values(work: Path, model: Path, options: argparse.Namespace, memory: float) -> dict[str, Any]:
    return {
        "mode": "both",
        "project": "bench",
        "name": "policies",
        "checkpoint_root_dir": str(work / "job"),
        "model": {
            "model_path": str(model),
            "max_model_len": 2048 if options.gpu else 512,
            "served_model_name": _MODEL,
            "lora": {"rank": options.rank, "resident": options.policies},
        },
        "cluster": {"gpu_per_node": int(options.gpu)},
        "explorer": {
            "proxy_port": _PORT,
            "rollout_model": rollout_of(on_gpu=options.gpu, memory=memory, api_servers=None),
        },
        "buffer": {"train_batch_size": options.batch},
        "trainer": {"save_interval": 1, "max_checkpoints_to_keep": 0},
    }


def _serve(work: Path, options: argparse.Namespace, clock: Clock, stack: ExitStack) -> int:
    model = make_model(options.size, work / "model", on_gpu=options.gpu)
    values = _values(work, model, options, options.memory / 2)
    if options.gpu:  # else the two would disturb each other when they look for room
        values["explorer"]["rollout_model"]["kv_cache_memory_bytes"] = _CACHE_BYTES
    settings = write_settings(work / "tuneloop.yaml", values)
    log, bare_log = work / "explorer.log", work / "bare.log"
    bare = stack.enter_context(bare_engine(settings, model, _BARE_PORT, bare_log, env={PACKS: "0"}))
    ours = stack.enter_context(service(work / "tuneloop.yaml", "explorer", log, env={"TUNELOOP_LOG_JSON": "1"}))
    url = f"http://127.0.0.1:{_PORT}"
    await_ready(f"{url}/health/ready", ours, log, timeout_s=clock.remaining - 60)
    await_ready(f"http://127.0.0.1:{_BARE_PORT}/health", bare, bare_log, timeout_s=clock.remaining - 60)
    clock.say(f"both are up; bare {plugin_of(f'http://127.0.0.1:{_BARE_PORT}', _MODEL)}")
    ledger = stack.enter_context(closing(Ledger.of(settings)))
    names = [f"p{number}" for number in range(options.policies)]
    numbers = {name: ledger.policies.create(name, by="benchmark").id for name in names}
    began = time.monotonic()
    versions = _publish_adapters(settings, ledger, list(numbers.values()))
    clock.say(f"{len(versions)} adapters are written in {time.monotonic() - began:.1f} s")
    while missing := [n for n, v in zip(names, versions, strict=True) if _champion(ledger, numbers[n]) != v]:
        if clock.remaining < 60:
            raise SystemExit(f"{len(missing)} policies are not served")
        time.sleep(0.2)
    clock.say(f"all are served, {time.monotonic() - began:.1f} s after the first was begun")
    store = CheckpointStore(settings.job_dir)
    for name, version in zip(names, versions, strict=True):
        body = {"lora_name": name, "lora_path": str(store.path(version) / ACTOR)}
        httpx.post(f"http://127.0.0.1:{_BARE_PORT}/v1/load_lora_adapter", json=body, timeout=60).raise_for_status()
    failed = 0
    rates: dict[int, list[tuple[float, float]]] = defaultdict(list)
    counts = [int(each) for each in options.at_once.split(",")]
    for number in range(-1, options.rounds):  # the first one warms up
        for at_once in counts if number >= 0 else counts[-1:]:
            ports = (_BARE_PORT, _PORT) if number % 2 else (_PORT, _BARE_PORT)
            found = {port: asyncio.run(_rate(port, names, at_once, options)) for port in ports}
            failed += sum(each[1] for each in found.values())
            pair = found[_PORT][0], found[_BARE_PORT][0]
            if number >= 0:
                rates[at_once].append(pair)
            clock.say(f"{at_once} at once: ours {pair[0]:,.0f} tokens/s, bare {pair[1]:,.0f}: {pair[0] / pair[1]:.3f}")
    for at_once, pairs in rates.items():
        ratio = geometric_mean([one / other for one, other in pairs])
        own, other = (median(each) for each in zip(*pairs, strict=True))
        print(f"{at_once} at once: ours {own:,.0f} tokens/s, bare {other:,.0f}, ratio {ratio:.3f} in {len(pairs)}")
    failed += _first_replies(ledger, names, versions, options, clock)
    print(f"failed requests: {failed}")
    tell_trouble(log, clock)
    return int(failed > 0)


def _publish_adapters(settings: Settings, ledger: Ledger, policies: Sequence[int]) -> list[int]:
    """A version for each policy, with a random adapter."""
    learner = snapshot.load(settings, None)
    store, epoch, found = CheckpointStore(settings.job_dir), ledger.training.take_epoch("benchmark"), []
    for policy in policies:
        with torch.no_grad():
            for each in learner.actor.network.parameters():
                if each.requires_grad:
                    each.normal_(std=0.02)
        weights, probe = snapshot.weights_of(learner), snapshot.probe(learner, settings)
        parent = ledger.versions.of(policy).newest().version
        publication = Publication(settings, store, weights, probe, epoch=epoch, parent=parent, policy=policy)
        found.append(publication.register(ledger.training, []).version)
    del learner
    torch.cuda.empty_cache()
    return found


def _champion(ledger: Ledger, policy: int) -> int:
    return ledger.versions.of(policy).champion().version


def _body(name: str, tokens: int) -> dict[str, Any]:
    said = f"Tell me about number {random.randrange(10**9)}."
    messages = [{"role": "user", "content": said}]
    return {"model": name, "messages": messages, "max_tokens": tokens}


async def _rate(port: int, names: Sequence[str], at_once: int, options: argparse.Namespace) -> tuple[float, int]:
    """Tokens a second of so many clients, each of which asks for one policy after the other; and failures."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    tokens, failed, whole = 0, 0, {"ignore_eos": True}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=180, limits=limits) as http:

        async def lane(number: int) -> None:
            nonlocal tokens, failed
            for turn in range(options.waves):
                name = names[(number + turn * 7) % len(names)]
                reply = await http.post("/v1/chat/completions", json=_body(name, options.tokens) | whole)
                if reply.status_code == 200:
                    tokens += reply.json()["usage"]["completion_tokens"]
                else:
                    failed += 1

        began = time.monotonic()
        await asyncio.gather(*map(lane, range(at_once)))
        return tokens / (time.monotonic() - began), failed


def _first_replies(
    ledger: Ledger, names: Sequence[str], versions: Sequence[int], options: argparse.Namespace, clock: Clock
) -> int:
    """Seconds of the first reply of a policy whose adapter is not loaded."""
    began = time.monotonic()
    parents = itertools.cycle(versions)
    more = [f"more{number}" for number in range(options.registered - len(names))]
    for name in more:
        ledger.policies.create(name, parent=next(parents), by="benchmark")
    clock.say(f"{len(more)} more are registered in {time.monotonic() - began:.1f} s")
    time.sleep(5.0)  # the workers learn of them within a second
    failed, first, again = 0, [], []
    with httpx.Client(base_url=f"http://127.0.0.1:{_PORT}", timeout=60) as http:
        for name in random.Random(7).sample(more, min(len(more), options.first)):
            for found in (first, again):
                began = time.monotonic()
                reply = http.post("/v1/chat/completions", json=_body(name, 1))
                found.append(time.monotonic() - began)
                if reply.status_code != 200:
                    failed += 1
                    clock.say(f"{name}: {reply.status_code} {reply.text[:200]}")
    if first:
        clock.say(
            f"first reply of an adapter that was not loaded, {len(first)} of {options.registered} policies: median "
            f"{median(first):.2f} s, most {max(first):.2f} s; the next one of it: median {median(again):.3f} s"
        )
    return failed


def _train(work: Path, options: argparse.Namespace, clock: Clock, stack: ExitStack) -> int:
    model = make_model(options.size, work / "model", on_gpu=options.gpu)
    torch.cuda.empty_cache()
    values = _values(work, model, options, options.memory)
    values["policies"] = {f"p{number}": {} for number in range(options.policies)}
    settings = write_settings(work / "tuneloop.yaml", values)
    log = work / "both.log"
    command = [sys.executable, "-P", "-c", _RUN, "run", "--config", work / "tuneloop.yaml"]
    pid = stack.enter_context(running(command, log, env={"TUNELOOP_LOG_JSON": "1"}))
    url = f"http://127.0.0.1:{_PORT}"
    await_ready(f"{url}/health/ready", pid, log, timeout_s=clock.remaining - 60)
    ledger = stack.enter_context(closing(Ledger.of(settings)))
    clock.say("it serves")
    with _tell_at_end(log, clock):
        failed, taken = asyncio.run(_teach(url, ledger, options, clock))
    everything = [each for some in taken.values() for each in some]
    for name, some in taken.items():
        print(f"{name}: commit to served {', '.join(f'{each:.2f}' for each in some)} s")
    warm = [each for some in taken.values() for each in some[1:]]
    if warm:
        print(f"commit to served, without each policy's first: median {median(warm):.2f} s, most {max(warm):.2f} s")
    print(f"{len(everything)} versions; failed requests: {failed}")
    return int(failed > 0)


async def _teach(
    url: str, ledger: Ledger, options: argparse.Namespace, clock: Clock
) -> tuple[int, dict[str, list[float]]]:
    names = [f"p{number}" for number in range(options.policies)]
    numbers = {each.name: each.id for each in ledger.policies.all()}
    taken: dict[str, list[float]] = defaultdict(list)
    failed, over = 0, asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=180) as http, asyncio.TaskGroup() as group:

        async def ask(name: str, *, rate: bool) -> None:
            nonlocal failed
            body = _body(name, options.tokens) | {"metadata": {"train": str(rate).lower()}}
            reply = await http.post("/v1/chat/completions", json=body)
            if reply.status_code == 200 and rate:
                said = {"msg_ids": [reply.json()["id"]], "reward": random.random()}
                reply = await http.post("/feedback", json=said)
            if reply.status_code != 200:
                failed += 1
                clock.say(f"{name}: {reply.status_code} {reply.text[:200]}")

        async def lane(number: int) -> None:
            turn = number
            while not over.is_set():
                await ask(names[turn % len(names)], rate=False)
                turn += 1

        for number in range(options.lanes):
            group.create_task(lane(number))
        for name in itertools.cycle(names[: options.taught]):
            if clock.remaining < 20:
                break
            line = ledger.versions.of(numbers[name])
            before = line.champion().version
            await asyncio.gather(*(ask(name, rate=True) for _ in range(options.batch)))
            committed = time.monotonic()
            (await http.post("/commit", json={})).raise_for_status()
            until = min(150.0, clock.remaining - 8)
            if await asyncio.to_thread(_is_replaced, line, before, until_s=until):
                taken[name].append(time.monotonic() - committed)
            clock.say(f"{name}: version {line.champion().version}, {time.monotonic() - committed:.2f} s")
        over.set()
    return failed, taken


def _is_replaced(line: RegisteredVersions, champion: int, *, until_s: float) -> bool:
    """Whether another version is the champion within so many seconds; returns as soon as one is."""
    ends = time.monotonic() + until_s
    while line.champion().version == champion and time.monotonic() < ends:
        time.sleep(0.02)
    return line.champion().version != champion


@contextmanager
def _tell_at_end(log: Path, clock: Clock) -> Iterator[None]:
    """What the trainer's changes from one policy to another took, and what went wrong."""
    try:
        yield
    finally:
        tell_trouble(log, clock)
        switches = [each["seconds"] for each in log_events(log) if each.get("event") == "policy_switch"]
        steps = [each["seconds"] for each in log_events(log) if each.get("event") == "step" and "seconds" in each]
        if switches:
            later = sorted(switches[len(switches) // 2 :])
            print(
                f"switches: {', '.join(f'{each:.2f}' for each in switches)} s; of the second half median "
                f"{median(later):.2f}, most {later[-1]:.2f}"
            )
        told = {"step", "policy_switch", "version_published", "policy_version_served", "version_verified"}
        for each in [each for each in log_events(log) if each.get("event") in told][-30:]:
            print(f"    {each.pop('timestamp')[11:23]} {each.pop('event')} {each}")
        if steps:
            print(f"steps: {', '.join(f'{each:.2f}' for each in steps)} s")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("what", choices=("serve", "train"))
    parser.add_argument("--size", help="of the model")
    parser.add_argument("--policies", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--registered", type=int, default=1000 if on_gpu else 20, help="policies in all")
    parser.add_argument("--first", type=int, default=20, help="how many are asked for the first time")
    parser.add_argument("--at-once", default="64,256" if on_gpu else "4")
    parser.add_argument("--tokens", type=int, default=128 if on_gpu else 8, help="of a reply")
    parser.add_argument("--waves", type=int, default=2, help="requests of each client in a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16 if on_gpu else 4)
    parser.add_argument("--taught", type=int, help="policies that get rewards; all are asked")
    parser.add_argument("--lanes", type=int, default=16 if on_gpu else 2)
    parser.add_argument("--memory", type=float, help="gpu_memory_utilization")
    parser.add_argument("--budget-seconds", type=float, default=420.0)
    parser.add_argument("--work", type=Path, help="where to put everything")
    parser.add_argument("--gpu", action=argparse.BooleanOptionalAction, default=on_gpu)
    options = parser.parse_args()
    serves = options.what == "serve"
    options.size = options.size or (("0.6b" if serves else "8b") if options.gpu else "tiny")
    options.policies = options.policies or ((64 if serves else 8) if options.gpu else 3)
    options.rank = options.rank or ((16 if serves else 32) if options.gpu else 8)
    options.memory = options.memory or (0.6 if serves else 0.35)
    return options


if __name__ == "__main__":
    sys.exit(main())
