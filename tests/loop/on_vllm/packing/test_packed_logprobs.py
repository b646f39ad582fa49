"""Packed log-probabilities are vLLM's own, to the last bit, however a request is sampled."""

import asyncio
from array import array
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.loop.harness.bare_engine import KEY, MODEL, engine_on, put_weights, session_of
from tests.loop.harness.oracle import Oracle
from tests.loop.harness.services import free_port
from tuneloop.explorer.engines.packing import front_end
from tuneloop.explorer.engines.packing.wire import HEADER, PACKED
from tuneloop.explorer.engines.vllm import CAPTURE, CAPTURE_TEXT, EngineControl
from tuneloop.explorer.transcript import ChatTranscript, RequestedFields, TextTranscript, Transcript

pytestmark = pytest.mark.vllm

Json = dict[str, Any]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA: Json = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
FORMAT: Json = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOL: Json = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
LONG: Json = {"messages": [{"role": "user", "content": "once upon a time " * 30}]}

LEAST: dict[str, Json] = {
    CHAT: {"messages": [{"role": "user", "content": "Grüezi!"}], "max_tokens": 24},
    TEXT: {"prompt": "Once upon a", "max_tokens": 24},
}

#: One choice each: of several, it depends on the moment which gets which random number.
CASES: dict[str, tuple[str, Json]] = {
    "plain": (CHAT, {}),
    "cold": (CHAT, {"temperature": 0.3}),
    "hot": (CHAT, {"temperature": 1.5}),
    "greedy": (CHAT, {"temperature": 0}),
    "nucleus": (CHAT, {"top_p": 0.5}),
    "top k": (CHAT, {"top_k": 5, "min_p": 0.1}),
    "bias": (CHAT, {"logit_bias": {"70": 5}, "presence_penalty": 1.5}),
    # Who reads stop strings is behind who samples, by some tokens or other.
    "stopped": (CHAT, {"stop": ["a", "e", "<", "o"], "max_tokens": 60, "temperature": 0}),
    "stop kept": (CHAT, {"stop": ["a", "e"], "include_stop_str_in_output": True, "temperature": 0}),
    "schema": (CHAT, {"response_format": FORMAT, "max_tokens": 60}),
    "tools": (CHAT, {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}),
    "free to call": (CHAT, {"tools": [TOOL]}),
    "long": (CHAT, LONG),
    "its prefix cached": (CHAT, LONG | {"temperature": 0.7}),
    "text": (TEXT, {}),
    "text, cool": (TEXT, {"temperature": 0.7}),
    "text, stopped": (TEXT, {"temperature": 0, "stop": ["a", "e"]}),
    "text, greedy": (TEXT, {"temperature": 0}),
    "prompt logprobs": (TEXT, {"prompt_logprobs": 0}),
}


class Heard(NamedTuple):
    """What was heard of one request: the tokens of each choice with their log-probabilities, its prompt; all of it."""

    choices: Mapping[int, tuple[list[int], bytes]]
    prompts: Mapping[int, list[int]]
    raw: str


def ask(engine: httpx.Client, path: str, body: Json, *, packed: bool, stream: bool) -> Heard:
    asked = {"model": MODEL, **LEAST[path], **body, **(CAPTURE if path == CHAT else CAPTURE_TEXT), "stream": stream}
    reply = engine.post(path, json=asked, headers={HEADER: PACKED} if packed else {}).raise_for_status()
    transcript: Transcript = (ChatTranscript if path == CHAT else TextTranscript)("x", RequestedFields())
    pieces = [reply.content]
    if stream:
        pieces = [line[6:] for line in reply.content.split(b"\n") if line.startswith(b"data: {")]
    for piece in pieces:
        transcript.feed(piece)
    assert transcript.complete
    assert not any(each.unreadable for each in transcript.choices.values())
    heard = {
        index: (each.completion_ids, array("f", each.logprobs).tobytes()) for index, each in transcript.choices.items()
    }
    prompts = {index: list(array("i", each.prompt_ids or b"")) for index, each in transcript.choices.items()}
    return Heard(heard, prompts, reply.text)


def ask_anew(engine: httpx.Client, name: str, *, packed: bool, stream: bool) -> Heard:
    """As if the engine had been asked nothing before, but for what is to find its prefix cached."""
    path, body = CASES[name]
    engine.post("/reset_prefix_cache").raise_for_status()
    if name == "its prefix cached":
        ask(engine, *CASES["long"], packed=packed, stream=stream)
    # The same random numbers each time.
    return ask(engine, path, body | {"seed": 5}, packed=packed, stream=stream)


@pytest.fixture(scope="module")
def roads(bare_engine: httpx.Client, model: Path) -> tuple[dict[Any, Heard], dict[Any, Heard]]:
    """All requests, packed, and vLLM's own way."""
    put_weights(bare_engine, model)
    asked = [(name, stream) for name in CASES for stream in (False, True)]
    packed, full = (
        {each: ask_anew(bare_engine, each[0], packed=is_packed, stream=each[1]) for each in asked}
        for is_packed in (True, False)
    )
    return packed, full


def test_packed_log_probabilities_are_the_others_to_the_last_bit(
    roads: tuple[dict[Any, Heard], dict[Any, Heard]],
) -> None:
    packed, full = roads
    assert {each: heard.choices for each, heard in packed.items()} == {
        each: heard.choices for each, heard in full.items()
    }
    assert all(ids and len(ids) * 4 == len(told) for heard in packed.values() for ids, told in heard.choices.values())


def test_an_engine_with_our_plugin_is_known_by_one_token(bare_engine: httpx.Client) -> None:
    async def ask() -> bool | None:
        async with session_of(bare_engine) as session:
            control = EngineControl(session, model_name=MODEL)
            await control.find_plugin()
        return control.packs

    assert asyncio.run(ask()) is True


def test_they_come_without_tokens_of_their_own(roads: tuple[dict[Any, Heard], dict[Any, Heard]]) -> None:
    packed, full = roads
    for name, heard in packed.items():
        assert '"packed":"' in heard.raw, name
        assert '"bytes":' not in heard.raw, name
        assert '"packed":' not in full[name].raw, name


def test_those_of_a_stream_come_many_at_once(roads: tuple[dict[Any, Heard], dict[Any, Heard]]) -> None:
    packed, _full = roads
    for (name, streamed), heard in packed.items():
        if streamed and name != "prompt logprobs":
            most = sum(len(ids) // front_end._AT_ONCE + 1 for ids, _told in heard.choices.values())
            assert heard.raw.count('"packed":"') <= most, name


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[httpx.Client]:
    """An engine of several processes, where prompts are read in pieces, and requests have to wait for one another."""
    rollout = {
        "single_process": False,
        "api_servers": 2,
        "engine_args": [
            *("--served-model-name", MODEL),
            *("--api-key", KEY),
            *("--max-model-len", "1024"),
            *("--max-num-batched-tokens", "128"),
            *("--num-gpu-blocks-override", "16"),
        ],
    }
    with engine_on(free_port(), tmp_path_factory.mktemp("crowded"), model, **rollout) as engine:
        yield engine


def preemptions(engine: httpx.Client) -> float:
    lines = engine.get("/metrics").raise_for_status().text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_preemptions_total"))


def give_up(engine: httpx.Client) -> None:
    """Ask for a stream, and go after its first words."""
    body = {"model": MODEL, **LEAST[CHAT], **CAPTURE, "stream": True, "max_tokens": 500, "ignore_eos": True}
    with engine.stream("POST", CHAT, json=body, headers={HEADER: PACKED}) as reply:
        next(reply.iter_raw())


def test_among_others_each_gets_its_own(crowded: httpx.Client, model: Path) -> None:
    """Packed and not, whole and streamed, of several choices and prompts, given up, preempted, by two API servers."""
    ignoring = {"ignore_eos": True, "max_tokens": 200}
    several: list[tuple[str, Json]] = [
        (CHAT, {"n": 3, "temperature": 0.7, **ignoring}),
        (CHAT, LONG | ignoring),
        (TEXT, {"prompt": ["One", "Two", "Three"], "n": 2, "temperature": 1.5, **ignoring}),
        (CHAT, {"stop": ["a", "e", "<", "o"], "n": 4, "max_tokens": 200}),
    ]
    oracle, asked = (
        Oracle(model),
        [
            (path, body, packed, stream)
            for path, body in several
            for packed in (True, True, False)
            for stream in (False, True)
        ],
    )
    with ThreadPoolExecutor(len(asked) + 4) as pool:
        left = [pool.submit(give_up, crowded) for _ in range(4)]
        heard = [pool.submit(ask, crowded, path, body, packed=p, stream=s) for path, body, p, s in asked]
        for each in left:
            each.result()
        replies = [each.result() for each in heard]
    assert preemptions(crowded) > 0
    for (path, body, packed, _), reply in zip(asked, replies, strict=True):
        assert ('"packed":"' in reply.raw) is packed
        assert len(reply.choices) == body.get("n", 1) * (3 if path == TEXT else 1)
        for index, (ids, told) in reply.choices.items():
            expected = oracle.logprobs(reply.prompts[index], ids, body.get("temperature", 1.0))
            assert list(array("f", told)) == pytest.approx(expected, abs=1e-4)
