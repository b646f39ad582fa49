"""Traces of a whole explorer, by what a real OTLP receiver gets of them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer.running import HELLO, RunningExplorer, eventually, explorer_running, settings_for
from tuneloop.shared.experience import VersionAction
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry.spans import span_of_reply, span_of_version

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Receiver:
    """An OTLP receiver: HTTP with protobuf."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        receiver = self

        class Answer(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                receiver.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, request: ExportTraceServiceRequest) -> None:
        for of_service in request.resource_spans:
            attributes = attributes_of(of_service.resource)
            self.services.add(str(attributes["service.name"]))
            self.spans += [span for scope in of_service.scope_spans for span in scope.spans]

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    @contextmanager
    def running(self) -> Iterator["Receiver"]:
        thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


def attributes_of(of: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


def links_of(span: Any) -> list[tuple[int, int]]:
    return [(int.from_bytes(each.trace_id), int.from_bytes(each.span_id)) for each in span.links]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver().running() as running:
        yield running


def traced(tmp_path: Path, double: EngineDouble, url: str) -> Settings:
    settings = settings_for(tmp_path, [double.url])
    return settings.model_copy(update={"monitor": settings.monitor.model_copy(update={"otlp_url": url})})


@pytest.fixture
def explorer(tmp_path: Path, double: EngineDouble, receiver: Receiver) -> Iterator[RunningExplorer]:
    with explorer_running(traced(tmp_path, double, receiver.url)) as running:
        yield running


def ask(explorer: RunningExplorer, *, flags: str = "01", **but: Any) -> str:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-{flags}"}
    answer = explorer.http.post("/v1/chat/completions", json=HELLO | but, headers=headers)
    assert answer.status_code == 200
    return answer.text if but.get("stream") else str(answer.json()["id"])


def test_a_request_is_in_its_clients_trace_and_so_is_the_engines_part(
    explorer: RunningExplorer, double: EngineDouble, receiver: Receiver
) -> None:
    msg_id = ask(explorer, metadata={"run_id": "run-1", "task_id": "sums"})
    eventually(lambda: len(receiver.spans) >= 3)
    engine, server = sorted(receiver.named(f"chat {MODEL}"), key=lambda span: span.kind, reverse=True)
    assert server.trace_id.hex() == engine.trace_id.hex() == TRACE
    assert (server.parent_span_id.hex(), engine.parent_span_id) == (SPAN, server.span_id)
    sent = double.chats[-1].headers["traceparent"]
    assert sent == f"00-{TRACE}-{engine.span_id.hex()}-01"
    found = attributes_of(server)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == MODEL
    assert found["gen_ai.response.id"] == msg_id
    assert found["gen_ai.conversation.id"] == "run-1"
    assert found["gen_ai.usage.input_tokens"] > 0
    assert found["gen_ai.usage.output_tokens"] > 0
    assert (found["http.response.status_code"], found["tuneloop.version"]) == (200, 0)
    assert attributes_of(engine)["gen_ai.provider.name"] == "vllm"
    assert server.start_time_unix_nano <= engine.start_time_unix_nano <= engine.end_time_unix_nano
    assert receiver.services == {"tuneloop-explorer"}


def test_what_becomes_of_a_reply_links_to_where_it_was_recorded(explorer: RunningExplorer, receiver: Receiver) -> None:
    msg_id = ask(explorer)
    explorer.feedback(msg_id, reward=0.5)
    eventually(lambda: bool(receiver.named("feedback")) and bool(receiver.named("record")))
    [record], [feedback] = receiver.named("record"), receiver.named("feedback")
    place = span_of_reply(msg_id)
    assert (int.from_bytes(record.trace_id), int.from_bytes(record.span_id)) == place
    assert [trace for trace, _ in links_of(record)] == [int(TRACE, 16)]
    assert links_of(feedback) == [place]
    [result] = feedback.events
    assert result.name == "gen_ai.evaluation.result"
    said = attributes_of(result)
    assert (said["gen_ai.evaluation.score.value"], said["gen_ai.response.id"]) == (0.5, msg_id)
    assert said["tuneloop.feedback.outcome"] == "accepted"


def test_streams_are_traced_and_what_the_engine_refuses_too(
    explorer: RunningExplorer, double: EngineDouble, receiver: Receiver
) -> None:
    ask(explorer, stream=True)
    eventually(lambda: len(receiver.spans) >= 3)
    double.dead = True
    assert explorer.chat().status_code >= 500
    eventually(lambda: any(span.status.code == 2 for span in receiver.spans))
    [failed] = [span for span in receiver.spans if span.status.code == 2]
    assert attributes_of(failed)["error.type"]


def test_a_client_that_wants_no_spans_gets_none(explorer: RunningExplorer, receiver: Receiver) -> None:
    ask(explorer, flags="00")
    ask(explorer)
    eventually(lambda: len(receiver.spans) >= 3)
    assert len(receiver.spans) == 3


def test_a_decision_about_a_version_is_a_span(explorer: RunningExplorer, receiver: Receiver) -> None:
    explorer.until_looked()
    explorer.ledger.versions.note(0, VersionAction.PINNED, by="admin:ann", reason="Friday")
    eventually(lambda: bool(receiver.named("version pinned")))
    [span] = receiver.named("version pinned")
    assert attributes_of(span) == {"tuneloop.version": 0, "tuneloop.by": "admin:ann", "tuneloop.reason": "Friday"}
    assert links_of(span) == [span_of_version("tuneloop/default", 0)]


def test_no_text_of_a_user_is_sent(explorer: RunningExplorer, receiver: Receiver) -> None:
    msg_id = ask(explorer, messages=[{"role": "user", "content": "secret-word"}], user="ann-the-user")
    explorer.http.post("/feedback", json={"msg_ids": [msg_id], "comment": "secret-comment", "reward": 1})
    eventually(lambda: len(receiver.spans) >= 4)
    assert [each for each in receiver.spans if "secret-" in str(each) or "ann-the-user" in str(each)] == []


def test_a_receiver_that_is_away_costs_no_request(tmp_path: Path, double: EngineDouble) -> None:
    with explorer_running(traced(tmp_path, double, "http://127.0.0.1:9")) as explorer:
        began = time.monotonic()
        assert [explorer.chat().status_code for _ in range(20)] == [200] * 20
        assert time.monotonic() - began < 30
