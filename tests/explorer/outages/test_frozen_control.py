"""The control process stands still (SIGSTOP): its workers answer in their time, and what they acknowledge is learnt."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.doubles.engine import CHAT, EngineDouble
from tests.explorer.processes.test_workers import Staff, chat, hired
from tests.explorer.running import HELLO, eventually
from tests.explorer.test_main import attached_to, service, write_settings
from tuneloop.shared.experience import State

pytestmark = pytest.mark.xdist_group("workers")


def timed(http: httpx.Client, method: str, path: str, **request: object) -> tuple[httpx.Response, float]:
    started = time.monotonic()
    try:
        answer = http.request(method, path, **request)  # type: ignore[arg-type]
    except httpx.TimeoutException as error:
        raise AssertionError(f"{method} {path} has no answer") from error
    return answer, time.monotonic() - started


def rewards(staff: Staff) -> dict[State, int]:
    with closing(staff.ledger()) as ledger:
        return ledger.reports.counts()


def test_every_route_answers_in_its_time_and_feedback_is_learnt_after_the_thaw(
    tmp_path: Path, double: EngineDouble
) -> None:
    with hired(tmp_path, double) as staff:
        before = chat(staff.http)
        token = staff.http.post("/v1/feedback_tokens", json={"msg_id": before}).json()["token"]
        eventually(lambda: staff.http.get(f"{CHAT}/{before}").status_code == 200)
        staff.process.send_signal(signal.SIGSTOP)
        try:
            said = chat(staff.http)
            # The seconds that docs/several_machines.md names, and some for a machine that runs other tests.
            asked = (
                ("POST", "/feedback", {"msg_ids": [before, said], "reward": 1}, 200, 3),
                ("POST", "/commit", {}, 503, 9),
                ("GET", "/metrics", None, 503, 5),
                ("GET", "/trinity/metrics", None, 503, 5),
                ("GET", f"{CHAT}/{said}", None, 503, 3),
                ("DELETE", f"{CHAT}/{said}", None, 503, 3),
                ("GET", f"{CHAT}/{before}", None, 200, 1),
                ("GET", CHAT, None, 200, 3),
                ("GET", f"/v1/responses/{said}", None, 503, 5),
                ("POST", "/v1/responses", {"model": "t", "input": "x", "previous_response_id": said}, 503, 6),
                ("GET", "/health/live", None, 200, 1),
                ("GET", "/health/ready", None, 200, 1),
                ("GET", "/v1/models", None, 200, 1),
                ("POST", CHAT, HELLO, 200, 1),
            )
            with ThreadPoolExecutor(len(asked)) as pool:  # at once: who waits keeps nobody else waiting
                waiting = [pool.submit(timed, staff.http, method, path, json=body) for method, path, body, *_ in asked]
            for (_, path, _, status, within_s), told in zip(asked, waiting, strict=True):
                answer, took_s = told.result()
                assert (path, answer.status_code) == (path, status), answer.text
                assert took_s < within_s + 3, path
                assert status != 503 or "retry-after" in answer.headers, path
                if path == "/feedback":
                    assert answer.json()["outcomes"] == {before: "pending", said: "pending"}
            bearer = {"Authorization": f"Bearer {token}"}
            answer, took_s = timed(
                staff.http, "POST", "/feedback", json={"msg_ids": [before], "reward": 0}, headers=bearer
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "control_process_silent")
            assert took_s < 5
        finally:
            staff.process.send_signal(signal.SIGCONT)
        eventually(lambda: rewards(staff)[State.REWARDED] == 2)
        eventually(lambda: staff.http.post("/commit").json().get("committed") == 2)
        assert staff.http.get("/metrics").status_code == 200


def test_feedback_that_was_pending_is_learnt_although_the_control_process_was_killed_while_it_stood_still(
    tmp_path: Path, double: EngineDouble
) -> None:
    settings = write_settings(tmp_path, **attached_to(double))
    with service(settings) as (running, http):
        before = chat(http)
        running.send_signal(signal.SIGSTOP)
        said = chat(http)
        told = http.post("/feedback", json={"msg_ids": [before, said], "reward": 1}).json()["outcomes"]
        assert told == {before: "pending", said: "pending"}
        running.kill()
        running.wait()
    with service(settings) as (_, http):
        eventually(lambda: http.post("/commit").json().get("committed") == 2)
