"""What an engine held to a grammar is recorded with it, as the engine's renderer tells it; else it is marked."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.doubles.engine import EngineDouble, EnginePlace
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tests.explorer.wire import Wire, http_request, streamed
from tuneloop.shared.experience import Experience, Grammar

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
STRICT = {"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}
TAG = '{"type": "structural_tag"}'


@dataclass
class Pondering(EngineDouble):
    """An engine whose renderer never answers."""

    asked: int = 0

    async def _answer(self, scope: Any, body: bytes, send: Any) -> None:
        if scope["path"].endswith("/render"):
            self.asked += 1
            await asyncio.Event().wait()
        await super()._answer(scope, body, send)


def rendered(*, stop_token_ids: list[int] | None = None, parser: Any = None, **constraint: Any) -> bytes:
    """An answer of vLLM 0.32's renderer, with what is read of it."""
    names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    outputs = dict.fromkeys(names) | {"disable_any_whitespace": False, "_backend": None} | constraint
    params = {"n": 1, "stop_token_ids": stop_token_ids or [], "structured_outputs": outputs if constraint else None}
    return json.dumps(
        {
            "request_id": "x",
            "token_ids": [1],
            "sampling_params": params,
            "reasoning_ended": None,
            "reasoning_parser_kwargs": parser,
        }
    ).encode()


def recorded(explorer: RunningExplorer) -> list[Experience]:
    return [each for exchange in explorer.exchanges() for each in exchange.experiences]


def ask(explorer: RunningExplorer, **fields: Any) -> Experience:
    with explorer.openai() as client:
        client.chat.completions.create(**HELLO, **fields)
    return recorded(explorer)[-1]


@pytest.mark.parametrize(
    ("answer", "grammar"),
    [
        (rendered(structural_tag=TAG), Grammar(kind="structural_tag", spec=TAG)),
        (rendered(regex="a+", stop_token_ids=[5, 6]), Grammar(kind="regex", spec="a+", stop_ids=(5, 6))),
        (rendered(json=SCHEMA), Grammar(kind="json", spec=json.dumps(SCHEMA, separators=(",", ":")))),
        (rendered(json='{"type": "object"}'), Grammar(kind="json", spec='{"type": "object"}')),
        (rendered(json_object=True), Grammar(kind="json", spec='{"type": "object"}')),
        (rendered(), None),  # strict for a parser that knows no grammar: nothing was held
    ],
)
def test_the_grammar_is_what_the_engine_made_of_the_request(
    explorer: RunningExplorer, double: EngineDouble, answer: bytes, grammar: Grammar | None
) -> None:
    double.rendered = answer
    found = ask(explorer, tools=[STRICT], stream=False)
    assert (found.unsampled, found.grammar) == (None, grammar)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"{}",
        b"no JSON",
        b"[]",
        rendered(choice=["a"]),
        rendered(grammar='root ::= "a"'),
        rendered(json_object=False),
        rendered(regex=3),
        rendered(structural_tag=TAG, parser={"chat_template_kwargs": None}),
    ],
)
def test_without_a_grammar_that_can_be_rebuilt_the_reply_is_marked(
    explorer: RunningExplorer, double: EngineDouble, answer: bytes | None
) -> None:
    double.rendered = answer
    found = ask(explorer, tools=[STRICT])
    assert (found.unsampled, found.grammar) == ("sampling:tools", None)


def test_an_engine_is_asked_once_for_all_requests_of_an_agent(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.rendered = rendered(structural_tag=TAG)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    for text in ("a", "b"):
        for fields in ({"tools": [STRICT]}, {"tools": [STRICT], "tool_choice": "required"}, {"response_format": form}):
            said = {**HELLO, "messages": [{"role": "user", "content": text}]}
            with explorer.openai() as client:
                list(client.chat.completions.create(**said, **fields, stream=True))  # type: ignore[misc]
    assert len(double.renders) == 3
    assert all(each["messages"] == [{"role": "user", "content": "a"}] for each in double.renders)
    assert [each.get("tool_choice") for each in double.renders] == [None, "required", None]
    assert {each.grammar for each in recorded(explorer)} == {Grammar(kind="structural_tag", spec=TAG)}


def test_of_large_requests_and_grammars_nothing_is_held(explorer: RunningExplorer, double: EngineDouble) -> None:
    """Neither what a client fills its template with, nor a grammar of any size: both would be, for each request."""
    double.rendered = rendered(structural_tag=TAG)
    for number in range(2):
        ask(explorer, tools=[STRICT], extra_body={"chat_template_kwargs": {"x": f"{number}" * 100_000}})
    held = explorer.services.proxy._grammars._found
    assert [len(key) for key in held] == [64, 64]
    double.rendered = rendered(structural_tag=json.dumps({"type": "structural_tag", "x": "a" * 70_000}))
    for _ in range(2):
        found = ask(explorer, tools=[STRICT], response_format={"type": "json_object"})
        assert found.grammar is not None
        assert len(found.grammar.spec) > 70_000
    assert (len(held), len(double.renders)) == (2, 4)


@pytest.mark.parametrize("leaves", [True, False])
def test_what_a_client_has_in_full_is_kept_once_whatever_happens_while_the_engine_is_asked(
    running_explorer: Run, places: list[EnginePlace], leaves: bool
) -> None:
    places[0].double = double = Pondering(url=places[0].url)
    explorer = running_explorer(double, request_timeout=30 if leaves else 0.5)
    with Wire(explorer.url) as wire:
        wire.send(http_request(streamed(tools=[STRICT])))
        eventually(lambda: double.asked == 1)
        if leaves:
            wire.reset()
        eventually(lambda: explorer.services.proxy.admission.in_flight == 0)
    [found] = recorded(explorer)
    assert (found.drop_reason, found.unsampled, found.grammar) == (None, "sampling:tools", None)
    assert found.finish_reason == "tool_calls"


def test_nobody_is_asked_about_other_replies(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.rendered = rendered(structural_tag=TAG)
    found = [
        ask(explorer).unsampled,
        ask(explorer, tools=[{"type": "function", "function": {"name": "add"}}]).unsampled,
        ask(explorer, tools=[STRICT], top_p=0.5).unsampled,
        ask(explorer, tools=[STRICT], metadata={"train": "false"}).drop_reason,
    ]
    assert found == [None, None, "sampling:top_p", "opt_out"]
    assert double.renders == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--structured-outputs-config", '{"backend": "guidance"}'],
        ["--structured-outputs-config.disable_any_whitespace", "true"],
    ],
)
def test_who_cannot_rebuild_it_asks_nobody(running_explorer: Run, double: EngineDouble, arguments: list[str]) -> None:
    rollout = {"engine_urls": [double.url], "dtype": "float32", "engine_args": arguments}
    double.rendered = rendered(structural_tag=TAG)
    explorer = running_explorer(double, rollout_model=rollout)
    assert ask(explorer, tools=[STRICT]).unsampled == "sampling:tools"
    assert double.renders == []


def test_xgrammar_itself_may_be_named(running_explorer: Run, double: EngineDouble) -> None:
    arguments = ["--structured-outputs-config", '{"backend": "xgrammar"}']
    double.rendered = rendered(structural_tag=TAG)
    rollout = {"engine_urls": [double.url], "dtype": "float32", "engine_args": arguments}
    assert ask(running_explorer(double, rollout_model=rollout), tools=[STRICT]).grammar is not None


def test_calls_that_the_engine_holds_by_itself_are_recorded_with_their_grammar(
    running_explorer: Run, double: EngineDouble
) -> None:
    rollout = {"engine_urls": [double.url], "dtype": "float32", "engine_args": ["--tool-strict-level", "function"]}
    double.rendered = rendered(structural_tag=TAG)
    plain = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
    found = ask(running_explorer(double, rollout_model=rollout), tools=[plain])
    assert (found.unsampled, found.grammar) == (None, Grammar(kind="structural_tag", spec=TAG))


def test_an_engine_that_is_attached_to_is_given_a_grammar(running_explorer: Run, double: EngineDouble) -> None:
    with running_explorer(double).openai():
        assert double.grammars_given == 1
