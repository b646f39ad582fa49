"""How long one key's chats take while another key sends as much as it can: `python -m benchmarks.access.fairness`.

An explorer of 16 places before an engine double whose replies take 100 ms. The quiet key asks one after the other; the
loud one floods it over 64 connections, from a process of its own.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from threading import Thread

import httpx

from tests.doubles.engine import engine_place
from tests.explorer.running import HELLO, RunningExplorer, eventually, explorer_running, settings_for
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import KeyGrant, KeyLimits

_PLACES, _REPLY_S, _CONNECTIONS, _ASKED, _WARM_S = 16, 0.1, 64, 300, 3.0
_CHAT = "/v1/chat/completions"

Flood = Callable[[httpx.Client], object]


def _chat(http: httpx.Client) -> object:
    return http.post(_CHAT, json=HELLO).status_code == 200 or time.sleep(0.05)


def _feedback(http: httpx.Client) -> object:
    body = {"task_id": "t", "run_id": str(time.monotonic_ns()), "reward": 1}
    return http.post("/feedback", json=body).status_code == 200 or time.sleep(0.05)


def _flood(url: str, headers: dict[str, str], send: Flood, ended: Event) -> None:
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
def _flood_beside(explorer: RunningExplorer, headers: dict[str, str], send: Flood | None) -> Iterator[None]:
    if send is None:
        yield
        return
    context = multiprocessing.get_context("fork")
    ended = context.Event()
    process = context.Process(target=_flood, args=(explorer.url, headers, send, ended))
    process.start()
    time.sleep(_WARM_S)
    try:
        yield
    finally:
        ended.set()
        process.join()


def _key(explorer: RunningExplorer, name: str, limits: KeyLimits) -> dict[str, str]:
    grant = KeyGrant(name=name, scopes=(Scope.INFERENCE, Scope.FEEDBACK), limits=limits)
    headers = {"Authorization": f"Bearer {explorer.ledger.keys.create(grant, actor='benchmark')[1]}"}
    eventually(lambda: explorer.http.get("/v1/models").status_code == 401)
    eventually(lambda: explorer.http.get("/v1/models", headers=headers).status_code == 200)
    return headers


def _milliseconds(explorer: RunningExplorer, headers: dict[str, str]) -> tuple[float, float]:
    """The median and the 99th percentile of one chat after the other."""
    found = []
    for _ in range(_ASKED):
        began = time.perf_counter()
        explorer.http.post(_CHAT, json=HELLO, headers=headers).raise_for_status()
        found.append(1e3 * (time.perf_counter() - began))
    cuts = statistics.quantiles(found, n=100)
    return cuts[49], cuts[98]


def main() -> None:
    """Print a line for each kind of neighbour."""
    with engine_place() as place, tempfile.TemporaryDirectory() as folder:
        double = place.fresh()
        double.piece_pause_s = _REPLY_S
        settings = settings_for(Path(folder), [double.url], max_in_flight=_PLACES)
        with explorer_running(settings) as explorer:
            quiet, loud = (_key(explorer, name, KeyLimits()) for name in ("quiet", "loud"))
            bound = KeyLimits(max_concurrent=8, feedback_per_minute=600, requests_per_minute=6000)
            bounded = _key(explorer, "bounded", bound)
            for what, asker, flooder, send in (
                ("alone", quiet, loud, None),
                ("one queue for all (same key)", quiet, quiet, _chat),
                ("a key without limits chats", quiet, loud, _chat),
                ("a key at its limits chats", quiet, bounded, _chat),
                ("a key at its limits rates", quiet, bounded, _feedback),
                ("alone again", quiet, loud, None),
            ):
                with _flood_beside(explorer, flooder, send):
                    median, most = _milliseconds(explorer, asker)
                print(f"{what:30} {median:7.1f} {most:7.1f} ms", flush=True)


if __name__ == "__main__":
    main()
