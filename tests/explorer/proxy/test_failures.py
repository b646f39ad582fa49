"""What becomes of a request when its engine fails, its client goes, too many come at once, or nobody reads."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from tests.doubles.engine import CHAT, EngineDouble, EnginePlace, engine_place
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tests.explorer.wire import BODY, Wire, http_request, streamed
from tuneloop.explorer.dialects.dialect import ChatDialect, ReplyWriter
from tuneloop.explorer.engines.fleet import EngineState
from tuneloop.shared.experience import State

pytestmark = pytest.mark.contract

RESPONSE = {"model": HELLO["model"], "input": "3+4=", "max_output_tokens": 12}
MESSAGE = HELLO | {"max_tokens": 12}
ASKED = {CHAT: HELLO, "/v1/responses": RESPONSE, "/v1/messages": MESSAGE}


@dataclass
class Mortal(EngineDouble):
    """An engine that dies of every chat, before its first byte."""

    died: int = 0

    async def _chat(self, scope: Any, body: bytes, send: Any) -> None:
        self.died += 1
        raise ConnectionAbortedError


@dataclass
class Failing(EngineDouble):
    """An engine that tells an error in its streams, and ends them in good order."""

    async def _stream(self, reply: list[bytes], send: Any) -> None:
        error = b'data: {"error":{"message":"no","type":"InternalServerError","param":null,"code":500}}\n\n'
        await super()._stream([*reply[:3], error, b"data: [DONE]\n\n"], send)


@dataclass
class Talkative(EngineDouble):
    """An engine that streams until `ends` is set."""

    pieces: int = 0
    ends: threading.Event = field(default_factory=threading.Event)

    async def _chat(self, scope: Any, body: bytes, send: Any) -> None:
        if not json.loads(body).get("stream"):
            return await super()._chat(scope, body, send)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not self.ends.is_set():
            await send({"type": "http.response.body", "body": piece(self.pieces), "more_body": True})
            self.pieces += 1
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": piece(self.pieces, "stop") + b"data: [DONE]\n\n"})


def piece(number: int, finish: str | None = None) -> bytes:
    delta = {"index": 0, "delta": {"content": f"{number} " + "x" * 4000}, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({"id": "x", "object": "chat.completion.chunk", "choices": [delta]}).encode()


def code_of(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


def nothing_is_taken(explorer: RunningExplorer) -> bool:
    proxy, fleet = explorer.services.proxy, explorer.services.fleet
    return (proxy.admission.in_flight, proxy.admission.waiting, [each.in_flight for each in fleet.engines]) == (
        0,
        0,
        [0] * len(fleet.engines),
    )


def all_ready(explorer: RunningExplorer) -> RunningExplorer:
    eventually(lambda: all(each.state is EngineState.READY for each in explorer.services.fleet.engines))
    return explorer


def outcomes(explorer: RunningExplorer) -> dict[str, float]:
    """How many replies had each outcome."""
    families = text_string_to_metric_families(explorer.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return {each.labels["outcome"]: each.value for each in samples if each.name == "tuneloop_replies_total"}


def answered(explorer: RunningExplorer) -> dict[tuple[str, str], float]:
    """How many requests were answered, by endpoint and status."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(explorer.http.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "tuneloop_requests_total":
                key = sample.labels["endpoint"], sample.labels["status"]
                found[key] = found.get(key, 0) + sample.value
    return found


@pytest.fixture
def two(running_explorer: Run, doubles: list[EngineDouble]) -> RunningExplorer:
    """An explorer with two engines, both ready; the first gets the first request."""
    return all_ready(running_explorer(*doubles))


# An engine fails.


def test_an_engine_that_goes_before_its_first_byte_costs_nothing_where_there_is_another(
    two: RunningExplorer, doubles: list[EngineDouble]
) -> None:
    doubles[0].dead = True
    for stream in (False, True):
        assert two.chat(stream=stream).status_code == 200
    assert [len(each.chats) for each in doubles] == [0, 2]
    assert [len(each.experiences) for each in two.exchanges()] == [1, 1]
    assert two.counts()[State.RECORDED] == 2
    eventually(lambda: nothing_is_taken(two))


def test_an_engine_that_is_ill_is_not_the_last_word_where_there_is_another(
    two: RunningExplorer, doubles: list[EngineDouble]
) -> None:
    times = [(status, stream) for status in (500, 502, 503) for stream in (False, True)]
    for number, (doubles[0].status, stream) in enumerate(times, 1):
        assert two.chat(stream=stream).status_code == 200
        assert [len(each.chats) for each in doubles] == [number, number]
        assert len(two.exchanges()) == number
    doubles[1].status = 507
    assert two.chat(stream=True).status_code == 507
    assert [len(each.chats) for each in doubles] == [len(times) + 1] * 2
    assert len(two.exchanges()) == len(times)
    eventually(lambda: nothing_is_taken(two))


def test_what_an_engine_refuses_no_other_is_asked(two: RunningExplorer, doubles: list[EngineDouble]) -> None:
    for doubles[0].status in (400, 404, 422, 429):
        assert two.chat().status_code == doubles[0].status
    assert [len(each.chats) for each in doubles] == [4, 0]


def test_what_is_no_answer_to_the_client_is_not_passed_on(two: RunningExplorer, doubles: list[EngineDouble]) -> None:
    for doubles[0].status in (204, 301, 401, 403):
        assert code_of(two.chat()) == (502, "engine_error")
    assert answered(two) == {(CHAT, "502"): 4}


def test_a_request_that_kills_two_engines_is_not_sent_to_a_third(running_explorer: Run) -> None:
    with ExitStack() as stack:
        places = [stack.enter_context(engine_place()) for _ in range(3)]
        mortals = [Mortal(url=place.url) for place in places]
        for place, mortal in zip(places, mortals, strict=True):
            place.double = mortal
        explorer = all_ready(running_explorer(*mortals))
        assert code_of(explorer.chat()) == (502, "engine_error")
        assert [each.died for each in mortals] == [1, 1, 0]
        assert explorer.exchanges() == []
        eventually(lambda: nothing_is_taken(explorer))


def test_a_stream_that_has_begun_is_not_begun_again(two: RunningExplorer, doubles: list[EngineDouble]) -> None:
    doubles[0].piece_pause_s, doubles[0].cut_after = 0.01, 3
    assert '"code":"engine_error"' in two.chat(stream=True).text
    assert [len(each.chats) for each in doubles] == [1, 0]
    assert [each.experiences[0].drop_reason for each in two.exchanges()] == ["cut_off"]
    eventually(lambda: nothing_is_taken(two))


def test_a_whole_reply_that_has_begun_is_not_begun_again(two: RunningExplorer, doubles: list[EngineDouble]) -> None:
    doubles[0].cut_after = 0
    assert code_of(two.chat()) == (502, "engine_error")
    assert [len(each.chats) for each in doubles] == [1, 0]
    assert two.exchanges() == []


# An engine takes too long.


def test_no_answer_in_time_is_said_so(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double, request_timeout=0.3)
    double.hangs = True
    for path, stream in itertools.product(ASKED, (False, True)):
        reply = explorer.http.post(path, json=ASKED[path] | {"stream": stream})
        assert (reply.status_code, reply.headers["x-should-retry"]) == (504, "false")
        assert "did not answer in time" in reply.json()["error"]["message"]
        assert ("code" in reply.json()["error"]) == (path != "/v1/messages")
    assert answered(explorer) == {(path, "504"): 2 for path in ASKED}
    eventually(lambda: double.left == 6)
    eventually(lambda: nothing_is_taken(explorer))
    with explorer.openai().with_options(max_retries=5) as client, pytest.raises(openai.InternalServerError):
        client.chat.completions.create(**HELLO)
    assert len(double.chats) == 7


def test_a_stream_that_stops_is_ended_with_an_error_and_kept_as_cut_off(
    running_explorer: Run, double: EngineDouble
) -> None:
    explorer = running_explorer(double, request_timeout=2)
    double.stalls_after = 4
    begins = {CHAT: "data: ", "/v1/messages": "event: error\n", "/v1/responses": "event: response.failed\n"}
    for number, path in enumerate(ASKED, 1):
        reply = explorer.http.post(path, json=ASKED[path] | {"stream": True})
        *_, last = [event for event in reply.text.split("\n\n") if event]
        assert last.startswith(begins[path])
        answer = json.loads(last.rpartition("data: ")[2])
        assert (answer.get("error") or answer["response"]["error"])["message"] == "the engine did not answer in time"
        kept = explorer.exchanges()[-1]
        assert (kept.endpoint, kept.experiences[0].drop_reason) == (path, "cut_off")
        assert kept.experiences[0].completion_ids
        assert len(explorer.exchanges()) == number
    eventually(lambda: double.left == 3)
    eventually(lambda: nothing_is_taken(explorer))


@pytest.mark.parametrize(("path", "body"), ASKED.items())
def test_a_stream_that_ends_in_the_engines_own_error_counts_as_a_failure(
    running_explorer: Run, places: list[EnginePlace], path: str, body: dict[str, Any]
) -> None:
    places[0].double = double = Failing(url=places[0].url)
    explorer = running_explorer(double)
    assert "error" in explorer.http.post(path, json=body | {"stream": True}).text
    assert outcomes(explorer) == {"failed": 1}
    assert [each.experiences[0].drop_reason for each in explorer.exchanges()] == ["cut_off"]


def test_who_waited_for_an_engine_in_vain_may_come_again(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double, request_timeout=0.3)
    explorer.services.fleet.engines[0].state = EngineState.RELOADING
    reply = explorer.chat()
    assert code_of(reply) == (503, "engine_unavailable")
    assert reply.headers["retry-after-ms"] == "2000"
    eventually(lambda: nothing_is_taken(explorer))


# A client goes.


def streaming(explorer: RunningExplorer, double: EngineDouble) -> Callable[[], bool]:
    double.stalls_after = 6
    return lambda: len(double.chats) == 1


def hanging(explorer: RunningExplorer, double: EngineDouble) -> Callable[[], bool]:
    double.hangs = True
    return lambda: len(double.chats) == 1


def waiting_for_an_engine(explorer: RunningExplorer, double: EngineDouble) -> Callable[[], bool]:
    explorer.services.fleet.engines[0].state = EngineState.RELOADING
    return lambda: explorer.services.proxy.admission.in_flight == 1


@pytest.mark.parametrize(
    ("when", "stream", "reset"),
    [
        (streaming, True, False),
        (streaming, True, True),
        (streaming, False, False),
        (hanging, True, False),
        (hanging, False, True),
        (waiting_for_an_engine, True, False),
        (waiting_for_an_engine, False, True),
    ],
)
def test_a_client_that_goes_stops_all(
    explorer: RunningExplorer, double: EngineDouble, when: Any, stream: bool, reset: bool
) -> None:
    there = when(explorer, double)
    if when is streaming and not stream:
        double.piece_pause_s = 60
    with Wire(explorer.url) as wire:
        wire.send(http_request(streamed() if stream else BODY))
        eventually(there)
        if when is streaming and stream:
            wire.response(head=True)
            assert wire.line().startswith(b"data: ")
        if reset:
            wire.reset()
    if when is not waiting_for_an_engine:
        eventually(lambda: double.left == 1)
    eventually(lambda: nothing_is_taken(explorer))
    assert [each.experiences[0].drop_reason for each in explorer.exchanges()] == ["cut_off"] * (
        when is streaming and stream
    )
    assert answered(explorer) == {(CHAT, "499"): 1}
    double.hangs, double.stalls_after, double.piece_pause_s = False, None, 0
    explorer.services.fleet.engines[0].state = EngineState.READY
    assert explorer.chat().status_code == 200


def test_a_client_that_goes_while_it_sends_or_waits_for_a_place_is_forgotten(
    running_explorer: Run, double: EngineDouble
) -> None:
    explorer = running_explorer(double, max_in_flight=1)
    admission = explorer.services.proxy.admission
    double.hangs = True
    with Wire(explorer.url) as first, Wire(explorer.url) as second, Wire(explorer.url) as third:
        first.send(http_request())
        eventually(lambda: admission.in_flight == 1)
        second.send(http_request())
        eventually(lambda: admission.waiting == 1)
        third.send(http_request()[:-5])
        time.sleep(0.05)
        second.close()
        third.close()
        eventually(lambda: admission.waiting == 0)
        assert admission.in_flight == 1
        double.hangs = False
        assert first.response().status == 200
    eventually(lambda: nothing_is_taken(explorer))
    assert len(double.chats) == 1
    eventually(lambda: answered(explorer) == {(CHAT, "200"): 1, (CHAT, "499"): 2})


# Too many come.


def are_there(explorer: RunningExplorer, number: int) -> bool:
    admission = explorer.services.proxy.admission
    return admission.in_flight + admission.waiting == number


def test_so_many_are_answered_so_many_wait_and_the_others_are_sent_away(
    running_explorer: Run, double: EngineDouble
) -> None:
    explorer = running_explorer(double, max_in_flight=2, max_waiting=2)
    double.hangs = True
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(explorer.url)) for _ in range(4)]
        for number, wire in enumerate(wires):
            wire.send(http_request())
            eventually(partial(are_there, explorer, number + 1))
        metrics = explorer.metrics()
        assert (metrics["tuneloop_requests_in_flight"], metrics["tuneloop_requests_waiting"]) == (2, 2)
        reply = explorer.chat()
        assert code_of(reply) == (429, "too_many_requests")
        assert reply.json()["error"]["type"] == "rate_limit_error"
        assert (reply.headers["retry-after"], reply.headers["retry-after-ms"]) == ("1", "1000")
        message = explorer.http.post("/v1/messages", json=MESSAGE)
        assert (message.status_code, message.json()["error"]["type"]) == (429, "rate_limit_error")
        assert explorer.http.get("/v1/models").status_code == 200
        assert len(double.chats) == 2
        double.hangs = False
        assert [wire.response().status for wire in wires] == [200] * 4
    metrics = explorer.metrics()
    assert (metrics["tuneloop_requests_in_flight"], metrics["tuneloop_requests_waiting"]) == (0, 0)
    eventually(lambda: nothing_is_taken(explorer))


def test_who_waits_too_long_for_a_place_is_sent_away(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double, max_in_flight=1, wait_timeout=0.2)
    double.hangs = True
    with Wire(explorer.url) as wire:
        wire.send(http_request())
        eventually(lambda: explorer.services.proxy.admission.in_flight == 1)
        reply = explorer.chat()
        assert code_of(reply) == (503, "overloaded")
        assert reply.headers["retry-after"] == "1"
        double.hangs = False
        assert wire.response().status == 200
    eventually(lambda: nothing_is_taken(explorer))


async def test_openais_client_gets_through_by_itself(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double, max_in_flight=1, max_waiting=0)
    double.piece_pause_s = 0.3
    async with explorer.openai_async().with_options(max_retries=2) as client:
        replies = await asyncio.gather(*(client.chat.completions.create(**HELLO) for _ in range(2)))
    assert len({reply.id for reply in replies}) == 2
    assert answered(explorer)[CHAT, "429"] >= 1


# Nobody reads.


@pytest.fixture
def talkative(places: list[EnginePlace]) -> Iterator[Talkative]:
    engine = Talkative(url=places[0].url)
    places[0].double = engine
    yield engine
    engine.ends.set()


def unread(explorer: RunningExplorer, engine: Talkative) -> Wire:
    """A client that asks for an endless stream and reads none of it; everybody waits for it by now."""
    wire = Wire(explorer.url)
    wire.send(http_request(streamed()))
    reply = -1
    while reply != engine.pieces or not reply:
        reply = engine.pieces
        time.sleep(0.2)
    return wire


def test_an_endless_stream_that_nobody_reads_is_not_read_from_the_engine(
    running_explorer: Run, talkative: Talkative
) -> None:
    explorer = running_explorer(talkative)
    with unread(explorer, talkative) as wire:
        reply = talkative.pieces
        assert reply * len(piece(reply)) < 32 << 20, "more than the sockets hold"
        for _ in range(3):
            started = time.monotonic()
            assert explorer.chat().status_code == 200
            assert time.monotonic() - started < 5
        assert talkative.pieces == reply
        talkative.ends.set()
        numbers = [int(event.partition('"content":"')[2].split()[0]) for event in events_of(wire)]
        assert numbers == list(range(talkative.pieces + 1))
    eventually(lambda: nothing_is_taken(explorer))


def is_held(wire: Wire) -> bool:
    """Whether the server has the connection open still, which the client cannot tell without reading."""
    ends = [f":{port:04X}" for _, port in (wire.socket.getpeername(), wire.socket.getsockname())]
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    state, *_ = [line[3] for line in lines if [line[1][-5:], line[2][-5:]] == ends] or ["gone"]
    return state == "01"


def events_of(wire: Wire) -> list[str]:
    *events, done, rest = wire.response().body.decode().replace('"content": "', '"content":"').split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return events


def test_a_client_that_reads_nothing_and_goes_frees_all(running_explorer: Run, talkative: Talkative) -> None:
    explorer = running_explorer(talkative)
    unread(explorer, talkative).close()
    eventually(lambda: talkative.left == 1)
    eventually(lambda: nothing_is_taken(explorer))
    assert [each.experiences[0].drop_reason for each in explorer.exchanges()] == ["cut_off"]


def test_a_client_that_never_reads_is_not_waited_for_for_ever(running_explorer: Run, talkative: Talkative) -> None:
    explorer = running_explorer(talkative, request_timeout=5)
    with unread(explorer, talkative) as wire:
        eventually(lambda: talkative.left == 1)
        eventually(lambda: not is_held(wire))
        eventually(lambda: nothing_is_taken(explorer))


# We fail ourselves.


class Buggy(ChatDialect):
    """Chat completions, but with a bug."""

    def writer(self, body: dict[str, Any], msg_id: str, upstream_id: str) -> ReplyWriter:
        return _BuggyWriter(super().writer(body, msg_id, upstream_id).transcript)


class _BuggyWriter(ReplyWriter):
    def convert_whole(self, reply: bytes) -> bytes:
        raise ZeroDivisionError("a secret")

    def convert_event(self, event: bytes) -> bytes:
        answer = super().convert_event(event)
        if len(self.transcript.choices[0].completion_ids) == 3:
            raise ZeroDivisionError("a secret")
        return answer


def test_a_bug_loses_no_more_than_it_must(explorer: RunningExplorer, double: EngineDouble) -> None:
    routes = explorer.app.routes
    assert isinstance(routes, dict)
    routes[CHAT] = partial(explorer.services.proxy.answer, Buggy())
    with capture_logs() as logs:
        reply = explorer.chat()
        double.stalls_after = 8
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            explorer.chat(stream=True)
    assert code_of(reply) == (500, "internal")
    assert "secret" not in reply.text
    assert [each["event"] for each in logs if each.get("exc_info")] == ["request_failed", "answer_broken_off"]
    (kept,) = explorer.exchanges()
    assert kept.experiences[0].drop_reason == "cut_off"
    assert kept.experiences[0].completion_ids
    eventually(lambda: double.left == 1)
    eventually(lambda: nothing_is_taken(explorer))
    assert answered(explorer) == {(CHAT, "500"): 2}


# Whatever happens is counted, and reported in the client's own dialect.


def test_every_answer_is_counted_and_every_error_is_in_an_envelope(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double, max_body_bytes=10_000)
    patience_s = explorer.services.proxy._timeout_s
    for path, body in ASKED.items():
        double.hangs, double.answer, explorer.services.proxy._timeout_s = False, None, patience_s
        replies = [
            explorer.http.post(path, json=body),
            explorer.http.post(path, content=b"{"),
            explorer.http.post(path, json=body | {"model": "nope"}),
            explorer.http.post(path, content=b" " * 20_000),
        ]
        double.answer = b"nonsense"
        replies.append(explorer.http.post(path, json=body))
        double.hangs, explorer.services.proxy._timeout_s = True, 0.3
        replies.append(explorer.http.post(path, json=body))
        statuses = [reply.status_code for reply in replies]
        assert statuses == [200, 400, 404, 413, 502, 504]
        for reply in replies[1:]:
            assert reply.headers["x-request-id"]
            error = reply.json()["error"]
            wanted = {"type", "message"} if path == "/v1/messages" else {"message", "type", "param", "code"}
            assert error.keys() == wanted
        assert {key: count for key, count in answered(explorer).items() if key[0] == path} == {
            (path, str(status)): 1 for status in statuses
        }


def test_a_refusal_about_tools_names_our_settings(explorer: RunningExplorer, double: EngineDouble) -> None:
    said = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    double.status, double.answer = 400, json.dumps({"error": {"message": said, "type": "BadRequestError"}}).encode()
    for stream in (False, True):
        refused = explorer.chat(stream=stream, tools=[{"type": "function", "function": {"name": "f"}}])
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert "explorer.rollout_model.enable_auto_tool_choice" in message
        assert "--" not in message
