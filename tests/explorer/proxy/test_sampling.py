import ast
import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneloop.explorer.proxy.request import BEYOND_IDS, NEUTRAL, sampling_of
from tuneloop.explorer.transcript import Sampling
from tuneloop.shared.errors import RequestRefused

pytestmark = pytest.mark.contract


def unsampled(**asked: Any) -> str | None:
    return sampling_of(asked, default_temperature=1.0).unsampled


def drop_reason(**asked: Any) -> str | None:
    return sampling_of(asked, default_temperature=1.0).drop_reason


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
        ("bad_words", ["no"]),
        ("allowed_token_ids", [1, 2]),
        ("min_tokens", 3),
        ("use_beam_search", True),
        ("ignore_eos", True),
        ("structured_outputs", {"json": {}}),
        ("guided_json", {}),
        ("guided_regex", "a*"),
        ("guided_choice", ["a"]),
        ("guided_grammar", "x"),
        ("thinking_token_budget", "10"),
        ("logits_processors", ["x"]),
        ("continue_final_message", True),
        ("vllm_xargs", {"a": 1}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", "json"),
        ("response_format", []),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}),
        ("top_p", "0.9"),
        ("thinking_token_budget", 0),
        ("repetition_detection", {"max_pattern_size": 4}),
    ],
)
def test_what_changes_the_distribution_is_named(name: str, value: object) -> None:
    assert (unsampled(**{name: value}), drop_reason(**{name: value})) == (f"sampling:{name}", None)


@pytest.mark.parametrize(
    ("asked", "truncated"),
    [
        ({"top_p": 0.9}, True),
        ({"top_k": "20", "top_p": 0.95, "min_p": 0.1, "temperature": 0.6}, True),
        ({"top_p": 0.9, "response_format": {"type": "json_object"}}, True),
        ({"top_p": 1, "top_k": -1, "min_p": 0}, False),
        ({"top_p": 0.9, "temperature": 0}, False),
        ({"top_p": 0.9, "presence_penalty": 0.5}, False),
        ({"response_format": {"type": "json_object"}}, False),
    ],
)
def test_what_only_cuts_tokens_off_is_told_from_the_rest(asked: dict[str, Any], truncated: bool) -> None:
    assert sampling_of(asked, default_temperature=1.0).truncated is truncated


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_embeds", "AAAA"),
        ("kv_transfer_params", {"do_remote_prefill": True}),
        ("ec_transfer_params", {"a": 1}),
    ],
)
def test_what_answers_more_than_token_ids_is_for_nothing(name: str, value: object) -> None:
    assert (unsampled(**{name: value}), drop_reason(**{name: value})) == (None, f"sampling:{name}")
    assert drop_reason(**{name: value, "top_p": 0.5}) == f"sampling:{name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 1),
        ("top_p", 1.0),
        ("top_k", 0),
        ("top_k", -1),
        ("min_p", 0.0),
        ("presence_penalty", 0),
        ("frequency_penalty", 0.0),
        ("repetition_penalty", 1.0),
        ("logit_bias", {}),
        ("logit_bias", None),
        ("bad_words", []),
        ("min_tokens", 0),
        ("use_beam_search", False),
        ("response_format", {"type": "text"}),
        ("response_format", None),
        ("tool_choice", "auto"),
        ("tool_choice", "none"),
        ("stop", ["x"]),
        ("max_tokens", 5),
        ("temperature", 0.7),
        ("n", 2),
        ("thinking_token_budget", -1),
        ("prompt_embeds", None),
        ("kv_transfer_params", None),
        ("parallel_tool_calls", False),
        ("tools", [{"type": "function", "function": {"name": "add", "strict": False}}]),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": "Hi."}, "Hi."]}]),
    ],
)
def test_what_leaves_the_distribution_alone_is_not(name: str, value: object) -> None:
    assert (unsampled(**{name: value}), drop_reason(**{name: value})) == (None, None)


ADD = {"type": "function", "function": {"name": "add"}}
STRICT = {"type": "function", "function": {"name": "add", "strict": True}}


def test_calls_that_vllm_holds_to_a_grammar_are_named() -> None:
    assert unsampled(tools=[ADD]) is None
    assert unsampled(tools=[ADD, STRICT]) == "sampling:tools"
    assert unsampled(tools=[ADD], parallel_tool_calls=False) == "sampling:parallel_tool_calls"
    assert unsampled(tools=[STRICT], tool_choice="none", parallel_tool_calls=False) is None
    assert unsampled(tools=[ADD], tool_choice="auto", parallel_tool_calls=True) is None


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"image_url": "x"}, {"type": []}, 3]
)
def test_what_is_no_text_is_named(part: object) -> None:
    asked = [{"role": "system", "content": "Hi."}, {"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    assert drop_reason(messages=asked) == "sampling:media"
    assert drop_reason(messages=asked, temperature=0) == "sampling:media"


#: Fields of vLLM's requests that leave alone what the trainer recomputes: log softmax(logits / temperature) of the
#: reply's token ids after the prompt's.
HARMLESS = {
    # Which prompt: its token ids are recorded.
    *("messages", "prompt", "suffix", "documents", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
    *("add_special_tokens", "reasoning_effort", "truncate_prompt_tokens", "truncation_side", "model"),
    # Where it ends: what comes until then is the policy's.
    *("max_tokens", "max_completion_tokens", "stop", "stop_token_ids"),
    # How it is told.
    *("echo", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
    *("include_reasoning", "stream", "stream_options", "stream_interval", "n"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "routed_experts_prompt_start"),
    *("return_token_ids", "return_tokens_as_token_ids", "return_token_offsets", "return_prompt_text"),
    # Read before, by a rule of their own; length_penalty is for beams alone.
    *("temperature", "response_format", "tools", "tool_choice", "parallel_tool_calls", "length_penalty"),
    "structured_outputs",
    # For images, and those are named.
    *("media_io_kwargs", "mm_processor_kwargs", "mm_payload", "return_mm_kwargs"),
    # Who asks, when it is its turn, and which random numbers it gets.
    *("user", "priority", "request_id", "session_id", "cache_salt", "seed"),
}


def fields_of(module: str, name: str) -> Iterator[str]:
    """The fields of a class of vLLM, which is read and not imported: that takes long."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / module).read_text())
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            yield node.target.id


@pytest.mark.parametrize(
    ("module", "name"),
    [("chat_completion", "ChatCompletionRequest"), ("completion", "CompletionRequest")],
)
def test_every_field_of_vllms_requests_is_known(module: str, name: str) -> None:
    found = set(fields_of(f"entrypoints/openai/{module}/protocol.py", name))
    assert len(found) > 40
    assert {each for each in found if each not in HARMLESS | NEUTRAL.keys() | BEYOND_IDS.keys()} == set()


def test_no_field_is_both() -> None:
    assert HARMLESS.isdisjoint(NEUTRAL | BEYOND_IDS)
    assert NEUTRAL.keys().isdisjoint(BEYOND_IDS)


@pytest.mark.parametrize("asked", [0, 0.0, "0"])
def test_greedy_decoding_is_no_sample(asked: object) -> None:
    assert unsampled(temperature=asked) == "sampling:temperature=0"


@pytest.mark.parametrize(("asked", "kept"), [(0.7, 0.7), (1e-6, 0.01), (1, 1.0), ("0.5", 0.5), (None, 0.9)])
def test_the_temperature_is_what_the_engine_makes_of_it(asked: object, kept: float) -> None:
    assert sampling_of({"temperature": asked}, default_temperature=0.9) == Sampling(kept)
    assert sampling_of({}, default_temperature=0.9).temperature == 0.9


@pytest.mark.parametrize("asked", [-1, "nan", "inf", "x", [], {}, math.inf])
def test_a_temperature_that_is_none_is_refused(asked: object) -> None:
    with pytest.raises(RequestRefused, match="temperature"):
        sampling_of({"temperature": asked}, default_temperature=1.0)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(
    st.dictionaries(
        st.sampled_from(["top_p", "response_format", "tool_choice", "tools", "messages", "temperature"]), _json
    )
)
def test_any_request_is_read_or_refused(asked: dict[str, Any]) -> None:
    try:
        found = sampling_of(asked, default_temperature=1.0)
    except RequestRefused:
        return
    assert 0 <= found.temperature < math.inf


def test_calls_that_the_engine_holds_to_a_grammar_by_itself_are_named() -> None:
    def why(**asked: Any) -> str | None:
        return sampling_of(asked, default_temperature=1.0, holds_tools=True).unsampled

    assert why(tools=[ADD]) == "sampling:tools"
    assert why(tools=[ADD], tool_choice="none") is None
    assert why(tools=[]) is None
    assert why() is None
