"""docs/limits.md is true: every bound is the one in the code, and what is beyond it is answered as the table says."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.doubles.engine import CHAT, MODEL, EnginePlace
from tests.explorer.running import HELLO, RunningExplorer, explorer_running, settings_for
from tests.explorer.wire import BODY, Wire, chunked
from tests.hostile.bed import ADMIN_KEY
from tests.house.documents.page_files import part_below
from tuneloop.explorer import edge, tokens
from tuneloop.explorer.dialects import conversations
from tuneloop.explorer.drain import STOP_S
from tuneloop.explorer.feedback import events, routes
from tuneloop.explorer.http import bodies, lists
from tuneloop.explorer.limits import ConnectionLimits
from tuneloop.explorer.processes import worker
from tuneloop.explorer.proxy import request
from tuneloop.explorer.routes import admin, files, fine_tuning, passthrough, stored_completions
from tuneloop.explorer.ui import site
from tuneloop.shared import logging
from tuneloop.shared.experience import MAX_NAME
from tuneloop.shared.finetuning import lines
from tuneloop.shared.ledger.files import UPLOAD_S
from tuneloop.shared.ledger.recording.feedback import MAX_EARLY, MAX_SAID, MAX_SAID_BY_ONE
from tuneloop.shared.ledger.recording.stored_completions import MAX_EXAMINED, MAX_PAGE_BYTES, MAX_PAIRS
from tuneloop.shared.ledger.training.groups import MAX_CONNECTED
from tuneloop.shared.operations import job_requests
from tuneloop.shared.settings.serving import ExplorerSettings
from tuneloop.shared.settings.settings import options

_PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

#: The bounds that no setting moves, and those that cannot be written as a number.
FIXED: dict[str, object] = {
    "a [key](keys.md#limits)": None,
    "keys that a tenant's administrators make, with revoked ones": admin.MAX_KEYS,
    "a connection without another request": worker._KEEP_ALIVE_S,
    "a request's headers; lines between a body's chunks": edge.MAX_HEAD_BYTES,
    "headers after a chunked body (trailers)": (),
    "its `Content-Encoding`": None,
    "silence in an event stream": edge.KEEP_ALIVE_S,
    "how deep a body is nested": bodies.MAX_DEPTH,
    "objects and lists in a body": bodies.MAX_CONTAINERS,
    "values in a body": bodies.MAX_VALUES,
    "how long they wait": ExplorerSettings.wait_timeout,
    "how long the database stores nothing": ExplorerSettings.outbox_max_age,
    "unread bytes of a client": None,
    "reading an answer over 64 KiB": ConnectionLimits.read_timeout_s,
    "bodies of `/tokenize`, `/detokenize`, `/v1/messages/count_tokens`": passthrough._MAX_TEXT_BYTES,
    "such requests of a worker at once": 1,
    "such requests waiting": passthrough._MAX_WAITING,
    "a body of feedback or commit": routes.MAX_BODY_BYTES,
    "ids in one call of feedback": events.MAX_IDS,
    "events about one reply or run in one call of feedback": events.MAX_OF_ONE,
    "events about one reply or run in all": MAX_SAID,
    "of these from one key, or source without a key": MAX_SAID_BY_ONE,
    "a tenant's events about missing runs and replies": MAX_EARLY,
    "replies in one group of preferences": MAX_CONNECTED,
    "draining the outbox at the end": STOP_S,
    "`metadata` of a request": request.MAX_METADATA_BYTES,
    "text in one call of feedback, once for each id": events.MAX_CHARACTERS,
    "`task_id`, `run_id`, `source`, `metric`, `label`, `idempotency_key`": MAX_NAME,
    "tasks named in one commit": routes.MAX_TASKS,
    "completions in one listing": lists.MAX_LIMIT,
    "completions read for a filtered listing": MAX_EXAMINED,
    "pairs of a stored completion's new metadata": MAX_PAIRS,
    "a body with a stored completion's new metadata": stored_completions._MAX_BODY_BYTES,
    "responses of a conversation that is continued": conversations.MAX_RESPONSES,
    "its requests and replies": conversations.MAX_BYTES,
    "the requests that one listing reads": MAX_PAGE_BYTES,
    "a request for a browser's token": routes._MAX_TOKEN_BYTES,
    "how long a browser's token lives": tokens.MAX_LIFE_S,
    "events that a browser's token allows": tokens.MAX_EVENTS,
    "a request for a key": admin._MAX_KEY_BYTES,
    "a form of the page at `/ui`": site._MAX_FORM_BYTES,
    "an administrator's body": admin._MAX_BODY_BYTES,
    "an administrator's reason": admin.MAX_REASON,
    "events of versions in one answer": admin.MAX_EVENTS,
    "log lines of one event in a process": logging.LINES_AT_ONCE,
    "open [fine-tuning jobs](files.md#fine-tuning-jobs) of a tenant": job_requests.MOST_OPEN,
    "a [file](files.md#files)": files.MAX_FILE_BYTES,
    "a part of an upload": files.MAX_PART_BYTES,
    "how long an upload may take": UPLOAD_S,
    "free disk space beside files": files.RESERVED_BYTES,
    "a line of a file": lines.MAX_LINE_BYTES,
    "a grader that is tried": fine_tuning._MAX_BODY_BYTES,
}


class Limit(NamedTuple):
    """A row of the table."""

    what: str
    bound: str
    setting: str
    beyond: str


def table() -> dict[str, Limit]:
    rows = [
        line[1:-1].split("|") for line in part_below(_PAGE.read_text(), "Limits").splitlines() if line.startswith("|")
    ][2:]
    found = [
        Limit(*(each.strip(" `") if place == 2 else each.strip() for place, each in enumerate(row))) for row in rows
    ]
    assert len({each.what for each in found}) == len(found)
    return {each.what: each for each in found}


def number_in(bound: str) -> object:
    """What a bound says, in bytes, seconds or pieces; () for none, None for what is no number."""
    if bound == "none":
        return ()
    found = re.match(r"([\d,]+) ?(\w+)?", bound)
    return int(found[1].replace(",", "")) * _UNITS.get(found[2] or "", 1) if found else None


@pytest.mark.parametrize("what", table())
def test_a_bound_is_the_one_in_the_code(what: str) -> None:
    limit, defaults = table()[what], {key: field.default for key, field in options()}
    assert number_in(limit.bound) == (defaults[limit.setting] if limit.setting else FIXED[what])


def test_no_bound_is_forgotten() -> None:
    assert FIXED.keys() <= table().keys()
    limits = re.compile(r"explorer\.(max_|head_|body_|wait_|request_|outbox_max_)\w+")
    named = {each.setting for each in table().values()}
    assert {key for key, _ in options() if limits.fullmatch(key)} <= named


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory, places: list[EnginePlace]) -> Iterator[RunningExplorer]:
    folder = tmp_path_factory.mktemp("limits")
    with explorer_running(settings_for(folder, [places[0].fresh().url], admin_key=ADMIN_KEY)) as running:
        yield running


class Beyond:
    """Sends what is just beyond a bound."""

    def __init__(self, explorer: RunningExplorer, limit: Limit) -> None:
        self.http, self.url = explorer.http, explorer.url
        bound = number_in(limit.bound)
        self.more = bound + 1 if isinstance(bound, int) else 0

    def post(self, path: str, body: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"} if path.startswith("/admin") else {}
        return self.http.post(path, content=body if isinstance(body, bytes) else json.dumps(body), headers=headers)

    def announce(self, path: str) -> tuple[int, str]:
        """Only say how long the body is."""
        with Wire(self.url) as wire:
            wire.send(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {self.more}\r\n\r\n".encode())
            answer = wire.response()
            return answer.status, answer.error["code"]

    def over_the_wire(self, data: bytes) -> tuple[int, str]:
        with Wire(self.url) as wire:
            wire.send(data)
            answer = wire.response()
            return answer.status, answer.error["code"]

    def reply(self) -> str:
        found: str = self.http.post(CHAT, json=HELLO).json()["id"]
        return found


_IMAGE = {"type": "image_url", "image_url": {"url": "http://elsewhere.example/x.png"}}

BEYOND: dict[str, Callable[[Beyond], Any]] = {
    "a request's headers; lines between a body's chunks": lambda to: to.over_the_wire(
        b"GET /health HTTP/1.1\r\nX: " + b"y" * to.more
    ),
    "headers after a chunked body (trailers)": lambda to: to.over_the_wire(chunked(BODY)[:-2] + b"X: y\r\n\r\n"),
    "a request's body": lambda to: to.announce(CHAT),
    "how deep a body is nested": lambda to: to.post(CHAT, b'{"a":' + b"[" * to.more + b"]" * to.more + b"}"),
    "objects and lists in a body": lambda to: to.post(CHAT, b'{"a":[' + b"[]," * to.more + b"0]}"),
    "values in a body": lambda to: to.post(CHAT, b'{"a":[' + b"0," * to.more + b"0]}"),
    "bodies of `/tokenize`, `/detokenize`, `/v1/messages/count_tokens`": lambda to: to.post(
        "/tokenize", b" " * to.more
    ),
    "a body of feedback or commit": lambda to: to.post("/feedback", b" " * to.more),
    "ids in one call of feedback": lambda to: to.post("/feedback", {"msg_ids": ["x"] * to.more, "reward": 1}),
    "text in one call of feedback, once for each id": lambda to: to.post(
        "/feedback", {"msg_ids": [to.reply()] * 8, "comment": "x" * (to.more // 8 + 1)}
    ),
    "`task_id`, `run_id`, `source`, `metric`, `label`, `idempotency_key`": lambda to: to.post(
        "/feedback", {"msg_ids": [to.reply()], "reward": 1, "source": "x" * to.more}
    ),
    "tasks named in one commit": lambda to: to.post("/commit", {"task_ids": ["x"] * to.more}),
    "completions in one listing": lambda to: to.http.get(f"{CHAT}?limit={to.more}"),
    "pairs of a stored completion's new metadata": lambda to: to.post(
        f"{CHAT}/{to.reply()}", {"metadata": {str(number): "x" for number in range(to.more)}}
    ),
    "a body with a stored completion's new metadata": lambda to: to.post(f"{CHAT}/{to.reply()}", b" " * to.more),
    "a request for a browser's token": lambda to: to.post("/v1/feedback_tokens", b" " * to.more),
    "how long a browser's token lives": lambda to: to.post(
        "/v1/feedback_tokens", {"msg_id": to.reply(), "expires_in": to.more}
    ),
    "events that a browser's token allows": lambda to: to.post(
        "/v1/feedback_tokens", {"msg_id": to.reply(), "max_events": to.more}
    ),
    "a request for a key": lambda to: to.post("/admin/keys", b" " * to.more),
    "an administrator's body": lambda to: to.post("/admin/versions/unpin", b" " * to.more),
    "an administrator's reason": lambda to: to.post("/admin/versions/unpin", {"reason": "x" * to.more}),
    "events of versions in one answer": lambda to: to.http.get(
        f"/admin/versions/events?last={to.more}", headers={"Authorization": f"Bearer {ADMIN_KEY}"}
    ),
}


@pytest.mark.parametrize("what", BEYOND)
def test_what_is_beyond_it_is_answered_as_the_table_says(explorer: RunningExplorer, what: str) -> None:
    limit = table()[what]
    answer = BEYOND[what](Beyond(explorer, limit))
    if isinstance(answer, httpx.Response):
        answer = answer.status_code, answer.json()["error"]["code"]
    assert limit.beyond == f"{answer[0]} `{answer[1]}`"


def test_a_listing_of_large_requests_comes_in_short_pages(explorer: RunningExplorer) -> None:
    content = "x" * (6 << 20)
    sent = []
    for number in range(5):
        message = {"role": "user", "content": content + str(number)}
        sent.append(explorer.http.post(CHAT, json=HELLO | {"messages": [message], "model": MODEL}).json()["id"])
    listed, after = [], {"after": sent[0], "limit": "100"}
    while True:
        page = explorer.http.get(CHAT, params=after).json()
        assert len(page["data"]) <= 2
        listed += [each["id"] for each in page["data"]]
        if not page["has_more"]:
            break
        after["after"] = page["last_id"]
    assert listed == sent[1:]


@pytest.mark.parametrize(
    ("piece", "turns"), [('"' + "x" * (7 << 20) + '"', 4), ("[" + "{}," * 70_000 + "0]", 2)], ids=["bytes", "values"]
)
def test_a_large_conversation_is_not_continued_for_ever(explorer: RunningExplorer, piece: str, turns: int) -> None:
    previous: str | None = None
    for _ in range(turns):
        body = {
            "model": MODEL,
            "input": "3+4=",
            "max_output_tokens": 8,
            "metadata": {},
            "previous_response_id": previous,
        }
        data = json.dumps(body)[:-1] + f', "user_data": {piece}}}'
        answer = explorer.http.post("/v1/responses", content=data)
        assert answer.status_code == 200, answer.text[:500]
        previous = answer.json()["id"]
    answer = explorer.http.post("/v1/responses", content=json.dumps(body | {"previous_response_id": previous}))
    assert answer.status_code == 200  # large, but not too large
    data = json.dumps(body | {"previous_response_id": previous})[:-1] + f', "user_data": {piece}}}'
    previous = explorer.http.post("/v1/responses", content=data).json()["id"]
    answer = explorer.http.post("/v1/responses", content=json.dumps(body | {"previous_response_id": previous}))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "conversation_too_large")
