"""A service that takes feedback as a test wants, over real HTTP."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]

#: Status, headers, body.
Answer = tuple[int, dict[str, str], Json | str]


def taken(body: Json) -> Answer:
    names = [name for entry in body["feedback"] for name in entry.get("msg_ids") or ["run"]]
    return 200, {}, {"status": "success", "outcomes": dict.fromkeys(names, "accepted"), "accepted": len(names)}


@dataclass
class FeedbackService:
    """`answers` come first, one to each call; then `answer` answers. `calls` are the bodies, in order."""

    url: str = ""
    calls: list[Json] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    answer: Callable[[Json], Answer] = taken

    @property
    def entries(self) -> list[Json]:
        return [entry for call in self.calls for entry in call.get("feedback", ())]

    def respond(self, path: str, body: Json, key: str | None) -> Answer:
        if path != "/feedback":
            return 200, {}, {"status": "success", "committed": 3}
        self.calls.append(body)
        self.keys.append(key)
        return self.answers.pop(0) if self.answers else self.answer(body)


@contextmanager
def feedback_service(port: int = 0, double: FeedbackService | None = None) -> Iterator[FeedbackService]:
    found = double or FeedbackService()

    class Respond(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # or each answer waits for the acknowledgement of its head

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, headers, answer = found.respond(self.path, body, self.headers["authorization"])
            payload = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(payload))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", port), Respond) as server:
        found.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
