"""Clients that send what was generated: each answer is looked at, and counted."""

import json
import re
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from tests.doubles.engine import CHAT, MODEL
from tests.hostile.bed import ADMIN_KEY, Bed, fresh_name
from tests.hostile.echo import planted, reply_to

RESPONSES, MESSAGES, TEXT = "/v1/responses", "/v1/messages", "/v1/completions"
Path = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]

#: Why the service may say that it cannot now.
_HONEST = {
    "overloaded",
    "storage_full",
    "database_unavailable",
    "engine_unavailable",
    "too_many_connections",
    "stopping",
}

_AT_ONCE = 8


@dataclass
class Reply:
    """A reply that somebody has got, and what should be known of it."""

    msg_id: str
    path: Path
    names: tuple[str, ...]
    task_id: str
    run_id: str
    #: What each source said last (as a thumb, its worth), and how many events that took.
    rewards: dict[str, tuple[bool, float]] = field(default_factory=dict)
    events: int = 0
    deleted: bool = False

    @property
    def text(self) -> str:
        return reply_to(*self.names)


def request_body(path: Path, name: str, **but: Any) -> dict[str, Any]:
    """A request whose reply says `name`."""
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body: dict[str, Any] = {"model": MODEL, limit: 50}
    if path == TEXT:
        return body | {"prompt": planted(name)} | but
    if path == RESPONSES:
        return body | {"input": planted(name)} | but
    return body | {"messages": [{"role": "user", "content": planted(name)}]} | but


def text_of(path: Path, answer: dict[str, Any]) -> str:
    """What a whole reply says."""
    if path == CHAT:
        return str(answer["choices"][0]["message"]["content"])
    if path == TEXT:
        return str(answer["choices"][0]["text"])
    parts = answer["output"][0]["content"] if path == RESPONSES else answer["content"]
    return "".join(part["text"] for part in parts)


def read_stream(path: Path, data: str) -> tuple[str, str]:
    """The id and the text of a streamed reply, which must have come to its end."""
    events = [json.loads(each) for each in re.findall(r"^data: (\{.*\})$", data, re.MULTILINE)]
    assert events, data
    if path == RESPONSES:
        assert events[-1]["type"] == "response.completed", data[-500:]
        deltas = (each["delta"] for each in events if each["type"] == "response.output_text.delta")
        return events[-1]["response"]["id"], "".join(deltas)
    if path == MESSAGES:
        assert events[-1]["type"] == "message_stop", data[-500:]
        deltas = (each["delta"]["text"] for each in events if each["type"] == "content_block_delta")
        return events[0]["message"]["id"], "".join(deltas)
    assert data.endswith("data: [DONE]\n\n"), data[-500:]
    choices = [choice for each in events for choice in each["choices"]]
    said = (each["text"] if path == TEXT else each["delta"].get("content") or "" for each in choices)
    return events[0]["id"], "".join(said)


class Traffic:
    """Several clients of one service. `requests` counts what they have sent, `statuses` what came back.

    They all bring the key `bearer`, if there is one.
    """

    bearer = ""

    def __init__(self, bed: Bed, *, clients: int = 3, keys: Sequence[str] = ()) -> None:
        """With `keys`, each request brings the next of them."""
        self.bed = bed
        self._keys = keys
        self.requests = 0
        self.statuses: Counter[int] = Counter()
        self.codes: Counter[str] = Counter()
        self.unauthorized: set[str] = set()
        self._clients = [httpx.Client(base_url=bed.url, timeout=60) for _ in range(clients)]
        self._pool = ThreadPoolExecutor(_AT_ONCE)

    def close(self) -> None:
        self._pool.shutdown()
        for each in self._clients:
            each.close()

    def send(self, method: str, path: str, *, admin: bool = False, **what: Any) -> httpx.Response:
        """Send a request; its answer is one that a client may get, and comes."""
        self.requests += 1
        if "json" in what:  # httpx sends no infinity
            what["content"] = json.dumps(what.pop("json")).encode()
        if self._keys:
            key = self._keys[self.requests % len(self._keys)]
            what["headers"] = {"Authorization": f"Bearer {key}"} | what.get("headers", {})
        elif key := ADMIN_KEY if admin else self.bearer:
            what["headers"] = {"Authorization": f"Bearer {key}"} | what.get("headers", {})
        answer = self._clients[self.requests % len(self._clients)].request(method, path, **what)
        self.statuses[answer.status_code] += 1
        if answer.status_code == 401:
            self.unauthorized.add(path)
        if answer.status_code >= 500:
            error = answer.json()["error"]
            self.codes[str(error.get("code"))] += 1
            honest = answer.status_code == 503 and error.get("code") in _HONEST and "retry-after" in answer.headers
            assert honest, (method, path, what, answer.status_code, answer.text)
        return answer

    def ask(self, path: Path, *, stream: bool, after: Reply | None = None, **but: Any) -> Reply:
        """Get a reply, and see that it is the one to this request."""
        name, (task_id, run_id) = fresh_name(), but.pop("labels", ("", ""))
        if task_id:
            but["metadata"] = {"tuneloop_task_id": task_id, "tuneloop_run_id": run_id}
        if after is not None:
            but["previous_response_id"] = after.msg_id
        body = request_body(path, name, stream=stream, **but)
        answer = self.send("POST", path, json=body)
        assert answer.status_code == 200, (path, body, answer.text)
        if stream:
            msg_id, text = read_stream(path, answer.text)
        else:
            msg_id, text = answer.json()["id"], text_of(path, answer.json())
        reply = Reply(msg_id, path, (*(after.names if after else ()), name), task_id, run_id)
        assert text == reply.text, (path, body, answer.text)
        return reply

    def ask_at_once(self, kinds: list[tuple[Path, bool]], labels: tuple[str, str]) -> list[Reply]:
        """Get several replies at the same time."""
        return list(self._pool.map(lambda kind: self.ask(kind[0], stream=kind[1], labels=labels), kinds))

    def leave(self, path: Path, *, after_bytes: int, reset: bool, labels: tuple[str, str]) -> None:
        """Ask for a stream, and go when some of it has come."""
        self.requests += 1
        with self._connected() as connection:
            connection.sendall(self._written(path, fresh_name(), labels, stream=True))
            got = 0
            while got < after_bytes and (piece := connection.recv(after_bytes - got)) and b"\r\n0\r\n" not in piece:
                got += len(piece)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def pipeline(self, paths: Sequence[Path], labels: tuple[str, str]) -> list[Reply]:
        """Ask for several replies on one connection without waiting for any."""
        names = [fresh_name() for _ in paths]
        self.requests += len(paths)
        requests = [self._written(path, name, labels) for path, name in zip(paths, names, strict=True)]
        with self._connected() as connection:
            connection.sendall(b"".join(requests))
            with connection.makefile("rb") as file:
                answers = [_read_whole(file) for _ in names]
        self.statuses[200] += len(answers)
        found = []
        for path, name, answer in zip(paths, names, answers, strict=True):
            found.append(Reply(answer["id"], path, (name,), *labels))
            assert text_of(path, answer) == found[-1].text, answer
        return found

    def _written(self, path: Path, name: str, labels: tuple[str, str], **but: Any) -> bytes:
        metadata = {"tuneloop_task_id": labels[0], "tuneloop_run_id": labels[1]}
        body = json.dumps(request_body(path, name, metadata=metadata, **but)).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
        if self.bearer:
            lines.append(f"Authorization: Bearer {self.bearer}")
        return "\r\n".join([*lines, "", ""]).encode() + body

    def _connected(self) -> socket.socket:
        parts = urlsplit(self.bed.url)
        return socket.create_connection((parts.hostname, parts.port), timeout=60)


def _read_whole(file: Any) -> dict[str, Any]:
    assert file.readline().startswith(b"HTTP/1.1 200 ")
    length = 0
    while (line := file.readline()) not in {b"\r\n", b""}:
        with suppress(ValueError):
            name, value = line.decode("latin-1").split(":", 1)
            length = int(value) if name == "content-length" else length
    found: dict[str, Any] = json.loads(file.read(length))
    return found
