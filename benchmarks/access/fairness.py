"""How long one key's requests take while another key sends as much as it can: `python -m benchmarks.access.fairness`.

Control process, worker and engine double are processes, as in production; the worker has 16 places, and the double's
replies take 100 ms. The quiet key asks and rates the reply, one after the other; the loud one floods the service over
64 connections, from a process of its own. What that process takes of the cores that all share shows where it floods
another service.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from threading import Thread

import httpx

from tests.explorer.running import eventually
from tests.hostile.bed import Bed, asking, bed_with
from tests.hostile.echo import echo_process
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import KeyGrant, KeyLimits

_PLACES, _REPLY_S, _CONNECTIONS, _ASKED, _WARM_S = 16, 0.1, 64, 300, 3.0
_CHAT = "/v1/chat/completions"
_HELLO = asking("n0")

Headers = dict[str, str]
Send = Callable[[httpx.Client], object]


def _chat(http: httpx.Client) -> object:
    return http.post(_CHAT, json=_HELLO).status_code == 200 or time.sleep(0.05)


def _rate(http: httpx.Client) -> object:
    body = {"task_id": "t", "run_id": str(time.monotonic_ns()), "reward": 1}
    return http.post("/feedback", json=body).status_code == 200 or time.sleep(0.05)


def _rate_many(http: httpx.Client) -> object:
    run = str(time.monotonic_ns())
    body = {"feedback": [{"task_id": "t", "run_id": f"{run}/{number}", "reward": 1} for number in range(500)]}
    return http.post("/feedback", json=body).status_code == 200 or time.sleep(0.05)


def _flood(url: str, headers: Headers, send: Send, ended: Event) -> None:
    def one() -> None:
        with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
            while not ended.is_set():
                send(http)

    threads = [Thread(target=one) for _ in range(_CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def _flood_beside(url: str, headers: Headers, send: Send | None) -> Iterator[None]:
    if send is None:
        yield
        return
    context = multiprocessing.get_context("fork")
    ended = context.Event()
    process = context.Process(target=_flood, args=(url, headers, send, ended))
    process.start()
    time.sleep(_WARM_S)
    try:
        yield
    finally:
        ended.set()
        process.join()


def _key(bed: Bed, name: str, limits: KeyLimits) -> Headers:
    ledger = bed.ledger()
    grant = KeyGrant(name=name, scopes=(Scope.INFERENCE, Scope.FEEDBACK), limits=limits)
    headers = {"Authorization": f"Bearer {ledger.keys.create(grant, actor='benchmark')[1]}"}
    ledger.close()
    eventually(lambda: bed.http.get("/v1/models", headers=headers).status_code == 200)
    return headers


def _milliseconds(bed: Bed, headers: Headers, asked: int) -> Iterator[str]:
    """The median and the 99th percentile of a chat, and of rating its reply, one after the other."""
    chats, ratings = [], []
    with httpx.Client(base_url=bed.url, headers=headers, timeout=60) as http:
        for _ in range(asked):
            began = time.perf_counter()
            answer = http.post(_CHAT, json=_HELLO).raise_for_status()
            replied = time.perf_counter()
            http.post("/feedback", json={"msg_ids": [answer.json()["id"]], "reward": 1}).raise_for_status()
            chats.append(1e3 * (replied - began))
            ratings.append(1e3 * (time.perf_counter() - replied))
    for found in (chats, ratings):
        cuts = statistics.quantiles(found, n=100)
        yield f"{cuts[49]:7.1f} {cuts[98]:7.1f}"


def main() -> None:
    """Print a line for each kind of neighbour."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--asked", type=int, default=_ASKED)
    asked = parser.parse_args().asked
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        url, other = (stack.enter_context(echo_process(Path(folder), pause_s=_REPLY_S)) for _ in range(2))
        bed = stack.enter_context(bed_with(Path(folder), [url], max_in_flight=_PLACES))
        free, bound = KeyLimits(), KeyLimits(max_concurrent=8, feedback_per_minute=600, requests_per_minute=6000)
        quiet, loud, bounded = (_key(bed, *each) for each in (("quiet", free), ("loud", free), ("bounded", bound)))
        for what, flooded, flooder, send in (
            ("alone", bed.url, loud, None),
            ("a flood of another service", other, loud, _chat),
            ("one queue for all (same key)", bed.url, quiet, _chat),
            ("a key without limits chats", bed.url, loud, _chat),
            ("a key without limits rates", bed.url, loud, _rate),
            ("a key without limits rates, 500 a call", bed.url, loud, _rate_many),
            ("a key at its limits chats", bed.url, bounded, _chat),
            ("a key at its limits rates", bed.url, bounded, _rate),
            ("alone again", bed.url, loud, None),
        ):
            with _flood_beside(flooded, flooder, send):
                chats, ratings = _milliseconds(bed, quiet, asked)
            print(f"{what:40} chat {chats} ms, rating {ratings} ms", flush=True)


if __name__ == "__main__":
    main()
