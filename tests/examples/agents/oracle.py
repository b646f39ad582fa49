"""An OpenAI endpoint that answers as the worlds' teachers do, and keeps what it was asked."""

import base64
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from examples.tasks.dialogue import Reply, Task


class Oracle:
    """Knows the tasks of a world by their questions. `asked` are the bodies of the requests, with their paths."""

    def __init__(self, world: Task, tasks: Sequence[dict[str, Any]]) -> None:
        self._world, self._tasks = world, {task.get("question", ""): task for task in tasks}
        self.asked: list[tuple[str, dict[str, Any]]] = []

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The labels of the runs that requests belong to, by their paths."""
        tokens = [path.split("/")[2] for path, _ in self.asked if path.startswith("/run/")]
        return [json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))) for token in tokens]

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A chat completion, or that feedback was taken."""
        self.asked.append((path, body))
        if path in {"/feedback", "/commit"}:
            return {"status": "success", "outcomes": {}, "committed": 1}
        message = dict(self._reply(body["messages"]).message)
        if calls := message.get("tool_calls"):  # each has an id of its own, as an engine's have
            message["tool_calls"] = [{**each, "id": f"call_{len(self.asked)}_{n}"} for n, each in enumerate(calls)]
        ended = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "finish_reason": ended, "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": f"chatcmpl-{len(self.asked)}", "object": "chat.completion", "created": 1, "model": body["model"]}
        return {**head, "choices": [choice], "usage": usage}

    def _reply(self, messages: Sequence[dict[str, Any]]) -> Reply:
        question = text_of(next(each for each in messages if each["role"] == "user"))
        turn = sum(each["role"] == "assistant" for each in messages)
        if question not in self._tasks:
            return Reply("Ben")
        replies = list(self._world.replies(self._tasks[question], None))
        return replies[min(turn, len(replies) - 1)]


def text_of(message: dict[str, Any]) -> str:
    """The text of a message, as vLLM reads it."""
    content = message.get("content")
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())


@contextmanager
def serving(oracle: Oracle) -> Iterator[str]:
    """The URL of the service that the oracle is behind."""

    class Requests(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = json.dumps(oracle.answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
