"""Whether two replies are the same reply: one of vLLM itself, one through the explorer in front of it."""

import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import httpx
import pytest

Json = dict[str, Any]

#: How far two log-probabilities of the same token may lie apart: what is in the prefix cache changes the last digits.
NATS = 2e-4

_AT_ONCE = 16

#: How often the two are asked until they cut a stream alike.
_TRIES = 6

#: vLLM 0.26 gives the items of a response bare ones.
_ID = re.compile(r"(chatcmpl-tool-|chatcmpl-|cmpl-|resp_|msg_|rs_|fc_|modelperm-|)[0-9A-Za-z]{16,}")
#: What older versions of vLLM don't say, and what they are asked for here that others say without.
_LATER = frozenset({"cache_write_tokens", "token_ids", "prompt_token_ids"})
_ADDS_UP = frozenset({"content", "text", "arguments", "reasoning", "token_ids"})


class Together:
    """A client that has asked the questions of a whole file at once, which takes an engine a third of the time.

    Each answer is given once. Who asks for it again, or anything else, is answered then.
    """

    def __init__(self, client: httpx.Client, questions: Iterable[tuple[str, Json]]) -> None:
        self._client = client
        asked = {_key(path, body): (path, body) for path, body in questions}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            told = pool.map(lambda each: client.post(each[0], json=each[1]), asked.values())
            self._told = dict(zip(asked, told, strict=True))

    def post(self, path: str, **how: Any) -> httpx.Response:
        told = self._told.pop(_key(path, how["json"]), None) if [*how] == ["json"] else None
        return self._client.post(path, **how) if told is None else told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def _key(path: str, body: Json) -> str:
    return f"{path} {json.dumps(body)}"


def chosen(request: pytest.FixtureRequest) -> Iterable[tuple[str, Json]]:
    """The tests of a file that are to run: their names, and what each is called with."""
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            yield item.originalname, item.callspec.params


class Said(NamedTuple):
    """A reply, without what differs from call to call: a body, or the events of a stream."""

    status: int
    body: Any
    events: list[Any]

    @property
    def joined(self) -> Any:
        """All that a stream says, whatever pieces it comes in."""
        return _joined(self.events)


def ask(client: httpx.Client, path: str, body: Json) -> Said:
    """Ask, and take out what differs from call to call."""
    reply = client.post(path, json=body)
    if reply.headers["content-type"].startswith("text/event-stream"):
        return Said(reply.status_code, None, list(_events(reply.text)))
    return Said(reply.status_code, masked(reply.json()), [])


def masked(told: Any, key: str = "", parent: Json | None = None) -> Any:
    """Without ids (but for how they begin) and times."""
    if isinstance(told, dict):
        return {name: masked(value, name, told) for name, value in told.items()}
    if isinstance(told, list):
        return [masked(value) for value in told]
    if key == "id" and isinstance(told, str) and (id_ := _ID.fullmatch(told)):
        # Anthropic's messages have ids of chat completions in vLLM, and ours their own.
        return "msg_" if (parent or {}).get("type") == "message" else id_[1]
    if key in {"created", "created_at"} and isinstance(told, int):
        return 0
    return told


def nearly(told: Any) -> Any:
    """The same, but numbers are equal when they nearly are."""
    if isinstance(told, dict):
        return {key: nearly(value) for key, value in told.items()}
    if isinstance(told, list | tuple):
        return [nearly(value) for value in told]
    return pytest.approx(told, abs=NATS) if isinstance(told, float) else told


def assert_alike(vllm: httpx.Client, ours: httpx.Client, path: str, body: Json) -> Said:
    """Ask both, and compare event by event. An old vLLM streams fewer log-probabilities: missing ones are skipped."""
    cuts, old = [], is_old(vllm)
    for number in range(_TRIES):
        theirs, told = ask(vllm, path, body), ask(ours, path, body)
        if old and theirs.events and "messages" in body and body.get("logprobs"):
            theirs = ask(vllm, path, body | {"return_token_ids": True})
        if old:
            theirs, told = (Said(said.status, _less(said.body), _less(said.events)) for said in (theirs, told))
        assert told.status == theirs.status, (told, theirs)
        if number == 0 and told != theirs and nearly(told) != theirs:
            continue  # answered beside others, where likelihoods that hardly differ may change places
        assert told.body == nearly(theirs.body)
        if _by_choice(told.events) == nearly(_by_choice(theirs.events)):
            return told
        assert told.joined == nearly(theirs.joined)
        cuts.append((len(theirs.events), len(told.events)))
    assert len(set(cuts)) > 1, (told.events, theirs.events)
    return told


@cache
def is_old(vllm: httpx.Client) -> bool:
    """Whether this vLLM is older than 0.31."""
    major, minor = vllm.get("/version").json()["version"].split(".")[:2]
    return (int(major), int(minor)) < (0, 31)


def _less(told: Any) -> Any:
    if isinstance(told, dict):
        return {name: _less(value) for name, value in told.items() if name not in _LATER}
    return [_less(value) for value in told] if isinstance(told, list) else told


def _events(text: str) -> Iterable[Any]:
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    for block in blocks:
        data = block.removeprefix("data: ")
        yield data if data == "[DONE]" else masked(json.loads(data))


def _by_choice(events: list[Any]) -> list[Any]:
    """The events of one choice after the other: how several take turns is the scheduler's."""
    choices = [event["choices"] if isinstance(event, dict) and "choices" in event else [] for event in events]
    last = 1 + max((choice[0]["index"] for choice in choices if choice), default=0)
    order = sorted(range(len(events)), key=lambda at: choices[at][0]["index"] if choices[at] else last)
    return [events[at] for at in order]


def _joined(events: list[Any]) -> Any:
    """What each choice comes to, what was said beside the choices, and how the stream began and ended."""
    choices: dict[int, Json] = {}
    around: Json = {}
    beside = []
    for event in events:
        if not isinstance(event, dict) or not event.get("choices"):
            beside.append(event)
            continue
        for choice in event["choices"]:
            _add(choices.setdefault(choice["index"], {}), {**choice, "usage": event.get("usage")})
        around |= {
            name: value for name, value in event.items() if name not in {"choices", "usage"} and value is not None
        }
    return [choices, around, beside]


def _add(whole: Json, piece: Json) -> None:
    for name, value in piece.items():
        if value is None:
            whole.setdefault(name, None)
        elif name == "tool_calls":
            calls = whole.setdefault(name, {})
            for call in value:
                _add(calls.setdefault(call["index"], {}), call)
        elif isinstance(value, dict):
            if whole.get(name) is None:
                whole[name] = {}
            _add(whole[name], value)
        elif (name in _ADDS_UP or isinstance(value, list)) and whole.get(name) is not None:
            whole[name] = whole[name] + value
        else:
            whole[name] = value
