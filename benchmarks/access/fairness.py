"""How long one key's requests take while another key sends as much as it can: `python -m benchmarks.access.fairness`.

Control process, worker and engine double are processes, as in production; the worker has 16 places, and the double's
replies take 100 ms. The quiet key asks, rates the reply and commits, one after the other; the loud one floods the
service over 64 connections, from a session of its own that gets only the processor time that nobody else wants
(`SCHED_IDLE`): what it needs of the cores that all share is not the service's. Each round asks beside each kind of
neighbour, and the ratios of the 99th percentiles are to the requests without one, before and after: of all rounds, and
of each.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from tests.explorer.running import eventually
from tests.hostile.bed import Bed, asking, bed_with
from tests.hostile.echo import echo_process
from tuneloop.shared.experience import DEFAULT_TENANT, Scope
from tuneloop.shared.ledger.keys import KeyGrant, KeyLimits

_PLACES, _REPLY_S, _CONNECTIONS, _WARM_S, _NICE = 16, 0.1, 64, 3.0, 19
_AS_IN_PRODUCTION = {"service_status_check_interval": 60.0}
_CHAT = "/v1/chat/completions"
_HELLO = asking("n0")
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)

Headers = dict[str, str]


class _Flood(NamedTuple):
    """What the loud key sends: so many events of feedback a call, or chats; how long it waits where it is refused."""

    url: str
    headers: Headers
    events: int = 0
    pause_s: float = 0.05

    def body(self) -> bytes:
        run = str(time.monotonic_ns())
        rated = [{"task_id": "t", "run_id": f"{run}/{number}", "reward": 1} for number in range(self.events)]
        return json.dumps({"feedback": rated} if rated else _HELLO).encode()

    def request(self) -> bytes:
        body = self.body()
        lines = [f"{name}: {value}" for name, value in self.headers.items()]
        path = "/feedback" if self.events else _CHAT
        head = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}", *lines]
        return "\r\n".join([*head, "", ""]).encode() + body


async def _send(flood: _Flood, ended: Event) -> None:
    """Send requests over one connection after the other; as little as possible is done with what comes back."""
    where = urlsplit(flood.url)
    while not ended.is_set():
        try:
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            while not ended.is_set():
                writer.write(flood.request())
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                await reader.readexactly(int(length[1]) if length else 0)
                if not head.startswith(b"HTTP/1.1 200"):
                    await asyncio.sleep(flood.pause_s)
            writer.close()
        except (OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(flood.pause_s)


def _give_way() -> None:
    """Have only the processor time that nobody else wants."""
    os.setsid()  # Where the kernel shares time between sessions first, a priority counts only within one.
    autogroup = Path("/proc/self/autogroup")
    if autogroup.exists():
        autogroup.write_text(str(_NICE))
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _run_flood(flood: _Flood, ended: Event) -> None:
    _give_way()

    async def all_connections() -> None:
        senders = [asyncio.create_task(_send(flood, ended)) for _ in range(_CONNECTIONS)]
        await asyncio.to_thread(ended.wait)
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)

    asyncio.run(all_connections())


@contextmanager
def _flood_beside(flood: _Flood | None) -> Iterator[None]:
    if flood is None:
        yield
        return
    context = multiprocessing.get_context("fork")
    ended = context.Event()
    process = context.Process(target=_run_flood, args=(flood, ended))
    process.start()
    time.sleep(_WARM_S)
    try:
        yield
    finally:
        ended.set()
        process.join()


def _key(bed: Bed, name: str, limits: KeyLimits, tenant: str) -> Headers:
    ledger = bed.ledger()
    grant = KeyGrant(name=name, tenant=tenant, scopes=(Scope.INFERENCE, Scope.FEEDBACK, Scope.COMMIT), limits=limits)
    headers = {"Authorization": f"Bearer {ledger.keys.create(grant, actor='benchmark')[1]}"}
    ledger.close()
    eventually(lambda: bed.http.get("/v1/models", headers=headers).status_code == 200)
    return headers


class _Times(NamedTuple):
    """Milliseconds."""

    chats: list[float]
    ratings: list[float]
    commits: list[float]


def _ask(bed: Bed, headers: Headers, asked: int) -> _Times:
    """How long each of so many chats takes, and rating its reply, and a commit, one after the other."""
    gc.collect()  # not while something is being timed: it stops this process for a second
    gc.freeze()
    found = _Times([], [], [])
    with httpx.Client(base_url=bed.url, headers=headers, timeout=60) as http:
        for _ in range(asked):
            began = time.perf_counter()
            answer = http.post(_CHAT, json=_HELLO).raise_for_status()
            replied = time.perf_counter()
            http.post("/feedback", json={"msg_ids": [answer.json()["id"]], "reward": 1}).raise_for_status()
            rated = time.perf_counter()
            http.post("/commit", json={}).raise_for_status()
            committed = time.perf_counter()
            for times, seconds in zip(found, (replied - began, rated - replied, committed - rated), strict=True):
                times.append(1e3 * seconds)
    return found


def _p99(found: list[float]) -> float:
    return statistics.quantiles(found, n=100)[98]


def _line(what: str, rounds: list[_Times], alone: list[_Times]) -> str:
    """Median and 99th percentile of all rounds, and the ratio of the latter to that without a neighbour."""
    parts = []
    for kind in _Times._fields:
        each, others = ([getattr(found, kind) for found in several] for several in (rounds, alone))
        pooled = [ms for found in each for ms in found]
        ratio = _p99(pooled) / _p99([ms for found in others for ms in found])
        by_round = " ".join(f"{_p99(mine) / _p99(quiet):.2f}" for mine, quiet in zip(each, others, strict=False))
        parts.append(f"{kind} {statistics.median(pooled):6.1f} {_p99(pooled):6.1f} ms, x {ratio:.2f} ({by_round})")
    return f"{what:44} " + "; ".join(parts)


def main() -> None:
    """Print a line for each kind of neighbour, after each round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--asked", type=int, default=150, help="chats beside each neighbour, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="neighbours whose name has this in it")
    parser.add_argument("--apart", action="store_true", help="the loud keys are of another tenant")
    given = parser.parse_args()
    gc.disable()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        url, other = (stack.enter_context(echo_process(Path(folder), pause_s=_REPLY_S)) for _ in range(2))
        bed = stack.enter_context(bed_with(Path(folder), [url], max_in_flight=_PLACES, **_AS_IN_PRODUCTION))
        free, bound = KeyLimits(), KeyLimits(max_concurrent=8, feedback_per_minute=600, requests_per_minute=6000)
        theirs = "another" if given.apart else DEFAULT_TENANT
        quiet = _key(bed, "quiet", free, DEFAULT_TENANT)
        loud, bounded = (_key(bed, *each, theirs) for each in (("loud", free), ("bounded", bound)))
        neighbours = {
            "a flood of another service": _Flood(other, loud),
            "one queue for all (same key)": _Flood(bed.url, quiet),
            "a key without limits chats": _Flood(bed.url, loud),
            "a key without limits rates": _Flood(bed.url, loud, events=1),
            "a key without limits rates, 500 a call": _Flood(bed.url, loud, events=500),
            "a key at its limits chats": _Flood(bed.url, bounded),
            "a key at its limits chats, without a pause": _Flood(bed.url, bounded, pause_s=0),
            "a key at its limits rates": _Flood(bed.url, bounded, events=1),
            "a key at its limits rates, without a pause": _Flood(bed.url, bounded, events=1, pause_s=0),
        }
        found: dict[str, list[_Times]] = defaultdict(list)
        alone: list[_Times] = []
        _ask(bed, quiet, 20)
        for number in range(given.rounds):
            before = _ask(bed, quiet, given.asked)
            for what, flood in neighbours.items():
                if given.only in what:
                    with _flood_beside(flood):
                        found[what].append(_ask(bed, quiet, given.asked))
                    print(_line(what, found[what][-1:], [before]), flush=True)
            after = _ask(bed, quiet, given.asked)
            alone.append(_Times(*(each + more for each, more in zip(before, after, strict=True))))
            print(f"round {number + 1} of {given.rounds}; x: the 99th percentile to that of nobody")
            print(_line("nobody", alone, alone), flush=True)
            for what, rounds in found.items():
                print(_line(what, rounds, alone), flush=True)


if __name__ == "__main__":
    main()
